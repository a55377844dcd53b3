"""Replay: the last rollouts stay on the device (or in its host's memory), and update batches are drawn from them.

Owns: the ring's state, which rows are kept, use counts and ages. Does not know: how slots are chosen (choice),
credit, losses, the mesh (the shard axis M is laid on its data axes by whoever places the state), which sizes a user may
ask for: what is asserted here, ``limits`` and ``sharding.check_divisible`` have made sure of.
Letters: R rows inserted, M shards, C slots per shard, b = batch_size / M rows drawn per shard, S row width; of a ring
in pages, N pages of T tokens per shard. Device functions;
nothing here needs a collective when M lies on the mesh's data axes (but for the two settings that look at all rows
of an iteration: ``latest_visit`` and ``solved_fraction``).

A draw does not remove, and does not repeat a row within a batch. New rows overwrite those that can never be drawn
again (tied, superseded, used up, too old), then the oldest. Nothing is recomputed at replay: behaviour
log-probabilities and advantages are those of the rollout's time. On-policy training is a ring of one iteration.

With ``positive_fraction`` d the last d*C slots of a shard are a second ring, of the correct rows that the first one
overwrites: together they hold the freshest (1-d)*C rows and the freshest d*C correct ones not among those, all of which
may be drawn. With ``admission`` "likely" it is of the likely ones instead.
Source: Arnal et al. 2026, arXiv:2604.08706, section 3; two rings are one form of its definition.

With ``capacity_tokens`` the tokens of a row, and all that is kept per token, lie in a log of pages without padding
(ops.paged_log), and only its other fields in its slot. Pages go from the oldest on, whether their row may be drawn or
not: the ring then holds of its rows those whose pages are there.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.views import COLUMNS, PER_TOKEN
from jaxrl_llm.config import ReplayConfig
from jaxrl_llm.ops import paged_log, ring_buffer
from jaxrl_llm.replay import choice
from jaxrl_llm.replay.choice import lanes
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import AGE_BUCKETS, Experience, RingState


@flax.struct.dataclass
class DrawInfo:
    """What was drawn; all 0 or False where not ``is_real``."""

    is_real: jax.Array  # [M, b] bool, False = fewer than b slots of the shard could be drawn
    age: jax.Array  # [M, b] i32 iterations since insertion
    uses: jax.Array  # [M, b] i32 times drawn, this one counted
    first_use: jax.Array  # [M, b] bool
    since_last_use: jax.Array  # [M, b] i32 optimizer steps since it was last drawn, 0 on the first use
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
    """An empty ring.

    Args:
        experience_shape: rows of any number (leaves [R, ...]), arrays or ``jax.ShapeDtypeStruct``.
        capacity: slots of all shards together.
        num_shards: M.
        on_host: the rows lie in the host's memory; what is counted of them lies on the device all the same.
        capacity_tokens: tokens of all shards together, without padding; 0 = every slot has room for a row's S.
        page_tokens: T.
    """
    num_slots = _per_shard(capacity, num_shards)
    in_pages, log = capacity_tokens > 0, (capacity_tokens // num_shards // page_tokens, page_tokens)

    def shape(path: tuple[Any, ...], x: jax.Array) -> jax.ShapeDtypeStruct:
        places = (*log, *x.shape[2:]) if in_pages and _is_per_token(path) else (num_slots, *x.shape[1:])
        return jax.ShapeDtypeStruct((num_shards, *places), x.dtype)

    column = lambda value, dtype: jnp.full((num_shards, num_slots), value, dtype)
    return RingState(
        slots=ring_buffer.zeros(jax.tree_util.tree_map_with_path(shape, _stored(experience_shape)), on_host=on_host),
        order=jnp.broadcast_to(jnp.arange(num_slots, dtype=jnp.int32), (num_shards, num_slots)),
        num_draws=jnp.zeros(num_shards, jnp.int32),
        uses=column(0, jnp.int32),
        last_use=column(0, jnp.int32),
        priority=column(0, jnp.float32),
        inserted_step=column(-1, jnp.int32),
        question=column(0, jnp.int32),
        is_retired=column(False, bool),
        pages={"first": column(-1, jnp.int32), "oldest": jnp.zeros(num_shards, jnp.int32)} if in_pages else {},
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
    """Write R rows over those that are spent, and then over the oldest. Row r goes to shard r // (R / M).

    A row that is not trainable takes a slot (shapes and ages stay those of the iteration) and is never drawn.

    Args:
        ring: donate it.
        experience: leaves [R, ...].
        iteration: [] i32.
        config: which rows are kept, their priority (0 if not finite), and which are retired: by ``skip_tied`` those of
            tied groups, by ``latest_visit`` the earlier ones of a prompt of which there are new ones that may be drawn,
            by ``solved_fraction`` those of a group that is solved and the earlier ones of its prompt.
        pass_threshold: a rollout is correct when its reward is at least this.
        imitates: what others wrote and is correct teaches without an advantage, and so stays.
        group_size: so many neighbouring rows are drawn together, and overwritten together.
    """
    num_shards = ring.uses.shape[0]
    num_rows = _per_shard(experience.reward.shape[0], num_shards)
    main, kept = lanes(ring, config)
    assert num_rows <= main.size and not (kept.size and ring.pages)
    question = experience.columns["question_id"]
    retired = ~experience.trainable
    if config.skip_tied:
        tied = experience.columns["tied"]
        if imitates:
            tied &= (experience.rollout.group_id >= 0) | (experience.reward < pass_threshold)
        retired |= tied
    supersedes = ~retired if config.latest_visit else jnp.zeros_like(retired)  # the earlier rows of its prompt
    if config.solved_fraction:
        solved = _pass_share(experience, pass_threshold) >= config.solved_fraction
        supersedes, retired = supersedes | solved, retired | solved
    if config.latest_visit or config.solved_fraction:
        ring = ring.replace(is_retired=ring.is_retired | _is_among(ring.question, question, supersedes))
    priority = jnp.where(retired, 0.0, jnp.nan_to_num(config.priority(experience), posinf=0.0, neginf=0.0))
    experience = _stored(experience)
    rows, question, retired, priority = jax.tree.map(
        lambda x: x.reshape(num_shards, num_rows, *x.shape[1:]), (experience, question, retired, priority)
    )
    blank = jnp.zeros((num_shards, num_rows), jnp.int32)
    written = {
        "slots": rows,
        "uses": blank,
        "last_use": blank,
        "priority": priority,
        "inserted_step": jnp.full_like(blank, iteration),
        "question": question,
        "is_retired": retired,
    }
    stored, log = {name: getattr(ring, name) for name in written}, None
    if ring.pages:
        # Tokens go to the log; what follows sees the rest of the rows alone.
        (stored["slots"], log), (written["slots"], tokens) = _apart(ring.slots), _apart(rows)
        (num_pages, page), width = log.rollout.tokens.shape[1:], tokens.rollout.tokens.shape[2]
        assert num_rows * -(-width // page) <= num_pages
        length = rows.rollout.length
        first, oldest = paged_log.next_pages(ring.pages["oldest"], length, num_pages=num_pages, page=page)
        log = paged_log.write(log, first, length, tokens)
        stored["first"], written["first"] = ring.pages["first"], first
        ring = ring.replace(pages={**ring.pages, "oldest": oldest})
    spent = choice.is_spent(ring, iteration, config)
    order = ring_buffer.renew(main, spent, num_rows, group_size=group_size)
    target, kept_order = order[:, main.size - num_rows :], kept.order
    if kept.size:
        evicted = ring_buffer.take(stored, target)
        is_kept = config.admission(evicted["slots"], rows, pass_threshold)
        is_kept &= evicted["slots"].trainable & ~ring_buffer.take(spent, target)
        stored, kept_order = ring_buffer.write_some(stored, kept, spent, evicted, is_kept)
    stored = ring_buffer.put(stored, target, written)
    stored["slots"] = _together(stored["slots"], log)
    if ring.pages:
        stored["pages"] = {**ring.pages, "first": stored.pop("first")}
    return ring.replace(order=jnp.concatenate([order, kept_order], axis=1), **stored)


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
    """Draw an update batch without repeats, with the weights of ``config.draw`` over the slots that may be drawn.

    A slot may be drawn when its row is trainable and not retired, at most ``max_age_steps`` iterations old and drawn
    fewer than ``max_uses`` times (0 = no limit), and with ``delay_iterations`` of just that age. ``fresh_fraction`` of
    the batch, rounded up per shard, comes from the rows inserted in this iteration, and the rest from older rows, as
    far as there are any of each: what one kind lacks the other makes up. With ``fresh_batches`` it is the chance of a
    batch to come from them, and else it comes from the rest, likewise. From ``fresh_from_iteration`` on there are no
    others.

    With ``group_size`` above 1 whole groups are drawn instead of rollouts: runs of that many neighbouring slots,
    as ``insert`` was given them. A group may be drawn when any of its rows may, with the largest of their weights;
    its rows come out side by side.

    Args:
        ring: donate it.
        key: one random key; the draw depends on it and on the ring alone, not on the mesh. Shard m uses
            ``fold_in(key, m)``.
        iteration: [] i32.
        config: limits, weights and fractions.
        batch_size: rows of all shards together.
        row_tokens: S, of a ring in pages, which does not show it.

    Returns:
        The ring with uses counted, rows [M, b, ...], and what they are. Rows that are not real (too few slots
        could be drawn) have ``trainable`` False.
    """
    num_shards, num_slots = ring.uses.shape
    num_rows = _per_shard(batch_size, num_shards)
    assert num_rows <= num_slots and num_slots % group_size == num_rows % group_size == 0
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_shards))

    # One coin for all shards.
    is_fresh = jax.random.uniform(jax.random.fold_in(key, num_shards)) < config.fresh_fraction

    def choose(keys, ring, *others):
        return choice.choose(keys, ring, *others, config, num=num_rows // group_size, group_size=group_size)

    # Without its rows: what is drawn depends on the columns, and a device looks at those of its own shards.
    args, axes = (keys, ring.replace(slots=None), iteration, is_fresh), (("batch",), ("batch",), (), ())
    slot_index, is_real = sharding.by_device(choose, *args, axes=axes)

    experience = rows_at(ring, slot_index, row_tokens)
    columns = (ring.inserted_step, ring.uses, ring.last_use, ring.question)
    inserted, uses, last_use, question = ring_buffer.take(columns, slot_index)
    draw_number = ring.num_draws + 1
    real = lambda x: jnp.where(is_real, x, jnp.zeros_like(x))
    age, is_first = iteration - inserted, uses == 0
    info = DrawInfo(
        is_real=is_real,
        age=real(age),
        uses=real(uses + 1),
        first_use=is_real & is_first,
        since_last_use=real(jnp.where(is_first, 0, draw_number[:, None] - last_use)),
        question=real(question),
    )
    used = jnp.where(is_real, slot_index, num_slots)  # that slot is nowhere
    new = (uses + 1, jnp.broadcast_to(draw_number[:, None], uses.shape))
    counted, last_use = ring_buffer.put((ring.uses, ring.last_use), used, new)
    ring = ring.replace(uses=counted, last_use=last_use, num_draws=draw_number)
    bucket = real(_age_bucket(age))
    rows = experience.replace(trainable=experience.trainable & is_real).with_columns(age_bucket=bucket)
    return ring, rows, info


def rows_at(ring: RingState, slot_index: jax.Array, row_tokens: int) -> Experience:
    """The rows [M, b, ...] in these slots [M, b]."""
    if not ring.pages:
        return ring_buffer.take(ring.slots, slot_index)
    slots, log = _apart(ring.slots)
    experience, first_page = ring_buffer.take((slots, ring.pages["first"]), slot_index)
    how = {"width": row_tokens, "padding": _padding(log)}
    return _together(experience, paged_log.take(log, first_page, experience.rollout.length, **how))


def retire_stale(ring: RingState, iteration: jax.Array, effective: jax.Array, config: ReplayConfig) -> RingState:
    """Retire the rows of every age bucket of which too little counts: they are never drawn again.

    Rows that grow into the bucket later are not meant: what is thought of them is asked when they have been drawn.

    Args:
        ring: donate it.
        iteration: [] i32.
        effective: [len(AGE_BUCKETS) + 1] f32, effective sample size of the ratios of drawn rows by their age, over the
            number of their tokens; 1 where none was drawn.
        config: rows go where it is below ``min_ess``.

    The form is ours.
    """
    bucket = _age_bucket(iteration - ring.inserted_step)
    return ring.replace(is_retired=ring.is_retired | (effective < config.min_ess)[bucket])


def _age_bucket(age: jax.Array) -> jax.Array:
    """Ages in iterations to 0..len(AGE_BUCKETS), i32 of the same shape."""
    return jnp.searchsorted(jnp.asarray(AGE_BUCKETS), age).astype(jnp.int32)


def sums(info: DrawInfo) -> dict[str, Any]:
    """Sums, a maximum and counts [] i32 over the real rows of a draw; means are taken by the metrics."""
    return {
        "age_sum": jnp.sum(info.age),
        "age_max": jnp.max(info.age),
        "uses_sum": jnp.sum(info.uses),
        "first_use_count": jnp.sum(info.first_use, dtype=jnp.int32),
        "since_last_use_sum": jnp.sum(info.since_last_use),
        "real_count": jnp.sum(info.is_real, dtype=jnp.int32),
        "unique_prompt_count": _num_different(info.question, info.is_real),
    }


def usage(ring: RingState) -> tuple[jax.Array, jax.Array]:
    """Rows in the slots, and how often they have been drawn altogether, each [] i32."""
    is_there = ring.inserted_step >= 0
    return jnp.sum(is_there, dtype=jnp.int32), jnp.sum(jnp.where(is_there, ring.uses, 0))


def ended(before: tuple[jax.Array, jax.Array], ring: RingState, *, num_new: int) -> dict[str, jax.Array]:
    """Of the rows that left the ring when so many new ones came: their number, and the draws of their lives, [] i32."""
    rows, uses = usage(ring)
    return {"ended_rows": before[0] + num_new - rows, "ended_uses": before[1] - uses}


def num_filled(ring: RingState) -> jax.Array:
    """Slots [] i32 that hold a row."""
    return jnp.sum(_is_filled(ring), dtype=jnp.int32)


def wasted_share(ring: RingState) -> jax.Array:
    """Share [] f32 of the ring's places for tokens that hold no token of a row it has as a whole."""
    length = jax.device_put(ring.slots.rollout.length, jax.memory.Space.Device)
    held = jnp.sum(jnp.where(_is_filled(ring), length, 0).astype(jnp.float32))
    return 1 - held / ring.slots.rollout.tokens.size


def _is_filled(ring: RingState) -> jax.Array:
    if ring.pages:
        return paged_log.is_held(ring.pages["first"], ring.pages["oldest"])
    return ring.inserted_step >= 0


def _apart(rows: Experience) -> tuple[Experience, Experience]:
    """What rows [M, n, ...] have once, and what they have for each token; None stands for the rest."""

    def those(per_token: bool) -> Experience:
        keep = lambda path, x: x if _is_per_token(path) == per_token else None
        return jax.tree_util.tree_map_with_path(keep, rows)

    return those(False), those(True)


def _together(once: Experience, per_token: Experience | None) -> Experience:
    """The inverse of ``_apart``."""
    if per_token is None:
        return once
    return jax.tree.map(lambda x, y: y if x is None else x, once, per_token, is_leaf=lambda x: x is None)


def _padding(log: Experience) -> Experience:
    """What stands in a row past its length, by field."""
    zero = jax.tree.map(lambda _: 0, log)
    return zero.replace(rollout=zero.rollout.replace(policy_version=-1))


def _is_per_token(path: tuple[Any, ...]) -> bool:
    """Whether the leaf of rows at this path of their tree is [B, S, ...]."""
    name = getattr(path[-1], "name", None) or path[-1].key
    return COLUMNS[name].per_token if name in COLUMNS else name in PER_TOKEN


def _stored(rows: Experience) -> Experience:
    """What slots keep of rows."""
    stored = lambda columns: {name: x for name, x in columns.items() if COLUMNS[name].is_stored}
    return rows.replace(
        columns=stored(rows.columns), rollout=rows.rollout.replace(columns=stored(rows.rollout.columns))
    )


def _pass_share(experience: Experience, pass_threshold: float) -> jax.Array:
    """Of each row's group, the share [R] f32 of trainable rows that are correct."""
    group = experience.rollout.group_id
    same = ((group[:, None] == group[None, :]) & experience.trainable[None, :]).astype(jnp.float32)
    correct = (experience.reward >= pass_threshold).astype(jnp.float32)
    return (same @ correct) / jnp.maximum(jnp.sum(same, axis=1), 1.0)


def _is_among(values: jax.Array, others: jax.Array, counts: jax.Array) -> jax.Array:
    """Which of ``values`` are one of ``others`` [R] that ``counts`` [R] bool, bool of their shape."""
    # Those that do not count stand for the largest that does: shapes stay what they are.
    others = jnp.where(counts, others, jnp.max(jnp.where(counts, others, jnp.iinfo(others.dtype).min)))
    return jnp.isin(values, others, method="binary_search") & jnp.any(counts)


def _num_different(values: jax.Array, counts: jax.Array) -> jax.Array:
    """How many different values [] i32 stand where it counts."""
    flag, value = jax.lax.sort(((~counts).astype(jnp.int32).ravel(), values.ravel()), num_keys=2)
    is_new = jnp.concatenate([jnp.ones(1, bool), value[1:] != value[:-1]])
    return jnp.sum(is_new & (flag == 0), dtype=jnp.int32)


def _per_shard(total: int, num_shards: int) -> int:
    assert total % num_shards == 0
    return total // num_shards
