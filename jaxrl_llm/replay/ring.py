"""Replay ring: the last rollouts, from which update batches are drawn, in the memory of the device or of the host.

Owns: the ring's state, which rows are kept, use counts and ages. Does not know: how slots are chosen (choice),
credit, losses, the mesh (the caller that places the state shards M over the data axes), which sizes a user may set.
``limits`` and ``sharding.check_divisible`` have checked the conditions that are asserted here.
Letters: R rows inserted, M shards, C slots per shard, b = batch_size / M rows drawn per shard, S row width; for a ring
in pages, N pages of T tokens per shard.

All functions run on the device. They need no collective if M is sharded over the mesh's data axes. Exceptions are
``latest_visit`` and ``retirement``, which compare all rows of an iteration.

A draw leaves the rows in the ring and does not repeat a row within a batch. New rows overwrite rows that can never be
drawn again (tied, superseded, used up, too old), then the oldest rows. Stored behaviour log-probabilities and
advantages are not recomputed. On-policy training uses a ring of one iteration.

With ``positive_fraction`` d, the last d*C slots of a shard are a second ring for correct rows that the main ring
overwrites. The main ring holds the freshest (1-d)*C rows, the second ring the freshest d*C other correct rows. Draws
use the rows of both rings. With ``admission`` "likely" the second ring holds likely rows instead of correct rows.
Source: Arnal et al. 2026, arXiv:2604.08706, section 3. The paper's definition also allows other forms than two rings.

With ``capacity_tokens``, all per-token fields of a row lie in a log of pages without padding (ops.paged_log). The slot
of the row holds only the other fields. The oldest pages are overwritten first, even if their row may still be drawn.
A row counts as stored only while all its pages are in the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.inputs import COLUMNS, PER_TOKEN
from jaxrl_llm.method_config import ReplayConfig
from jaxrl_llm.ops import paged_log, ring_buffer
from jaxrl_llm.replay import choice
from jaxrl_llm.replay.choice import lanes
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import AGE_BUCKETS, Experience, RingState, Sums


@flax.struct.dataclass
class DrawInfo:
    """Facts about the drawn rows. All fields are 0 or False if ``is_real`` is False."""

    is_real: jax.Array  # [M, b] bool, False = filler row, because the shard had fewer than b slots to draw
    age: jax.Array  # [M, b] i32 iterations since insertion
    uses: jax.Array  # [M, b] i32 times drawn, including this draw
    first_use: jax.Array  # [M, b] bool
    since_last_use: jax.Array  # [M, b] i32 batches drawn since the row's last draw, 0 on the first use
    question: jax.Array  # [M, b] i32 question_id


def init(
    experience_shape: Experience,
    *,
    capacity: int,
    num_shards: int,
    on_host: bool = False,
    capacity_tokens: int = 0,
    page_tokens: int = 1,
) -> RingState:
    """Return an empty ring.

    Args:
        experience_shape: rows with leaves [R, ...], arrays or ``jax.ShapeDtypeStruct``. The number R is ignored.
        capacity: slots of all shards together.
        num_shards: M.
        on_host: store the rows in the host's memory. Counts and other columns stay on the device.
        capacity_tokens: tokens of all shards together, without padding; 0 = every slot has room for S tokens.
        page_tokens: T.
    """
    num_slots = _per_shard(capacity, num_shards)
    in_pages = capacity_tokens > 0
    num_pages = capacity_tokens // num_shards // page_tokens

    def shape(path: tuple[Any, ...], x: jax.Array) -> jax.ShapeDtypeStruct:
        if in_pages and _is_per_token(path):
            return jax.ShapeDtypeStruct((num_shards, num_pages, page_tokens, *x.shape[2:]), x.dtype)
        return jax.ShapeDtypeStruct((num_shards, num_slots, *x.shape[1:]), x.dtype)

    def column(value: Any, dtype: Any) -> jax.Array:
        return jnp.full((num_shards, num_slots), value, dtype)

    slot_shapes = jax.tree_util.tree_map_with_path(shape, _stored(experience_shape))
    slot_numbers = jnp.arange(num_slots, dtype=jnp.int32)
    pages = {}
    if in_pages:
        pages = {"first": column(-1, jnp.int32), "oldest": jnp.zeros(num_shards, jnp.int32)}
    return RingState(
        slots=ring_buffer.zeros(slot_shapes, on_host=on_host),
        order=jnp.broadcast_to(slot_numbers, (num_shards, num_slots)),
        num_draws=jnp.zeros(num_shards, jnp.int32),
        uses=column(0, jnp.int32),
        last_use=column(0, jnp.int32),
        priority=column(0, jnp.float32),
        inserted_step=column(-1, jnp.int32),
        question=column(0, jnp.int32),
        is_retired=column(False, bool),
        pages=pages,
    )


def insert(
    ring: RingState,
    experience: Experience,
    iteration: jax.Array,
    config: ReplayConfig,
    *,
    pass_threshold: float = 1.0,
    imitates: bool = False,
    group_size: int = 1,
) -> RingState:
    """Write R rows over spent slots (never drawn again), then over the oldest. Row r goes to shard r // (R / M).

    A row that is not trainable takes a slot and is never drawn. Every iteration thus inserts the same number of rows.

    Args:
        ring: the caller should donate it.
        experience: leaves [R, ...].
        iteration: [] i32.
        config: settings of the admission to the second ring and of the priority (0 if not finite), and the rows to
            retire:

            - ``skip_tied``: rows of tied groups.
            - ``latest_visit``: the earlier rows of each question that has new rows that may be drawn.
            - ``retirement``: the new rows that this function returns, and the earlier rows of their questions.
        pass_threshold: a rollout is correct if its reward is at least this.
        imitates: the loss also trains on correct external rows without an advantage, so ``skip_tied`` keeps them.
        group_size: number of neighbouring rows that are drawn and overwritten together.
    """
    num_shards = ring.uses.shape[0]
    num_rows = _per_shard(experience.reward.shape[0], num_shards)
    main, kept = lanes(ring, config)
    assert num_rows <= main.size
    assert not (kept.size and ring.pages)
    retired, supersedes = _retirement(experience, config, pass_threshold=pass_threshold, imitates=imitates)
    ring = _with_superseded_retired(ring, experience, supersedes, config)
    written = _new_entries(experience, retired, iteration, config, num_shards=num_shards)
    rows = written["slots"]
    stored: dict[str, Any] = {name: getattr(ring, name) for name in written}
    log = None
    if ring.pages:
        # Per-token fields go to the log. The code below handles only the other fields.
        stored["slots"], _ = _apart(ring.slots)
        written["slots"], _ = _apart(rows)
        stored["first"] = ring.pages["first"]
        log, written["first"], oldest = _write_tokens(ring, rows)
        ring = dataclasses.replace(ring, pages={**ring.pages, "oldest": oldest})
    spent = choice.is_spent(ring, iteration, config)
    order = ring_buffer.renew(main, spent, num_rows, group_size=group_size)
    target = order[:, main.size - num_rows :]
    kept_order = kept.order
    if kept.size:
        evicted = ring_buffer.take(stored, target)
        is_kept = config.admission(evicted["slots"], rows, pass_threshold)
        is_kept &= evicted["slots"].trainable & ~ring_buffer.take(spent, target)
        stored, kept_order = ring_buffer.write_some(stored, kept, spent, evicted, is_kept)
    stored = ring_buffer.put(stored, target, written)
    stored["slots"] = _together(stored["slots"], log)
    if ring.pages:
        stored["pages"] = {**ring.pages, "first": stored.pop("first")}
    stored["order"] = jnp.concatenate([order, kept_order], axis=1)
    return dataclasses.replace(ring, **stored)


def _new_entries(
    experience: Experience,
    retired: jax.Array,
    iteration: jax.Array,
    config: ReplayConfig,
    *,
    num_shards: int,
) -> dict[str, Any]:
    """Return the fields of ``RingState`` for new rows, by name, [M, n, ...]."""
    num_rows = _per_shard(experience.reward.shape[0], num_shards)
    finite_priority = jnp.nan_to_num(config.priority(experience), posinf=0.0, neginf=0.0)
    priority = jnp.where(retired, 0.0, finite_priority)

    def by_shard(x: jax.Array) -> jax.Array:
        return x.reshape(num_shards, num_rows, *x.shape[1:])

    zero = jnp.zeros((num_shards, num_rows), jnp.int32)
    return {
        "slots": jax.tree.map(by_shard, _stored(experience)),
        "uses": zero,
        "last_use": zero,
        "priority": by_shard(priority),
        "inserted_step": jnp.full_like(zero, iteration),
        "question": by_shard(experience.columns["question_id"]),
        "is_retired": by_shard(retired),
    }


def _write_tokens(
    ring: RingState,
    rows: Experience,
) -> tuple[Experience, jax.Array, jax.Array]:
    """Return the log with the tokens of new rows [M, n, ...], their first pages, and the new oldest page."""
    _, log = _apart(ring.slots)
    _, tokens = _apart(rows)
    num_pages, page = log.rollout.tokens.shape[1:]
    num_rows, width = tokens.rollout.tokens.shape[1:]
    assert num_rows * -(-width // page) <= num_pages
    length = rows.rollout.length
    first, oldest = paged_log.next_pages(ring.pages["oldest"], length, num_pages=num_pages, page=page)
    return paged_log.write(log, first, length, tokens), first, oldest


def _retirement(
    experience: Experience,
    config: ReplayConfig,
    *,
    pass_threshold: float,
    imitates: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return which new rows are never drawn, and which new rows retire the earlier rows of their question, [R] bool."""
    retired = ~experience.trainable
    if config.skip_tied:
        tied = experience.columns["tied"]
        if imitates:
            is_own = experience.rollout.group_id >= 0
            is_wrong = experience.reward < pass_threshold
            tied &= is_own | is_wrong
        retired |= tied
    supersedes = ~retired if config.latest_visit else jnp.zeros_like(retired)
    if config.retirement:
        retired_by_function = config.retirement(experience, pass_threshold)
        supersedes = supersedes | retired_by_function
        retired = retired | retired_by_function
    return retired, supersedes


def _with_superseded_retired(
    ring: RingState,
    experience: Experience,
    supersedes: jax.Array,
    config: ReplayConfig,
) -> RingState:
    """Return the ring with earlier rows retired, if a new row of their question has ``supersedes`` [R] True."""
    if not (config.latest_visit or config.retirement):
        return ring
    is_superseded = _is_among(ring.question, experience.columns["question_id"], supersedes)
    return dataclasses.replace(ring, is_retired=ring.is_retired | is_superseded)


def draw(
    ring: RingState,
    key: jax.Array,
    iteration: jax.Array,
    config: ReplayConfig,
    *,
    batch_size: int,
    group_size: int = 1,
    row_tokens: int = 0,
) -> tuple[RingState, Experience, DrawInfo]:
    """Draw an update batch without repeats. ``replay.choice`` describes which slots may be drawn.

    Args:
        ring: the caller should donate it.
        key: one random key. Shard m uses ``fold_in(key, m)``. The draw depends on key and ring, not on the mesh.
        iteration: [] i32.
        config: limits, weights and fractions.
        batch_size: rows of all shards together.
        group_size: above 1, whole groups of this many neighbouring rows are drawn.
        row_tokens: S. Only a ring in pages needs S, because its arrays do not have this dimension.

    Returns:
        The ring with updated use counts, the drawn rows [M, b, ...], and facts about them (``DrawInfo``). If too few
        slots could be drawn, filler rows have ``trainable`` False.
    """
    slot_index, is_real = _choose_slots(ring, key, iteration, config, batch_size=batch_size, group_size=group_size)
    experience = rows_at(ring, slot_index, row_tokens)
    drawn_columns = (ring.inserted_step, ring.uses, ring.last_use, ring.question)
    inserted, uses, last_use, question = ring_buffer.take(drawn_columns, slot_index)
    draw_number = ring.num_draws + 1

    def real(values: jax.Array) -> jax.Array:
        """Return the values of real rows, 0 for filler rows."""
        return jnp.where(is_real, values, jnp.zeros_like(values))

    age = iteration - inserted
    is_first = uses == 0
    since_last_use = jnp.where(is_first, 0, draw_number[:, None] - last_use)
    info = DrawInfo(
        is_real=is_real,
        age=real(age),
        uses=real(uses + 1),
        first_use=is_real & is_first,
        since_last_use=real(since_last_use),
        question=real(question),
    )
    ring = _with_counts(ring, slot_index, is_real, uses + 1)
    rows = dataclasses.replace(experience, trainable=experience.trainable & is_real)
    rows = rows.with_columns(age_bucket=real(_age_bucket(age)))
    return ring, rows, info


def _choose_slots(
    ring: RingState,
    key: jax.Array,
    iteration: jax.Array,
    config: ReplayConfig,
    *,
    batch_size: int,
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return slots [M, b] i32 and whether each was drawn, [M, b] bool. Slots that were not drawn are fillers."""
    num_shards, num_slots = ring.uses.shape
    num_rows = _per_shard(batch_size, num_shards)
    assert num_rows <= num_slots
    assert num_slots % group_size == num_rows % group_size == 0
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_shards))

    # One random number for all shards.
    uniform_number = jax.random.uniform(jax.random.fold_in(key, num_shards))

    def choose(
        keys: jax.Array,
        ring: RingState,
        iteration: jax.Array,
        uniform_number: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        return choice.choose(
            keys,
            ring,
            iteration,
            uniform_number,
            config,
            num=num_rows // group_size,
            group_size=group_size,
        )

    # The choice reads only the columns, not the rows. Each device reads the columns of its own shards.
    no_rows: Any = None
    columns = dataclasses.replace(ring, slots=no_rows)
    axes = (("batch",), ("batch",), (), ())
    return sharding.by_device(choose, keys, columns, iteration, uniform_number, axes=axes)


def _with_counts(
    ring: RingState,
    slot_index: jax.Array,
    is_real: jax.Array,
    uses: jax.Array,
) -> RingState:
    """Return the ring with one more draw counted: the new ``uses`` [M, b] of the drawn slots, and their last use."""
    num_slots = ring.uses.shape[1]
    draw_number = ring.num_draws + 1
    used = jnp.where(is_real, slot_index, num_slots)  # an index out of range is dropped
    last_use = jnp.broadcast_to(draw_number[:, None], uses.shape)
    all_uses, all_last_uses = ring_buffer.put((ring.uses, ring.last_use), used, (uses, last_use))
    return dataclasses.replace(ring, uses=all_uses, last_use=all_last_uses, num_draws=draw_number)


def rows_at(ring: RingState, slot_index: jax.Array, row_tokens: int) -> Experience:
    """Return the rows [M, b, ...] in the slots ``slot_index`` [M, b]."""
    if not ring.pages:
        return ring_buffer.take(ring.slots, slot_index)
    slots, log = _apart(ring.slots)
    experience, first_page = ring_buffer.take((slots, ring.pages["first"]), slot_index)
    tokens = paged_log.take(
        log,
        first_page,
        experience.rollout.length,
        width=row_tokens,
        padding=_padding(log),
    )
    return _together(experience, tokens)


def retire_stale(
    ring: RingState,
    iteration: jax.Array,
    effective: jax.Array,
    config: ReplayConfig,
) -> RingState:
    """Retire the rows of every age bucket with a small effective sample size. Retired rows are never drawn again.

    Rows that reach the bucket later are not retired by this call.

    Args:
        ring: the caller should donate it.
        iteration: [] i32.
        effective: [len(AGE_BUCKETS) + 1] f32, effective sample size of the drawn rows' importance ratios in each age
            bucket, divided by the number of their tokens; 1 if no row of the bucket was drawn.
        config: rows of a bucket are retired if ``effective`` is below ``min_ess``.

    This rule is not from a paper.
    """
    bucket = _age_bucket(iteration - ring.inserted_step)
    is_stale = (effective < config.min_ess)[bucket]
    return dataclasses.replace(ring, is_retired=ring.is_retired | is_stale)


def _age_bucket(age: jax.Array) -> jax.Array:
    """Return the age bucket, 0..len(AGE_BUCKETS), of ages in iterations, i32 of the same shape."""
    return jnp.searchsorted(jnp.asarray(AGE_BUCKETS), age).astype(jnp.int32)


def sums(info: DrawInfo) -> Sums:
    """Return sums, maxima and counts [] i32 over the real rows of a draw, for the replay metrics."""
    totals = {
        "age_sum": jnp.sum(info.age),
        "uses_sum": jnp.sum(info.uses),
        "first_use_count": jnp.sum(info.first_use, dtype=jnp.int32),
        "since_last_use_sum": jnp.sum(info.since_last_use),
        "real_count": jnp.sum(info.is_real, dtype=jnp.int32),
        "unique_prompt_count": _num_different(info.question, info.is_real),
    }
    return Sums(totals, {"age_max": jnp.max(info.age)})


def usage(ring: RingState) -> tuple[jax.Array, jax.Array]:
    """Return the number of rows in the slots and the sum of their use counts, each [] i32."""
    holds_row = ring.inserted_step >= 0
    num_rows = jnp.sum(holds_row, dtype=jnp.int32)
    num_uses = jnp.sum(jnp.where(holds_row, ring.uses, 0))
    return num_rows, num_uses


def ended(
    before: tuple[jax.Array, jax.Array],
    ring: RingState,
    *,
    num_new: int,
) -> dict[str, jax.Array]:
    """Return the number of rows that ``num_new`` new rows overwrote, and the sum of their use counts, [] i32 each.

    Args:
        before: ``usage`` before the insertion.
        ring: the ring after the insertion.
    """
    rows_before, uses_before = before
    rows, uses = usage(ring)
    return {
        "ended_rows": rows_before + num_new - rows,
        "ended_uses": uses_before - uses,
    }


def num_filled(ring: RingState) -> jax.Array:
    """Return the number of slots [] i32 that hold a whole row."""
    return jnp.sum(_is_filled(ring), dtype=jnp.int32)


def wasted_share(ring: RingState) -> jax.Array:
    """Return the fraction [] f32 of the ring's token places that hold no token of a whole row."""
    length = jax.device_put(ring.slots.rollout.length, jax.memory.Space.Device)
    held_length = jnp.where(_is_filled(ring), length, 0)
    num_held = jnp.sum(held_length.astype(jnp.float32))
    return 1 - num_held / ring.slots.rollout.tokens.size


def _is_filled(ring: RingState) -> jax.Array:
    """Return which slots hold a whole row, [M, C] bool."""
    if ring.pages:
        return jnp.asarray(paged_log.is_held(ring.pages["first"], ring.pages["oldest"]))
    return ring.inserted_step >= 0


def _apart(rows: Experience) -> tuple[Experience, Experience]:
    """Split rows [M, n, ...] into fields without and with a token dimension; None marks a field of the other part."""

    def keep_by_row(path: tuple[Any, ...], x: jax.Array) -> jax.Array | None:
        return None if _is_per_token(path) else x

    def keep_per_token(path: tuple[Any, ...], x: jax.Array) -> jax.Array | None:
        return x if _is_per_token(path) else None

    by_row = jax.tree_util.tree_map_with_path(keep_by_row, rows)
    per_token = jax.tree_util.tree_map_with_path(keep_per_token, rows)
    return by_row, per_token


def _together(by_row: Experience, per_token: Experience | None) -> Experience:
    """Join the two parts that ``_apart`` returned. ``per_token`` None means that nothing was split."""
    if per_token is None:
        return by_row

    def present(x: jax.Array | None, y: jax.Array | None) -> jax.Array | None:
        return y if x is None else x

    def is_absent(x: jax.Array | None) -> bool:
        return x is None

    return jax.tree.map(present, by_row, per_token, is_leaf=is_absent)


def _padding(log: Experience) -> Experience:
    """Return the padding value of each field past a row's length."""
    zero = jax.tree.map(lambda _: 0, log)
    return dataclasses.replace(zero, rollout=dataclasses.replace(zero.rollout, policy_version=-1))


def _is_per_token(path: tuple[Any, ...]) -> bool:
    """Return whether the leaf of rows at this tree path has a token dimension, [B, S, ...]."""
    name = getattr(path[-1], "name", None) or path[-1].key
    if name in COLUMNS:
        return COLUMNS[name].per_token
    return name in PER_TOKEN


def _stored(rows: Experience) -> Experience:
    """Return rows with only the columns that the ring stores."""

    def stored(columns: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: x for name, x in columns.items() if COLUMNS[name].is_stored}

    rollout = dataclasses.replace(rows.rollout, columns=stored(rows.rollout.columns))
    return dataclasses.replace(rows, columns=stored(rows.columns), rollout=rollout)


def _is_among(values: jax.Array, others: jax.Array, counts: jax.Array) -> jax.Array:
    """Return a mask of the ``values`` that equal one of the entries of ``others`` [R] selected by ``counts`` [R]."""
    # Shapes are static, so replace every entry that is not selected by the largest selected entry.
    smallest_integer = jnp.iinfo(others.dtype).min
    largest = jnp.max(jnp.where(counts, others, smallest_integer))
    others = jnp.where(counts, others, largest)
    return jnp.isin(values, others, method="binary_search") & jnp.any(counts)


def _num_different(values: jax.Array, counts: jax.Array) -> jax.Array:
    """Return the number [] i32 of different values among the values that the mask ``counts`` selects."""
    is_ignored = (~counts).astype(jnp.int32)
    is_ignored, value = jax.lax.sort((is_ignored.ravel(), values.ravel()), num_keys=2)
    differs = value[1:] != value[:-1]
    is_new = jnp.concatenate([jnp.ones(1, bool), differs])
    return jnp.sum(is_new & (is_ignored == 0), dtype=jnp.int32)


def _per_shard(total: int, num_shards: int) -> int:
    """Return the number of rows of each shard."""
    assert total % num_shards == 0
    return total // num_shards
