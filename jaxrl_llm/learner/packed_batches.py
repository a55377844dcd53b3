"""Packed micro-batches: lines of a fixed number of tokens, filled with rows side by side (ops.packing).

Letters: M ring shards, b rows per shard, S row width, G rows of a unit, X units and K = X*G rows of a line.
Owns: which rows share a line, which lines share a micro-batch. Does not know: losses, models.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.learner.micro_batches import MicroBatches
from jaxrl_llm.ops import packing
from jaxrl_llm.types import Experience


def packed(
    batch: Experience, weight: Any, *, num_lines: int, width: int, unit_width: int, group_size: int
) -> MicroBatches:
    """Cut rows [M,b,...] and their weights into micro-batches of ``num_lines`` lines, each with places for K rows.

    Units without a trainable row are omitted. The completion of a row that is not trainable is omitted too. At a free
    place of a line, lengths and weights are 0 and ``trainable`` is False.

    Args:
        width: number of tokens in a line.
        unit_width: number of tokens in the largest possible unit.
        group_size: G.
    """
    M, b = batch.reward.shape
    of_unit = lambda x: x.reshape(M, b // group_size, group_size)
    prompt_length = batch.rollout.prompt_length
    length = jnp.where(batch.trainable, batch.rollout.length, prompt_length)
    batch = batch.replace(rollout=batch.rollout.replace(length=length))
    size = packing.unit_size(of_unit(prompt_length)[..., 0], of_unit(length - prompt_length))
    size = jnp.where(jnp.any(of_unit(batch.trainable), axis=-1), size, 0)
    max_units = packing.units_per_line(width, unit_width)
    unit_of, used = jax.vmap(lambda s: packing.first_fit(s, width=width, max_units=max_units))(size)
    per_shard = num_lines // M
    most = -(-unit_of.shape[1] // per_shard)
    spare = most * per_shard - unit_of.shape[1]
    unit_of = jnp.pad(unit_of, ((0, 0), (0, spare), (0, 0)), constant_values=-1)

    def at(i):
        unit = jax.lax.dynamic_slice_in_dim(unit_of, i * per_shard, per_shard, axis=1)
        row = unit[..., None] * group_size + jnp.arange(group_size, dtype=jnp.int32)[None, None, None, :]
        row = row.reshape(M, -1)  # [M, lines * K], negative at a free place
        is_there = (row >= 0).reshape(-1)
        take = jax.vmap(lambda x, index: x[index])
        taken = jax.tree.map(lambda x: take(x, jnp.maximum(row, 0)), (batch, weight))
        rows, weights = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), taken)
        there = lambda x: jnp.where(is_there.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))
        rollout = rows.rollout
        rollout = rollout.replace(prompt_length=there(rollout.prompt_length), length=there(rollout.length))
        rows = rows.replace(rollout=rollout, trainable=there(rows.trainable))
        return rows, jax.tree.map(there, weights)

    return MicroBatches(-(-jnp.max(used) // per_shard), most, at)
