"""Micro-batches: pieces of a drawn batch, each with one forward and backward pass.

A padded micro-batch has a fixed number of rows of full width. A packed micro-batch has a fixed number of lines. Each
line has a fixed number of tokens and holds rows side by side (ops.packing), so the number of packed micro-batches
depends on the batch.

Letters: M ring shards, b rows per shard, S row width, G rows of a unit, X units and K = X*G rows of a line.
Owns: which rows form a micro-batch, which rows share a line. Does not know: losses, models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ops import packing
from jaxrl_llm.types import Experience

Weights = TypeVar("Weights")  # one or more arrays [M,b,S]


class MicroBatches(NamedTuple, Generic[Weights]):
    """Micro-batches of one batch, by number."""

    count: int | jax.Array  # number of micro-batches
    max_count: int  # largest possible count
    # Function of i that returns the rows and weights of micro-batch i, from every shard.
    at: Callable[[jax.Array | int], tuple[Experience, Weights]]


def padded(
    batch: Experience,
    weight: Weights,
    *,
    num_rows: int,
) -> MicroBatches[Weights]:
    """Cut rows [M,b,...] and their weights into micro-batches of ``num_rows`` rows of full width."""
    M, b = batch.reward.shape
    count = M * b // num_rows
    rows_per_shard = b // count

    def cut(x: jax.Array, i: jax.Array | int) -> jax.Array:
        piece = jax.lax.dynamic_slice_in_dim(x, i * rows_per_shard, rows_per_shard, axis=1)
        return piece.reshape(num_rows, *piece.shape[2:])

    def at(i: jax.Array | int) -> tuple[Experience, Weights]:
        return jax.tree.map(lambda x: cut(x, i), (batch, weight))

    return MicroBatches(count, max_count=count, at=at)


def packed(
    batch: Experience,
    weight: Weights,
    *,
    num_lines: int,
    width: int,
    unit_width: int,
    group_size: int,
) -> MicroBatches[Weights]:
    """Cut rows [M,b,...] and their weights into micro-batches of ``num_lines`` lines, each with places for K rows.

    Units without a trainable row are omitted. The completion of a row that is not trainable is omitted too. At a free
    place of a line, lengths and weights are 0 and ``trainable`` is False.

    Args:
        width: number of tokens in a line.
        unit_width: number of tokens in the largest possible unit.
        group_size: G.
    """
    M = batch.reward.shape[0]
    lines_per_shard = num_lines // M
    batch = _without_untrainable_completions(batch)
    max_units = packing.units_per_line(width, unit_width)

    def pack(unit_size: jax.Array) -> tuple[jax.Array, jax.Array]:
        return packing.first_fit(unit_size, width=width, max_units=max_units)

    unit_of_line, num_used_lines = jax.vmap(pack)(_unit_sizes(batch, group_size))
    num_all_lines = unit_of_line.shape[1]
    max_count = -(-num_all_lines // lines_per_shard)
    count = -(-jnp.max(num_used_lines) // lines_per_shard)
    num_spare_lines = max_count * lines_per_shard - num_all_lines
    padded_unit_of_line = jnp.pad(unit_of_line, ((0, 0), (0, num_spare_lines), (0, 0)), constant_values=-1)

    def at(i: jax.Array | int) -> tuple[Experience, Weights]:
        first_line = i * lines_per_shard
        unit = jax.lax.dynamic_slice_in_dim(padded_unit_of_line, first_line, lines_per_shard, axis=1)
        first_row = unit[..., None] * group_size
        offset = jnp.arange(group_size, dtype=jnp.int32)[None, None, None, :]
        row = (first_row + offset).reshape(M, -1)  # [M, lines * K], negative at a free place
        return _rows_at(batch, weight, row)

    return MicroBatches(count, max_count, at)


def _without_untrainable_completions(batch: Experience) -> Experience:
    """Return the batch with only the prompt of each row that is not trainable."""
    length = jnp.where(batch.trainable, batch.rollout.length, batch.rollout.prompt_length)
    rollout = dataclasses.replace(batch.rollout, length=length)
    return dataclasses.replace(batch, rollout=rollout)


def _unit_sizes(batch: Experience, group_size: int) -> jax.Array:
    """Return the number of tokens of each unit, [M, b/G] i32; 0 for a unit without a trainable row."""
    M, b = batch.reward.shape

    def by_unit(x: jax.Array) -> jax.Array:
        return x.reshape(M, b // group_size, group_size)

    prompt_length = batch.rollout.prompt_length
    completion_length = batch.rollout.length - prompt_length
    unit_prompt_length = by_unit(prompt_length)[..., 0]
    size = packing.unit_size(unit_prompt_length, by_unit(completion_length))
    is_trained = jnp.any(by_unit(batch.trainable), axis=-1)
    return jnp.where(is_trained, size, 0)


def _rows_at(
    batch: Experience,
    weight: Weights,
    row: jax.Array,
) -> tuple[Experience, Weights]:
    """Return the rows with the indices ``row`` [M,n] and their weights. A negative index is a free place."""
    is_filled = (row >= 0).reshape(-1)
    index = jnp.maximum(row, 0)

    def take_of_shard(x: jax.Array, index: jax.Array) -> jax.Array:
        return x[index]

    def take(x: jax.Array) -> jax.Array:
        rows = jax.vmap(take_of_shard)(x, index)
        return rows.reshape(-1, *rows.shape[2:])

    def zero_if_free(x: jax.Array) -> jax.Array:
        num_other_dims = x.ndim - 1
        mask = is_filled.reshape(-1, *[1] * num_other_dims)
        return jnp.where(mask, x, jnp.zeros_like(x))

    rows: Experience
    rows, weights = jax.tree.map(take, (batch, weight))
    rollout = dataclasses.replace(
        rows.rollout,
        prompt_length=zero_if_free(rows.rollout.prompt_length),
        length=zero_if_free(rows.rollout.length),
    )
    rows = dataclasses.replace(rows, rollout=rollout, trainable=zero_if_free(rows.trainable))
    return rows, jax.tree.map(zero_if_free, weights)
