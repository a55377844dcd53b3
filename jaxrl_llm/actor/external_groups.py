"""External groups: answers to one question that this run did not sample, as lines of JSON.

    {"prompt": "...", "completions": ["...", [3, 1, 4]], "rewards": [1.0, 0.0], ...}

    prompt         text or messages; ``messages`` is another name for a prompt of messages
    completions    at most rollout.group_size: texts, to which the end token is appended, or token ids of this model,
                   which are used unchanged
    rewards        optional: a number for each completion; completions with null are not trained on. Without this field,
                   rewards.functions score the completions with the other columns of the line.
    prompt_ids     optional: the prompt's token ids, which must equal the ids that this run computes. The field detects
                   a run with another tokenizer or chat template.

A run with ``metrics.share_rollouts`` writes its own groups in this format for other runs.

Owns: the format of a group, the lines that a run shares. Does not know: the source of a line, device arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxrl_llm.actor.resampling import Sampled
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.questions.stream import EncodedExample
from jaxrl_llm.questions.tasks.files import question
from jaxrl_llm.runtime import hosts
from jaxrl_llm.runtime.json_lines import BadRowError, parse
from jaxrl_llm.scoring.worker_processes import is_number
from jaxrl_llm.types import STOP_EOS, STOP_LENGTH, STOP_STRING, Example


class HeldOutError(BadRowError):
    """Error for a line whose question is one of this run's held-out questions."""


@dataclasses.dataclass
class ExternalGroup:
    """Answers to one prompt.

    Attributes:
        example: the question.
        prompt: token ids.
        completions: token ids of each completion.
        stop_reasons: STOP_* of each completion.
        rewards: reward of each completion, NaN = no reward. None = reward functions score the group.
        ticket: pending scores, if ``rewards`` is None and this host scores the group.
        played: always None, because external groups have no conversations. ``FinishedGroup`` has this attribute, and
            both kinds of groups are scored in the same way.
    """

    example: Example
    prompt: list[int]
    completions: list[list[int]]
    stop_reasons: list[int]
    rewards: list[float] | None
    ticket: Any = None
    played: None = None


@dataclasses.dataclass(frozen=True)
class GroupParser:
    """Parser of lines into external groups.

    Attributes:
        vocab_size: number of token ids of the model.
        held_out: token ids of the prompts whose groups the run must not use.
    """

    config: Config
    tokenizer: Tokenizer
    vocab_size: int
    held_out: frozenset[tuple[int, ...]] = frozenset()

    def group(self, line: bytes, origin: str) -> ExternalGroup:
        """Parse a line as a group.

        Args:
            origin: file and line number, for error messages about the question.

        Raises:
            BadRowError: the line is not a group that this run can use.
            HeldOutError: the question is held out.
        """
        row = parse(line)
        group_fields = {}
        if isinstance(row, dict):
            group_fields = {name: row.pop(name, None) for name in ("completions", "rewards", "prompt_ids")}
        prompt, columns = question(row)
        try:
            prompt_ids = self.tokenizer.encode_prompt(prompt, **self.config.prompts.encoding)
            completions = self._completions(group_fields["completions"])
        except ConfigError as error:
            raise BadRowError(str(error)) from error
        self._check_prompt(prompt_ids, group_fields["prompt_ids"])
        return ExternalGroup(
            example=Example(prompt, columns, origin),
            prompt=prompt_ids,
            completions=completions,
            stop_reasons=[self._stop_reason(ids) for ids in completions],
            rewards=self._rewards(group_fields["rewards"], len(completions)),
        )

    def _check_prompt(self, prompt_ids: list[int], expected_ids: Any) -> None:
        """Check the length of a prompt, the field ``prompt_ids`` and that the question is not held out."""
        limit = self.config.prompts.max_tokens
        if not 1 <= len(prompt_ids) <= limit:
            raise BadRowError(
                f"`prompt` has {len(prompt_ids)} tokens, but prompts.max_tokens={limit} allows 1 to {limit}"
            )
        if expected_ids not in (None, prompt_ids):
            raise BadRowError(
                "`prompt_ids` differ from the token ids that this run's tokenizer and chat template give the prompt. "
                "The line is from a run with another tokenizer or chat template."
            )
        if tuple(prompt_ids) in self.held_out:
            raise HeldOutError("the question is one of this run's held-out questions")

    def _completions(self, values: Any) -> list[list[int]]:
        """Return the token ids of each completion in the field ``completions``."""
        algorithm = self.config.algorithm
        group_size = self.config.rollout.group_size
        # A single completion has no advantage if the advantage compares the group's completions, but it can be
        # imitated.
        compares_siblings = algorithm.advantage.facts.siblings and not algorithm.imitates
        least = 2 if compares_siblings else 1
        if not isinstance(values, list) or not least <= len(values) <= group_size:
            raise BadRowError(
                f"`completions` must be a list of {least} (algorithm.advantage={algorithm.advantage.name!r}) "
                f"to {group_size} (rollout.group_size)"
            )
        return [self._completion(value, f"`completions[{i}]`") for i, value in enumerate(values)]

    def _completion(self, value: Any, field: str) -> list[int]:
        """Return the token ids of one completion: a text or a list of token ids."""
        ids = value
        if isinstance(value, str):
            text_ids = self.tokenizer.encode(value, special_tokens=self.config.prompts.special_tokens)
            ids = [*text_ids, self.tokenizer.end_id]
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise BadRowError(f"{field} must be a text or a list of token ids")
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise BadRowError(
                    f"{field}: token id {token} is not in the model's vocabulary 0..{self.vocab_size - 1}"
                )
        limit = self.config.sampling.max_completion_tokens
        if len(ids) > limit:
            raise BadRowError(f"{field} has {len(ids)} tokens, more than sampling.max_completion_tokens={limit}")
        return ids

    def _rewards(self, values: Any, num_completions: int) -> list[float] | None:
        """Return the numbers of the field ``rewards``, NaN for null. Return None without this field."""
        if values is None:
            return None
        algorithm = self.config.algorithm
        if algorithm.looks_at_parts:
            raise BadRowError(
                f"`rewards` are sums over reward functions, but algorithm.advantage={algorithm.advantage.name!r} needs "
                "the reward of each function. Remove the field, so that rewards.functions score the completions."
            )
        is_list = isinstance(values, list) and len(values) == num_completions
        if not is_list or not all(value is None or is_number(value) for value in values):
            raise BadRowError(
                f"`rewards` must be a list of {num_completions} numbers, one for each completion. A number is at most "
                "1e12 in size; null means no reward."
            )
        return [math.nan if value is None else float(value) for value in values]

    def _stop_reason(self, ids: list[int]) -> int:
        """Return the stop reason of a completion, inferred because lines do not contain it.

        A completion without an end token or a stop string counts as cut at the length limit.
        """
        if ids[-1] in self.tokenizer.eos_ids:
            return STOP_EOS
        stop_strings = self.config.sampling.stop_strings
        if stop_strings:
            text = self.tokenizer.decode(ids)
            if any(stop in text for stop in stop_strings):
                return STOP_STRING
        return STOP_LENGTH


def shared_groups(sampled: Sampled, lookup: Callable[[int], EncodedExample]) -> list[dict[str, Any]]:
    """Return the run's own kept groups as lines that another run can read.

    Args:
        sampled: groups of one iteration.
        lookup: returns the tokenised prompt of a group id.
    """
    completions = sampled.completions()
    totals = sampled.rewards.total.reshape(len(sampled.kept), -1).tolist()
    lines: list[dict[str, Any] | None] = []
    for j, (group, group_rewards) in enumerate(zip(sampled.groups, totals, strict=True)):
        first = j * len(group_rewards)
        if first not in completions:  # the rows of the group are on another host
            lines.append(None)
            continue
        lines.append(
            {
                "prompt": group.example.prompt,
                "prompt_ids": lookup(group.group_id).tokens.tolist(),
                "completions": [completions[i] for i in range(first, first + len(group_rewards))],
                "rewards": group_rewards,
            }
        )
    return [line for line in hosts.complete(lines) if line is not None]  # each group is on one of the hosts
