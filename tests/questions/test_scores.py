"""Rewards that suit many tasks, by hand."""

import pytest

from jaxrl_llm.questions.tasks import scores


@pytest.mark.parametrize(
    ("text", "answer", "number"),
    [
        ("I think.\n<answer>Paris</answer> <answer> Rome </answer>", "Rome", "Rome"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}", r"\frac{1}{2}"),
        ("first\nThe answer is 1,000.50.\n\n", "The answer is 1,000.50.", "1000.5"),
        ("-3", "-3", "-3"),
        ("it is 3/4", "it is 3/4", "3/4"),
        (r"\boxed{7", r"\boxed{7", "7"),
        ("", "", ""),
        ("100", "100", "100"),
        ("It has 3 of 4", "It has 3 of 4", "4"),
        (r"\boxed{\$1,250.0}", r"\$1,250.0", r"\$1,250.0"),
        ("<answer>$12.50</answer>", "$12.50", "12.5"),
    ],
)
def test_what_the_answer_of_a_completion_is(text, answer, number):
    assert (scores.answer_of(text), scores.number_of(text)) == (answer, number)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>3</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
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


def test_exact_and_partial_credit():
    texts = ["The Eiffel Tower.", "eiffel tower in Paris", "tower", "no", ""]
    answers = ["Eiffel tower"] * 5
    assert scores.exact([], texts, answers) == [1, 0, 0, 0, 0]
    # Words in common over (4 + 2) / 2, and over (1 + 2) / 2.
    assert scores.f1([], texts, answers) == pytest.approx([1, 4 / 6, 2 / 3, 0, 0])
    assert scores.exact([], ["7"], [["six", "7"]]) == scores.f1([], ["7"], [["six", "7"]]) == [1]


def test_key_steps_tell_two_wrong_answers_apart():
    steps = ["x = 4", "the area is 12"]
    texts = ["x = 4\nso 13", "no idea\n13", "x = 4, area is 12\n12", "12"]
    got = scores.key_steps([], texts, ["12"] * 4, [steps] * 4)
    assert got == pytest.approx([0.05, 0, 1.1, 1])


def test_keywords_are_counted_as_whole_words():
    wanted = [["risk", "cash flow", "margin"]] * 3
    texts = ["The RISK, and the margin.", "risks of cash and flow", "Cash flow: margin at risk"]
    assert scores.keywords([], texts, wanted) == pytest.approx([2 / 3, 0, 1])
    assert scores.keywords([], ["risk"], [[]]) == [0]


def test_the_majority_is_the_label_and_no_label_is_read():
    texts = ["so 4", r"\boxed{4.0}", "<answer>5</answer>", "5", "no", "4"]
    assert scores.majority([], texts, answer=["5"] * 6) == [1, 1, 0, 0, 0, 1]
    assert scores.majority([], ["5", "4", "", ""]) == [1, 0, 0, 0]  # as frequent: the first
    assert scores.majority([], ["", " "]) == [0, 0]


def test_the_fewer_steps_the_better_where_the_answer_is_right():
    texts = ["a\n\nb\nit is 4", "4", "3", "x\n" * 30 + "4"]
    assert scores.short_steps([], texts, ["4"] * 4) == pytest.approx([17 / 20, 19 / 20, 0, 0])
