"""Prompt stream: turn questions into ``PromptBatch`` objects in an order that a checkpoint can save and restore.

Owns: the held-out split, the token ids of questions, the order of questions. Does not know: the source of the questions
(tasks), the answers to them (rollout). All code here runs on the host.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import grain
import numpy as np

from jaxrl_llm.config import ConfigError, PromptsConfig
from jaxrl_llm.limits import FILE_SOURCES
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.types import Example, PromptBatch

# Number of prompts in one call of the tokenizer; 16 prompts of one megabyte take about ten seconds.
ENCODED_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class EncodedExample:
    """Question with its token ids."""

    example: Example
    tokens: Any  # [1..width] i32 numpy
    width: int  # L, the padded prompt width; the same for every prompt of the run


def split_held_out(
    examples: Sequence[Example], num_held_out: int, *, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Return ``(train, held_out)``. The two sets have no question in common.

    Two examples are the same question if their ``prompt`` and ``hidden`` are equal. Other columns are ignored, because
    generated sources repeat questions. ``held_out`` contains the first copy of each drawn question. All other copies
    are removed from ``train``.

    Args:
        num_held_out: number of distinct questions to hold out, drawn by a permutation of ``seed``; 0 holds out none.

    Raises:
        ConfigError: no question would be left for training.
    """
    keys = [question_of(example) for example in examples]
    first_copies: dict[str, Example] = {}
    for key, example in zip(keys, examples, strict=True):
        first_copies.setdefault(key, example)
    if num_held_out >= len(first_copies):
        raise ConfigError(
            f"eval.num_prompts={num_held_out} must be less than the {len(first_copies)} distinct questions of the "
            "source (prompts.size): the other questions are for training"
        )
    rows = list(first_copies.items())
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out = dict(rows[i] for i in order[:num_held_out])
    train = [example for key, example in zip(keys, examples, strict=True) if key not in held_out]
    return tuple(train), tuple(held_out.values())


def question_of(example: Example) -> str:
    """Return the key that identifies a question: its prompt and its hidden text, as JSON."""
    return json.dumps([example.prompt, example.hidden], sort_keys=True)


def encode_examples(
    examples: Sequence[Example], tokenizer: Any, config: PromptsConfig
) -> tuple[list[EncodedExample], list[str]]:
    """Return the encoded questions that fit ``config.max_tokens``, and one message for each question left out.

    Raises:
        ConfigError: a prompt is too long and ``prompts.long_prompt="error"``; a prompt has no token ids and
            ``prompts.bad_row="error"``; or no question is left.
    """
    encoded = []
    left_out: list[str] = []

    def leave_out(example: Example, reason: object, setting: str) -> None:
        message = f"{example.origin}: {reason}"
        if getattr(config, setting) == "error":
            raise ConfigError(f"{message} (prompts.{setting}='skip' leaves such rows out)")
        left_out.append(message)

    def encode(batch: Sequence[Example]) -> list[Sequence[int] | ConfigError]:
        return _token_ids(batch, tokenizer, config)

    # Threads work in parallel, because tokenizers release the interpreter's lock.
    pool = concurrent.futures.ThreadPoolExecutor()
    try:
        encode(examples[:1])  # in the main thread: only there can an endless chat template be interrupted
        batches = [examples[i : i + ENCODED_AT_ONCE] for i in range(0, len(examples), ENCODED_AT_ONCE)]
        token_ids = itertools.chain.from_iterable(pool.map(encode, batches))
        for example, ids in zip(examples, token_ids, strict=True):
            if isinstance(ids, ConfigError):
                leave_out(example, ids, "bad_row")
            elif not ids:
                leave_out(example, "the prompt has no token", "bad_row")
            elif len(ids) > config.max_tokens:
                reason = f"prompt of {len(ids)} tokens is over prompts.max_tokens={config.max_tokens}"
                leave_out(example, reason, "long_prompt")
            else:
                encoded.append(EncodedExample(example, np.array(ids, np.int32), config.max_tokens))
    finally:
        pool.shutdown(cancel_futures=True)
    if not encoded:
        raise ConfigError(f"no question is left: {len(left_out)} are left out ({left_out[0]})")
    return encoded, left_out


def _token_ids(examples: Sequence[Example], tokenizer: Any, config: PromptsConfig) -> list[Sequence[int] | ConfigError]:
    """Return the token ids of each question's prompt, or the error of a prompt that cannot be encoded."""
    prompts: list[Any] = [example.prompt for example in examples]
    # The prompt of an agent's request already has token ids.
    if all(prompt and isinstance(prompt[0], int) for prompt in prompts):
        return prompts
    try:
        return tokenizer.encode_prompts(prompts, **config.encoding)
    except ConfigError as error:  # one prompt of the batch failed: encode one by one to find that prompt
        if len(examples) == 1:
            return [error]
        return [ids for example in examples for ids in _token_ids([example], tokenizer, config)]


def batch_of(rows: Sequence[EncodedExample], group_ids: Sequence[int]) -> PromptBatch:
    """Return a batch of questions that share one prompt width."""
    tokens = np.zeros((len(rows), rows[0].width if rows else 0), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row.tokens)] = row.tokens
    return PromptBatch(
        tokens=tokens,
        length=np.array([len(row.tokens) for row in rows], np.int32),
        group_id=np.array(group_ids, np.int32),
        examples=tuple(row.example for row in rows),
    )


def _digest(rows: Iterable[Any]) -> str:
    """Return a hash of the rows as JSON. Values that JSON cannot store (dates, bytes) are hashed as text."""
    digests = (hashlib.sha256(json.dumps(row, default=str).encode()).digest() for row in rows)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


class PromptStream:
    """Endless passes over the questions. With ``shuffle`` each pass has a new order drawn from the seed.

    The order is a grain pipeline, which returns the item at any position directly. The position is the group's id.

    ``prompts.retire_pass_rate`` retires a question when the ledger's pass rate for this question reaches that value.
    The stream skips retired questions. If all questions are retired, the stream asks every question.

    The versions of a question can form a ladder from easy to hard. In a ladder, each version waits until the next
    easier version is retired. The last version of a ladder is the original question and is never retired.

    Source of the retirement: ScaleRL, arXiv:2510.13786, no positive resampling at 0.9.

    Args:
        ledger: must not contain a question yet.
        held_out: held-out questions. The stream does not ask them, but its state records a hash of them.

    Raises:
        ConfigError: (``check``, ``restore``) the state belongs to other questions, another seed or another order.
    """

    def __init__(
        self,
        encoded: Sequence[EncodedExample],
        config: PromptsConfig,
        ledger: Ledger,
        *,
        seed: int,
        held_out: Any = (),
    ):
        self._encoded = encoded
        self.ledger = ledger
        self._question_ids = [self.ledger.question_id(row.tokens, row.example.hidden) for row in encoded]
        self.ledger.close_data()
        self._easier: list[int | None] = []  # per question, the next easier question that must be retired first
        last_of_ladder: dict[str, int] = {}
        for row, question in zip(encoded, self._question_ids, strict=True):
            ladder = row.example.ladder
            self._easier.append(last_of_ladder.get(ladder) if ladder else None)
            if ladder:
                last_of_ladder[ladder] = question
        self._last = set(last_of_ladder.values())
        order = grain.MapDataset.source(range(len(encoded))).seed(seed)
        self._order = (order.shuffle() if config.shuffle else order).repeat()
        self._position = 0
        self._retire_pass_rate = config.retire_pass_rate
        digest = hashlib.sha256(json.dumps([len(encoded), config.shuffle, seed]).encode())
        for row in encoded:
            digest.update(row.tokens.tobytes() + f"/{row.example.hidden}".encode())
        self._fingerprint = digest.hexdigest()[:16]
        # Only files need these hashes. Other sources are determined by the settings, except for the columns of some
        # reasoning-gym datasets that depend on the order of Python sets.
        self._file_digests: dict[str, str] = {}
        if config.source in FILE_SOURCES:
            questions = [(row.example.prompt, row.example.columns) for row in held_out]
            self._file_digests["answers or other columns"] = _digest(row.example.columns for row in encoded)
            self._file_digests["held-out questions"] = _digest(questions)

    def next_batch(self, num_prompts: int) -> PromptBatch:
        """Return the next ``num_prompts`` questions of the stream. A batch may continue past the end of a pass."""
        retired = self.retired()
        asks_all = len(retired) == len(set(self._question_ids))
        group_ids = []
        while len(group_ids) < num_prompts:
            index = self._index(self._position)
            easier = self._easier[index]
            waits = easier is not None and easier not in retired
            is_retired = self._question_ids[index] in retired
            if asks_all or not (waits or is_retired):
                group_ids.append(self._position)
            self._position += 1
        return batch_of([self.lookup(i) for i in group_ids], group_ids)

    def _index(self, position: int) -> int:
        """Return the index of the question at a position of the stream."""
        index = self._order[position]
        if index is None:  # grain's type allows None, but only for filtered pipelines
            raise RuntimeError(f"the order of questions has no item at position {position}")
        return int(index)

    def lookup(self, group_id: int) -> EncodedExample:
        """Return the question at the position ``group_id`` of the stream."""
        return self._encoded[self._index(group_id)]

    def question_id(self, group_id: int) -> int:
        """Return the ledger's id of the question at the position ``group_id``."""
        return self._question_ids[self._index(group_id)]

    def retired(self) -> set[int]:
        """Return the ids of the questions that are not asked again."""
        if not self._retire_pass_rate:
            return set()
        return self.ledger.passing(self._retire_pass_rate) - self._last

    def state(self) -> dict[str, Any]:
        """Return the state that ``restore`` needs, as plain JSON."""
        return {
            "position": self._position,
            "fingerprint": self._fingerprint,
            "beside": self._file_digests,
        }

    def check(self, state: dict[str, Any], *, allow_changes: bool) -> None:
        """Raise ConfigError if this stream cannot continue from ``state``.

        The fingerprint of the questions must always match. The answers, other columns and held-out questions of a file
        must match unless ``allow_changes`` is set.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                f"the questions have the fingerprint {self._fingerprint}, and those of the checkpoint "
                f"{state['fingerprint']}: the file, the tokenizer, a date in its template, seed or prompts.* has "
                "changed. Set them back, or use another workdir"
            )
        saved = state.get("beside", {})  # checkpoints of earlier versions have no such entry
        changed = [name for name, digest in self._file_digests.items() if saved.get(name, digest) != digest]
        if changed and not allow_changes:
            raise ConfigError(
                f"the {' and the '.join(changed)} differ from the checkpoint's, because their file has changed. Set "
                "them back, or use another workdir, or pass --allow_config_changes"
            )

    def restore(self, state: dict[str, Any]) -> None:
        self.check(state, allow_changes=True)
        self._position = state["position"]
