"""Resampling: an iteration generates further groups when too many of its groups are tied.

A group is mixed if its rewards differ, and tied if its rewards are all equal.

    P groups --> all mixed? --no--> P groups of new questions --> P mixed among all? --no--> ...
                     |                                                   |
                     +---------------------------------------------------+--> P groups for the ring, mixed ones first

Every round has P groups, because array shapes are static. Surplus groups are left out of the ring, but the metrics
count them as generated. If the iteration has only one round, all its groups stay.

Owns: which groups stay, their lines in samples.jsonl. Does not know: how groups are generated and scored, the later use
of the groups.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.config import Config
from jaxrl_llm.conversations.agents import prompt_shown
from jaxrl_llm.models.files.decoding import Decode
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.types import (
    MAX_ERRORS_KEPT,
    OUTCOME_SCORE,
    STOP_LENGTH,
    STOP_NAMES,
    Agreed,
    Example,
    PerHost,
    PromptBatch,
    Rewards,
    Rollout,
)


@dataclasses.dataclass
class Sampled:
    """The groups that an iteration has generated, with their rewards.

    Attributes:
        rollout: P*G rows that stay, on the device.
        kept: indices into ``asked`` of the P groups that stay, in the order of ``rollout``.
        asked: all generated groups, in order.
        answers: rewards of the rows of all generated groups.
        num_tied_left_out: number of tied groups that were left out.
        waited_s: seconds spent waiting for rewards while nothing was generated.
    """

    rollout: Agreed[Rollout]
    kept: Agreed[np.ndarray]
    asked: Agreed[list[FinishedGroup]]
    answers: Agreed[Rewards]
    num_tied_left_out: Agreed[int] = 0
    waited_s: PerHost[float] = 0.0

    @property
    def groups(self) -> list[FinishedGroup]:
        """Return the groups that stay."""
        return [self.asked[i] for i in self.kept]

    @property
    def rewards(self) -> Rewards:
        """Return the rewards of the rows that stay."""
        group_size = len(self.answers.outcome) // len(self.asked)
        first_rows = self.kept[:, None] * group_size
        rows = (first_rows + np.arange(group_size)).ravel()

        def kept_rows(array: np.ndarray) -> np.ndarray:
            return array[rows]

        return each_array(kept_rows, self.answers)

    def state(self) -> dict[str, Any]:
        """Return the saved form of the object as plain JSON, without ``rollout``. ``restored`` reads it."""
        groups = [[group.group_id, group.lengths, group.stop_reasons, group.turns] for group in self.asked]
        return {
            "kept": self.kept.tolist(),
            "asked": groups,
            "answers": state_of(self.answers),
            "waited_s": self.waited_s,
        }

    @staticmethod
    def restored(
        state: dict[str, Any],
        rollout: Rollout,
        example: Callable[[int], Example],
        column_shapes: Mapping[str, tuple[int, ...]],
    ) -> Sampled:
        """Return the object that was saved by ``state``.

        Args:
            example: returns the question of a group_id.
            column_shapes: ``Config.reward_columns``.
        """
        groups = []
        for group_id, lengths, stop_reasons, turns in state["asked"]:
            groups.append(FinishedGroup(group_id, example(group_id), lengths, stop_reasons, turns))
        return Sampled(
            rollout=rollout,
            kept=np.array(state["kept"]),
            asked=groups,
            answers=restored(state["answers"], column_shapes),
            waited_s=state.get("waited_s", 0.0),
        )

    def sample_lines(self, iteration: int, count: int, decode: Decode) -> list[dict[str, Any]]:
        """Return ``count`` of the rows that stay, spread over the groups, as lines of samples.jsonl."""
        rewards = self.rewards
        groups = self.groups
        versions = sharding.own_rows(self.rollout.policy_version)
        completions = self.completions()
        num_rows = len(rewards.outcome)
        group_size = num_rows // len(self.kept)
        num_lines = min(count, num_rows)
        lines: list[dict[str, Any] | None] = []
        for k in range(num_lines):
            i = k * num_rows // num_lines
            if i not in versions:  # the row is on another host
                lines.append(None)
                continue
            group = groups[i // group_size]
            drawn_versions = versions[i][versions[i] >= 0]  # of the tokens that the policy drew
            oldest = int(drawn_versions.min())
            newest = int(drawn_versions.max())
            line = {
                "iteration": iteration,
                "prompt_id": group.group_id,
                "group_id": group.group_id,
                "prompt": prompt_shown(group.example.prompt, decode),
                "completion": decode(completions[i]),
                "reward": float(rewards.total[i]),
                "parts": {name: float(part[i]) for name, part in rewards.parts.items()},
                "stop_reason": STOP_NAMES[group.stop_reasons[i % group_size]],
                "policy_version": oldest,
                "age": newest - oldest,  # number of weight updates between the oldest and the newest token
            }
            lines.append(line)
        return [line for line in hosts.complete(lines) if line is not None]  # each row is on one of the hosts

    def completions(self) -> dict[int, list[int]]:
        """Return the completions' token ids of the rows that stay and lie on this host, by row index."""
        tokens = sharding.own_rows(self.rollout.tokens)
        start = sharding.own_rows(self.rollout.prompt_length)
        end = sharding.own_rows(self.rollout.length)
        completions = {}
        for i, row in tokens.items():
            completions[i] = row[start[i] : end[i]].tolist()
        return completions


def sample(
    generator: Generator,
    next_batch: Callable[[int], PromptBatch],
    collect: Callable[[list[Any]], Rewards],
    choose: Callable[[Rollout, Rollout, jax.Array], Rollout] | None,
    params: Any,
    *,
    config: Config,
    rounds: list[Sampled],
    version: jax.Array,
    key: jax.Array,
    on_finished: Callable[[FinishedGroup], Any],
) -> Sampled:
    """Generate rounds of P groups until P groups are mixed, or until the limit on rounds is reached.

    The limit is ``rollout.max_resample_rounds`` rounds after the first. Mixed groups stay in the order of generation.
    If there are fewer than P mixed groups, tied groups fill the remaining places. ``is_mixed`` uses the rewards as
    scored, before any shaping. Therefore length penalties do not make a tied group mixed.

    Args:
        next_batch: returns the given number of further questions.
        collect: waits for tickets and returns their scores in order.
        choose: compiled program that selects P groups from two rounds; None if there is only one round.
        params, version, key, on_finished: see ``Generator.generate``.
        config: the sections ``rollout``, ``algorithm`` and ``rewards`` are used.
        rounds: the merged earlier rounds, as a list of one element or none. A run that was stopped continues from them.

    Source: dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476. Differs: DAPO requires 0 < correct < G, this
        function requires different rewards in the group. The number of rounds is limited, so tied groups can remain.
    """
    num_groups = config.rollout.prompts_per_iteration
    while True:
        groups = generator.generate(
            params,
            next_batch(generator.prompts_wanted()),
            version=version,
            key=key,
            on_finished=on_finished,
        )
        started = time.monotonic()
        hosts.doing("rewards")
        answers = collect([group.ticket for group in groups])
        waited_s = time.monotonic() - started
        # Take the rows only after the rewards have arrived. If the run is stopped before, the rows are still in the
        # sampler.
        sampled = Sampled(generator.take(), np.arange(num_groups), groups, answers, waited_s=waited_s)
        if rounds:
            assert choose is not None, "rollout.max_resample_rounds is 0"
            sampled = _merge(rounds.pop(), sampled, choose, generator, config)
        mixed = is_mixed(sampled.answers, sampled.asked, config)
        num_rounds = len(sampled.asked) // num_groups
        if mixed[sampled.kept].all() or num_rounds > config.rollout.max_resample_rounds:
            num_tied = np.sum(~mixed)
            num_tied_kept = np.sum(~mixed[sampled.kept])
            sampled.num_tied_left_out = int(num_tied - num_tied_kept)
            return sampled
        rounds.append(sampled)


def _merge(
    earlier: Sampled,
    new: Sampled,
    choose: Callable[[Rollout, Rollout, jax.Array], Rollout],
    generator: Generator,
    config: Config,
) -> Sampled:
    """Return the merged earlier rounds and a new round as one round. Mixed groups stay first."""
    asked = earlier.asked + new.asked
    answers = each_array(_concatenate, earlier.answers, new.answers)
    mixed = is_mixed(answers, asked, config)
    candidates = np.concatenate([earlier.kept, len(earlier.asked) + new.kept])
    mixed_first = np.argsort(~mixed[candidates], kind="stable")
    place = mixed_first[: len(new.kept)].astype(np.int32)
    place_on_devices = sharding.put(place, sharding.replicated(generator.sampler.mesh, 0))
    return Sampled(
        rollout=choose(earlier.rollout, new.rollout, place_on_devices),
        kept=candidates[place],
        asked=asked,
        answers=answers,
        waited_s=earlier.waited_s + new.waited_s,
    )


def _concatenate(*arrays: np.ndarray) -> np.ndarray:
    return np.concatenate(arrays)


def choose(first: Rollout, second: Rollout, place: jax.Array, *, group_size: int) -> Rollout:
    """Return the groups at indices ``place`` [P] i32 among the 2P groups of two rounds, as one round on the device."""

    def take(x, y):
        groups = jnp.concatenate([x, y]).reshape(-1, group_size, *x.shape[1:])
        return groups[place].reshape(x.shape)

    return jax.tree.map(take, first, second)


def each_array(function: Callable[..., np.ndarray], *rewards: Rewards) -> Rewards:
    """Apply ``function`` to each array of several ``Rewards`` and return one ``Rewards`` with the first few errors."""
    first = rewards[0]
    errors: dict[str, None] = {}  # ordered and without duplicates
    for some in rewards:
        errors |= dict.fromkeys(some.errors)
    parts = {}
    for name in first.parts:
        parts[name] = function(*(some.parts[name] for some in rewards))
    columns = {}
    for name in first.columns:
        columns[name] = function(*(some.columns[name] for some in rewards))
    return Rewards(
        total=function(*(some.total for some in rewards)),
        parts=parts,
        outcome=function(*(some.outcome for some in rewards)),
        errors=tuple(errors)[:MAX_ERRORS_KEPT],
        columns=columns,
    )


def state_of(rewards: Rewards) -> dict[str, Any]:
    """Return rewards as plain JSON, for ``restored``."""
    return {
        "total": rewards.total.tolist(),
        "parts": {name: part.tolist() for name, part in rewards.parts.items()},
        "outcome": rewards.outcome.tolist(),
        "errors": list(rewards.errors),
        "columns": {name: _sparse(column) for name, column in rewards.columns.items()},
    }


def restored(
    state: dict[str, Any] | list[Any],
    column_shapes: Mapping[str, tuple[int, ...]],
) -> Rewards:
    """Return the rewards that were saved by ``state_of``.

    Args:
        state: a list in checkpoints of earlier versions.
        column_shapes: ``Config.reward_columns``.
    """
    if isinstance(state, list):
        state = _state_of_list(state, column_shapes)
    return Rewards(
        np.array(state["total"], np.float32),
        {name: np.array(part, np.float32) for name, part in state["parts"].items()},
        np.array(state["outcome"], np.int8),
        tuple(state["errors"]),
        {name: _dense(column) for name, column in state["columns"].items()},
    )


def _state_of_list(state: list[Any], column_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the state in the form of ``state_of``. Earlier versions saved a list."""
    total, parts, outcome, errors, turn_reward, masked, *timed = state
    columns = {}
    if turn_reward is not None:
        columns["turn_reward"] = np.array(turn_reward, np.float32)
    if timed and timed[0] is not None and "turn_seconds" in column_shapes:
        columns["turn_seconds"] = np.array(timed[0], np.float32)
    if "reward_mask" in column_shapes:
        mask = np.zeros((len(total), *column_shapes["reward_mask"]), np.float32)
        for row, positions in zip(mask, masked, strict=True):
            row[positions] = 1.0
        columns["reward_mask"] = mask
    sparse = {name: _sparse(column) for name, column in columns.items()}
    return {
        "total": total,
        "parts": parts,
        "outcome": outcome,
        "errors": errors,
        "columns": sparse,
    }


def _sparse(column: np.ndarray) -> dict[str, list[Any]]:
    """Return an array as plain JSON: its shape, and the flat indices and values that are not 0."""
    flat = column.ravel()
    indices = np.flatnonzero(flat)
    return {
        "shape": list(column.shape),
        "indices": indices.tolist(),
        "values": flat[indices].tolist(),
    }


def _dense(saved: dict[str, list[Any]]) -> np.ndarray:
    """Return the f32 array that was saved by ``_sparse``."""
    flat = np.zeros(math.prod(saved["shape"]), np.float32)
    flat[saved["indices"]] = saved["values"]
    return flat.reshape(saved["shape"])


def is_mixed(rewards: Rewards, groups: list[FinishedGroup], config: Config) -> np.ndarray:
    """Return whether a group has two different rewards, [groups] bool. The rows of a group are adjacent.

    Only rewards that credit assignment compares are used:

    - Rows without a score are ignored.
    - Truncated rows are ignored if ``algorithm.overlong_filter`` is set.
    - If the advantage is computed per reward function, each function with a nonzero weight is compared separately.
    """
    counts = rewards.outcome == OUTCOME_SCORE
    if config.algorithm.overlong_filter:
        reasons = np.concatenate([group.stop_reasons for group in groups])
        counts &= reasons != STOP_LENGTH
    columns = [rewards.total]
    if config.algorithm.looks_at_parts:
        parts = [rewards.parts[name] for name in config.rewards.functions]
        weighted = list(zip(parts, config.rewards.weights, strict=True))
        columns = [part for part, weight in config.algorithm.compared(weighted, np.where) if weight]
    counts = counts.reshape(len(groups), -1)

    def differ(value: np.ndarray) -> np.ndarray:
        value = value.reshape(len(groups), -1)
        highest = np.max(np.where(counts, value, -np.inf), axis=1)
        lowest = np.min(np.where(counts, value, np.inf), axis=1)
        return lowest < highest

    return np.any([differ(value) for value in columns], axis=0)
