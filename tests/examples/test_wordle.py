"""Wordle: marks computed by hand, also for letters that occur twice."""

import pytest
from support.refusal import refused

from jaxrl_llm.examples.wordle import Wordle


@pytest.mark.parametrize(
    ("word", "guess", "marks"),
    [
        ("crane", "crane", "GGGGG You have found it."),
        ("crane", "CRATE", "GGG-G"),
        ("crane", "nacre", "YYYYG"),
        ("abbey", "bobby", "Y-G-G"),  # the first b is the one that is left, the third of the guess has none
        ("level", "eleve", "YYYY-"),
        ("sheep", "eerie", "YY---"),  # two e, and three of them guessed
    ],
)
def test_marks(word, guess, marks):
    game = Wordle()
    game.reset(word=word, other=1)
    assert game.guess(guess) == f"{guess.upper()}\n{marks}"


def test_it_is_worth_its_best_guess():
    game = Wordle()
    game.reset("crane")
    assert game.get_reward() == 0.0
    for guess, worth in (("crone", 0.4), ("abide", 0.4), ("crane", 1.0)):
        game.guess(guess)
        assert game.get_reward() == pytest.approx(worth)
    for wrong in ("cran", "cr4ne", ""):
        with pytest.raises(ValueError, match="5 letters"):
            game.guess(wrong)
    assert game.guesses == 3


def test_no_guess_but_the_word_is_worth_as_much():
    """Eleven right letters of twelve are worth less than the word, and an empty word is refused."""
    game = Wordle()
    game.reset("intermediate")
    game.guess("intermediatx")
    assert game.get_reward() == pytest.approx(0.9 * 11 / 12)
    for word in ("", "ab c"):
        with refused("word", word, raises=ValueError):
            game.reset(word)


def test_a_letter_with_its_accent_is_one_letter_in_any_encoding():
    game = Wordle()
    game.reset("caf\u00e9")
    assert game.guess("CAFE\u0301").endswith("You have found it.")
    game.reset("cafe\u0301")
    assert game.guess("caf\u00e9").startswith("CAF\u00c9\nGGGG")
