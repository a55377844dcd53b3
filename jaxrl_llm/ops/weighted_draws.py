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
    num_shards = length.shape[0]
    if taken is None:
        taken = (
            jnp.zeros((num_shards, 0), jnp.int32),
            jnp.zeros((num_shards, 0), bool),
        )
    num_candidates = min(max_length, max(MIN_CANDIDATES, CANDIDATES_PER_DRAW * num))
    keys = jax.vmap(jax.random.split)(keys)
    bits = jax.vmap(lambda key: jax.random.bits(key, (2, num_candidates), jnp.uint32))(keys[:, 0])
    chance = _uniform(bits[:, 0])
    first_positions = jnp.broadcast_to(jnp.arange(num_candidates, dtype=jnp.int32), chance.shape)
    if num_candidates == max_length:
        return _first(*_sorting(slot_at, first_positions, chance, length, weight, taken), num)

    # Sort a shard with few slots. Try random positions in a shard with many slots.
    is_short = (length <= num_candidates)[:, None]
    random_positions, is_even = _anywhere(length[:, None], bits[:, 1])
    slot = slot_at(jnp.where(is_short, first_positions, random_positions))
    w = weight(slot)
    is_accepted = jnp.where(is_short, (first_positions < length[:, None]) & (w > 0), (chance < w) & is_even)
    is_accepted &= _is_new(taken, (slot, is_accepted))
    order = jnp.where(is_short, _race(chance, w), first_positions.astype(jnp.float32))
    candidates = _first(slot, jnp.where(is_accepted, order, jnp.inf), num)

    def sort_the_rest(drawn: Drawn) -> Drawn:
        chance = _uniform(jax.vmap(lambda key: jax.random.bits(key, (max_length,), jnp.uint32))(keys[:, 1]))
        positions = jnp.broadcast_to(jnp.arange(max_length, dtype=jnp.int32), chance.shape)
        all_taken = _joined(taken, drawn)
        return chain(
            drawn,
            _first(*_sorting(slot_at, positions, chance, length, weight, all_taken), num),
        )

    is_missing = jnp.any(~is_short & ~candidates[1])
    return jax.lax.cond(is_missing, sort_the_rest, lambda drawn: drawn, candidates)


def chain(first: Drawn, second: Drawn) -> Drawn:
    """Return the drawn slots of ``first``, then the slots of ``second``, cut to the width [M, b] of ``second``."""
    num_first = first[0].shape[1]
    num = second[0].shape[1]
    place = jnp.arange(num)[None, :]
    place_in_second = place - jnp.sum(first[1], axis=1, keepdims=True)

    def join(a: Array, b: Array) -> Array:
        a = jnp.take_along_axis(a, jnp.minimum(place, num_first - 1), axis=1)
        b = jnp.take_along_axis(b, jnp.maximum(place_in_second, 0), axis=1)
        return jnp.where(place_in_second < 0, a, b)

    return join(first[0], second[0]), join(first[1], second[1])


def _joined(first: Drawn, second: Drawn) -> Drawn:
    """Return both lists, one after the other."""
    slots = jnp.concatenate([first[0], second[0]], axis=1)
    return slots, jnp.concatenate([first[1], second[1]], axis=1)


def _uniform(bits: Array) -> Array:
    """Return uniform numbers in [0, 1), f32, from u32."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _anywhere(length: Array, bits: Array) -> tuple[Array, Array]:
    """Return positions 0..length-1, i32 from u32, and a mask of the positions to keep, which are exactly uniform."""
    n = jnp.maximum(length, 1).astype(jnp.uint32)
    surplus = (jnp.uint32(0) - n) % n  # 2^32 mod n
    return (bits % n).astype(jnp.int32), bits <= jnp.uint32(2**32 - 1) - surplus


def _sorting(
    slot_at: SlotAt,
    position: Array,
    chance: Array,
    length: Array,
    weight: WeightOf,
    taken: Drawn,
) -> tuple[Array, Array]:
    """Return the slots at these positions [M, k] and their order [M, k] f32; inf = may not be drawn."""
    slot = slot_at(position)
    w = weight(slot)
    is_open = (position < length[:, None]) & (w > 0)
    is_open &= _is_new(taken, (slot, is_open))
    return slot, jnp.where(is_open, _race(chance, w), jnp.inf)


def _race(chance: Array, w: Array) -> Array:
    """Return finite arrival times of exponential clocks of rate w."""
    return jnp.minimum(-jnp.log1p(-chance) / jnp.maximum(w, 1e-30), 3e38)


def _first(slot: Array, order: Array, num: int) -> Drawn:
    """Return the ``num`` slots that come first. Use a sort, because XLA gathers the operand of top_k over the mesh."""
    num_missing = num - slot.shape[1]
    if num_missing > 0:
        slot = jnp.pad(slot, ((0, 0), (0, num_missing)))
        order = jnp.pad(order, ((0, 0), (0, num_missing)), constant_values=jnp.inf)
    order, slot = jax.lax.sort((order, slot), dimension=1, num_keys=1, is_stable=True)
    return slot[:, :num], jnp.isfinite(order[:, :num])


def _is_new(taken: Drawn, slots: Drawn) -> Array:
    """Return whether each slot [M, k] is neither taken nor earlier in the row. Slots that do not count are ignored."""
    num_taken = taken[0].shape[1]
    slot, counts = _joined(taken, slots)
    place = jnp.broadcast_to(jnp.arange(slot.shape[1], dtype=jnp.int32), slot.shape)
    slot, place = jax.lax.sort((jnp.where(counts, slot, -1), place), dimension=1, num_keys=2)
    is_first = jnp.concatenate([jnp.ones_like(slot[:, :1], bool), slot[:, 1:] != slot[:, :-1]], axis=1)

    def unsort(place: Array, is_first: Array) -> Array:
        return jnp.zeros(place.shape, bool).at[place].set(is_first, unique_indices=True)

    return jax.vmap(unsort)(place, is_first)[:, num_taken:]
