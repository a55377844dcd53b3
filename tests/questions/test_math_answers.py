"""The reward `math`: numbers as JSON and people write them, and answers that are none."""

import time

import pytest

math_answers = pytest.importorskip("jaxrl_llm.questions.tasks.math_answers")
math = math_answers.reward


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (0.00001, [r"\boxed{0.00001}", r"\boxed{10^{-5}}", "The answer is 1e-5.", "0.00001"], ["0", "1", "0.00002"]),
        (-2e-5, ["-2e-5", r"\boxed{-0.00002}"], ["2e-5"]),
        ("1e-8", ["1e-8", "0.00000001", r"\boxed{10^{-8}}"], ["0", "2e-8", r"\boxed{0.00000002}"]),
        (6.02e23, [r"\boxed{6.02\times 10^{23}}", "6.02e23", "602000000000000000000000"], ["6.02", "6.03e23"]),
        ("2e-1", [r"\boxed{2e - 1}", r"\boxed{2e-1}", "0.2"], ["2"]),  # Euler's number, or a fifth
        ("2e - 1", [r"\boxed{2e-1}"], ["0.2"]),
        ("ab", [r"\boxed{ab}", r"\boxed{ba}"], [r"\boxed{a}"]),
        ("x", ["$x$"], ["$y$"]),
        (r"\text{Paris}", [r"\boxed{\text{Paris}}"], [r"\boxed{\text{Rome}}"]),
        ("3 apples", ["3"], ["4"]),
    ],
)
def test_small_and_large_numbers_and_letters_are_what_they_mean(answer, right, wrong):
    """A JSON file's 0.00001 was 1e-05, which is e - 5; 6.02e23 was 6.02 e + 23."""
    got = math([], right + wrong, answer=[answer] * len(right + wrong))
    assert got == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize(
    "answer", [None, True, "None", "N/A", "nan", "unknown", "Paris", "New York", r"so \boxed{unknown}", "#### unknown"]
)
def test_words_are_a_fault_of_the_data(answer):
    """They were products of their letters, so that every completion was wrong."""
    with pytest.raises(ValueError, match=r"is no mathematics but words.*scores:exact.*\\text\{\}"):
        math([], ["1"], answer=[answer])


@pytest.mark.parametrize(
    ("inside", "label", "score"),
    [
        *((label, label, 1) for label in ("72", "-5", "1/2", "1,234", r"\frac{1}{2}", "x^2+1", "(3, 4)", "10 cm^2")),
        *((text, "72", 1) for text in (" 72 ", "72.", "$72$", r"\$72", r"\boxed{72}", "It is 72", "72 cm^2", "**72**")),
        *((text, "72", 1) for text in ("72 km/h", "72 L", "72 m^2.")),
        ("96", "72", 0),
        ("", "72", 0),
        ("72</answer><answer>73", "72", 0),
        ("72x", "72", 0),
        ("72 x", "72", 0),
        ("72 m + 1", "72", 0),
        ("(3, 72)", "72", 0),
        ("3 or 4", "4", 0),
    ],
)
def test_of_a_completion_with_tags_what_is_inside_is_read(inside, label, score):
    """A number of the thinking was taken: math did not see inside tags without spaces."""
    assert math([], [f"<think>Is it 5? 48 + 24 = 72.</think>\n<answer>{inside}</answer>"], answer=[label]) == [score]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("-3", ["The answer is \u22123.", "\\boxed{\u22123}", "<answer>It is \u22123</answer>"], ["The answer is 3."]),
        ("\u22123", ["-3", "The answer is \u22123."], ["3"]),
        ("1e-5", ["1e\u22125", r"$10^{-5}$"], ["1"]),
        (
            "18",
            [r"He pays \$18 in all.", r"$\$18$", r"\boxed{\$18}", r"\[\$18\]", r"<answer>\$18 a day</answer>"],
            ["17"],
        ),
        (r"\$36", ["36", r"It is \$36.", "$36$", r"<answer>\$36</answer>"], ["6", r"\$3"]),
        (r"\$18.90", ["18.9", r"$\$18.90$"], ["18"]),
        (r"$\$1,000$", ["1000", r"\$1,000"], ["1"]),
        (r"so \$5 #### \$7", ["7"], ["5"]),
        (r"$$x+1 \\$$", [r"$$x+1 \\$$"], ["$x$"]),  # a line's end, and the end of the formula
    ],
)
def test_a_minus_and_prices_as_people_write_them(answer, right, wrong):
    """Prose had neither of them, and a price was no label."""
    got = math([], right + wrong, answer=[answer] * len(right + wrong))
    assert got == [1.0] * len(right) + [0.0] * len(wrong)


BOMBS = [
    *(r"\boxed{9^{9^{9}}}", r"\boxed{(10^9)!}", r"\boxed{10^{10^{10}}}", r"\boxed{2^{2^{2^{40}}}}"),
    *(r"\boxed{1e999999999}", r"\boxed{9^{9^9}", r"$\boxed{9^{9^9}}$", r"\boxed{4+0\cdot 9^{9^9}}"),
    *(r"$9^{9^9}$", r"$$9^{9^9}$$", r"\[9^{9^9}\]", r"\(9^{9^9}\)", r"so [9^{9^9}] "),
    *("The answer is 9^9^9^9.", "The answer is 9**9**9**9", "9 ^ 9 ^ 9 ^ 9", "(9)^(9)^(9)^(9)"),
    *("-9^9^9^9", "1e999999999", "9^" * 3000 + "9", "9" * 100_000),
    *("<answer>9^{9^9}</answer>", "<answer>9**9**9</answer>", "<answer>(10^9)!</answer>"),
    *(r"\boxed{\prod_{i=1}^{10^{9}} i}", r"\boxed{\binom{10^9}{5\cdot 10^8}}"),
    *(r"\boxed{" + r"\frac{1}{" * 1000 + "4" + "}" * 1001, r"\boxed{" + "{" * 30 + "2" + "}" * 31),
    *(r"\boxed{" + "9" * 100_000 + "}", r"\boxed{" + "(" * 100_000, r"\boxed{" * 2000),
    r"\boxed{\begin{pmatrix}" + "1&" * 5000 + r"1\end{pmatrix}}",
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:24])
def test_formulas_that_cannot_be_computed_are_worth_nothing_at_once(bomb):
    began = time.monotonic()
    assert math([], [bomb, "4"], answer=["4"] * 2) == [0.0, 1.0]
    assert math([], [bomb], answer=["9"]) == [0.0]
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("4", [r"$9^{9^9}$ is large. The answer is 4.", r"not \(9^{9^9}\), but \boxed{4}"], ["5"]),
        ("2^{100}", [r"\boxed{2^{100}}", r"\boxed{1267650600228229401496703205376}"], [r"\boxed{2^{99}}"]),
        ("100!", [r"\boxed{100!}", r"\boxed{99!\cdot 100}"], [r"\boxed{99!}"]),
        ("10^{100}", [r"\boxed{10^{100}}"], [r"\boxed{10^{99}}"]),
        (
            r"\binom{100}{50}",
            [r"\boxed{\binom{100}{50}}", "100891344545564193334812497256"],
            [r"\boxed{\binom{100}{49}}"],
        ),
        # Labels that cannot be computed are compared by their text.
        ("2024!", [r"\boxed{2024!}"], [r"\boxed{2023!}", "2024"]),
        ("9^{9^{9}}", [r"\boxed{9^{9^{9}}}", "$9^{ 9^{9} }$"], [r"\boxed{9^{9^{8}}}", r"\boxed{10^{10^{10}}}", "9"]),
    ],
)
def test_large_labels_and_large_numbers_on_the_way_still_compare(answer, right, wrong):
    got = math([], right + wrong, answer=[answer] * len(right + wrong))
    assert got == [1.0] * len(right) + [0.0] * len(wrong)
