"""Rates that this machine reaches through XLA: float32 matmul rate and memory read bandwidth.

A measurement takes about a second, so it can be repeated between steps. Both are sustained rates of the best of a few
bursts, because other work only slows a burst down.

Owns: these two measurements. Does not know: floors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.floors import Ceilings
from jaxrl_llm.models.architecture import Architecture

BURSTS = 5
READ_BYTES = 2**28  # far above the caches


class Probe:
    """Programs that are compiled when the object is made, so that ``measure`` only runs them.

    Args:
        decode_rows: rows of the matmul that stands for a decode step. It has the shape of the model's FFN.
        batch_rows: rows of the matmul that stands for prefill and update.
        dtype: dtype of the matmuls and of the memory.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        decode_rows: int = 128,
        batch_rows: int = 1024,
        dtype: str = "float32",
    ):
        self._decode = _matmul(arch, decode_rows, dtype)
        self._batch = _matmul(arch, batch_rows, dtype)
        self._read = _read(dtype)

    def measure(self) -> Ceilings:
        """Return the rates that the machine reaches now."""
        return Ceilings(_best_rate(self._decode), _best_rate(self._batch), _best_rate(self._read))


def _matmul(arch: Architecture, rows: int, dtype: str) -> tuple[Callable[[], jax.Array], float]:
    """Return a chain of products through the FFN's two shapes, and the number of its operations."""
    D = arch.width
    F = arch.ffn
    pair_flops = 2 * 2 * rows * D * F
    count = max(1, round(2e10 / pair_flops))  # long enough to hide the dispatch
    up = jax.random.normal(jax.random.key(0), (D, F)).astype(dtype) / D**0.5
    down = jax.random.normal(jax.random.key(1), (F, D)).astype(dtype) / F**0.5
    start = jax.random.normal(jax.random.key(2), (rows, D)).astype(dtype)

    @jax.jit
    def chain(x, up, down):
        return jax.lax.fori_loop(0, count, lambda _, x: (x @ up) @ down, x)

    return lambda: chain(start, up, down), float(count * pair_flops)


def _read(dtype: str) -> tuple[Callable[[], jax.Array], float]:
    """Return a matrix-vector product, which reads the matrix once, and the number of its bytes."""
    width = 4096
    matrix = jnp.ones((READ_BYTES // width // jnp.dtype(dtype).itemsize, width), dtype)
    vector = jnp.ones(width, dtype)
    product = jax.jit(lambda matrix, vector: matrix @ vector)
    return lambda: product(matrix, vector), float(matrix.nbytes)


def _best_rate(work: tuple[Callable[[], jax.Array], float]) -> float:
    """Return the amount of work per second in the fastest burst."""
    call, amount = work
    call().block_until_ready()
    times = []
    for _ in range(BURSTS):
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
    return amount / min(times)
