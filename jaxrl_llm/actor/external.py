"""External rollouts: groups of answers that this run did not sample, from files, other runs or hindsight functions.

``actor.external_groups`` defines the format of a group. ``actor.external_sources`` defines the sources of groups and
their order.

The program ``join`` computes the log-probs of external rows under the current weights, as if the current policy had
sampled the rows. Credit, ring and update then treat all rows alike. An advantage that compares siblings needs at least
two rewards in a group. A run can learn from an expert's demonstration in three ways:

    - the group also has a worse answer
    - the advantage has another baseline than the siblings
    - ``algorithm.cross_entropies`` has "imitation"

Source: SAPO, arXiv:2509.08721. Differs: the newest unread groups of a run are taken, instead of a sample of the untied
groups (``replay.skip_tied`` keeps tied groups from being drawn). Rewards of another run can be reused.

Owns: the groups of an iteration, their rows and rewards. Does not know: the ring, how rewards are scored.
Letters: J groups an iteration, G rows of a group, S row width.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.actor.external_groups import ExternalGroup, GroupParser
from jaxrl_llm.actor.external_sources import HindsightSource, source_of
from jaxrl_llm.actor.resampling import Sampled
from jaxrl_llm.config import Config
from jaxrl_llm.models.files.decoding import Decode
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.questions.stream import EncodedExample
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, STOP_NONE, Rewards, Rollout


class External:
    """Reader of the groups in ``external.paths``, with its reading position.

    Args:
        train, held_out: the run's questions. Groups about held-out questions are skipped, unless the question is also a
            training question.
        vocab_size: number of token ids of the model.
        layout: shardings of the external rows (``LearnerPrograms.abstract_external``).
        num_parts: number of parts in which program ``join`` interleaves own and external rows.

    Raises:
        ConfigError: a path is not a file, folder or function. Or a line of a file is not a group; the message has the
            file, line and field.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        train: Sequence[EncodedExample] = (),
        held_out: Sequence[EncodedExample] = (),
        *,
        vocab_size: int,
        layout: Rollout,
        num_parts: int,
    ):
        self._config = config
        self._layout = layout
        self._num_parts = num_parts
        unseen: frozenset[tuple[int, ...]] = frozenset()
        if config.external.paths:
            unseen = _prompts(held_out) - _prompts(train)
        parser = GroupParser(config, tokenizer, vocab_size, unseen)
        self._sources = {path: source_of(path, parser) for path in config.external.paths}

    def next_groups(self, iteration: int, score: Callable[[ExternalGroup], Any]) -> ExternalBatch | None:
        """Return the next J groups, taken from the sources in turn. If the sources have fewer groups, the rest is None.

        Args:
            iteration: number of the iteration. Group ids derive from it; they are negative and unique over the run.
            score: called with each group without rewards; returns the group's ticket.

        Returns:
            The groups, or None if ``external.groups_per_iteration`` is 0.
        """
        num_groups = self._config.external.groups_per_iteration
        if not num_groups:
            return None
        groups = self._take(num_groups, first_source=iteration)
        for j, group in enumerate(groups):
            is_own = j % hosts.count() == jax.process_index()
            if group.rewards is None and is_own:
                group.ticket = score(group)
        padded = [*groups, *[None] * (num_groups - len(groups))]
        rows = _rows(padded, self._config, first_id=-1 - iteration * num_groups)
        return ExternalBatch(
            rows=sharding.put(rows, self._layout),
            groups=padded,
            group_size=self._config.rollout.group_size,
            functions=self._config.rewards.functions,
            column_shapes=self._config.reward_columns,
            num_parts=self._num_parts,
            skipped_lines=sum(source.skipped for source in self._sources.values()),
            failed_calls=sum(source.failed for source in self._sources.values()),
        )

    def _take(self, num_groups: int, *, first_source: int) -> list[ExternalGroup]:
        """Return at most ``num_groups`` groups, one from each source in turn."""
        queue = collections.deque(self._sources.values())
        for source in queue:
            source.refresh()
        queue.rotate(-first_source)
        groups: list[ExternalGroup] = []
        while queue and len(groups) < num_groups:
            group = queue[0].next_group()
            if group is None:
                queue.popleft()
            else:
                groups.append(group)
                queue.rotate(-1)
        return groups

    def observe(self, sampled: Sampled, decode: Decode) -> None:
        """Pass the groups that this run has sampled to the hindsight functions."""
        for source in self._sources.values():
            if isinstance(source, HindsightSource):
                source.observe(sampled, decode)

    def close(self) -> None:
        """Kill the processes of the hindsight functions."""
        for source in self._sources.values():
            if isinstance(source, HindsightSource):
                source.close()

    def state(self) -> dict[str, Any]:
        """Return the reading positions as plain JSON, the argument of ``restore``."""
        return {path: source.state() for path, source in self._sources.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the reading positions of the sources that the state has."""
        for path in self._sources.keys() & state.keys():
            self._sources[path].restore(state[path])


def _prompts(rows: Sequence[EncodedExample]) -> frozenset[tuple[int, ...]]:
    """Return the token ids of the prompts."""
    return frozenset(tuple(row.tokens.tolist()) for row in rows)


@dataclasses.dataclass
class ExternalBatch:
    """External groups of one iteration.

    Attributes:
        rows: [J*G, S] on the device. The completion of a missing row or group has no tokens.
        groups: J groups, None = missing.
        group_size: G.
        functions: names of the reward functions.
        column_shapes: shapes of the columns of rewards, without rows (``Config.reward_columns``).
        num_parts: see ``External``.
        skipped_lines: number of skipped lines so far. In files, only lines about held-out questions are skipped.
        failed_calls: number of failed calls of hindsight functions so far.
        rewards: rewards of the J*G rows after ``score``; else None.
    """

    rows: Rollout
    groups: list[ExternalGroup | None]
    group_size: int
    functions: Sequence[str]
    column_shapes: Mapping[str, tuple[int, ...]]
    num_parts: int
    skipped_lines: int
    failed_calls: int
    rewards: Rewards | None = None

    def score(self, collect: Callable[[list[Any]], Rewards]) -> None:
        """Set ``rewards``: wait for the pending scores, and fill in the given rewards. Later calls do nothing.

        Args:
            collect: waits for tickets and returns their scores.
        """
        if self.rewards is not None:
            return
        G = self.group_size
        rows = (len(self.groups), G)
        total = np.full(rows, np.nan, np.float32)
        outcome = np.full(rows, OUTCOME_ERROR, np.int8)
        parts = {name: total.copy() for name in self.functions}
        columns = {}
        for name, shape in self.column_shapes.items():
            columns[name] = np.zeros((*rows, *shape), np.float32)
        for j, group in enumerate(self.groups):
            if group is None:
                continue
            size = len(group.completions)
            if group.rewards is not None:
                total[j, :size] = group.rewards
                has_score = np.isfinite(group.rewards)
                outcome[j, :size] = np.where(has_score, OUTCOME_SCORE, OUTCOME_ERROR)
                continue
            scored = collect([group.ticket])
            total[j, :size] = scored.total
            outcome[j, :size] = scored.outcome
            for name, part in scored.parts.items():
                parts[name][j, :size] = part
            for name, column in columns.items():
                column[j, :size] = scored.columns[name]
        flat_parts = {name: part.ravel() for name, part in parts.items()}
        flat_columns = {}
        for name, column in columns.items():
            flat_columns[name] = column.reshape(-1, *self.column_shapes[name])
        self.rewards = Rewards(total.ravel(), flat_parts, outcome.ravel(), columns=flat_columns)

    @property
    def _scored(self) -> Rewards:
        assert self.rewards is not None, "call score first"
        return self.rewards

    def join(
        self,
        rewards: Rewards,
        questions: Sequence[int],
        question_id: Callable[[list[int]], int],
    ) -> tuple[Rewards, list[int]]:
        """Return rewards and question ids of own and external groups together, in the row order of program ``join``.

        Args:
            rewards: rewards of the run's own rows.
            questions: question ids of the run's own groups.
            question_id: maps a prompt's token ids to its question id.
        """
        external = self._scored
        external_questions = [question_id(group.prompt) if group else -1 for group in self.groups]
        joined = Rewards(
            total=self._interleave(rewards.total, external.total),
            parts=self._interleave_all(rewards.parts, external.parts),
            outcome=self._interleave(rewards.outcome, external.outcome),
            errors=rewards.errors,
            columns=self._interleave_all(rewards.columns, external.columns),
        )
        return joined, self._interleave(questions, external_questions).tolist()

    def _interleave(self, own: Any, external: Any) -> np.ndarray:
        """Concatenate own and external values within each of ``num_parts`` parts, as ``join`` does with rows."""
        parts = []
        for array in map(np.asarray, (own, external)):
            rows_per_part = len(array) // self.num_parts
            parts.append(array.reshape(self.num_parts, rows_per_part, *array.shape[1:]))
        joined = np.concatenate(parts, axis=1)
        return joined.reshape(-1, *joined.shape[2:])

    def _interleave_all(self, own: Mapping[str, np.ndarray], external: Mapping[str, np.ndarray]) -> Any:
        """Interleave the own and external arrays of each name in ``own``."""
        return {name: self._interleave(array, external[name]) for name, array in own.items()}

    def values(self) -> dict[str, float]:
        """Return the metrics of external rollouts."""
        groups = [group for group in self.groups if group]
        rewards = self._scored
        scores = rewards.total[rewards.outcome == OUTCOME_SCORE]
        num_completions = sum(len(group.completions) for group in groups)
        return {
            "external/groups": len(groups),
            "external/reward_mean": float(scores.mean()) if len(scores) else math.nan,
            "external/failed_rewards": num_completions - len(scores),
            "external/skipped_lines": self.skipped_lines,
            "external/failed_calls": self.failed_calls,
        }


def _rows(groups: Sequence[ExternalGroup | None], config: Config, *, first_id: int) -> Rollout:
    """Return the rows of the groups in numpy (see ``ExternalBatch``), without log-probs and policy versions.

    The program ``join`` computes both.
    """
    G = config.rollout.group_size
    num_rows = len(groups) * G
    tokens = np.zeros((num_rows, config.row_tokens), np.int32)
    prompt_length = np.ones(num_rows, np.int32)
    length = np.ones(num_rows, np.int32)
    stop_reason = np.full(num_rows, STOP_NONE, np.int8)
    for j, group in enumerate(groups):
        if group is None:
            continue
        siblings = slice(j * G, (j + 1) * G)  # the row of a missing completion holds the prompt of its group
        prompt_size = len(group.prompt)
        tokens[siblings, :prompt_size] = group.prompt
        prompt_length[siblings] = prompt_size
        length[siblings] = prompt_size
        for g, (ids, reason) in enumerate(zip(group.completions, group.stop_reasons, strict=True)):
            row = j * G + g
            length[row] += len(ids)
            tokens[row, prompt_length[row] : length[row]] = ids
            stop_reason[row] = reason
    group_index = np.arange(len(groups), dtype=np.int32)
    group_id = np.repeat(first_id - group_index, G)
    arrays: list[Any] = [tokens, prompt_length, length, None, group_id, None, stop_reason]
    return Rollout(*arrays)  # the ``Rollout`` holds numpy arrays instead of device arrays
