"""Rings of rows, one or two per shard, in one array of slots, on the device or in its host's memory.

Leaves are [M, C, ...]: the mesh shards M and a ring runs over C, so writing and reading need no collective. A ring
is a ``Lane`` of the slots; a second one keeps some of what the first overwrites. A lane knows its slots in the order of
time, so any limit on ages is an interval of it; new rows go over those that are spent, then over the oldest.
Letters: M data shards, C slots per shard, L slots of a lane, n rows written per shard, b rows read per shard.
Owns: where rows are written and in which order they stand. Does not know: what a row is, what is drawn, the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import compute_on as _compute_on
from jaxtyping import Array, ArrayLike, Bool, Int, PyTree, Shaped

# jax 0.10 has two of them; what the second takes, the only one of 0.12 takes.
compute_on = getattr(_compute_on, "compute_on2", _compute_on.compute_on)


class Lane(NamedTuple):
    """A ring of every shard.

    Attributes:
        order: [M, L] i32, its slots, the one with the oldest row first; those that hold none before all others.
        filled: [M] i32, slots that hold a row.
    """

    order: jax.Array
    filled: jax.Array

    @property
    def size(self) -> int:
        return self.order.shape[1]

    def of_groups(self, group_size: int) -> Lane:
        """The same of groups, each so many neighbouring slots that were written together."""
        return Lane(self.order[:, ::group_size] // group_size, self.filled // group_size)

    def newest_first(self, position: Int[ArrayLike, "M k"]) -> Int[Array, "M k"]:
        """Slots [M, k] i32 of positions [M, k] i32; 0 = the last row written."""
        return take(self.order, (self.size - 1 - position) % self.size)

    def count_newest(self, is_in: Callable[[Int[Array, "M 1"]], Bool[Array, "M 1"]]) -> Int[Array, " M"]:
        """Rows [M] i32 before the first one, newest first, that is not in; all after it are not in either.

        Args:
            is_in: slots [M, 1] i32 to [M, 1] bool.
        """

        # Binary search: rows before `low` are in, rows from `high` on are not.
        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) // 2
            inside = is_in(self.newest_first(middle[:, None]))[:, 0] & (middle < high)
            return jnp.where(inside, middle + 1, low), jnp.where(inside, high, middle)

        bounds = (jnp.zeros_like(self.filled), self.filled)
        return jax.lax.fori_loop(0, self.size.bit_length(), halve, bounds)[0]


def slots_of_groups(group: Int[ArrayLike, "M k"], group_size: int) -> Int[Array, "M _"]:
    """The neighbouring slots [M, k * group_size] i32 of groups [M, k] i32."""
    slots = group[:, :, None] * group_size + jnp.arange(group_size, dtype=jnp.int32)[None, None, :]
    return slots.reshape(group.shape[0], -1)


def renew(
    lane: Lane, is_spent: Bool[ArrayLike, "M C"], count: Int[ArrayLike, "M 1"] | int, *, group_size: int = 1
) -> Int[Array, "M L"]:
    """The lane's order with the next ``count`` slots to be written at its end: spent ones first, then the oldest.

    Args:
        is_spent: [M, C] bool, slots that hold no row that will be read.
        count: [M, 1] i32 or a number, at most L.
        group_size: so many neighbouring slots are renewed together, as spent when all of them are.

    Returns:
        [M, L] i32.
    """
    groups = lane.of_groups(group_size)
    num_groups, count = groups.size, count // group_size
    spent = jnp.all(is_spent.reshape(is_spent.shape[0], -1, group_size), axis=2)
    spent = take(spent, groups.order)
    rank = lambda x: jnp.cumsum(x, axis=1, dtype=jnp.int32)
    spare = rank(spent)
    is_next = jnp.where(spent, spare <= count, rank(~spent) <= count - spare[:, -1:])
    place = jnp.where(is_next, num_groups - count + rank(is_next), rank(~is_next)) - 1
    order = jax.vmap(lambda place, slot: jnp.zeros_like(slot).at[place].set(slot, unique_indices=True))(
        place, groups.order
    )
    return slots_of_groups(order, group_size)


def write_some(
    slots: PyTree[Shaped[ArrayLike, "M C ..."]],
    lane: Lane,
    is_spent: Bool[ArrayLike, "M C"],
    rows: PyTree[Shaped[ArrayLike, "M n ..."]],
    is_kept: Bool[ArrayLike, "M n"],
) -> tuple[PyTree[Shaped[Array, "M C ..."]], Int[Array, "M L"]]:
    """The slots with those of the rows [M, n] that are kept, in their order, and the lane's new order [M, L].

    Of too many for the lane the last ones.
    """
    rank = jnp.cumsum(is_kept, axis=1, dtype=jnp.int32)
    total = rank[:, -1:]
    is_kept = is_kept & (total - rank < lane.size)
    order = renew(lane, is_spent, jnp.minimum(total, lane.size))
    target = take(order, jnp.maximum(lane.size - 1 - (total - rank), 0))
    return put(slots, jnp.where(is_kept, target, jax.tree.leaves(slots)[0].shape[1]), rows), order


def put(
    slots: PyTree[Shaped[ArrayLike, "M C ..."]],
    slot_index: Int[ArrayLike, "M b"],
    rows: PyTree[Shaped[ArrayLike, "M b ..."]],
) -> PyTree[Shaped[Array, "M C ..."]]:
    """Slots [M, C, ...] with rows [M, b, ...] at ``slot_index`` [M, b] i32; index C is nowhere."""

    def one(slot_C: jax.Array, index: jax.Array, row_b: jax.Array) -> jax.Array:
        return slot_C.at[index].set(row_b, mode="drop")

    return jax.tree.map(lambda slot, row: where_it_lies(jax.vmap(one), slot, slot_index, row), slots, rows)


def take(
    slots: PyTree[Shaped[ArrayLike, "M C ..."]], slot_index: Int[ArrayLike, "M b"]
) -> PyTree[Shaped[Array, "M b ..."]]:
    """Rows of a pytree of [M, C, ...] at ``slot_index`` [M, b] i32: a pytree of [M, b, ...], on the device."""
    rows_of = jax.vmap(lambda slot_C, index: slot_C[index])

    def one(leaf: jax.Array) -> jax.Array:
        rows = where_it_lies(rows_of, leaf, slot_index)
        return jax.device_put(rows, jax.memory.Space.Device) if _is_on_host(rows) else rows

    return jax.tree.map(one, slots)


def zeros(
    shapes: PyTree[Shaped[jax.ShapeDtypeStruct, "M _ ..."]], *, on_host: bool = False
) -> PyTree[Shaped[Array, "M _ ..."]]:
    """Zeros of a pytree of shapes [M, C, ...], on the device or in the host's memory.

    The host repeats a slot of the device: what is constant the TPU compiler would make on the device and move.
    """

    def one(x: jax.ShapeDtypeStruct) -> jax.Array:
        slot = jnp.zeros((x.shape[0], 1, *x.shape[2:]), x.dtype)
        if on_host:
            slot = jax.device_put(slot, jax.memory.Space.Host)
        return where_it_lies(lambda slot: jnp.broadcast_to(slot, x.shape), slot)

    return jax.tree.map(one, shapes)


def where_it_lies(
    function: Callable[..., Shaped[Array, "..."]], leaf: Shaped[ArrayLike, "..."], *rows: Shaped[ArrayLike, "..."]
) -> Shaped[Array, "..."]:
    """``function(leaf, *rows)``, by the host's processor where the leaf lies in the host's memory.

    Only what the rows hold then moves between host and device, never the leaf. Returns: what lies where the leaf lies.
    """
    if not _is_on_host(leaf):
        return function(leaf, *rows)
    by_host = compute_on(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return by_host(leaf, *jax.device_put(rows, jax.memory.Space.Host))


def _is_on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host
