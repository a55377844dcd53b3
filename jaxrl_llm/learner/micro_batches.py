"""Micro-batches: how a drawn batch is cut into pieces of one forward and backward pass each.

Padded, a piece has a fixed number of rows, all of full width. Packed (packed_batches), it has a budget of tokens, and
how many pieces there are is known when the batch is.

Letters: M ring shards, b rows per shard, S row width.
Owns: which rows go together. Does not know: losses, models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl_llm.types import Experience


class MicroBatches(NamedTuple):
    count: int | jax.Array  # how many there are
    most: int  # and at most can be
    at: Callable[[jax.Array], tuple[Experience, Any]]  # the i-th's rows and weights; each has some of every shard


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
