"""The reward `math`: numbers as JSON and people write them, and answers that are none."""

import pytest

math = pytest.importorskip("jaxrl_llm.questions.tasks.math_answers").reward


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
