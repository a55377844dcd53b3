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

from jaxrl_llm.actor.agents import prompt_shown
from jaxrl_llm.actor.generator import FinishedGroup
from jaxrl_llm.config import Config
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.types import (
    MAX_ERRORS_KEPT,
    OUTCOME_SCORE,
    STOP_LENGTH,
    STOP_NAMES,
    Agreed,
    PerHost,
    PromptBatch,
    Rewards,
    Rollout,
)


@dataclasses.dataclass
class Sampled:
    """What an iteration has sampled.

    Attributes:
        rollout: P*G rows that stay, on the device.
        kept: P places in ``asked``, of their groups in the same order.
        asked: all groups that were generated, in order.
        answers: rewards of their rows.
        num_tied_left_out: tied groups among those that do not stay.
        waited_s: seconds of waiting for rewards while nothing was generated.
    """

    rollout: Agreed[Rollout]
    kept: Agreed[np.ndarray]
    asked: Agreed[list[Any]]
    answers: Agreed[Rewards]
    num_tied_left_out: Agreed[int] = 0
    waited_s: PerHost[float] = 0.0

    @property
    def groups(self) -> list[Any]:
        return [self.asked[i] for i in self.kept]

    @property
    def rewards(self) -> Rewards:
        """Of the rows that stay."""
        size = len(self.answers.outcome) // len(self.asked)
        rows = (self.kept[:, None] * size + np.arange(size)).ravel()
        return each_array(lambda x: x[rows], self.answers)

    def state(self) -> dict[str, Any]:
        """What ``restored`` needs of it besides ``rollout``; plain JSON."""
        groups = [[group.group_id, group.lengths, group.stop_reasons, group.turns] for group in self.asked]
        whole = {"kept": self.kept.tolist(), "asked": groups, "answers": state_of(self.answers)}
        return whole | {"waited_s": self.waited_s}

    @staticmethod
    def restored(state: dict[str, Any], rollout: Rollout, example: Callable[[int], Any]) -> Sampled:
        """As it was; ``example``: the question of a group_id."""
        groups = [FinishedGroup(group_id, example(group_id), *of_rows) for group_id, *of_rows in state["asked"]]
        answers, waited_s = restored(state["answers"]), state.get("waited_s", 0.0)
        return Sampled(rollout, np.array(state["kept"]), groups, answers, waited_s=waited_s)

    def shown(self, iteration: int, count: int, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
        """A few of the rollouts that stay as rows of samples.jsonl, spread over their groups."""
        rewards, versions, completions = (
            self.rewards,
            sharding.own_rows(self.rollout.policy_version),
            self.completions(),
        )
        num_rows, size, groups = len(rewards.outcome), len(rewards.outcome) // len(self.kept), self.groups
        count, rows = min(count, num_rows), []
        for i in (k * num_rows // count for k in range(count)):
            group = groups[i // size]
            if i not in versions:  # another host's
                rows.append(None)
                continue
            own = versions[i][versions[i] >= 0]  # of the completion's tokens
            rows.append(
                {
                    "iteration": iteration,
                    "prompt_id": group.group_id,
                    "group_id": group.group_id,
                    "prompt": prompt_shown(group.example.prompt, decode),
                    "completion": decode(completions[i]),
                    "reward": float(rewards.total[i]),
                    "parts": {name: float(part[i]) for name, part in rewards.parts.items()},
                    "stop_reason": STOP_NAMES[group.stop_reasons[i % size]],
                    "policy_version": int(own.min()),
                    "age": int(own.max() - own.min()),  # policy versions between its first token and its last
                }
            )
        return hosts.complete(rows)

    def completions(self) -> dict[int, list[int]]:
        """Token ids of the rows that stay and are this host's, by row."""
        tokens, first = (sharding.own_rows(x) for x in (self.rollout.tokens, self.rollout.prompt_length))
        end = sharding.own_rows(self.rollout.length)
        return {i: row[first[i] : end[i]].tolist() for i, row in tokens.items()}


def sample(
    generator: Any,
    next_batch: Callable[[int], PromptBatch],
    collect: Callable[[list[Any]], Rewards],
    choose: Callable[[Rollout, Rollout, jax.Array], Rollout] | None,
    params: Any,
    *,
    config: Config,
    done: list[Sampled],
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
        done: what earlier rounds have come to, in one or none; a run that stops goes on from it.
        params, how: for ``generator.generate``.

    Source: dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476. Differs: it is mixed rewards that count, not
        0 < correct < G, and a bound on the rounds is part of the method: what is left over is tied.
    """
    num_groups = config.rollout.prompts_per_iteration
    while True:
        groups = generator.generate(params, next_batch(generator.prompts_wanted()), **how)
        start = time.monotonic()
        hosts.doing("rewards")
        answers = collect([group.ticket for group in groups])
        waited_s = time.monotonic() - start
        # Not before: what is stopped while it waits for rewards goes on from the sampler's rows.
        now = Sampled(generator.take(), np.arange(num_groups), groups, answers, waited_s=waited_s)
        before = done.pop() if done else None
        if before is not None:
            now.asked = before.asked + groups
            now.answers = each_array(lambda *x: np.concatenate(x), before.answers, answers)
        mixed = is_mixed(now.answers, now.asked, config)
        if before is not None:
            kept = np.concatenate([before.kept, len(before.asked) + now.kept])
            place = np.argsort(~mixed[kept], kind="stable")[:num_groups].astype(np.int32)
            place_on_devices = sharding.put(place, sharding.replicated(generator.sampler.mesh, 0))
            now.rollout, now.kept = choose(before.rollout, now.rollout, place_on_devices), kept[place]
            now.waited_s += before.waited_s
        rounds = len(now.asked) // num_groups
        if mixed[now.kept].all() or rounds > config.rollout.max_resample_rounds:
            now.num_tied_left_out = int(np.sum(~mixed) - np.sum(~mixed[now.kept]))
            return now
        done.append(now)


def choose(first: Rollout, second: Rollout, place: jax.Array, *, group_size: int) -> Rollout:
    """The groups [P] i32 at these places among the 2P of two rounds, as one round's. On the device."""

    def take(x, y):
        groups = jnp.concatenate([x, y]).reshape(-1, group_size, *x.shape[1:])
        return groups[place].reshape(x.shape)

    return jax.tree.map(take, first, second)


def each_array(function: Callable[..., np.ndarray], *rewards: Rewards) -> Rewards:
    """A function of each array of some ``Rewards``, as one; their first few errors."""
    first, errors = rewards[0], dict.fromkeys(error for one in rewards for error in one.errors)
    return Rewards(
        function(*(one.total for one in rewards)),
        {name: function(*(one.parts[name] for one in rewards)) for name in first.parts},
        function(*(one.outcome for one in rewards)),
        tuple(errors)[:MAX_ERRORS_KEPT],
        None if first.by_turn is None else function(*(one.by_turn for one in rewards)),
        None if first.masked is None else function(*(ragged(one.masked) for one in rewards)).tolist(),
        None if first.turn_seconds is None else function(*(one.turn_seconds for one in rewards)),
    )


def ragged(lists: list[list[int]]) -> np.ndarray:
    """[B] lists of any lengths, as an array of these."""
    array = np.empty(len(lists), object)
    for i, one in enumerate(lists):
        array[i] = one
    return array


def state_of(rewards: Rewards) -> list[Any]:
    """What ``restored`` takes; plain JSON."""
    parts = {name: part.tolist() for name, part in rewards.parts.items()}
    by_turn = None if rewards.by_turn is None else rewards.by_turn.tolist()
    seconds = None if rewards.turn_seconds is None else rewards.turn_seconds.tolist()
    return [rewards.total.tolist(), parts, rewards.outcome.tolist(), rewards.errors, by_turn, rewards.masked, seconds]


def restored(state: list[Any]) -> Rewards:
    total, parts, outcome, errors, by_turn, masked, *timed = state
    numbers = lambda x: np.array(x, np.float32)
    parts = {name: numbers(part) for name, part in parts.items()}
    by_turn = None if by_turn is None else numbers(by_turn)
    seconds = numbers(timed[0]) if timed and timed[0] is not None else None  # not there in older checkpoints
    return Rewards(numbers(total), parts, np.array(outcome, np.int8), tuple(errors), by_turn, masked, seconds)


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
