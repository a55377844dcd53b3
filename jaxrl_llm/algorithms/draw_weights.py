"""Weights of the ring's draws, priorities of rows, and which rows the ring keeps or retires.

- A draw is a function of ``Stored`` and its settings. It returns weights in [0, 1], elementwise. It may also declare
  which ages a batch prefers and which ages it allows (``facts.DrawFacts``).
- A priority is a function of ``Experience`` rows. It returns the priority of each row, [R] f32 >= 0, which the ring
  stores with the row.
- An admission is a function of overwritten rows, of the rows that overwrite them, and of the smallest correct reward.
  It returns which overwritten rows move to the second ring.
- A retirement is a function of new rows and of the smallest correct reward. It returns which rows are never drawn.

Owns: these functions, their tables. Does not know: the ring, the choice of slots by weights.
Letters: R rows, M shards, n rows of each shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import Stored
from jaxrl_llm.ops.masks import sampled_mask
from jaxrl_llm.settings.schema import Bounds, Count, CountOrZero, Exponent, Positive, Share
from jaxrl_llm.types import Experience, Rollout

# Largest age of the draw "age", in units of its scale. Larger ages would underflow to a weight of 0 in float32.
LARGEST_AGE = 80.0

PositiveShare = Annotated[float, Bounds(0.0, 1.0, closed=False)]


# ---- draws


def uniform(x: Stored) -> Float[Array, "*slots"]:
    """Return the same weight for every slot."""
    return jnp.ones_like(x.priority)


def _draws_no_zeros(settings: Mapping[str, Any]) -> bool:
    return settings["exponent"] > 0


@needs(never_draws=_draws_no_zeros)
def priority(x: Stored, *, exponent: Exponent = 1.0) -> Float[Array, "*slots"]:
    """Return P ~ p^exponent, where p is the row's priority (replay.priority). Rows of priority 0 are never drawn.

    Source: Schaul et al. 2016, arXiv:1511.05952. Differs: p is the stored priority (by default |advantage|, where the
        source has the TD error) and is never refreshed; rows are not repeated; there are no importance weights.
    """
    return x.priority**exponent


def age(x: Stored, *, scale_iterations: Positive = 4.0) -> Float[Array, "*slots"]:
    """Return P ~ exp(-age / scale). This form is not from a paper."""
    relative_age = jnp.minimum(x.age / scale_iterations, LARGEST_AGE)
    return jnp.exp(-relative_age)


def _oldest_age(
    settings: Mapping[str, Any],
    iteration: Int[Array, ""],
    oldest: int,
) -> Int[Array, ""] | int:
    """Return age 0 from ``fresh_from_iteration`` on (0 = never). Before, return the oldest age that the run allows."""
    first = settings["fresh_from_iteration"]
    if not first:
        return oldest
    return jnp.where(iteration >= first, 0, oldest)


def _preferred_ages(
    settings: Mapping[str, Any],
    uniform_number: Float[Array, ""],
    oldest: Int[Array, ""] | int,
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the youngest and the oldest age that a batch prefers: either age 0, or every larger age."""
    is_fresh = uniform_number < settings["fresh_share"]
    youngest_preferred = jnp.where(is_fresh, 0, 1)
    oldest_preferred = jnp.where(is_fresh, 0, oldest)
    return youngest_preferred, oldest_preferred


def _has_enough_fresh_rows(path: str, settings: Mapping[str, Any], config: Any) -> str:
    """Return an error message if one iteration has too few rows for a batch of fresh rows alone."""
    first = settings["fresh_from_iteration"]
    if not 0 < first < config.num_iterations or config.update.batch_size <= config.rows_per_iteration:
        return ""
    return (
        f"[update.batch_size] must be at most {config.rows_per_iteration}, the rollouts of an iteration: from "
        f"[{path}.fresh_from_iteration] on a batch has fresh rollouts alone"
    )


@needs(oldest_age=_oldest_age, preferred_ages=_preferred_ages, rule=_has_enough_fresh_rows)
def fresh_or_older(
    x: Stored,
    *,
    fresh_share: Share = 0.6,
    fresh_from_iteration: CountOrZero = 0,
) -> Float[Array, "*slots"]:
    """Return the same weight for every slot. Each batch prefers either fresh or older rollouts.

    A rollout is fresh if it was inserted in this iteration. If too few rollouts of the preferred kind exist, others
    fill the batch.

    Settings:
        fresh_share: probability that a batch is fresh.
        fresh_from_iteration: from this iteration on (the first is 0) every batch has fresh rollouts alone; 0 = never.

    Source: ReMix, Liang et al. 2025, arXiv:2507.06892.
    """
    return jnp.ones_like(x.priority)


@needs(oldest_age=_oldest_age, rule=_has_enough_fresh_rows)
def uniform_then_fresh(
    x: Stored,
    *,
    fresh_from_iteration: Count = 50,
) -> Float[Array, "*slots"]:
    """Return the same weight for every slot; from ``fresh_from_iteration`` on only fresh rollouts are drawn.

    Source: the end of replay of ReMix, Liang et al. 2025, arXiv:2507.06892.
    """
    return jnp.ones_like(x.priority)


# ---- priorities


def by_advantage(rows: Experience) -> Float[Array, " R"]:
    """Return the largest |advantage| of each row's tokens."""
    return jnp.max(jnp.abs(rows.advantage), axis=1)


@needs(reads_advantage=False)
def by_reward(rows: Experience) -> Float[Array, " R"]:
    """Return the reward, 0 for negative rewards. This priority is not from a paper."""
    return jnp.maximum(rows.reward, 0.0)


@needs(reads_advantage=False)
def by_length(rows: Experience) -> Float[Array, " R"]:
    """Return the number of tokens of the completion. This priority is not from a paper."""
    return (rows.rollout.length - rows.rollout.prompt_length).astype(jnp.float32)


@needs(reads_advantage=False)
def by_surprise(rows: Experience) -> Float[Array, " R"]:
    """Return minus the mean behaviour log-probability of the row's tokens. This priority is not from a paper."""
    return surprise(rows.rollout)


def surprise(rollout: Rollout) -> Float[Array, " R"]:
    """Return minus the mean behaviour log-probability of each row's sampled tokens, [R] f32 nats; 0 without tokens."""
    mask = sampled_mask(rollout.prompt_length, rollout.length, rollout.policy_version)
    total = jnp.sum(jnp.where(mask, rollout.behaviour_logp, 0.0), axis=1)
    num_tokens = jnp.sum(mask, axis=1)
    return -total / jnp.maximum(num_tokens, 1)


# ---- admissions


def correct(
    evicted: Experience,
    rows: Experience,
    pass_threshold: float,
) -> Bool[Array, "M n"]:
    """Return the rows whose reward is at least ``pass_threshold``, [M, n] bool.

    Source: positive-bias sampling, Arnal et al. 2026, arXiv:2604.08706.
    """
    return evicted.reward >= pass_threshold


def likely(
    evicted: Experience,
    rows: Experience,
    pass_threshold: float,
) -> Bool[Array, "M n"]:
    """Return the rows that are probably likely under the current policy, [M, n] bool, without a forward pass.

    The mean behaviour log-probability of their tokens is at least that of the rows that overwrite them in their shard.
    The current policy has just sampled these new rows. Tokens that were likely under the behaviour policy cannot have
    large ratios.

    Source: the idea is from OER and MBES, which admit by the current policy's mean log-probability. This form is not
        from a paper.
    """
    row_surprise = jax.vmap(surprise)
    newest = jnp.mean(row_surprise(rows.rollout), axis=1, keepdims=True, where=rows.trainable)
    return row_surprise(evicted.rollout) <= newest  # NaN if no new row is trainable; then no row is admitted


# ---- retirements


def solved(
    rows: Experience,
    pass_threshold: float,
    *,
    share: PositiveShare = 1.0,
) -> Bool[Array, " R"]:
    """Return the rows of groups in which at least ``share`` of the trainable rows are correct, [R] bool."""
    group = rows.rollout.group_id
    same_group_RR = group[:, None] == group[None, :]
    member_RR = (same_group_RR & rows.trainable[None, :]).astype(jnp.float32)
    is_correct = (rows.reward >= pass_threshold).astype(jnp.float32)
    num_correct = member_RR @ is_correct
    num_rows = jnp.sum(member_RR, axis=1)
    pass_rate = num_correct / jnp.maximum(num_rows, 1.0)
    return pass_rate >= share


DRAWS = {
    "uniform": uniform,
    "priority": priority,
    "age": age,
    "fresh_or_older": fresh_or_older,
    "uniform_then_fresh": uniform_then_fresh,
}

PRIORITIES = {
    "advantage": by_advantage,
    "reward": by_reward,
    "length": by_length,
    "surprise": by_surprise,
}

ADMISSIONS = {"correct": correct, "likely": likely}

RETIREMENTS = {"solved": solved}
