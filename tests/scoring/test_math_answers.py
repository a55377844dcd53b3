"""The reward `math`: numbers as JSON and people write them, and answers that cannot be read."""

import time

import pytest
from support.refusal import refused

math_answers = pytest.importorskip("jaxrl_llm.scoring.math_answers")
math = math_answers.reward


# Rows of answer, right completions and wrong completions.
TABLES = {
    # JSON writes 0.00001 as 1e-05, which is not e - 5; a letter is a name and not text.
    "number": [
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
    # A minus sign and a price as people write them, in prose and in labels.
    "price": [
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
    # Large labels, and large numbers in a completion.
    "large": [
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
}
CASES = [pytest.param(*row, id=f"{kind}-{row[0]}") for kind, table in TABLES.items() for row in table]


@pytest.mark.parametrize(("answer", "right", "wrong"), CASES)
def test_right_completions_score_1_and_wrong_ones_0(answer, right, wrong):
    got = math([], right + wrong, answer=[answer] * len(right + wrong))
    assert got == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize(
    "answer", [None, True, "None", "N/A", "nan", "unknown", "Paris", "New York", r"so \boxed{unknown}", "#### unknown"]
)
def test_words_are_a_fault_of_the_data(answer):
    """A word would be read as a product of its letters, and every completion would be wrong."""
    with refused("answer", answer, "scores:exact", r"\text{}", raises=ValueError):
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
    """The text before the tags is thinking, and its numbers do not count."""
    assert math([], [f"<think>Is it 5? 48 + 24 = 72.</think>\n<answer>{inside}</answer>"], answer=[label]) == [score]


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


# Completions that correct a first box 4 by a second box 5.
TWO_BOXES = (
    r"I first got \boxed{4}, but the correct one is \boxed{5}.",
    r"Trying \boxed{4}. Actually, \boxed{5}",
    "I first got \\boxed{4}.\n\nWait: 2+3 = 5.\n\nSo the answer is \\boxed{5}",
    r"$\boxed{4}$, no: $\boxed{5}$",
)
# Answer of the column, completion, reward: decided by hand.
VERDICTS = [
    ("5", r"\boxed{5.}", 1),
    ("12000", r"\boxed{12\,000}", 1),
    ("5", r"\fbox{5}", 1),
    ("-5", "It is \\boxed{\u20135}", 1),
    ("1/2", "\\boxed{\u00bd}", 1),
    ("5", "\\boxed{\uff15}", 1),
    ("5", r"\boxed{\color{red}5}", 1),
    ("10_2", r"\boxed{10_{3}}", 0),
    ("10_{3}", r"\boxed{10_3}", 1),
    ("10", r"\boxed{10_{2}}", 0),
    ("10_2", r"\boxed{10}", 0),
    ("2516_8", r"\boxed{2516_{8}}", 1),
    ("2516_8", r"\boxed{2516_{\text{eight}}}", 1),
    ("5", r"\boxed{}", 0),
    ("5", r"5 \boxed{}", 0),
    ("5", "<answer></answer>5", 0),
    ("5", "5 <answer> </answer>", 0),
    ("(1,2)", r"\boxed{(1, 2)}", 1),
    ("(1,2)", r"\boxed{\{1,2\}}", 0),
    ("(1,2)", r"\boxed{[1,2]}", 0),
    ("(1,2)", r"\boxed{(2,1)}", 0),
    (r"\{1,2\}", r"\boxed{\{2, 1\}}", 1),
    ("1,2", r"\boxed{2, 1}", 1),
    ("1,2", r"\boxed{1}", 0),
    ("1,2", r"\boxed{1 \text{ and } 2}", 1),
    ("[0,1)", r"\boxed{\left[0,1\right)}", 1),
    ("[0,1)", r"\boxed{(0,1)}", 0),
    ("(10^{-31}, 2)", r"\boxed{(10^{-19}, 2)}", 0),
    ("(10^{-31}, 2)", r"\boxed{(10^{-31}, 2)}", 1),
    (r"\{10^{-31}\}", r"\boxed{\{10^{-19}\}}", 0),
    ("10^{-31}x", r"\boxed{10^{-19}x}", 0),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\4&3\end{pmatrix}}", 0),
    (r"\begin{pmatrix}10^{-31}\\1\end{pmatrix}", r"\boxed{\begin{pmatrix}10^{-19}\\1\end{pmatrix}}", 0),
    (r"\{(10^{-31}, 2)\}", r"\boxed{\{(10^{-19}, 2)\}}", 0),
    (r"\{(10^{-31}, 2)\}", r"\boxed{\{(10^{-31}, 2)\}}", 1),
    (r"(10^{-31}, 10^{-19}, 3)", r"\boxed{(10^{-19}, 10^{-31}, 3)}", 0),
    (r"x+10^{-31}", r"\boxed{x+10^{-19}}", 0),
    (r"x+10^{-31}", r"\boxed{10^{-31}+x}", 1),
    (r"25_{10}", r"\boxed{25}", 1),
    ("x_1", r"\boxed{x_2}", 0),
    ("x_1+1", r"\boxed{1+x_1}", 1),
    ("5 km", r"\boxed{5\text{ km}}", 1),
    ("5", r"\boxed{5\text{ km}}", 1),
    ("5 km", r"\boxed{5\text{ m}}", 0),
    ("90", r"\boxed{90^\circ}", 1),
    (r"90^\circ", r"\boxed{90}", 1),
    ("50%", r"\boxed{50\%}", 1),
    (r"50\%", r"\boxed{50}", 1),
    (r"50\%", r"\boxed{0.5}", 1),
    ("0.5", r"\boxed{50\%}", 1),
    ("5", r"\boxed{50\%}", 0),
    (r"\sqrt{2}", r"\boxed{1.41421356}", 1),
    (r"\sqrt{2}", r"\boxed{1.41}", 0),
    (r"\sqrt{2}", r"\boxed{-\sqrt{2}}", 0),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    (r"\pi", r"\boxed{3.14}", 0),
    (r"\pi", r"\boxed{3.141593}", 1),
    ("1/3", r"\boxed{0.333333}", 1),
    ("1/3", r"\boxed{0.33}", 0),
    ("1/3", r"\boxed{0.333...}", 0),
    ("1000000", r"\boxed{1000001}", 0),
    ("12345678901234567890", r"\boxed{12345678901234567891}", 0),
    ("2^{100}", r"\boxed{1267650600228229401496703205377}", 0),
    ("2^{100}", r"\boxed{1267650600228229401496703205376}", 1),
    ("x=5", r"\boxed{5}", 1),
    ("5", r"\boxed{x=5}", 1),
    ("y=2x+1", r"\boxed{y=2x+1}", 1),
    ("y=2x+1", r"\boxed{2x+1}", 1),
    ("x>5", r"\boxed{x<5}", 0),
    ("x>5", r"\boxed{x>5}", 1),
    (r"\text{Paris}", r"\boxed{\text{paris}}", 1),
    (r"\text{(B)}", r"\boxed{B}", 1),
    (r"\text{B}", r"\boxed{\text{(B)}}", 1),
    (r"\text{Paris}", r"\boxed{Paris}", 1),
    (r"\text{A}", r"\boxed{\text{B}}", 0),
    (r"\infty", r"\boxed{-\infty}", 0),
    (r"\infty", r"\boxed{\infty}", 1),
    ("i", r"\boxed{-i}", 0),
    ("3+4i", r"\boxed{3+4i}", 1),
    ("3+4i", r"\boxed{3-4i}", 0),
    ("7", "The answer is - 7", 0),
    ("-7", "The answer is - 7", 1),
    ("-7", "The answer is \u2013 7.", 1),
    ("-7", r"\boxed{- 7}", 1),
    ("7", r"<think>\boxed{7}</think> I do not know", 0),
    ("7", r"<think>\boxed{6}</think>\boxed{7}", 1),
    ("7", r"\boxed{7}, in code: `\boxed{8}`", 1),
    ("5", r"\boxed{5\text{ or }6}", 0),
    ("1.5", r"\boxed{1\frac{1}{2}}", 1),
    ("1.5", "\\boxed{1\u00bd}", 1),
    ("1234.5", r"\boxed{1.234,5}", 1),
    ("1.5", r"\boxed{1,5}", 0),
    ("x^2+1", "\\boxed{x\u00b2+1}", 1),
    ("x_1", "\\boxed{x\u2081}", 1),
    ("\u0663", r"\boxed{3}", 1),
    ("3", "\\boxed{\u0663}", 1),
    ("100", r"\boxed{1e2}", 1),
    ("5", r"\boxed{5!}", 0),
    ("120", r"\boxed{5!}", 1),
    ("0", r"\boxed{10^{-20}}", 0),
    ("0", r"\boxed{\frac{1}{2^{98}}}", 0),
    ("0", r"\boxed{1e-30}", 0),
    ("-1e-20", r"\boxed{1e-20}", 0),
    (r"\sin(10^{-20})", r"\boxed{0}", 0),
    ("72", "72</answer>", 1),
    ("7", "<answer>The answer is $7$.</answer>", 1),
    ("7", "<answer>$3$ or $7$</answer>", 0),
    ("7", r"\boxed{3}\boxed{7}", 1),
    ("3", r"\boxed{3}\boxed{7}", 0),
    ("3,7", r"\boxed{3}, \boxed{7}", 0),
    ("5", "#### 5", 1),
    ("5", "#### 5\nQuestion: 3 + 4 =", 1),
    (r"\frac{1}{2}", r"\boxed{\frac12}", 1),
    (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}", 1),
    ("1/2", "\\boxed{1\u20442}", 1),
    (r"\frac{\pi}{2}", r"\boxed{\pi/2}", 1),
    (r"\$5", "\\boxed{\\text{\u20ac}5}", 0),
    ("6:30", r"\boxed{6:30}", 1),
    ("{5}", r"\boxed{5}", 1),
    (r"x \in [0,1]", r"\boxed{[0,1]}", 1),
    (r"(3,\infty)", r"\boxed{(3,\infty)}", 1),
    ("2,3,4", r"\boxed{2,3}", 0),
    ("1", r"\boxed{\text{N/A}}", 0),
    (r"1.6\times 10^{-19}", r"\boxed{9.1\times 10^{-31}}", 0),
    (r"6.63\times10^{-34}", r"\boxed{1.38\times10^{-23}}", 0),
    ("1.6e-19", r"\boxed{1.6\times10^{-18}}", 0),
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", 0),
    *((answer, text, answer == "5") for answer in ("4", "5") for text in TWO_BOXES),
]


@pytest.mark.parametrize(("answer", "text", "score"), VERDICTS)
def test_verdicts_are_ours_whatever_the_library_says(answer, text, score):
    """The library alone reads two boxes as a set, small constants as equal, 10_3 as 10_2, and not ``12\\,000``."""
    assert math([], [text], answer=[answer]) == [score]
