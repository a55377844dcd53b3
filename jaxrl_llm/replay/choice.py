"""The choice of the replay ring's slots for an update batch, from the ring's columns alone.

The columns decide whether a rollout may be drawn and give its weight (``replay.draw``). The ring is filled in the order
of time, so a limit on ages is an interval of the ring. A draw therefore need not read the slots outside the interval.
Letters: M shards, C slots per shard.
Owns: which rows may be drawn and their weights, by a run's settings. Does not know: rows, how columns are computed.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.inputs import Stored
from jaxrl_llm.config import ReplayConfig
from jaxrl_llm.ops import paged_log, ring_buffer
from jaxrl_llm.ops import weighted_draws as draws
from jaxrl_llm.ops.ring_buffer import Lane
from jaxrl_llm.types import RingState


def lanes(ring: RingState, config: ReplayConfig) -> tuple[Lane, Lane]:
    """Return the main ring and the second ring, which holds admitted rows that the main ring overwrote."""
    num_slots = ring.uses.shape[1]
    num_main = num_slots - round(config.positive_fraction * num_slots)

    def lane(order: jax.Array) -> Lane:
        is_filled = ring_buffer.take(ring.inserted_step, order) >= 0
        return Lane(order, jnp.sum(is_filled, axis=1, dtype=jnp.int32))

    return lane(ring.order[:, :num_main]), lane(ring.order[:, num_main:])


def is_spent(ring: RingState, iteration: jax.Array, config: ReplayConfig) -> jax.Array:
    """Return the slots, as [M, C] bool, that no draw from this iteration on can use. New rows overwrite them first."""
    age = iteration - ring.inserted_step
    spent = (ring.inserted_step < 0) | ring.is_retired
    if config.max_uses:
        spent |= ring.uses >= config.max_uses
    if oldest := config.delay_iterations or config.max_age_steps:
        spent |= age > oldest
    if config.fresh_from_iteration:
        spent |= (iteration >= config.fresh_from_iteration) & (age > 0)
    if config.draw.facts.never_draws(config.draw.settings):
        spent |= ring.priority <= 0
    if ring.pages:
        spent |= ~paged_log.is_held(ring.pages["first"], ring.pages["oldest"])
    return spent


def choose(
    keys: jax.Array,
    ring: RingState,
    iteration: jax.Array,
    is_fresh: jax.Array,
    config: ReplayConfig,
    *,
    num: int,
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return slots [M, num * group_size] i32 and whether each slot was drawn, [M, num * group_size] bool.

    The rows that the config prefers come first, then other rows that may be drawn. The code handles groups until the
    last line, which turns groups into slots.

    Args:
        is_fresh: [] bool, for ``config.fresh_batches``. True prefers fresh rows, False prefers older rows.
    """
    num_slots = ring.uses.shape[1]
    rings = [lane.of_groups(group_size) for lane in lanes(ring, config) if lane.size]
    largest = jnp.maximum(jnp.max(ring.priority, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)

    at, rows_of = ring_buffer.take, functools.partial(ring_buffer.slots_of_groups, group_size=group_size)

    def age(group: jax.Array) -> jax.Array:
        return iteration - at(ring.inserted_step, group * group_size)

    def weight(group: jax.Array) -> jax.Array:
        slot = rows_of(group)
        priority = at(ring.priority, slot)
        is_open = ~at(ring.is_retired, slot)
        if config.max_uses:
            is_open &= at(ring.uses, slot) < config.max_uses
        stored = Stored(priority / largest, iteration - at(ring.inserted_step, slot), at(ring.uses, slot))
        relative = jnp.clip(config.draw(stored), 0.0, 1.0)
        return jnp.max(jnp.where(is_open, relative, 0.0).reshape(*group.shape, group_size), axis=-1)

    def is_held(group: jax.Array) -> jax.Array:
        # The first row's pages are overwritten before the pages of the group's other rows.
        return paged_log.is_held(at(ring.pages["first"], group * group_size), ring.pages["oldest"])

    held = [lane.count_newest(is_held) if ring.pages else lane.filled for lane in rings]

    def aged(key_index: int, low, high, num: int, taken: draws.Drawn | None) -> draws.Drawn:
        """Draw from the held groups with low <= age <= high (None = no limit), which are an interval of each ring."""
        first = [0 * lane.filled if low is None else lane.count_newest(lambda s: age(s) < low) for lane in rings]
        last = [lane.filled if high is None else lane.count_newest(lambda s: age(s) <= high) for lane in rings]
        # Pages of filled slots can be overwritten. With a delay, all rows of the required age can be lost.
        last = [jnp.minimum(end, most) for end, most in zip(last, held, strict=True)]
        size = [jnp.maximum(end - start, 0) for start, end in zip(first, last, strict=True)]

        def slot_at(position: jax.Array) -> jax.Array:
            slot = rings[0].newest_first(first[0][:, None] + position)
            if len(rings) == 2:
                behind = rings[1].newest_first(first[1][:, None] + position - size[0][:, None])
                slot = jnp.where(position < size[0][:, None], slot, behind)
            return slot

        return draws.draw(
            jax.vmap(jax.random.fold_in, (0, None))(keys, key_index),
            slot_at,
            sum(size),
            weight,
            num=num,
            max_length=num_slots // group_size,
            taken=taken,
        )

    # Subtract a little, so that a rounding error above a whole number does not add a row.
    num_first, first_ages = math.ceil(config.fresh_fraction * num - 1e-9), (None, 0)
    low = config.delay_iterations or None
    high = config.delay_iterations or config.max_age_steps or None
    oldest = jnp.iinfo(jnp.int32).max if high is None else high
    if config.fresh_from_iteration:
        high = oldest = jnp.where(iteration >= config.fresh_from_iteration, 0, oldest)
    if config.fresh_batches:
        num_first, first_ages = num, (jnp.where(is_fresh, 0, 1), jnp.where(is_fresh, 0, oldest))
    first = aged(0, *first_ages, num_first, None) if num_first else None
    taken = first
    older = None
    if 0 < num_first < num:  # prefer older groups for the rest of the batch
        older = aged(2, 1, oldest, num - num_first, first)
        taken = tuple(jnp.concatenate(pair, axis=1) for pair in zip(first, older, strict=True))
    drawn = aged(1, low, high, num, taken)
    for before in filter(None, (older, first)):
        drawn = draws.chain(before, drawn)
    group, is_real = drawn
    return rows_of(group), jnp.repeat(is_real, group_size, axis=1)
