"""The choice of the replay ring's slots for an update batch, from the ring's columns alone.

A slot may be drawn if its row is trainable, is not retired and is within these limits:

    max_age_steps        largest age of the row in iterations (0 = no limit)
    max_uses             the row was drawn fewer times than this (0 = no limit)
    delay_iterations     exact age of the row in iterations (0 = no delay)

``replay.draw`` gives the weights of the slots that may be drawn. The ring is filled in the order of time, so a limit on
ages is an interval of the ring. A draw therefore need not read the slots outside the interval.

Fresh rows are the rows inserted in this iteration. ``fresh_fraction`` is the share of the batch from fresh rows,
rounded up per shard (0 = no preference). The rest comes from older rows. If one kind has too few rows, the other kind
fills the batch. Some draws choose between fresh and older rows themselves (draw_weights.fresh_or_older).

With ``group_size`` above 1, whole groups are drawn instead of rollouts. A group is this many neighbouring rows of
``ring.insert``. A group may be drawn if any of its rows may be drawn. Its weight is the largest weight of its rows. The
rows of a group are neighbours in the batch.

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

    main = lane(ring.order[:, :num_main])
    second = lane(ring.order[:, num_main:])
    return main, second


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
    oldest_of_draw = config.draw.facts.oldest_age
    if oldest_of_draw is None:
        return oldest
    oldest_or_no_limit = NO_LIMIT if oldest is None else oldest
    return oldest_of_draw(config.draw.settings, iteration, oldest_or_no_limit)


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
        largest_priority = jnp.max(ring.priority, axis=1, keepdims=True)
        self.largest_priority = jnp.maximum(largest_priority, jnp.finfo(jnp.float32).tiny)

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
        age = self.iteration - ring_buffer.take(self.ring.inserted_step, slot)
        uses = ring_buffer.take(self.ring.uses, slot)
        stored = Stored(priority / self.largest_priority, age, uses)
        relative = jnp.clip(self.config.draw(stored), 0.0, 1.0)
        by_row = jnp.where(may_be_drawn, relative, 0.0)
        by_group = by_row.reshape(*group.shape, self.group_size)
        return jnp.max(by_group, axis=-1)

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
    starts = []
    sizes = []
    for lane, held in zip(columns.lanes, num_held, strict=True):
        start = 0 * lane.filled
        if youngest is not None:
            start = lane.count_newest(lambda group: columns.age(group) < youngest)
        end = lane.filled
        if oldest is not None:
            end = lane.count_newest(lambda group: columns.age(group) <= oldest)
        # Pages of filled slots can be overwritten. With a delay, it can happen that no row of the required age is left.
        end = jnp.minimum(end, held)
        starts.append(start[:, None])
        sizes.append(jnp.maximum(end - start, 0))

    def group_at(position: jax.Array) -> jax.Array:
        group = columns.lanes[0].newest_first(starts[0] + position)
        if len(columns.lanes) == 1:
            return group
        size_of_main = sizes[0][:, None]
        of_second_lane = columns.lanes[1].newest_first(starts[1] + position - size_of_main)
        return jnp.where(position < size_of_main, group, of_second_lane)

    num_slots = columns.ring.uses.shape[1]
    return draws.draw(
        keys,
        group_at,
        sum(sizes[1:], sizes[0]),
        columns.weight,
        num=num,
        max_length=num_slots // columns.group_size,
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
    of groups. The last line of the function converts groups to slots.

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
    num_preferred, youngest_preferred, oldest_preferred = _preference(config, num, uniform_number, oldest_or_no_limit)
    earlier: list[draws.Drawn] = []
    taken = None
    if num_preferred:
        taken = draw_of_ages(0, youngest_preferred, oldest_preferred, num_preferred, None)
        earlier.append(taken)
    if taken is not None and num_preferred < num:  # prefer older groups for the rest of the batch
        older = draw_of_ages(2, 1, oldest_or_no_limit, num - num_preferred, taken)
        earlier.append(older)
        taken = draws.joined(taken, older)
    drawn = draw_of_ages(1, config.delay_iterations or None, oldest, num, taken)
    for preferred in reversed(earlier):
        drawn = draws.chain(preferred, drawn)
    group, is_real = drawn
    return columns.slots_of(group), jnp.repeat(is_real, group_size, axis=1)


def _preference(
    config: ReplayConfig,
    num: int,
    uniform_number: jax.Array,
    oldest: Age,
) -> tuple[int, Age | None, Age | None]:
    """Return how many of ``num`` groups have preferred ages, and the youngest and the oldest preferred age."""
    choose_ages = config.draw.facts.preferred_ages
    if choose_ages is not None:
        youngest_preferred, oldest_preferred = choose_ages(config.draw.settings, uniform_number, oldest)
        return num, youngest_preferred, oldest_preferred
    # Subtract a little, so that a rounding error above a whole number does not add a row.
    num_fresh = math.ceil(config.fresh_fraction * num - 1e-9)
    return num_fresh, None, 0
