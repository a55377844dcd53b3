"""External rollouts: groups of answers that this run did not sample, from files, other runs or hindsight functions.

Each line of a file in ``external.paths`` is a group:

    {"prompt": "...", "completions": ["...", [3, 1, 4]], "rewards": [1.0, 0.0], ...}

    prompt         text or messages; ``messages`` is another name for a prompt of messages
    completions    at most rollout.group_size: texts, to which the end token is appended, or token ids of this model,
                   which are used unchanged
    rewards        optional: a number for each completion; completions with null are not trained on. Without this field,
                   rewards.functions score the completions with the other columns of the line.
    prompt_ids     optional: the prompt's token ids, which must equal the ids that this run computes. The field detects
                   a run with another tokenizer or chat template.

``actor.external_sources`` defines the sources of groups and their order.

The program ``join`` computes the log-probs of external rows under the current weights, as if the current policy had
sampled the rows. Credit, ring and update then treat all rows alike. An advantage that compares siblings needs at least
two rewards in a group. An expert's demonstration therefore needs one of these:

    - a worse answer in the same group
    - an advantage with another baseline
    - "imitation" in ``algorithm.cross_entropies``

Source: SAPO, arXiv:2509.08721. Differs: the newest unread groups of a run are taken, instead of a sample of the untied
groups (``replay.skip_tied`` keeps tied groups from being drawn). Rewards of another run can be reused.

Owns: which lines are groups, their rows. Does not know: the ring, how rewards are scored.
Letters: J groups an iteration, G rows of a group, S row width.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_llm.actor.external_sources import HeldOutError, Hindsight, source_of
from jaxrl_llm.actor.resampling import Sampled
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.questions.tasks.files import question
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.runtime.json_lines import BadRowError, parse
from jaxrl_llm.scoring.worker_processes import is_number
from jaxrl_llm.types import (
    OUTCOME_ERROR,
    OUTCOME_SCORE,
    STOP_EOS,
    STOP_LENGTH,
    STOP_NONE,
    STOP_STRING,
    Example,
    Rewards,
    Rollout,
)

if TYPE_CHECKING:
    from jaxrl_llm.run import Run


@dataclasses.dataclass
class Group:
    """Answers to one prompt.

    Attributes:
        example: the question.
        prompt: token ids.
        completions: token ids of each completion.
        stop_reasons: STOP_* of each completion.
        rewards: reward of each completion, NaN = no reward. None = reward functions score the group.
        ticket: pending scores, if ``rewards`` is None and this host scores the group.
    """

    example: Example
    prompt: list[int]
    completions: list[list[int]]
    stop_reasons: list[int]
    rewards: list[float] | None
    ticket: Any = None
    played: Any = None  # always None; scoring reads this attribute of ``FinishedGroup`` too


class External:
    """Reader of the groups in ``external.paths``, with its reading position.

    Args:
        train, held_out: the run's questions (EncodedExample). Groups about held-out questions are skipped, unless the
            question is also a training question.

    Raises:
        ConfigError: a path is not a file, folder or function. Or a line of a file is not a group; the message has the
            file, line and field.
    """

    def __init__(self, run: Run, tokenizer: Any, train: Sequence[Any] = (), held_out: Sequence[Any] = ()):
        ids_of = lambda rows: (tuple(row.tokens.tolist()) for row in rows if run.config.external.paths)
        unseen = frozenset(ids_of(held_out)).difference(ids_of(train))
        reader = _Reader(run.config, tokenizer, run.model.arch.vocab_size, unseen)
        self._run = run
        self._sources = {path: source_of(path, reader) for path in run.config.external.paths}

    def next_groups(self, iteration: int, score: Callable[[Group], Any]) -> Guests | None:
        """Return the next J groups, taken from the sources in turn. If the sources have fewer groups, the rest is None.

        Args:
            iteration: number of the iteration. Group ids derive from it; they are negative and unique over the run.
            score: called with each group without rewards; returns the group's ticket.

        Returns:
            The groups, or None if ``external.groups_per_iteration`` is 0.
        """
        num_groups = self._run.config.external.groups_per_iteration
        if not num_groups:
            return None
        turns = collections.deque(self._sources.values())
        for source in turns:
            source.look()
        turns.rotate(-iteration)
        groups: list[Group | None] = []
        while turns and len(groups) < num_groups:
            group = turns[0].take()
            if group is None:
                turns.popleft()
            else:
                groups.append(group)
                turns.rotate(-1)
        for j, group in enumerate(groups):
            if group.rewards is None and j % hosts.count() == jax.process_index():
                group.ticket = score(group)
        groups += [None] * (num_groups - len(groups))
        rows = _rows(groups, self._run.config, first_id=-1 - iteration * num_groups)
        layout = sharding.of(self._run.learner.abstract_external)
        skipped, failed = (sum(getattr(x, name) for x in self._sources.values()) for name in ("skipped", "failed"))
        return Guests(sharding.put(rows, layout), groups, self._run, skipped, failed)

    def hear(self, sampled: Sampled, decode: Callable[[list[int]], str]) -> None:
        """Pass the groups that this run has sampled to the hindsight functions."""
        for source in self._sources.values():
            if isinstance(source, Hindsight):
                source.hear(sampled, decode)

    def close(self) -> None:
        for source in self._sources.values():
            if isinstance(source, Hindsight):
                source.close()

    def state(self) -> dict[str, Any]:
        """Return the reading positions as plain JSON, the argument of ``restore``."""
        return {path: source.state() for path, source in self._sources.items()}

    def restore(self, state: dict[str, Any]) -> None:
        for path in self._sources.keys() & state.keys():
            self._sources[path].restore(state[path])


@dataclasses.dataclass
class Guests:
    """External groups of one iteration.

    Attributes:
        rows: [J*G, S] on the device. The completion of a missing row or group has no tokens.
        groups: J groups, None = missing.
        skipped_lines: number of skipped lines so far. In files, only lines about held-out questions are skipped.
        failed_calls: number of failed calls of hindsight functions so far.
        rewards: rewards of the J*G rows after ``score``; else None.
    """

    rows: Rollout
    groups: list[Group | None]
    run: Run
    skipped_lines: int
    failed_calls: int
    rewards: Rewards | None = None

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
        about = [question_id(group.prompt) if group else -1 for group in self.groups]
        both = lambda own, theirs: _beside(own, theirs, self.run.learner.annotation.num_parts)
        joined = Rewards(
            total=both(rewards.total, self.rewards.total),
            parts={name: both(part, self.rewards.parts[name]) for name, part in rewards.parts.items()},
            outcome=both(rewards.outcome, self.rewards.outcome),
            errors=rewards.errors,
            columns={name: both(x, self.rewards.columns[name]) for name, x in rewards.columns.items()},
        )
        return joined, both(questions, about).tolist()

    def values(self) -> dict[str, float]:
        """Return the metrics of external rollouts."""
        came = [group for group in self.groups if group]
        scored = self.rewards.total[self.rewards.outcome == OUTCOME_SCORE]
        return {
            "external/groups": len(came),
            "external/reward_mean": float(scored.mean()) if len(scored) else math.nan,
            "external/failed_rewards": sum(len(group.completions) for group in came) - len(scored),
            "external/skipped_lines": self.skipped_lines,
            "external/failed_calls": self.failed_calls,
        }

    def score(self, collect: Callable[[list[Any]], Rewards]) -> None:
        """Set ``rewards``: wait for the pending scores, and fill in the given rewards. Later calls do nothing.

        Args:
            collect: waits for tickets and returns their scores.
        """
        if self.rewards is not None:
            return
        shape = len(self.groups), self.run.config.rollout.group_size
        total = np.full(shape, np.nan, np.float32)
        outcome = np.full(shape, OUTCOME_ERROR, np.int8)
        parts = {name: total.copy() for name in self.run.config.rewards.functions}
        column_shapes = self.run.config.reward_columns
        columns = {name: np.zeros((*shape, *rest), np.float32) for name, rest in column_shapes.items()}
        for j, group in enumerate(self.groups):
            if group is None:
                continue
            num = len(group.completions)
            if group.rewards is None:
                scored = collect([group.ticket])
                total[j, :num], outcome[j, :num] = scored.total, scored.outcome
                for name, column in columns.items():
                    column[j, :num] = scored.columns[name]
                for name, part in scored.parts.items():
                    parts[name][j, :num] = part
            else:
                total[j, :num] = group.rewards
                outcome[j, :num] = np.where(np.isfinite(group.rewards), OUTCOME_SCORE, OUTCOME_ERROR)
        parts = {name: part.ravel() for name, part in parts.items()}
        columns = {name: column.reshape(-1, *column.shape[2:]) for name, column in columns.items()}
        self.rewards = Rewards(total.ravel(), parts, outcome.ravel(), columns=columns)


def shared_groups(sampled: Sampled, lookup: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Return the run's own kept groups as lines that another run can read.

    Args:
        sampled: groups of one iteration.
        lookup: returns the tokenised prompt of a group id.
    """
    lines, own = [], sampled.completions()
    totals = sampled.rewards.total.reshape(len(sampled.kept), -1).tolist()
    for j, (group, total) in enumerate(zip(sampled.groups, totals, strict=True)):
        first, ids = j * len(total), lookup(group.group_id).tokens.tolist()
        rows = [own[i] for i in range(first, first + len(total))] if first in own else None
        line = {"prompt": group.example.prompt, "prompt_ids": ids, "completions": rows, "rewards": total}
        lines.append(line if rows else None)
    return hosts.complete(lines)


# ---- reading ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Parser of lines into groups."""

    config: Config
    tokenizer: Any
    vocab_size: int
    held_out: frozenset[tuple[int, ...]] = frozenset()  # token ids of held-out prompts

    def group(self, line: bytes, origin: str) -> Group:
        """Parse a line as a group.

        Raises:
            BadRowError: the line is not a group that this run can use.
            HeldOutError: the question is held out.
        """
        row = parse(line)
        own = {}
        if isinstance(row, dict):
            own = {name: row.pop(name, None) for name in ("completions", "rewards", "prompt_ids")}
        prompt, columns = question(row)
        prompts = self.config.prompts
        try:
            ids = self.tokenizer.encode_prompt(prompt, **prompts.encoding)
            completions = self._completions(own["completions"])
        except ConfigError as error:
            raise BadRowError(str(error)) from error
        if not 1 <= len(ids) <= prompts.max_tokens:
            raise BadRowError(f"`prompt` has {len(ids)} tokens, and prompts.max_tokens={prompts.max_tokens}")
        if own["prompt_ids"] not in (None, ids):
            raise BadRowError("`prompt_ids` are not what this run's tokenizer and chat template make of the prompt")
        if tuple(ids) in self.held_out:
            raise HeldOutError("the question is held out")
        return Group(
            Example(prompt, columns, origin),
            ids,
            completions,
            [self._stop_reason(ids) for ids in completions],
            self._rewards(own["rewards"], len(completions)),
        )

    def _completions(self, given: Any) -> list[list[int]]:
        algorithm, size = self.config.algorithm, self.config.rollout.group_size
        # A single completion has no advantage if siblings are compared, but it can be imitated.
        least = 1 if algorithm.imitates or not algorithm.advantage.needs.siblings else 2
        if not isinstance(given, list) or not least <= len(given) <= size:
            raise BadRowError(
                f"`completions` must be a list of {least} (algorithm.advantage={algorithm.advantage.name!r}) to {size} "
                "(rollout.group_size)"
            )
        completions, limit = [], self.config.sampling.max_completion_tokens
        for i, ids in enumerate(given):
            where = f"`completions[{i}]`"
            if isinstance(ids, str):
                special = self.config.prompts.special_tokens
                ids = [*self.tokenizer.encode(ids, special_tokens=special), self.tokenizer.end_id]
            if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
                raise BadRowError(f"{where} must be a text or a list of token ids")
            wrong = [i for i in ids if not 0 <= i < self.vocab_size]
            if wrong:
                raise BadRowError(
                    f"{where}: token id {wrong[0]} is not in the model's vocabulary 0..{self.vocab_size - 1}"
                )
            if len(ids) > limit:
                raise BadRowError(f"{where} has {len(ids)} tokens, over sampling.max_completion_tokens={limit}")
            completions.append(ids)
        return completions

    def _rewards(self, given: Any, num: int) -> list[float] | None:
        if given is None:
            return None
        if (method := self.config.algorithm).looks_at_parts:
            raise BadRowError(f"rewards are sums: algorithm.advantage={method.advantage.name!r} needs each function's")
        if not isinstance(given, list) or len(given) != num or not all(r is None or is_number(r) for r in given):
            raise BadRowError(f"`rewards` must be a list of {num} numbers up to 1e12, one for each completion, or null")
        return [math.nan if r is None else float(r) for r in given]

    def _stop_reason(self, ids: list[int]) -> int:
        """Return the stop reason of a completion, inferred because lines do not contain it.

        A completion without an end token or a stop string counts as cut at the length limit.
        """
        if ids[-1] in self.tokenizer.eos_ids:
            return STOP_EOS
        stops = self.config.sampling.stop_strings
        text = self.tokenizer.decode(ids) if stops else ""
        return STOP_STRING if any(stop in text for stop in stops) else STOP_LENGTH


# ---- rows ------------------------------------------------------------------------------------------------------


def _rows(groups: Sequence[Group | None], config: Config, *, first_id: int) -> Rollout:
    """Return the rows of the groups in numpy (see ``Guests``), without log-probs and policy versions.

    The program ``join`` computes both.
    """
    num_rows, size = len(groups) * config.rollout.group_size, config.rollout.group_size
    tokens = np.zeros((num_rows, config.row_tokens), np.int32)
    prompt_length = np.ones(num_rows, np.int32)
    length = np.ones(num_rows, np.int32)
    stop_reason = np.full(num_rows, STOP_NONE, np.int8)
    for j, group in enumerate(groups):
        if group is None:
            continue
        prompt = slice(j * size, (j + 1) * size)  # a missing completion has its siblings' prompt
        tokens[prompt, : len(group.prompt)] = group.prompt
        prompt_length[prompt] = length[prompt] = len(group.prompt)
        for row, (ids, reason) in enumerate(zip(group.completions, group.stop_reasons, strict=True), j * size):
            length[row] += len(ids)
            tokens[row, prompt_length[row] : length[row]] = ids
            stop_reason[row] = reason
    ids = np.repeat(first_id - np.arange(len(groups), dtype=np.int32), size)
    return Rollout(tokens, prompt_length, length, None, ids, None, stop_reason)


def _beside(own: Any, theirs: Any, num_parts: int) -> np.ndarray:
    """Concatenate own and external values within each of ``num_parts`` parts, as program ``join`` does with rows."""
    arrays = [np.asarray(x) for x in (own, theirs)]
    parts = [array.reshape(num_parts, len(array) // num_parts, *array.shape[1:]) for array in arrays]
    joined = np.concatenate(parts, axis=1)
    return joined.reshape(-1, *joined.shape[2:])
