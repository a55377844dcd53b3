"""Ledger: the identity of each question and the numbers that the run keeps for it.

The prompt's token ids and the environment's hidden text identify a question. Its ``question_id`` is the same on every
visit, for every copy in the data, and for answers that other programs give to it. A ``group_id`` is one visit.

Owns: the identity of questions, the counts of answers, the numbers that methods keep per question, their checkpoint
format. Does not know: which questions are asked, the meaning of the numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Numbers = dict[int, tuple[float, ...]]  # question id -> numbers of one method


class Ledger:
    """Per-question records of a run. Ids count from 0 in the order in which the ledger first sees the questions."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._num_data = 0  # number of questions in the data; they have the first ids
        self._answers: dict[int, tuple[int, int]] = {}  # passed, scored
        self._numbers: dict[str, Numbers] = {}

    def question_id(self, tokens: Any, hidden: str = "") -> int:
        """Return the id of a question and register the question if it is new.

        Args:
            tokens: the prompt's token ids, [n] integers without padding.
            hidden: text that only the environment knows (``Example.hidden``).
        """
        token_bytes = np.asarray(tokens, np.int32).tobytes()
        content = token_bytes + hidden.encode()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        next_id = len(self._ids)
        return self._ids.setdefault(digest, next_id)

    def close_data(self) -> None:
        """Mark the end of the data's questions. Questions that are registered later are saved in checkpoints."""
        self._num_data = len(self._ids)

    def observe(self, questions: Sequence[int], passed: np.ndarray, scored: np.ndarray) -> None:
        """Count answers, [B] bool each. The rows of one question's group must be adjacent."""
        num_questions = len(questions)
        is_passed = (passed & scored).reshape(num_questions, -1)
        is_scored = scored.reshape(num_questions, -1)
        new_passed = is_passed.sum(axis=1).tolist()
        new_scored = is_scored.sum(axis=1).tolist()
        for i, question in enumerate(questions):
            num_passed, num_scored = self.answers(question)
            num_passed += new_passed[i]
            num_scored += new_scored[i]
            self._answers[question] = (num_passed, num_scored)

    def answers(self, question: int) -> tuple[int, int]:
        """Return ``(passed, scored)``: the number of answers that passed and the number that have a score."""
        return self._answers.get(question, (0, 0))

    def passing(self, rate: float) -> set[int]:
        """Return the questions whose pass rate so far is at least ``rate``."""
        questions = set()
        for question, (passed, scored) in self._answers.items():
            if scored and passed >= rate * scored:
                questions.add(question)
        return questions

    def numbers(self, name: str) -> Numbers:
        """Return the mutable table (question id -> numbers) that a method keeps under ``name``."""
        return self._numbers.setdefault(name, {})

    def state(self) -> dict[str, Any]:
        """Return the state that ``restore`` needs, as plain JSON."""
        digests = list(self._ids)
        other_digests = digests[self._num_data :]
        return {
            "others": [digest.hex() for digest in other_digests],
            "answers": _rows(self._answers),
            "numbers": {name: _rows(table) for name, table in self._numbers.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load a saved state. The ledger must already contain the same data's questions."""
        for text in state["others"]:
            digest = bytes.fromhex(text)
            next_id = len(self._ids)
            self._ids.setdefault(digest, next_id)
        self._answers = {}
        for question, passed, scored in state["answers"]:
            self._answers[question] = (passed, scored)
        for name, rows in state["numbers"].items():
            table = self.numbers(name)
            for question, *numbers in rows:
                table[question] = tuple(numbers)


def _rows(table: Mapping[int, tuple[float, ...]]) -> list[list[float]]:
    """Return a table as rows [question id, numbers...], for JSON."""
    return [[question, *numbers] for question, numbers in table.items()]
