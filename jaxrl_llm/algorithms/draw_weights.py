"""Draws: how likely a stored rollout is drawn, what it is worth, and which ones a second ring is for.

A draw is a function of ``Stored`` and of its settings to weights in [0, 1], elementwise. A priority is one of
``Experience`` rows to what each is worth, [R] f32 >= 0, kept with it. An admission is one of rows that others
overwrite, of those others, and of the reward that is correct, to which of them go to the second ring.

Owns: those functions, the tables of them. Does not know: the ring, how slots are chosen by weights.
Letters: R rows, M shards, n rows of each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import Stored
from jaxrl_llm.ops.masks import sampled_mask
from jaxrl_llm.settings.schema import Exponent, Positive
from jaxrl_llm.types import Experience, Rollout

# In scales of "age": older ones still have a weight, where float32 would give them none.
LARGEST_AGE = 80.0


def uniform(x: Stored) -> Float[Array, "*slots"]:
    """All alike."""
    return jnp.ones_like(x.priority)


@needs(never_draws=lambda settings: settings["exponent"] > 0)
def priority(x: Stored, *, exponent: Exponent = 1.0) -> Float[Array, "*slots"]:
    """P ~ p^exponent, p = the row's priority (replay.priority); what is worth nothing is never drawn.

    Source: Schaul et al. 2016, arXiv:1511.05952. Differs: p is what was stored (their TD error is |advantage| here),
        never refreshed; without repeats; no importance weights.
    """
    return x.priority**exponent


def age(x: Stored, *, scale_iterations: Positive = 4.0) -> Float[Array, "*slots"]:
    """P ~ exp(-age / scale). The form is ours."""
    return jnp.exp(-jnp.minimum(x.age / scale_iterations, LARGEST_AGE))


def by_advantage(rows: Experience) -> Float[Array, " R"]:
    """The largest |advantage| of the row's tokens."""
    return jnp.max(jnp.abs(rows.advantage), axis=1)


@needs(reads_advantage=False)
def by_reward(rows: Experience) -> Float[Array, " R"]:
    """The reward, 0 where it is negative. The choice is ours."""
    return jnp.maximum(rows.reward, 0.0)


@needs(reads_advantage=False)
def by_length(rows: Experience) -> Float[Array, " R"]:
    """Tokens of the completion. The choice is ours."""
    return (rows.rollout.length - rows.rollout.prompt_length).astype(jnp.float32)


@needs(reads_advantage=False)
def by_surprise(rows: Experience) -> Float[Array, " R"]:
    """Minus the mean log-prob of its tokens when they were drawn. The choice is ours."""
    return surprise(rows.rollout)


def surprise(rollout: Rollout) -> Float[Array, " R"]:
    """Minus the mean behaviour log-probability of each row's sampled tokens, [R] f32 nats; 0 where it has none."""
    mask = sampled_mask(rollout.prompt_length, rollout.length, rollout.policy_version)
    total = jnp.sum(jnp.where(mask, rollout.behaviour_logp, 0.0), axis=1)
    return -total / jnp.maximum(jnp.sum(mask, axis=1), 1)


def correct(evicted: Experience, rows: Experience, pass_threshold: float) -> Bool[Array, "M n"]:
    """Those whose reward is at least ``pass_threshold``, [M, n] bool.

    Source: positive-bias sampling, Arnal et al. 2026, arXiv:2604.08706.
    """
    return evicted.reward >= pass_threshold


def likely(evicted: Experience, rows: Experience, pass_threshold: float) -> Bool[Array, "M n"]:
    """Those that the current policy finds likely, without its forward, [M, n] bool.

    The mean log-prob of their tokens when they were drawn is at least that of the rows which overwrite them in their
    shard, and which the current policy has just drawn. Tokens that the behaviour policy found likely cannot get large
    ratios.

    Source: the idea is of OER and MBES, which admit by the current policy's mean log-prob; the form is ours.
    """
    row_surprise = jax.vmap(surprise)
    newest = jnp.mean(row_surprise(rows.rollout), axis=1, keepdims=True, where=rows.trainable)
    return row_surprise(evicted.rollout) <= newest  # nan where no newcomer is trainable: none is admitted


DRAWS = {"uniform": uniform, "priority": priority, "age": age}

PRIORITIES = {"advantage": by_advantage, "reward": by_reward, "length": by_length, "surprise": by_surprise}

ADMISSIONS = {"correct": correct, "likely": likely}
