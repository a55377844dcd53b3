"""Which tokens lie in spans of a text, and how a reward function says which spans it masks."""

import numpy as np
import pytest

from jaxrl_llm.scoring.text_spans import tokens_in, unpacked

PIECES = ["def", " f", "(x", "):\n", "    ", "return", " 1\n", "</s>", "\n", "é", ""]
TEXT = {i: piece for i, piece in enumerate(PIECES)} | {PIECES.index("</s>"): ""}


def decode(ids):
    return "".join(TEXT[i] for i in ids)


def test_tokens_whose_characters_all_lie_within_are_in():
    ids = [0, 1, 2, 3, 4, 5, 6, 7]  # "def f(x):\n    return 1\n", end
    text = decode(ids)
    line = text.index("    return")
    assert tokens_in(decode, ids, [[line, len(text)]]) == [4, 5, 6]
    assert tokens_in(decode, ids, [[line - 1, len(text)]]) == [4, 5, 6]  # "):\n" has characters beside it
    assert tokens_in(decode, ids, [[0, 3], [3, 5]]) == [0, 1]
    assert tokens_in(decode, ids, [[0, 2], [2, 4]]) == [0]  # together they hold "def"
    assert tokens_in(decode, ids, [[-5, 10**9]]) == [0, 1, 2, 3, 4, 5, 6]
    assert tokens_in(decode, ids, [[5, 5], [8, 2]]) == tokens_in(decode, [], [[0, 9]]) == []


def test_the_bytes_of_one_character_are_in_with_the_last_of_them():
    """Each shows a replacement character until it is whole: the text does not grow by the last byte."""
    decode = lambda ids: bytes(ids).decode(errors="replace")
    ids = list("aé1".encode())
    assert tokens_in(decode, ids, [[0, 3]]) == [0, 1, 3]
    assert tokens_in(decode, ids, [[1, 2]]) == [1]


def test_bytes_that_a_decoder_shows_one_by_one_are_in_with_the_first_of_them():
    """As byte fallback of SentencePiece does: four replacement characters, then the one that they are."""
    shown = {i: "a" + "�" * (i - 1) for i in range(1, 5)} | {0: "", 5: "a😀", 6: "a😀b", 7: "a😀bc"}
    decode = lambda ids: shown[len(ids)]
    ids = list(range(7))
    assert tokens_in(decode, ids, [[2, 4]]) == [5, 6]  # "bc"
    assert tokens_in(decode, ids, [[1, 2]]) == [1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"reward": 0.5, "masked": [[1, 4], (6, 9)]}, (0.5, [[1, 4], [6, 9]])),
        ({"reward": 0.5, "masked": np.array([[1, 4]])}, (0.5, [[1, 4]])),
        ({"reward": [0.5, 1.0], "masked": []}, ([0.5, 1.0], [])),
        (0.25, (0.25, [])),
        (None, (None, [])),
    ],
)
def test_a_score_may_come_with_spans(value, expected):
    assert unpacked(value) == expected


@pytest.mark.parametrize(
    "value",
    [{"reward": 1.0}, {"reward": 1.0, "masked": [[1]]}, {"reward": 1.0, "masked": 3}, {"score": 1.0, "masked": []}],
)
def test_what_has_another_form_is_no_score(value):
    assert unpacked(value) == (value, [])
