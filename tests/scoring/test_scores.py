"""Rewards that suit many tasks, computed by hand."""

import pytest
from support.refusal import refused

from jaxrl_llm.scoring import scores


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>3</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("a\nb</think>\n<answer>3</answer>\n", 1.0),  # the template has opened the thought
        ("</think><answer>3</answer>", 1.0),
        ("a</think>b</think><answer>3</answer>", 0.0),
        ("<answer>3</answer>", 0.0),
        ("a</think> so <answer>3</answer>", 0.0),
        ("well, <think>a</think><answer>3</answer>", 0.0),
        ("<think>a</think><answer>3</answer> there", 0.0),
        ("<think>a</think><answer>3</answer><answer>4</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>3</answer>", 0.0),
        ("<answer>3</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
    ],
)
def test_format(text, expected):
    assert scores.format(["p"], [text]) == [expected]


def test_a_label_without_anything_after_its_mark_is_no_score():
    with refused("answer", "so\n#### ", raises=ValueError):
        scores.short_steps([], [""], ["so\n#### "])


@pytest.mark.parametrize("answer", [None, [], ["", None], "", [" "]])
def test_an_answer_that_is_not_there_is_no_score(answer):
    """`null` must not be compared as the word "None", and an empty completion must not equal an empty answer."""
    for score in (scores.exact, scores.f1, scores.short_steps):
        with refused("answer", answer, raises=ValueError):
            score([], [""], [answer])


def test_what_is_empty_among_accepted_answers_is_left_out():
    assert scores.exact([], ["4", "", "None"], [["4", None, " "]] * 3) == [1, 0, 0]


def test_a_worked_label_is_what_follows_its_mark():
    assert scores.exact([], ["72", "48"], ["48 + 24 = 72\n#### 72"] * 2) == [1, 0]
    assert scores.f1([], ["72", "48"], ["48 + 24 = 72\n#### 72"] * 2) == [1, 0]


def test_exact_reads_words_of_any_script_and_numbers_of_any_notation():
    said = ["\u201cParis\u201d", "Paris\u2026", r"\boxed{\text{Paris}.}", "C", "\u5317\u4eac\u3002", r"\boxed{12\,000}"]
    right = ["Paris", "Paris", "Paris", "C++", "\u5317\u4eac", "12,000"]
    assert scores.exact([], said, right) == [1, 1, 1, 0, 1, 1]


def test_keywords_are_found_in_writing_without_spaces():
    text = "\u6211\u5728\u5317\u4eac\u5de5\u4f5c"  # "I work in Beijing"
    assert scores.keywords([], [text], [["\u5317\u4eac", "\u4e0a\u6d77"]]) == [0.5]
    assert scores.keywords([], ["It\u2019s CAFE\u0301 time"], [["it's", "caf\u00e9", "cafe"]]) == pytest.approx([2 / 3])


def test_exact_and_partial_credit():
    texts = ["The Eiffel Tower.", "eiffel tower in Paris", "tower", "no", ""]
    answers = ["Eiffel tower"] * 5
    assert scores.exact([], texts, answers) == [1, 0, 0, 0, 0]
    # Words in common over (4 + 2) / 2, and over (1 + 2) / 2.
    assert scores.f1([], texts, answers) == pytest.approx([1, 4 / 6, 2 / 3, 0, 0])
    assert scores.exact([], ["7"], [["six", "7"]]) == scores.f1([], ["7"], [["six", "7"]]) == [1]


def test_an_answer_of_one_article_is_an_answer():
    """The first of several choices is A, so an article can be an answer. Saying nothing is not a choice."""
    texts = ["A", "a.", "", "B", "the"]
    assert scores.exact([], texts, ["A"] * 5) == [1, 1, 0, 0, 0] == scores.f1([], texts, ["A"] * 5)
    assert scores.exact([], ["?", ""], ["?"] * 2) == [1, 0]


def test_numbers_are_right_with_their_sign_and_decimals():
    texts = ["3", "-3", "It is -3.0", "3.5", "35", "3.50"]
    assert scores.exact([], texts, ["3", "3", "it is -3", "3 5", "3.5", "3.5"]) == [1, 0, 1, 0, 0, 1]


def test_key_steps_tell_two_wrong_answers_apart():
    steps = ["x = 4", "the area is 12"]
    texts = ["x = 4\nso 13", "no idea\n13", "x = 4, area is 12\n12", "12"]
    got = scores.key_steps([], texts, ["12"] * 4, [steps] * 4)
    assert got == pytest.approx([0.05, 0, 1.1, 1])


@pytest.mark.parametrize(
    ("text", "steps", "share"),
    [
        ("x = -3", ["x = 3"], 0),
        ("x = 3", ["x = -3"], 0),
        ("so x=-3.0", ["x = -3"], 1),
        ("3.5 apples", ["3"], 0),
        ("35", ["3.5"], 0),
        ("1,000 m", ["1000"], 1),
        ("b = 2a", [["2 a", "b = 2a"], ["c", "d"]], 1 / 2),
        ("b = 2a", [["a = b / 2", "b = 2 a"], "b"], 1 / 2),
        ("so 7 it is", [["seven", ["7", "07"]], 7, []], 2 / 3),
        ("so 7 it is", [], 0),
    ],
)
def test_a_key_step_is_there_in_any_of_its_forms_and_with_its_numbers(text, steps, share):
    assert scores.key_steps([], [f"{text}\n0"], ["1"], [steps]) == [pytest.approx(0.1 * share)]


def test_keywords_are_counted_as_whole_words():
    wanted = [["risk", "cash flow", "margin"]] * 3
    texts = ["The RISK, and the margin.", "risks of cash and flow", "Cash flow: margin at risk"]
    assert scores.keywords([], texts, wanted) == pytest.approx([2 / 3, 0, 1])
    assert scores.keywords([], ["risk"], [[]]) == [0]


@pytest.mark.parametrize(
    ("text", "wanted", "score"),
    [
        ("a cat", "a", 1),
        ("cat", "a", 0),
        ("", "The", 0),
        ("In the end", "The", 1),
        ("other", "the", 0),
        ("i++;", "++", 1),
        ("i--;", "++", 0),
        ("", "", 0),
        ("cat", " ", 0),
        ("A cat, the dog", "the cat", 1),
    ],
)
def test_a_keyword_that_is_an_article_or_a_sign_is_looked_for(text, wanted, score):
    assert scores.keywords([], [text], [[wanted]]) == [score]


def test_the_majority_is_the_label_and_no_label_is_read():
    texts = ["so 4", r"\boxed{4.0}", "<answer>5</answer>", "5", "no", "4"]
    assert scores.majority([], texts, answer=["5"] * 6) == [1, 1, 0, 0, 0, 1]
    assert scores.majority([], ["5", "4", "", ""]) == [1, 0, 0, 0]  # as frequent: the first
    assert scores.majority([], ["", " "]) == [0, 0]


def test_fewer_steps_score_more_for_right_answers_and_wrong_ones_score_nothing():
    """Steps are paragraphs. The score is (1 + 20 / (20 + k)) / 2."""
    texts = ["a\n\nb\nc\n \n\nit is 4", "first\nso\n4", "3", "x\n\n" * 1000 + "4", "\r\n\r\n4\r\n", "a\r\n\r\n4"]
    expected = [(1 + 20 / 23) / 2, (1 + 20 / 21) / 2, 0, (1 + 20 / 1021) / 2, (1 + 20 / 21) / 2, (1 + 20 / 22) / 2]
    assert scores.short_steps([], texts, ["4"] * 6) == pytest.approx(expected)
    assert min(x for x in expected if x) > 0.5


def test_a_long_paragraph_is_as_many_steps_as_its_length_allows():
    """Once, 1,001 lines without blank lines were one step: 0.976, more than three short paragraphs."""
    lines = "x is 1\n" * 1000 + "4"
    paragraphs = "First, x.\n\nThen y.\n\nSo 4"
    words = "so " * 3000 + "4"
    long, short, one_line = scores.short_steps([], [lines, paragraphs, words], ["4"] * 3)
    assert long == pytest.approx((1 + 20 / (20 + 36)) / 2)  # 7,002 characters by 200
    assert short == pytest.approx((1 + 20 / 23) / 2)
    assert one_line == pytest.approx((1 + 20 / (20 + 46)) / 2)
