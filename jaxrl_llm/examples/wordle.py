"""Wordle, as an environment (``environments.factory``) with one tool: find a hidden word by guesses.

    python -m jaxrl_llm.train --config=recipe:grpo --workdir=runs/wordle --config.model.path=MODEL \\
        --config.prompts.source=jsonl --config.prompts.name=words.jsonl --config.prompts.max_tokens=512 \\
        --config.sampling.max_completion_tokens=1024 --config.environments.max_turns=7 \\
        --config.environments.factory=jaxrl_llm.examples.wordle:Wordle \\
        --config.rewards.functions='("environment",)'

This example shows an environment that keeps state between turns and gives its own reward (``get_reward``).

Questions have a column ``word``. The prompt contains the rules. The reward is 1.0 for the hidden word. Without the
word, each letter in its right place in the best guess scores 0.1. For words of more than nine letters each letter
scores 0.9 divided by the number of letters.

Owns: guesses and the replies to them. Does not know: dictionaries, because any letters count as a word.
"""

from __future__ import annotations

import collections
import unicodedata
from typing import Any


def _letters(word: str) -> str:
    """Return a word in lower case, with one character for each letter with its accent."""
    return unicodedata.normalize("NFC", word).lower()


class Wordle:
    """Game with one hidden word."""

    def reset(self, word: str, **columns: Any) -> None:
        """Begin a game with the hidden word of the question."""
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
        guessed = _letters(str(word).strip())
        if len(guessed) != len(self.word) or not guessed.isalpha():
            raise ValueError(f"a guess must have {len(self.word)} letters")
        marks = _marks(guessed, self.word)
        self.guesses += 1
        self.best = max(self.best, marks.count("G"))
        reply = f"{guessed.upper()}\n{marks}"
        if guessed == self.word:
            reply += " You have found it."
        return reply

    def get_reward(self) -> float:
        """Return 1.0 for the word, or else at most 0.1 for each letter in its right place in the best guess so far."""
        num_letters = len(self.word)
        if self.best == num_letters:
            return 1.0
        letter_reward = min(0.1, 0.9 / num_letters)
        return letter_reward * self.best


def _marks(guessed: str, hidden: str) -> str:
    """Return a mark for each guessed letter. A hidden letter matches at most one guessed letter."""
    marks = ["-"] * len(hidden)
    unmatched = collections.Counter(hidden)
    for i, letter in enumerate(guessed):
        if letter == hidden[i]:
            marks[i] = "G"
            unmatched[letter] -= 1
    for i, letter in enumerate(guessed):
        if marks[i] == "-" and unmatched[letter] > 0:
            marks[i] = "Y"
            unmatched[letter] -= 1
    return "".join(marks)
