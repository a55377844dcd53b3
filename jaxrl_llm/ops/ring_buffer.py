"""A FIFO ring of rows on the device, one ring per shard, and a uniform draw from it.

Leaves are [M, C, ...]: the mesh shards M and the ring runs over C, so writing, drawing and reading need no
collective. Owns: where rows are written, which slots are drawn. Does not know: what a row is, ages, limits
(they arrive as a mask of drawable slots), the mesh.
Letters: M data shards, C slots per shard, n rows written per shard, b rows drawn per shard.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def insert(slots: Any, write_index: jax.Array, rows: Any) -> tuple[Any, jax.Array]:
    """Write n rows into each shard at its cursor, over the oldest, wrapping round the end.

    Args:
        slots: pytree of [M, C, ...]. Donate it: the cost is then that of the rows, not of the capacity.
        write_index: [M] i32 in [0, C), the next slot to write.
        rows: pytree of [M, n, ...], n <= C, same structure and dtypes.

    Returns:
        The slots and the advanced cursor.
    """
    capacity = jax.tree.leaves(slots)[0].shape[1]
    num_rows = jax.tree.leaves(rows)[0].shape[1]
    if num_rows > capacity:
        raise ValueError(f"{num_rows} rows per shard do not fit the {capacity} slots of a shard")
    target_MN = (write_index[:, None] + jnp.arange(num_rows, dtype=jnp.int32)[None, :]) % capacity

    def write(slot_C: jax.Array, row_N: jax.Array, target_N: jax.Array) -> jax.Array:
        return slot_C.at[target_N].set(row_N, unique_indices=True)

    slots = jax.tree.map(lambda slot, row: jax.vmap(write)(slot, row, target_MN), slots, rows)
    return slots, (write_index + num_rows) % capacity


def draw_uniform(
    key: jax.Array, drawable: jax.Array, fresh: jax.Array, num: int, num_fresh: int
) -> tuple[jax.Array, jax.Array]:
    """Draw ``num`` slots of each shard uniformly without repeats, ``num_fresh`` of them from the fresh ones.

    First ``num_fresh`` slots, uniformly among those that are drawable and fresh (all of them where there are
    fewer); then the rest, uniformly among the drawable slots not yet taken, fresh or not. Shard m uses
    ``fold_in(key, m)``: the draw does not depend on the mesh.

    Args:
        key: one random key.
        drawable: [M, C] bool.
        fresh: [M, C] bool.
        num: b <= C, slots to draw per shard.
        num_fresh: at most b.

    Returns:
        slot_index: [M, b] i32, all different within a shard.
        is_real: [M, b] bool; False = there were fewer than b drawable slots and this one is not drawable.
    """
    num_shards, capacity = drawable.shape
    assert 0 <= num_fresh <= num, (num_fresh, num)
    if num > capacity:
        raise ValueError(f"{num} different slots cannot be drawn from the {capacity} slots of a shard")

    def draw(shard: jax.Array, drawable_C: jax.Array, fresh_C: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Two independent orders: with one, a fresh slot that lost the first round would be more likely
        # than others to lose the second.
        order_2C = jax.random.bits(jax.random.fold_in(key, shard), (2, capacity), jnp.uint32)
        tier_C = jnp.where(drawable_C, 1, 2)
        if num_fresh:
            is_fresh_C = drawable_C & fresh_C
            first = _sorted_slots(~is_fresh_C, order_2C[0])[:num_fresh]
            tier_C = tier_C.at[first].set(jnp.where(is_fresh_C[first], 0, tier_C[first]), unique_indices=True)
        slot = _sorted_slots(tier_C, order_2C[1])[:num]
        return slot, drawable_C[slot]

    return jax.vmap(draw)(jnp.arange(num_shards), drawable, fresh)


def _sorted_slots(tier: jax.Array, order: jax.Array) -> jax.Array:
    """Slots [C] i32 by tier, then by order. A sort, because XLA gathers the operand of top_k over the mesh."""
    slots = jnp.arange(tier.shape[0], dtype=jnp.int32)
    return jax.lax.sort((tier.astype(jnp.int32), order, slots), num_keys=2)[2]


def take(slots: Any, slot_index: jax.Array) -> Any:
    """Rows of a pytree of [M, C, ...] at ``slot_index`` [M, b] i32: a pytree of [M, b, ...]."""
    return jax.tree.map(lambda leaf: jax.vmap(lambda slot_C, index: slot_C[index])(leaf, slot_index), slots)


def add_at(values: jax.Array, slot_index: jax.Array, amount: jax.Array) -> jax.Array:
    """``values`` [M, C] plus ``amount`` [M, b] at ``slot_index`` [M, b], all different within a shard."""

    def add(value_C: jax.Array, index: jax.Array, amount_b: jax.Array) -> jax.Array:
        return value_C.at[index].add(amount_b.astype(value_C.dtype), unique_indices=True)

    return jax.vmap(add)(values, slot_index, amount)
