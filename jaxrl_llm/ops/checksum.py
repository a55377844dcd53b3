"""Checksums of arrays by their values: the same for the same bits, wherever and in however many parts they lie.

Owns: the sum. Does not know: files, devices, what is compared with what.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree, Shaped, UInt32

from jaxrl_llm.ops.ring_buffer import where_it_lies


@jax.jit
def checksum(x: Shaped[ArrayLike, "..."]) -> UInt32[Array, ""]:
    """Sum of the elements' bits b_i, each weighted by an odd number of its place i in row-major order.

        sum_i w_i m(b_i),  m(b) = b xor (b >> 16),  w_i = h_i xor (h_i >> 16) or 1,  h_i = 2654435769 i   (all mod 2^32)

    One element that changes always shows: m is one to one, w_i is odd. Several go unseen once in 2^31 times or so;
    without m, x and -x that change places would always. Empty arrays, and zeros, have 0.

    Args:
        x: any shape, elements of at most 32 bits.

    Returns:
        [] u32.
    """
    size = x.shape[-1] if x.ndim else 1
    strides = [np.uint32(math.prod(x.shape[dim + 1 :]) % 2**32) for dim in range(x.ndim)]
    places = [stride * jnp.arange(n, dtype=jnp.uint32) for stride, n in zip(strides, x.shape, strict=True)]

    def total(in_steps: bool, x: jax.Array, *places: jax.Array) -> jax.Array:
        bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        along = (jnp.expand_dims(p, [*range(dim), *range(dim + 1, x.ndim)]) for dim, p in enumerate(places))
        weight = sum(along, np.uint32(0)) * np.uint32(2654435769)
        terms = (bits ^ bits >> 16) * (weight ^ weight >> 16 | 1)
        if in_steps:
            terms = terms.reshape(*x.shape[:-1], -1, math.gcd(size, 32))
            terms = jax.lax.optimization_barrier(jnp.sum(terms, axis=-1, dtype=jnp.uint32))
        return jnp.sum(terms, dtype=jnp.uint32)

    # For a long sum a CPU's program writes out the terms, one more array in memory; for short ones a TPU's does.
    here = lambda *of: jax.lax.platform_dependent(*of, cpu=partial(total, True), default=partial(total, False))
    return jax.device_put(where_it_lies(here, x, *places), jax.memory.Space.Device)


@jax.jit
def checksums(tree: PyTree[Shaped[ArrayLike, "..."]]) -> UInt32[Array, " K"]:
    """[K] u32, ``checksum`` of each of the K leaves in the order of ``jax.tree.leaves``."""
    return jnp.array([checksum(leaf) for leaf in jax.tree.leaves(tree)], jnp.uint32)
