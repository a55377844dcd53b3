"""Sequential draws without repeats, in proportion to a weight, at a cost that does not grow with the capacity.

Draw one of n things with probability w_i / sum w, put it aside, go on with the rest: the law of sorting by E_i / w_i,
E_i ~ Exp(1) (Gumbel top-k is the same in logarithms), and of throwing away repeats of independent draws, each a
uniform candidate accepted with probability w_i / bound. The second needs no look at the n things, so it is tried
first with a fixed number of candidates. Draws still missing then are taken by sorting those left over: what was found
is a prefix of the sequence and independent draws have no memory, so the law is exact either way.

Letters: M shards, n things of a shard, k candidates, b draws.
Owns: which positions are drawn. Does not know: rings, ages, what a weight means.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

# Candidates per draw. A share 1/8 of full weight fills a batch from a large ring with probability about one half.
CANDIDATES_PER_DRAW = 8
# So few things are always sorted.
MIN_CANDIDATES = 128

# Slots [M, k] i32 and whether each was drawn [M, k] bool, the drawn ones first.
Drawn = tuple[Int[Array, "M _"], Bool[Array, "M _"]]


def draw(
    keys: Key[Array, " M"],
    slot_at: Callable[[Int[Array, "M k"]], Int[Array, "M k"]],
    length: Int[Array, " M"],
    weight: Callable[[Int[Array, "M k"]], Float[Array, "M k"]],
    *,
    num: int,
    max_length: int,
    taken: Drawn | None = None,
) -> Drawn:
    """Draw ``num`` slots of each shard without repeats, each in proportion to its weight among those left.

        P(next = i) = w_i / sum of w_j over the slots not drawn yet

    Exact but for the granularity of float32. Where all shards are found by candidates, the cost is that of
    ``CANDIDATES_PER_DRAW * num`` slots; otherwise that of sorting ``max_length``, a ``cond`` over all shards given:
    on several devices call it for the shards of each (``sharding.by_device``), lest they wait for one another. A
    shard's draw depends on its key and slots alone.

    Args:
        keys: [M] random keys.
        slot_at: positions [M, k] i32 to slots [M, k] i32, all different; any position may be asked for.
        length: [M] i32, positions 0..length-1 hold a slot that may be drawn.
        weight: slots [M, k] i32 to [M, k] f32 in [0, 1]; 0 = may not be drawn.
        num: b.
        max_length: n, the largest ``length``.
        taken: slots that may not be drawn.

    Returns:
        Slots [M, b] i32 and whether they were drawn [M, b] bool, in the order of drawing; slots that were not drawn
        come last and are arbitrary.

    Source: Efraimidis and Spirakis 2006 (weighted sampling without replacement); as Gumbel top-k, Kool et al.
        2019, arXiv:1903.06059. Rejection of repeats with a sort of the rest is ours.
    """
    num_shards = length.shape[0]
    if taken is None:
        taken = (jnp.zeros((num_shards, 0), jnp.int32), jnp.zeros((num_shards, 0), bool))
    num_candidates = min(max_length, max(MIN_CANDIDATES, CANDIDATES_PER_DRAW * num))
    keys = jax.vmap(jax.random.split)(keys)
    bits = jax.vmap(lambda key: jax.random.bits(key, (2, num_candidates), jnp.uint32))(keys[:, 0])
    chance = _uniform(bits[:, 0])
    first = jnp.broadcast_to(jnp.arange(num_candidates, dtype=jnp.int32), chance.shape)
    if num_candidates == max_length:
        return _first(*_sorting(slot_at, first, chance, length, weight, taken), num)

    # A short window is sorted whole, a long one tried at random places.
    is_short = (length <= num_candidates)[:, None]
    anywhere, is_even = _anywhere(length[:, None], bits[:, 1])
    slot = slot_at(jnp.where(is_short, first, anywhere))
    w = weight(slot)
    is_accepted = jnp.where(is_short, (first < length[:, None]) & (w > 0), (chance < w) & is_even)
    is_accepted &= _is_new(taken, (slot, is_accepted))
    order = jnp.where(is_short, _race(chance, w), first.astype(jnp.float32))
    found = _first(slot, jnp.where(is_accepted, order, jnp.inf), num)

    def finish(found: Drawn) -> Drawn:
        chance = _uniform(jax.vmap(lambda key: jax.random.bits(key, (max_length,), jnp.uint32))(keys[:, 1]))
        whole = jnp.broadcast_to(jnp.arange(max_length, dtype=jnp.int32), chance.shape)
        gone = tuple(jnp.concatenate(pair, axis=1) for pair in zip(taken, found, strict=True))
        return chain(found, _first(*_sorting(slot_at, whole, chance, length, weight, gone), num))

    is_missing = jnp.any(~is_short & ~found[1])
    return jax.lax.cond(is_missing, finish, lambda found: found, found)


def chain(first: Drawn, second: Drawn) -> Drawn:
    """The drawn slots of ``first``, then those of ``second``, as many [M, b] as ``second`` has."""
    num_first, num = first[0].shape[1], second[0].shape[1]
    place = jnp.arange(num)[None, :]
    behind = place - jnp.sum(first[1], axis=1, keepdims=True)

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        a = jnp.take_along_axis(a, jnp.minimum(place, num_first - 1), axis=1)
        return jnp.where(behind < 0, a, jnp.take_along_axis(b, jnp.maximum(behind, 0), axis=1))

    return one(first[0], second[0]), one(first[1], second[1])


def _uniform(bits: jax.Array) -> jax.Array:
    """[0, 1) f32 from u32."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _anywhere(length: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions 0..length-1 i32 from u32, and whether to keep them: those kept are exactly uniform."""
    n = jnp.maximum(length, 1).astype(jnp.uint32)
    surplus = (jnp.uint32(0) - n) % n  # 2^32 mod n
    return (bits % n).astype(jnp.int32), bits <= jnp.uint32(2**32 - 1) - surplus


def _sorting(slot_at, position, chance, length, weight, taken) -> tuple[jax.Array, jax.Array]:
    """Slots at these positions [M, k] and the order of drawing them [M, k] f32, infinite where they may not be."""
    slot = slot_at(position)
    w = weight(slot)
    is_open = (position < length[:, None]) & (w > 0)
    is_open &= _is_new(taken, (slot, is_open))
    return slot, jnp.where(is_open, _race(chance, w), jnp.inf)


def _race(chance: jax.Array, w: jax.Array) -> jax.Array:
    """Arrival times of exponential clocks of rate w, finite."""
    return jnp.minimum(-jnp.log1p(-chance) / jnp.maximum(w, 1e-30), 3e38)


def _first(slot: jax.Array, order: jax.Array, num: int) -> Drawn:
    """The ``num`` slots that come first. A sort, because XLA gathers the operand of top_k over the mesh."""
    if (lack := num - slot.shape[1]) > 0:
        slot, order = jnp.pad(slot, ((0, 0), (0, lack))), jnp.pad(order, ((0, 0), (0, lack)), constant_values=jnp.inf)
    order, slot = jax.lax.sort((order, slot), dimension=1, num_keys=1, is_stable=True)
    return slot[:, :num], jnp.isfinite(order[:, :num])


def _is_new(taken: Drawn, slots: Drawn) -> jax.Array:
    """Whether each slot [M, k] is neither taken nor given earlier in the row; ones that do not count bar nobody."""
    num_taken = taken[0].shape[1]
    slot, counts = (jnp.concatenate(pair, axis=1) for pair in zip(taken, slots, strict=True))
    place = jnp.broadcast_to(jnp.arange(slot.shape[1], dtype=jnp.int32), slot.shape)
    slot, place = jax.lax.sort((jnp.where(counts, slot, -1), place), dimension=1, num_keys=2)
    is_first = jnp.concatenate([jnp.ones_like(slot[:, :1], bool), slot[:, 1:] != slot[:, :-1]], axis=1)
    is_new = jax.vmap(lambda p, first: jnp.zeros(p.shape, bool).at[p].set(first, unique_indices=True))(place, is_first)
    return is_new[:, num_taken:]
