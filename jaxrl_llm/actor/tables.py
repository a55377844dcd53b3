"""Tables of open rollouts: reading and writing rows by index, separately in each data shard.

    table by entry and sample [M,E,G,...]  <-- by_group --  table by row [M,Q,...]  -- take -->  chosen rows [M,N,...]
                                           -- by_row  -->                          <-- put --

An index counts within its shard, so no function here sends rows to another device. A write to an index out of range is
dropped.

Letters: as in ``sampler.py``, T entries of a shard's table, N chosen entries of each shard.
Owns: the layout of tables, indices into them. Does not know: the meaning of the rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.runtime import sharding


def by_row(table: jax.Array) -> jax.Array:
    """Return a table [M,E,G,...] as [M,Q,...], with one row for each sample of each entry."""
    M, E, G, *rest = table.shape
    return table.reshape(M, E * G, *rest)


def by_group(table: jax.Array, group_size: int) -> jax.Array:
    """Return a table [M,Q,...] as [M,E,G,...]."""
    M, Q, *rest = table.shape
    return table.reshape(M, Q // group_size, group_size, *rest)


def take(table: jax.Array, index_MN: jax.Array) -> jax.Array:
    """Return the entries [M,N,...] of a table [M,T,...] at these indices."""

    def of_shard(table, index_N):
        return table[index_N]

    return jax.vmap(of_shard)(table, index_MN)


def put(table: jax.Array, index_MN: jax.Array, value: jax.Array) -> jax.Array:
    """Return a table [M,T,...] in which the entries at these indices have the values [M,N,...]."""

    def of_shard(table, index_N, value):
        return table.at[index_N].set(value, mode="drop")

    return jax.vmap(of_shard)(table, index_MN, value)


def mark(table: jax.Array, index_MN: jax.Array, value: bool | int) -> jax.Array:
    """Return a table [M,T] in which the entries at these indices have the same ``value``."""

    def of_shard(table_T, index_N):
        return table_T.at[index_N].set(value, mode="drop")

    return jax.vmap(of_shard)(table, index_MN)


def take_at(table: jax.Array, index_MN: jax.Array, position: jax.Array) -> jax.Array:
    """Return the elements of a table [M,T,S] at one position [M,N], or several [M,N,...], of each chosen entry."""

    def of_shard(table, index_N, position):
        index = _beside(index_N, position)
        return table[index, position]

    return jax.vmap(of_shard)(table, index_MN, position)


def put_at(
    table: jax.Array,
    index_MN: jax.Array,
    position: jax.Array,
    value: jax.Array,
) -> jax.Array:
    """Return a table [M,T,S,...] in which the elements of ``take_at`` have the given values."""

    def of_shard(table, index_N, position, value):
        index = _beside(index_N, position)
        return table.at[index, position].set(value, mode="drop")

    return jax.vmap(of_shard)(table, index_MN, position, value)


def _beside(index_N: jax.Array, position: jax.Array) -> jax.Array:
    """Return the indices with as many dimensions as the positions, so that both broadcast."""
    return jnp.expand_dims(index_N, range(1, position.ndim))


def flat(values: jax.Array) -> jax.Array:
    """Return values [M,N,...] as [M*N,...], split over the data shards."""
    _, _, *rest = values.shape
    return sharding.constrain(values.reshape(-1, *rest), "batch", *(None,) * len(rest))
