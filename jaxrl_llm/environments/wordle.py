"""Wordle: a hidden word is found by guesses, as an environment (``environments.factory``) with one tool.

Questions have a column ``word``; the prompt tells the rules. What was learned counts turn by turn: the reward is 1.0
for the word, and before that 0.1 for each of its letters that stands where it should in the best guess, of more than
nine letters so much less that all are worth 0.9.

Owns: guesses and what is said to them. Does not know: dictionaries; any letters are a word.
"""

from __future__ import annotations

import collections
import unicodedata
from typing import Any


def _letters(word: str) -> str:
    """Return a word in lower case, with one character for a letter and its accent."""
    return unicodedata.normalize("NFC", word).lower()


class Wordle:
    """A hidden word."""

    def reset(self, word: str, **columns: Any) -> None:
        letters = _letters(word)
        if not letters.isalpha():
            raise ValueError(f"column word={word!r} must be letters, one at least")
        self.word = letters
        self.best = 0
        self.guesses = 0

    def guess(self, word: str) -> str:
        """Guesses the word, and says of each letter: G it stands here, Y it stands elsewhere, - it is not in it.

        Args:
            word: As many letters as the hidden word has.
        """
        said = _letters(str(word).strip())
        if len(said) != len(self.word) or not said.isalpha():
            raise ValueError(f"a guess must have {len(self.word)} letters")
        self.guesses += 1
        marks = ["G" if x == y else "-" for x, y in zip(said, self.word, strict=True)]
        self.best = max(self.best, marks.count("G"))
        left = collections.Counter(y for y, mark in zip(self.word, marks, strict=True) if mark == "-")
        for i, letter in enumerate(said):
            if marks[i] == "-" and left[letter] > 0:
                marks[i], left[letter] = "Y", left[letter] - 1
        return f"{said.upper()}\n{''.join(marks)}{' You have found it.' if said == self.word else ''}"

    def get_reward(self) -> float:
        """1.0 for the word; else 0.1, or less, for each letter in its place, in the best guess so far."""
        num = len(self.word)
        return 1.0 if self.best == num else min(0.1, 0.9 / num) * self.best
