"""The ledger: which question is which, and what is remembered of each.

A question is its prompt's token ids, and what an environment alone knows of it: its ``question_id`` is the same on
every visit, in every copy of it in the data, and for the answers of others to it. A ``group_id`` is one visit.

Owns: identity of questions, counts of answers, numbers that methods keep by question, their form in a checkpoint. Does
not know: which questions are asked, what the numbers mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np


class Ledger:
    """What a run knows of questions. Ids count from 0 in the order in which questions are first met."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._of_data = 0
        self._answers: dict[int, tuple[int, int]] = {}  # passed, scored
        self._numbers: dict[str, dict[int, tuple[float, ...]]] = {}

    def question_id(self, tokens: Any, hidden: str = "") -> int:
        """Of a prompt's token ids, [n] integers without padding, and of what an environment knows besides."""
        digest = hashlib.blake2b(np.asarray(tokens, np.int32).tobytes() + hidden.encode(), digest_size=16).digest()
        return self._ids.setdefault(digest, len(self._ids))

    def close_data(self) -> None:
        """All questions of the data have been met: those that come now are others' and go into checkpoints."""
        self._of_data = len(self._ids)

    def observe(self, questions: Sequence[int], passed: np.ndarray, scored: np.ndarray) -> None:
        """Count answers, [B] bool each; the rows of a question's group are neighbours."""
        counts = (np.sum(x.reshape(len(questions), -1), axis=1).tolist() for x in (passed & scored, scored))
        for question, num_passed, num_scored in zip(questions, *counts, strict=True):
            passed_before, scored_before = self.answers(question)
            self._answers[question] = passed_before + num_passed, scored_before + num_scored

    def answers(self, question: int) -> tuple[int, int]:
        """How many have passed, and how many have a score."""
        return self._answers.get(question, (0, 0))

    def passing(self, rate: float) -> set[int]:
        """Questions whose answers so far have passed at this rate or a higher one."""
        return {q for q, (passed, scored) in self._answers.items() if scored and passed >= rate * scored}

    def numbers(self, name: str) -> dict[int, tuple[float, ...]]:
        """By question, the few numbers that a method keeps under this name: to be read and written."""
        return self._numbers.setdefault(name, {})

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on from here; plain JSON."""
        return {
            "others": [digest.hex() for digest in list(self._ids)[self._of_data :]],
            "answers": [[question, *counts] for question, counts in self._answers.items()],
            "numbers": {name: [[q, *few] for q, few in numbers.items()] for name, numbers in self._numbers.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Into a ledger that has met the same data."""
        for digest in state["others"]:
            self._ids.setdefault(bytes.fromhex(digest), len(self._ids))
        self._answers = {question: tuple(counts) for question, *counts in state["answers"]}
        for name, numbers in state["numbers"].items():
            self.numbers(name).update((question, tuple(few)) for question, *few in numbers)
