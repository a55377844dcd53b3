"""Sequential draws without repeats, in proportion to a weight, at a cost that does not grow with the number of slots.

Draw one of n slots with probability w_i / sum w, remove it, and continue with the remaining slots. Two methods draw
from exactly this distribution:

- Sort by E_i / w_i, with E_i ~ Exp(1). (Gumbel top-k is the same in logarithms.)
- Draw uniform candidates independently, accept each with probability w_i / bound, and discard repeats.

The second method does not read all n slots. It is therefore tried first, with a fixed number of candidates. Draws that
are still missing are taken by sorting the remaining slots. The distribution stays exact: the accepted candidates are
the first draws of the sequence, and later draws do not depend on rejected candidates.

Letters: M shards, n slots of a shard, k candidates, b draws.
Owns: which positions are drawn. Does not know: rings, ages, the meaning of a weight.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

# Candidates per draw. If an eighth of the slots has full weight, they fill a batch with probability about one half.
CANDIDATES_PER_DRAW = 8
# At most this many slots are always sorted.
MIN_CANDIDATES = 128

# Slots [M, k] i32, and a mask [M, k] bool of the drawn slots, which come first.
Drawn = tuple[Int[Array, "M _"], Bool[Array, "M _"]]
SlotAt = Callable[[Int[Array, "M k"]], Int[Array, "M k"]]
WeightOf = Callable[[Int[Array, "M k"]], Float[Array, "M k"]]


def draw(
    keys: Key[Array, " M"],
    slot_at: SlotAt,
    length: Int[Array, " M"],
    weight: WeightOf,
    *,
    num: int,
    max_length: int,
    taken: Drawn | None = None,
) -> Drawn:
    """Draw ``num`` slots of each shard without repeats, each in proportion to its weight among the remaining slots.

        P(next = i) = w_i / sum of w_j over the slots not drawn yet

    The probabilities are exact up to the rounding of float32. If the candidates are enough for all shards, the cost is
    proportional to ``CANDIDATES_PER_DRAW * num`` slots. Otherwise it is the cost of sorting ``max_length`` slots,
    behind one ``cond`` over all shards. On several devices, call this function for the shards of each device
    (``sharding.by_device``), so that no device waits for another. The draw of a shard depends only on its key and its
    slots.

    Args:
        keys: [M] random keys.
        slot_at: positions [M, k] i32 to slots [M, k] i32, all different. It must accept any positions.
        length: [M] i32, positions 0..length-1 hold a slot that may be drawn.
        weight: slots [M, k] i32 to [M, k] f32 in [0, 1]; 0 = may not be drawn.
        num: b.
        max_length: n, the largest ``length``.
        taken: slots that may not be drawn.

    Returns:
        Slots [M, b] i32 and whether they were drawn [M, b] bool, in the order of drawing. Slots that were not drawn
        come last and are arbitrary.

    Source: Efraimidis and Spirakis 2006 (weighted sampling without replacement); as Gumbel top-k, Kool et al.
        2019, arXiv:1903.06059. The combination of rejection and a sort of the rest is not from a paper.
    """
    if taken is None:
        taken = _none_taken(num_shards=length.shape[0])
    num_candidates = min(max_length, max(MIN_CANDIDATES, CANDIDATES_PER_DRAW * num))
    keys = jax.vmap(jax.random.split)(keys)
    bits = _random_bits(keys[:, 0], (2, num_candidates))
    chance = _uniform(bits[:, 0])
    if num_candidates == max_length:
        slot, order = _sorting(slot_at, chance, length, weight, taken)
        return _first(slot, order, num)

    is_short = (length <= num_candidates)[:, None]
    slot, order = _candidates(slot_at, is_short, chance, bits[:, 1], length, weight, taken)
    candidates = _first(slot, order, num)

    def sort_the_rest(drawn: Drawn) -> Drawn:
        chance = _uniform(_random_bits(keys[:, 1], (max_length,)))
        slot, order = _sorting(slot_at, chance, length, weight, joined(taken, drawn))
        return chain(drawn, _first(slot, order, num))

    _, was_drawn = candidates
    is_missing = jnp.any(~is_short & ~was_drawn)
    return jax.lax.cond(is_missing, sort_the_rest, lambda drawn: drawn, candidates)


def chain(first: Drawn, second: Drawn) -> Drawn:
    """Return the drawn slots of ``first``, then the slots of ``second``, cut to the width [M, b] of ``second``."""
    first_slot, was_drawn_first = first
    second_slot, was_drawn_second = second
    num_first = first_slot.shape[1]
    num = second_slot.shape[1]
    num_drawn_first = jnp.sum(was_drawn_first, axis=1, keepdims=True)
    place = jnp.arange(num)[None, :]
    place_in_first = jnp.minimum(place, num_first - 1)
    place_in_second = place - num_drawn_first

    def join(x: Array, y: Array) -> Array:
        of_first = jnp.take_along_axis(x, place_in_first, axis=1)
        of_second = jnp.take_along_axis(y, jnp.maximum(place_in_second, 0), axis=1)
        return jnp.where(place_in_second < 0, of_first, of_second)

    slot = join(first_slot, second_slot)
    was_drawn = join(was_drawn_first, was_drawn_second)
    return slot, was_drawn


def _none_taken(num_shards: int) -> Drawn:
    """Return an empty list of slots of each shard."""
    slot = jnp.zeros((num_shards, 0), jnp.int32)
    counts = jnp.zeros((num_shards, 0), bool)
    return slot, counts


def joined(first: Drawn, second: Drawn) -> Drawn:
    """Return both lists, one after the other: slots [M, a + b] i32 and whether each slot counts, [M, a + b] bool."""
    slot = jnp.concatenate([first[0], second[0]], axis=1)
    counts = jnp.concatenate([first[1], second[1]], axis=1)
    return slot, counts


def _random_bits(keys: Array, shape: tuple[int, ...]) -> Array:
    """Return random u32 of this shape for each of the keys [M], [M, ...]."""

    def bits_of(key: Array) -> Array:
        return jax.random.bits(key, shape, jnp.uint32)

    return jax.vmap(bits_of)(keys)


def _all_positions(shape: tuple[int, ...]) -> Array:
    """Return the positions 0..k-1 for each shard, i32 of ``shape`` [M, k]."""
    positions = jnp.arange(shape[1], dtype=jnp.int32)
    return jnp.broadcast_to(positions, shape)


def _uniform(bits: Array) -> Array:
    """Return uniform numbers in [0, 1), f32, from u32."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _anywhere(length: Array, bits: Array) -> tuple[Array, Array]:
    """Return positions 0..length-1, i32 from u32, and a mask of the positions to keep, which are exactly uniform."""
    n = jnp.maximum(length, 1).astype(jnp.uint32)
    surplus = (jnp.uint32(0) - n) % n  # 2^32 mod n
    largest_kept = jnp.uint32(2**32 - 1) - surplus
    position = (bits % n).astype(jnp.int32)
    return position, bits <= largest_kept


def _candidates(
    slot_at: SlotAt,
    is_short: Array,
    chance: Array,
    position_bits: Array,
    length: Array,
    weight: WeightOf,
    taken: Drawn,
) -> tuple[Array, Array]:
    """Return candidate slots [M, k] and their order [M, k] f32; inf = not drawn.

    A shard with few slots is sorted. A shard with many slots is tried at random positions.

    Args:
        is_short: [M, 1] bool, shards with at most k slots.
        chance: [M, k] f32, uniform numbers in [0, 1).
        position_bits: [M, k] u32, random bits.
    """
    positions = _all_positions(chance.shape)
    random_positions, is_even = _anywhere(length[:, None], position_bits)
    slot = slot_at(jnp.where(is_short, positions, random_positions))
    w = weight(slot)
    is_sorted = (positions < length[:, None]) & (w > 0)
    is_accepted = (chance < w) & is_even
    is_drawn = jnp.where(is_short, is_sorted, is_accepted)
    is_drawn &= _is_new(taken, (slot, is_drawn))
    order = jnp.where(is_short, _race(chance, w), positions.astype(jnp.float32))
    return slot, jnp.where(is_drawn, order, jnp.inf)


def _sorting(
    slot_at: SlotAt,
    chance: Array,
    length: Array,
    weight: WeightOf,
    taken: Drawn,
) -> tuple[Array, Array]:
    """Return the slots at all positions [M, k] and their order [M, k] f32; inf = may not be drawn."""
    position = _all_positions(chance.shape)
    slot = slot_at(position)
    w = weight(slot)
    is_open = (position < length[:, None]) & (w > 0)
    is_open &= _is_new(taken, (slot, is_open))
    order = jnp.where(is_open, _race(chance, w), jnp.inf)
    return slot, order


def _race(chance: Array, w: Array) -> Array:
    """Return finite arrival times of exponential clocks of rate w."""
    exponential = -jnp.log1p(-chance)
    arrival = exponential / jnp.maximum(w, 1e-30)
    return jnp.minimum(arrival, 3e38)


def _first(slot: Array, order: Array, num: int) -> Drawn:
    """Return the ``num`` slots that come first. Use a sort, because XLA gathers the operand of top_k over the mesh."""
    num_missing = num - slot.shape[1]
    if num_missing > 0:
        slot = jnp.pad(slot, ((0, 0), (0, num_missing)))
        order = jnp.pad(order, ((0, 0), (0, num_missing)), constant_values=jnp.inf)
    order, slot = jax.lax.sort((order, slot), dimension=1, num_keys=1, is_stable=True)
    return slot[:, :num], jnp.isfinite(order[:, :num])


def _is_new(taken: Drawn, slots: Drawn) -> Array:
    """Return which slots [M, k] are new: not taken and not earlier in the row. Slots that do not count are ignored."""
    num_taken = taken[0].shape[1]
    slot, counts = joined(taken, slots)
    counted_slot = jnp.where(counts, slot, -1)
    place = _all_positions(slot.shape)
    slot, place = jax.lax.sort((counted_slot, place), dimension=1, num_keys=2)
    differs = slot[:, 1:] != slot[:, :-1]
    is_first = jnp.concatenate([jnp.ones_like(slot[:, :1], bool), differs], axis=1)

    def unsort(place: Array, is_first: Array) -> Array:
        unsorted = jnp.zeros(place.shape, bool)
        return unsorted.at[place].set(is_first, unique_indices=True)

    is_first_in_place = jax.vmap(unsort)(place, is_first)
    return is_first_in_place[:, num_taken:]
