"""The least time of a step: floating-point operations and bytes from the model's shapes, at measured ceilings.

The floor counts:

- weight matrices once per token that passes them, 2 operations forward and 6 with the backward pass;
- attention by its causal pairs;
- the output head at positions that predict a token;
- for a decode step, the bytes of the weights and of the cached keys and values.

It does not count norms, softmax, activations, sampling and the optimizer.

Unshared: a prompt is computed once per row. Shared: a prompt is computed once per group, in the sampler and in the
learner.
Letters: P prompts of L_p tokens, G samples of each, C completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl_llm.models.architecture import Architecture

BACKWARD = 3  # operations of forward and backward pass, divided by the operations of the forward pass


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Highest measured rates of the machine.

    Attributes:
        decode_flops: operations per second of the model's matmuls at the rows of a decode step.
        batch_flops: the same at many rows, for prefill and update.
        read_bytes: bytes per second read from memory.
    """

    decode_flops: float
    batch_flops: float
    read_bytes: float


def best(measured: Sequence[Ceilings]) -> Ceilings:
    """Return the highest of each rate, because disturbances only lower a measured rate."""
    return Ceilings(*(max(column) for column in zip(*map(dataclasses.astuple, measured), strict=True)))


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations and bytes of one piece of work."""

    flops: float
    bytes: float = 0.0

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the larger of compute time and memory time, because the two can overlap."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


@dataclasses.dataclass(frozen=True)
class Floor:
    """Least seconds of a step's parts."""

    generate_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        return self.generate_s + self.update_s


def matrix_params(arch: Architecture) -> int:
    """Return the number of parameters of the blocks' weight matrices, without the head."""
    attention = arch.width * arch.head_size * 2 * (arch.num_heads + arch.num_kv_heads)
    return arch.num_layers * (attention + 3 * arch.width * arch.ffn)


def forward_flops(arch: Architecture, *, tokens: float, pairs: float, predicted: float) -> float:
    """Return the floating-point operations of a forward pass.

    Args:
        tokens: number of tokens that pass the blocks.
        pairs: pairs of a query and a key that it attends to; 4 operations per head and head dimension, in every layer.
        predicted: positions whose logits are computed.
    """
    attention = 4 * arch.num_layers * arch.num_heads * arch.head_size * pairs
    return 2 * matrix_params(arch) * tokens + attention + 2 * arch.vocab_size * arch.width * predicted


def prefill(arch: Architecture, lengths: Sequence[int], *, itemsize: int = 4) -> Work:
    """Return the work to compute the keys and values of prompts, each prompt once."""
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    weights = itemsize * matrix_params(arch)
    return Work(forward_flops(arch, tokens=sum(lengths), pairs=pairs, predicted=0), weights)


def decode_step(
    arch: Architecture,
    *,
    rows: int,
    context: float,
    read: float | None = None,
    itemsize: int = 4,
) -> Work:
    """Return the work to decode one token for each of ``rows`` sequences.

    Args:
        context: mean number of keys a row attends to.
        read: keys read from memory for all rows together. By default, each row reads ``context`` keys.
    """
    flops = forward_flops(arch, tokens=rows, pairs=rows * context, predicted=rows)
    weights = matrix_params(arch) + arch.vocab_size * arch.width
    key = 2 * arch.num_layers * arch.num_kv_heads * arch.head_size
    return Work(flops, itemsize * (weights + key * (rows * context if read is None else read)))


def update_flops(
    arch: Architecture,
    lengths: Sequence[int],
    group: int,
    completion: int,
    *,
    shared: bool,
) -> float:
    """Return the operations of the forward and backward pass over P*G rows."""
    rows = len(lengths) * group
    times = 1 if shared else group  # how often a prompt is computed
    tokens = times * sum(lengths) + rows * completion
    own = completion * (completion + 1) / 2
    pairs = sum(times * n * (n + 1) / 2 + group * (n * completion + own) for n in lengths)
    return BACKWARD * forward_flops(arch, tokens=tokens, pairs=pairs, predicted=rows * completion)


def floor(
    arch: Architecture,
    lengths: Sequence[int],
    group: int,
    completion: int,
    ceilings: Ceilings,
    *,
    shared: bool,
    itemsize: int = 4,
) -> Floor:
    """Return the least seconds of one step: P*G completions of C tokens, and one update on them."""
    rows = len(lengths) * group
    batch = ceilings.batch_flops
    prompts = lengths if shared else [n for n in lengths for _ in range(group)]
    seconds = prefill(arch, prompts, itemsize=itemsize).seconds(batch, ceilings.read_bytes)
    for step in range(1, completion + 1):
        context = sum(lengths) / len(lengths) + step
        read = sum(prompts) + rows * step
        work = decode_step(arch, rows=rows, context=context, read=read, itemsize=itemsize)
        seconds += work.seconds(ceilings.decode_flops, ceilings.read_bytes)
    return Floor(seconds, update_flops(arch, lengths, group, completion, shared=shared) / batch)
