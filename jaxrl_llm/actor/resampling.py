"""Resampling: an iteration asks on when too many of its groups are tied.

    P groups --> all mixed? --no--> P groups of new questions --> P mixed among all? --no--> ...
                     |                                                   |
                     +---------------------------------------------------+--> P groups for the ring, mixed ones first

Every round is a whole round, for shapes are static: what it brings beyond need is left out, and counts as generated.
Without rounds beyond the first, all that is sampled stays.

Owns: which groups stay, what samples.jsonl shows of them. Does not know: how groups are generated and scored, what
becomes of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import OUTCOME_SCORE, STOP_LENGTH, STOP_NAMES, PromptBatch, Rewards, Rollout


@dataclasses.dataclass
class Sampled:
    """What an iteration has sampled.

    Attributes:
        rollout: P*G rows that stay, on the device.
        groups: P, in the same order.
        rewards: of their rows.
        asked: all groups that were generated, in order; those of ``groups`` alone where nothing was left out.
        answers: rewards of their rows.
        num_tied_left_out: tied groups among those that do not stay.
        waited_s: seconds of waiting for rewards while nothing was generated.
    """

    rollout: Rollout
    groups: list[Any]
    rewards: Rewards
    asked: list[Any]
    answers: Rewards
    num_tied_left_out: int
    waited_s: float

    def shown(self, iteration: int, count: int, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
        """A few of the rollouts that stay as rows of samples.jsonl, spread over their groups."""
        rewards, versions = self.rewards, jax.device_get(self.rollout.policy_version)
        num_rows, size = len(rewards.outcome), len(rewards.outcome) // len(self.groups)
        count, rows = min(count, num_rows), []
        for i in (k * num_rows // count for k in range(count)):
            group = self.groups[i // size]
            own = versions[i][versions[i] >= 0]  # of the completion's tokens
            rows.append(
                {
                    "iteration": iteration,
                    "prompt_id": group.group_id,
                    "group_id": group.group_id,
                    "prompt": group.example.prompt,
                    "completion": decode(group.completions[i % size]),
                    "reward": float(rewards.total[i]),
                    "parts": {name: float(part[i]) for name, part in rewards.parts.items()},
                    "stop_reason": STOP_NAMES[group.stop_reasons[i % size]],
                    "policy_version": int(own.min()),
                    "age": int(own.max() - own.min()),  # policy versions between its first token and its last
                }
            )
        return rows


def sample(
    generator: Any,
    next_batch: Callable[[int], PromptBatch],
    collect: Callable[[list[Any]], Rewards],
    choose: Callable[[Rollout, Rollout, jax.Array], Rollout] | None,
    params: Any,
    *,
    config: Config,
    **how: Any,
) -> Sampled:
    """Generate until P groups are mixed, at most ``rollout.max_resample_rounds`` times beyond the first.

    Mixed groups stay in the order in which they were generated, then, where they are fewer than P, tied ones. They
    are told apart by what credit compares of the rewards as scored: shaping by length unties nothing here.

    Args:
        generator: a ``generator.Generator``.
        next_batch: that many further questions.
        collect: scores of tickets, one after the other.
        choose: program that takes P groups out of two rounds'; None where there is but one round.
        config: its sections ``rollout``, ``algorithm`` and ``rewards``.
        params, how: for ``generator.generate``.

    Source: dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476. Differs: it is mixed rewards that count, not
        0 < correct < G, and a bound on the rounds is part of the method: what is left over is tied.
    """
    waited_s = 0.0

    def score(groups: list[Any]) -> Rewards:
        nonlocal waited_s
        start = time.monotonic()
        rewards = collect([group.ticket for group in groups])
        waited_s += time.monotonic() - start
        return rewards

    def ask() -> tuple[Rollout, list[Any]]:
        return generator.generate(params, next_batch(generator.prompts_wanted()), **how)

    rollout, asked = ask()
    num_groups = len(asked)
    answers, kept = score(asked), np.arange(num_groups)  # of all that were asked
    mixed = is_mixed(answers, asked, config)
    for _ in range(config.rollout.max_resample_rounds):
        if mixed[kept].all():
            break
        more, new = ask()
        kept = np.concatenate([kept, len(asked) + np.arange(num_groups)])
        asked = asked + new
        answers = score(asked)
        mixed = is_mixed(answers, asked, config)
        place = np.argsort(~mixed[kept], kind="stable")[:num_groups].astype(np.int32)
        rollout = choose(rollout, more, jax.device_put(place, sharding.replicated(generator.sampler.mesh, 0)))
        kept = kept[place]
    groups = [asked[i] for i in kept]
    rewards = score(groups) if len(groups) < len(asked) else answers
    tied_left_out = np.sum(~mixed) - np.sum(~mixed[kept])
    return Sampled(rollout, groups, rewards, asked, answers, int(tied_left_out), waited_s)


def choose(first: Rollout, second: Rollout, place: jax.Array, *, group_size: int) -> Rollout:
    """The groups [P] i32 at these places among the 2P of two rounds, as one round's. On the device."""

    def take(x, y):
        groups = jnp.concatenate([x, y]).reshape(-1, group_size, *x.shape[1:])
        return groups[place].reshape(x.shape)

    return jax.tree.map(take, first, second)


def is_mixed(rewards: Rewards, groups: list[Any], config: Config) -> np.ndarray:
    """Whether two of a group's rewards differ, [groups] bool; rows of a group are neighbours.

    Of those that credit compares: scored, not cut off under ``algorithm.overlong_filter``, and where the advantage is
    by reward function each by itself, as far as its weight is not 0.
    """
    counts = rewards.outcome == OUTCOME_SCORE
    if config.algorithm.overlong_filter:
        counts &= np.array([reason != STOP_LENGTH for group in groups for reason in group.stop_reasons])
    columns = [rewards.total]
    if config.algorithm.looks_at_parts:
        parts = [rewards.parts[name] for name in config.rewards.functions]
        weighted = list(zip(parts, config.rewards.weights, strict=True))
        columns = [part for part, weight in config.algorithm.compared(weighted, np.where) if weight]
    counts = counts.reshape(len(groups), -1)

    def differ(value: np.ndarray) -> np.ndarray:
        value = value.reshape(len(groups), -1)
        highest = np.max(np.where(counts, value, -np.inf), axis=1)
        return np.min(np.where(counts, value, np.inf), axis=1) < highest

    return np.any([differ(value) for value in columns], axis=0)
