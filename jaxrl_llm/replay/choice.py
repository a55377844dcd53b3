"""The choice of the replay ring's slots for an update batch, from the ring's columns alone.

The columns decide whether a rollout may be drawn and give its weight (``replay.draw``). The ring is filled in the order
of time, so a limit on ages is an interval of the ring. A draw therefore need not read the slots outside the interval.
Letters: M shards, C slots per shard.
Owns: which rows may be drawn, and their weights. Does not know: the contents of rows, how columns are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.inputs import Stored
from jaxrl_llm.method_config import ReplayConfig
from jaxrl_llm.ops import paged_log, ring_buffer
from jaxrl_llm.ops import weighted_draws as draws
from jaxrl_llm.ops.ring_buffer import Lane
from jaxrl_llm.types import RingState

# Type of an age in iterations: a number or [] i32.
Age = jax.Array | int
# Value of a limit on ages that allows every age.
NO_LIMIT = jnp.iinfo(jnp.int32).max


def lanes(ring: RingState, config: ReplayConfig) -> tuple[Lane, Lane]:
    """Return the two lanes of slots: the main ring and the second ring (admitted rows that the main ring overwrote)."""
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
    oldest = _oldest_age(iteration, config)
    if oldest is not None:
        spent |= age > oldest
    if config.draw.facts.never_draws(config.draw.settings):
        spent |= ring.priority <= 0
    if ring.pages:
        is_held = jnp.asarray(paged_log.is_held(ring.pages["first"], ring.pages["oldest"]))
        spent |= ~is_held
    return spent


def _oldest_age(iteration: jax.Array, config: ReplayConfig) -> Age | None:
    """Return the oldest age of rows that may be drawn in an iteration; None = no limit."""
    oldest = config.delay_iterations or config.max_age_steps or None
    oldest_age = config.draw.facts.oldest_age
    if oldest_age is None:
        return oldest
    return oldest_age(config.draw.settings, iteration, NO_LIMIT if oldest is None else oldest)


class _Columns:
    """Columns of the ring that a draw of groups reads. The index of a group is its first slot / ``group_size``."""

    def __init__(
        self,
        ring: RingState,
        iteration: jax.Array,
        config: ReplayConfig,
        group_size: int,
    ):
        self.ring = ring
        self.iteration = iteration
        self.config = config
        self.group_size = group_size
        self.lanes = [lane.of_groups(group_size) for lane in lanes(ring, config) if lane.size]
        smallest = jnp.finfo(jnp.float32).tiny
        self.largest_priority = jnp.maximum(jnp.max(ring.priority, axis=1, keepdims=True), smallest)

    def slots_of(self, group: jax.Array) -> jax.Array:
        """Return the slots of groups."""
        return ring_buffer.slots_of_groups(group, group_size=self.group_size)

    def age(self, group: jax.Array) -> jax.Array:
        """Return the age of groups in iterations."""
        return self.iteration - ring_buffer.take(self.ring.inserted_step, group * self.group_size)

    def weight(self, group: jax.Array) -> jax.Array:
        """Return the weight of groups: the largest weight of their rows that may be drawn."""
        slot = self.slots_of(group)
        priority = ring_buffer.take(self.ring.priority, slot)
        may_be_drawn = ~ring_buffer.take(self.ring.is_retired, slot)
        if self.config.max_uses:
            may_be_drawn &= ring_buffer.take(self.ring.uses, slot) < self.config.max_uses
        stored = Stored(
            priority / self.largest_priority,
            self.iteration - ring_buffer.take(self.ring.inserted_step, slot),
            ring_buffer.take(self.ring.uses, slot),
        )
        relative = jnp.clip(self.config.draw(stored), 0.0, 1.0)
        by_row = jnp.where(may_be_drawn, relative, 0.0).reshape(*group.shape, self.group_size)
        return jnp.max(by_row, axis=-1)

    def num_held(self) -> list[jax.Array]:
        """Return, for the main and the second ring, the number of groups whose rows are still stored."""
        if not self.ring.pages:
            return [lane.filled for lane in self.lanes]

        def is_held(group: jax.Array) -> jax.Array:
            # Check only the first row, because its pages are overwritten before the pages of the group's other rows.
            first_page = ring_buffer.take(self.ring.pages["first"], group * self.group_size)
            return jnp.asarray(paged_log.is_held(first_page, self.ring.pages["oldest"]))

        return [lane.count_newest(is_held) for lane in self.lanes]


def _draw_of_ages(
    columns: _Columns,
    num_held: Sequence[jax.Array],
    keys: jax.Array,
    youngest: Age | None,
    oldest: Age | None,
    num: int,
    taken: draws.Drawn | None,
) -> draws.Drawn:
    """Draw from the stored groups with youngest <= age <= oldest (None = no limit), an interval of each lane."""
    first = []
    size = []
    for lane, held in zip(columns.lanes, num_held, strict=True):
        start = 0 * lane.filled
        if youngest is not None:
            start = lane.count_newest(lambda group: columns.age(group) < youngest)
        end = lane.filled
        if oldest is not None:
            end = lane.count_newest(lambda group: columns.age(group) <= oldest)
        # Pages of filled slots can be overwritten. With a delay, it can happen that no row of the required age is left.
        end = jnp.minimum(end, held)
        first.append(start)
        size.append(jnp.maximum(end - start, 0))

    def group_at(position: jax.Array) -> jax.Array:
        group = columns.lanes[0].newest_first(first[0][:, None] + position)
        if len(columns.lanes) == 2:
            behind = columns.lanes[1].newest_first(first[1][:, None] + position - size[0][:, None])
            group = jnp.where(position < size[0][:, None], group, behind)
        return group

    return draws.draw(
        keys,
        group_at,
        sum(size[1:], size[0]),
        columns.weight,
        num=num,
        max_length=columns.ring.uses.shape[1] // columns.group_size,
        taken=taken,
    )


def choose(
    keys: jax.Array,
    ring: RingState,
    iteration: jax.Array,
    uniform_number: jax.Array,
    config: ReplayConfig,
    *,
    num: int,
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return slots [M, num * group_size] i32 and whether each slot was drawn, [M, num * group_size] bool.

    The rows that the config prefers come first, then other rows that may be drawn. The function computes with indices
    of groups. Its last line converts them to slots.

    Args:
        uniform_number: [] f32 in [0, 1), the same for all shards. Some draws choose by this number whether a batch
            prefers fresh or older rows.
    """
    columns = _Columns(ring, iteration, config, group_size)
    num_held = columns.num_held()

    def draw_of_ages(
        key_index: int,
        youngest: Age | None,
        oldest: Age | None,
        num: int,
        taken: draws.Drawn | None,
    ) -> draws.Drawn:
        draw_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, key_index)
        return _draw_of_ages(columns, num_held, draw_keys, youngest, oldest, num, taken)

    oldest = _oldest_age(iteration, config)
    oldest_or_no_limit = NO_LIMIT if oldest is None else oldest
    # Subtract a little, so that a rounding error above a whole number does not add a row.
    num_preferred = math.ceil(config.fresh_fraction * num - 1e-9)
    preferred_ages: tuple[Age | None, Age | None] = (None, 0)
    choose_ages = config.draw.facts.preferred_ages
    if choose_ages is not None:
        num_preferred = num
        preferred_ages = choose_ages(config.draw.settings, uniform_number, oldest_or_no_limit)
    earlier: list[draws.Drawn] = []
    taken = None
    if num_preferred:
        taken = draw_of_ages(0, *preferred_ages, num_preferred, None)
        earlier.append(taken)
    if 0 < num_preferred < num:  # prefer older groups for the rest of the batch
        older = draw_of_ages(2, 1, oldest_or_no_limit, num - num_preferred, taken)
        earlier.append(older)
        slots = jnp.concatenate([earlier[0][0], older[0]], axis=1)
        was_drawn = jnp.concatenate([earlier[0][1], older[1]], axis=1)
        taken = (slots, was_drawn)
    drawn = draw_of_ages(1, config.delay_iterations or None, oldest, num, taken)
    for preferred in reversed(earlier):
        drawn = draws.chain(preferred, drawn)
    group, is_real = drawn
    return columns.slots_of(group), jnp.repeat(is_real, group_size, axis=1)
