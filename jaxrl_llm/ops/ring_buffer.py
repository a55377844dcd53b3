"""Rings of rows in one array of slots: one or two rings per shard, on the device or in the memory of its host.

Leaves are [M, C, ...]. The mesh shards M, and a ring runs along C, so writing and reading need no collective. A ring is
a ``Lane`` of the slots. A second lane keeps some of the rows that the first lane overwrites. A lane has its slots in
the order of time, so a limit on the age of rows is an interval of the lane. New rows overwrite spent slots first, then
the oldest rows.

Letters: M data shards, C slots per shard, L slots of a lane, n rows written per shard, b rows read per shard.
Owns: where rows are written, the order of the slots. Does not know: the content of a row, which rows are drawn, the
mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import compute_on as compute_on_module
from jaxtyping import Array, Bool, Int, PyTree, Shaped

# jax 0.10 calls this function compute_on2. jax 0.12 has one function, compute_on, with the arguments of compute_on2.
compute_on: Callable[..., Callable[..., Array]] = getattr(
    compute_on_module, "compute_on2", compute_on_module.compute_on
)


class Lane(NamedTuple):
    """A ring of every shard.

    Attributes:
        order: [M, L] i32, slots of the ring. Empty slots come first, then the slots with rows, oldest row first.
        filled: [M] i32, number of slots that hold a row.
    """

    order: Array
    filled: Array

    @property
    def size(self) -> int:
        """Number of slots per shard, L."""
        return self.order.shape[1]

    def of_groups(self, group_size: int) -> Lane:
        """Return the lane of groups. A group is ``group_size`` neighbouring slots that were written together."""
        return Lane(self.order[:, ::group_size] // group_size, self.filled // group_size)

    def newest_first(self, position: Int[Array, "M k"]) -> Int[Array, "M k"]:
        """Return the slots [M, k] i32 at positions [M, k] i32. Position 0 is the last row written."""
        return take(self.order, (self.size - 1 - position) % self.size)

    def count_newest(
        self,
        is_in: Callable[[Int[Array, "M 1"]], Bool[Array, "M 1"]],
    ) -> Int[Array, " M"]:
        """Return the number of newest rows for which ``is_in`` is true, [M] i32.

        If ``is_in`` is false for a row, it must be false for all older rows.

        Args:
            is_in: slots [M, 1] i32 to [M, 1] bool.
        """

        # Binary search, newest row first: rows before `low` are in, rows from `high` on are not.
        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) // 2
            slot = self.newest_first(middle[:, None])
            inside = is_in(slot)[:, 0] & (middle < high)
            new_low = jnp.where(inside, middle + 1, low)
            new_high = jnp.where(inside, high, middle)
            return new_low, new_high

        bounds = (jnp.zeros_like(self.filled), self.filled)
        num_steps = self.size.bit_length()
        num_in, _ = jax.lax.fori_loop(0, num_steps, halve, bounds)
        return num_in


def slots_of_groups(group: Int[Array, "M k"], group_size: int) -> Int[Array, "M _"]:
    """Return the neighbouring slots [M, k * group_size] i32 of groups [M, k] i32."""
    first_slot = group[:, :, None] * group_size
    offset = jnp.arange(group_size, dtype=jnp.int32)[None, None, :]
    slots = first_slot + offset
    return slots.reshape(group.shape[0], -1)


def renew(
    lane: Lane,
    is_spent: Bool[Array, "M C"],
    count: Int[Array, "M 1"] | int,
    *,
    group_size: int = 1,
) -> Int[Array, "M L"]:
    """Return the lane's order with the next ``count`` slots to be written at the end.

    Spent slots (whose row will never be read) are written first, then the slots with the oldest rows.

    Args:
        is_spent: [M, C] bool, slots whose row will never be read.
        count: [M, 1] i32 or a number, at most L.
        group_size: number of neighbouring slots that are renewed together. A group is spent if all its slots are.

    Returns:
        [M, L] i32.
    """
    groups = lane.of_groups(group_size)
    num_groups = groups.size
    count = count // group_size
    is_spent_by_group = is_spent.reshape(is_spent.shape[0], -1, group_size)
    is_spent_group = jnp.all(is_spent_by_group, axis=2)
    spent = take(is_spent_group, groups.order)
    rank_of_spent = _rank(spent)
    rank_of_unspent = _rank(~spent)
    num_spent = rank_of_spent[:, -1:]
    is_next = jnp.where(spent, rank_of_spent <= count, rank_of_unspent <= count - num_spent)
    rank_at_end = num_groups - count + _rank(is_next)
    place = jnp.where(is_next, rank_at_end, _rank(~is_next)) - 1

    def permute(place: Array, slot: Array) -> Array:
        permuted = jnp.zeros_like(slot)
        return permuted.at[place].set(slot, unique_indices=True)

    order = jax.vmap(permute)(place, groups.order)
    return slots_of_groups(order, group_size)


def _rank(is_counted: Array) -> Array:
    """Return the number of true entries up to each position of a row, [M, L] i32."""
    return jnp.cumsum(is_counted, axis=1, dtype=jnp.int32)


def write_some(
    slots: PyTree[Shaped[Array, "M C ..."]],
    lane: Lane,
    is_spent: Bool[Array, "M C"],
    rows: PyTree[Shaped[Array, "M n ..."]],
    is_kept: Bool[Array, "M n"],
) -> tuple[PyTree[Shaped[Array, "M C ..."]], Int[Array, "M L"]]:
    """Write the rows [M, n] that are kept, in their order. Return the slots and the lane's new order [M, L].

    If the lane has too few slots for the kept rows, only the last rows are written.
    """
    num_slots = jax.tree.leaves(slots)[0].shape[1]
    rank = _rank(is_kept)
    num_kept = rank[:, -1:]
    num_later = num_kept - rank
    is_written = is_kept & (num_later < lane.size)
    order = renew(lane, is_spent, jnp.minimum(num_kept, lane.size))
    place = jnp.maximum(lane.size - 1 - num_later, 0)
    target = jnp.where(is_written, take(order, place), num_slots)  # a row at index C is dropped
    return put(slots, target, rows), order


def put(
    slots: PyTree[Shaped[Array, "M C ..."]],
    slot_index: Int[Array, "M b"],
    rows: PyTree[Shaped[Array, "M b ..."]],
) -> PyTree[Shaped[Array, "M C ..."]]:
    """Return slots [M, C, ...] with rows [M, b, ...] at ``slot_index`` [M, b] i32. A row at index C is dropped."""

    def put_shard(slot_C: Array, index: Array, row_b: Array) -> Array:
        return slot_C.at[index].set(row_b, mode="drop")

    def put_leaf(slot: Array, row: Array) -> Array:
        return where_it_lies(jax.vmap(put_shard), slot, slot_index, row)

    return jax.tree.map(put_leaf, slots, rows)


def take(
    slots: PyTree[Shaped[Array, "M C ..."]],
    slot_index: Int[Array, "M b"],
) -> PyTree[Shaped[Array, "M b ..."]]:
    """Return the rows of a pytree of [M, C, ...] at ``slot_index`` [M, b] i32, on the device: [M, b, ...]."""

    def take_shard(slot_C: Array, index: Array) -> Array:
        return slot_C[index]

    def take_leaf(leaf: Array) -> Array:
        rows = where_it_lies(jax.vmap(take_shard), leaf, slot_index)
        if _is_on_host(rows):
            return jax.device_put(rows, jax.memory.Space.Device)
        return rows

    return jax.tree.map(take_leaf, slots)


def zeros(
    shapes: PyTree[Shaped[jax.ShapeDtypeStruct, "M _ ..."]],
    *,
    on_host: bool = False,
) -> PyTree[Shaped[Array, "M _ ..."]]:
    """Return zeros of a pytree of shapes [M, C, ...], on the device or in the host's memory.

    For the host's memory, one slot is made on the device and repeated on the host. Otherwise the TPU compiler would
    make the whole array on the device and move it.
    """

    def zeros_of(x: jax.ShapeDtypeStruct) -> Array:
        num_shards, _, *row_shape = x.shape
        slot = jnp.zeros((num_shards, 1, *row_shape), x.dtype)
        if on_host:
            slot = jax.device_put(slot, jax.memory.Space.Host)

        def repeat(slot: Array) -> Array:
            return jnp.broadcast_to(slot, x.shape)

        return where_it_lies(repeat, slot)

    return jax.tree.map(zeros_of, shapes)


def where_it_lies(
    function: Callable[..., Shaped[Array, "..."]],
    leaf: Shaped[Array, "..."],
    *rows: Shaped[Array, "..."],
) -> Shaped[Array, "..."]:
    """Return ``function(leaf, *rows)``, computed by the host's processor if the leaf is in the host's memory.

    Then only the rows move between host and device, not the leaf.

    Returns:
        The result, in the same memory as the leaf.
    """
    if not _is_on_host(leaf):
        return function(leaf, *rows)
    by_host = compute_on(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return by_host(leaf, *jax.device_put(rows, jax.memory.Space.Host))


def _is_on_host(x: Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host
