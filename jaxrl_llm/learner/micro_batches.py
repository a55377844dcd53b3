"""Micro-batches: pieces of a drawn batch, each with one forward and backward pass.

A padded micro-batch has a fixed number of rows of full width. A packed micro-batch (packed_batches) has a budget of
tokens, and the number of packed micro-batches depends on the batch.

Letters: M ring shards, b rows per shard, S row width.
Owns: which rows go together. Does not know: losses, models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl_llm.types import Experience


class MicroBatches(NamedTuple):
    count: int | jax.Array  # number of micro-batches
    most: int  # largest possible count
    at: Callable[[jax.Array], tuple[Experience, Any]]  # i -> rows and weights of micro-batch i, from every shard


def padded(batch: Experience, weight: Any, *, num_rows: int) -> MicroBatches:
    """Cut rows [M,b,...] and their weights, one or more arrays [M,b,S], into pieces of ``num_rows`` rows."""
    M, b = batch.reward.shape
    count = M * b // num_rows

    def at(i):
        def cut(x):
            x = jax.lax.dynamic_slice_in_dim(x, i * (b // count), b // count, axis=1)
            return x.reshape(num_rows, *x.shape[2:])

        return jax.tree.map(cut, (batch, weight))

    return MicroBatches(count, count, at)
