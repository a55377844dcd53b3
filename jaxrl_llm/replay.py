"""Replay: the last rollouts stay on the device, and update batches are drawn from them.

Owns: the ring's state, which slots may be drawn (trainable, age, uses), use counts and ages. Does not know:
credit, losses, the mesh (the shard axis M is laid on its data axes by whoever places the state).
Letters: R rows inserted, M shards, C slots per shard, b = batch_size / M rows drawn per shard. Device
functions; nothing here needs a collective when M lies on the mesh's data axes.

A draw does not remove, and does not repeat a row within a batch; the oldest rows are overwritten. Nothing
is recomputed at replay: behaviour log-probabilities and advantages are those of the rollout's time.
On-policy training is a ring as large as one iteration.
Source: Arnal et al. 2026, arXiv:2604.08706, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.config import ConfigError, ReplayConfig
from jaxrl_llm.ops import ring_buffer
from jaxrl_llm.types import Experience, RingState


@flax.struct.dataclass
class DrawInfo:
    """What was drawn; all 0 or False where not ``is_real``."""

    is_real: jax.Array  # [M, b] bool, False = fewer than b slots of the shard could be drawn
    age: jax.Array  # [M, b] i32 iterations since insertion
    uses: jax.Array  # [M, b] i32 times drawn, this one counted
    first_use: jax.Array  # [M, b] bool


def init(experience_shape: Experience, *, capacity: int, num_shards: int) -> RingState:
    """An empty ring.

    Args:
        experience_shape: rows of any number (leaves [R, ...]), arrays or ``jax.ShapeDtypeStruct``.
        capacity: slots of all shards together.
        num_shards: M.

    Raises:
        ConfigError: the shards do not divide the capacity.
    """
    num_slots = _per_shard("replay.capacity", capacity, num_shards)
    return RingState(
        slots=jax.tree.map(lambda x: jnp.zeros((num_shards, num_slots, *x.shape[1:]), x.dtype), experience_shape),
        write_index=jnp.zeros(num_shards, jnp.int32),
        num_inserted=jnp.zeros(num_shards, jnp.int32),
        uses=jnp.zeros((num_shards, num_slots), jnp.int32),
        priority=jnp.zeros((num_shards, num_slots), jnp.float32),
        inserted_step=jnp.full((num_shards, num_slots), -1, jnp.int32),
    )


def insert(ring: RingState, experience: Experience, iteration: jax.Array) -> RingState:
    """Write R rows over the oldest. Row r goes to shard r // (R / M).

    A row that is not trainable takes a slot (shapes and ages stay those of the iteration) and is never drawn.

    Args:
        ring: donate it.
        experience: leaves [R, ...].
        iteration: [] i32.

    Raises:
        ConfigError: the shards do not divide R, or R exceeds the capacity.
    """
    num_shards, num_slots = ring.uses.shape
    num_rows = _per_shard("rollouts per iteration", experience.reward.shape[0], num_shards)
    if num_rows > num_slots:
        raise ConfigError(
            f"replay.capacity={num_shards * num_slots} must be at least the {num_shards * num_rows} rollouts inserted"
        )
    rows = jax.tree.map(lambda x: x.reshape(num_shards, num_rows, *x.shape[1:]), experience)
    written = (
        rows,
        jnp.zeros((num_shards, num_rows), jnp.int32),
        jnp.max(jnp.abs(rows.advantage), axis=-1),
        jnp.full((num_shards, num_rows), iteration, jnp.int32),
    )
    stored = (ring.slots, ring.uses, ring.priority, ring.inserted_step)
    (slots, uses, priority, inserted_step), write_index = ring_buffer.insert(stored, ring.write_index, written)
    return RingState(
        slots=slots,
        write_index=write_index,
        num_inserted=ring.num_inserted + num_rows,
        uses=uses,
        priority=priority,
        inserted_step=inserted_step,
    )


def draw(
    ring: RingState,
    key: jax.Array,
    iteration: jax.Array,
    config: ReplayConfig,
    *,
    batch_size: int,
    group_size: int = 1,
) -> tuple[RingState, Experience, DrawInfo]:
    """Draw an update batch, uniformly over the slots that may be drawn and without repeats.

    A slot may be drawn when its row is trainable, at most ``max_age_steps`` iterations old and drawn fewer than
    ``max_uses`` times (0 = no limit), and, with ``skip_tied``, has an advantage that is not zero.
    ``fresh_fraction`` of the batch, rounded up per shard, comes from the rows inserted in this iteration, as far
    as there are any.

    With ``group_size`` above 1 whole groups are drawn instead of rollouts: runs of that many neighbouring slots,
    as ``insert`` was given them. A group may be drawn when any of its rows may; its rows come out side by side.

    Args:
        ring: donate it.
        key: one random key; the draw depends on it and on the ring alone, not on the mesh.
        iteration: [] i32.
        config: limits and fraction.
        batch_size: rows of all shards together.

    Returns:
        The ring with uses counted, rows [M, b, ...], and what they are. Rows that are not real (too few slots
        could be drawn) have ``trainable`` False.

    Raises:
        ConfigError: the shards do not divide the batch, or it exceeds the capacity.
    """
    num_shards, num_slots = ring.uses.shape
    num_rows = _per_shard("update.batch_size", batch_size, num_shards)
    if num_rows > num_slots:
        raise ConfigError(f"update.batch_size={batch_size} must be at most replay.capacity={num_shards * num_slots}")
    age_MC = iteration - ring.inserted_step
    drawable_MC = ring.slots.trainable & (ring.inserted_step >= 0)
    if config.max_age_steps:
        drawable_MC = drawable_MC & (age_MC <= config.max_age_steps)
    if config.max_uses:
        drawable_MC = drawable_MC & (ring.uses < config.max_uses)
    if config.skip_tied:
        drawable_MC = drawable_MC & (ring.priority > 0)
    if num_slots % group_size or num_rows % group_size:
        raise ConfigError(
            f"replay.unit='group': rollout.group_size={group_size} must divide the {num_slots} slots and the "
            f"{num_rows} drawn rows of each of {num_shards} ring shards"
        )
    num_draws = num_rows // group_size
    # Less a rounding error, lest 0.1 * 30 become 4.
    num_fresh = math.ceil(config.fresh_fraction * num_draws - 1e-9)
    any_of = lambda x: jnp.any(x.reshape(num_shards, -1, group_size), axis=-1)  # noqa: E731
    group_index, is_real = ring_buffer.draw_uniform(key, any_of(drawable_MC), any_of(age_MC == 0), num_draws, num_fresh)
    slot_index = group_index[:, :, None] * group_size + jnp.arange(group_size)[None, None, :]
    slot_index = slot_index.reshape(num_shards, num_rows)
    is_real = jnp.repeat(is_real, group_size, axis=1)

    experience, age, uses_before = ring_buffer.take((ring.slots, age_MC, ring.uses), slot_index)
    experience = experience.replace(trainable=experience.trainable & is_real)
    info = DrawInfo(
        is_real=is_real,
        age=jnp.where(is_real, age, 0),
        uses=jnp.where(is_real, uses_before + 1, 0),
        first_use=is_real & (uses_before == 0),
    )
    return ring.replace(uses=ring_buffer.add_at(ring.uses, slot_index, is_real)), experience, info


def sums(info: DrawInfo) -> dict[str, Any]:
    """Sums, a maximum and a count [] i32 over the real rows of a draw; means are taken by the metrics."""
    return {
        "age_sum": jnp.sum(info.age),
        "age_max": jnp.max(info.age),
        "uses_sum": jnp.sum(info.uses),
        "first_use_count": jnp.sum(info.first_use, dtype=jnp.int32),
        "real_count": jnp.sum(info.is_real, dtype=jnp.int32),
    }


def _per_shard(name: str, total: int, num_shards: int) -> int:
    if total % num_shards:
        raise ConfigError(f"{name}={total} must be a multiple of the {num_shards} shards of the ring (replay.shards)")
    return total // num_shards
