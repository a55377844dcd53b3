"""The calculator: values of expressions, and its answers to a turn."""

import time

import pytest

from jaxrl_llm.examples.calculator import Calculator, plain, used, value


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("98 * 64", "6272"),
        ("(12 + 3) * -4", "-60"),
        ("7/2", "3.5"),
        ("6 / 3", "2"),
        ("0.1 + 0.2", "0.3"),  # exact
        ("1/3", "0.333333333333"),
        ("17 // 5 + 17 % 5", "5"),
        ("2 ** 10 - 2 ^ 3", "1016"),
        ("2 ** -2", "0.25"),
        ("12 x 3", "36"),
        ("12x3", "36"),
        ("12 \u00d7 4 \u00f7 6", "8"),
        ("1,000 + 2", "1002"),
        ("1'234.5 * 2", "2469"),
        ("12,34,567 + 0", "1234567"),  # India
        ("\uff11\uff12 \uff0b \u0663", "15"),  # fullwidth and Arabic-Indic
        ("5 \u2212 7", "-2"),
        ("2\u00b3 + 1", "9"),
        ("123456789012345678901234567890 * 10", "1234567890123456789012345678900"),
    ],
)
def test_values(expression, expected):
    assert value(expression) == expected
    assert Calculator().calculate(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 +",
        "__import__('os')",
        "abs(3)",
        "9 ** 9 ** 9",
        "10 ** 1000",
        "2 ** 0.5",
        "'a' * 3",
        "True + 1",
        "[1]",
        "1,00 + 2",
        "3,5 * 2",
    ],
)
def test_what_is_none_or_too_large_is_refused(expression):
    with pytest.raises((ValueError, SyntaxError)):
        value(expression)
    with pytest.raises(ValueError, match="expression of 300 characters"):
        value("1" * 300)


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("I write 98 * 64.", "98 * 64 = 6272"),
        ("First 1 + 1, then 2 * 3 = 7", "2 * 3 = 6"),
        ("The answer is 6272.", None),
        ("(2 + 3) * 4 =", "(2 + 3) * 4 = 20"),
        ("5 / 0", "5 / 0: division by zero"),
        ("", None),
        ("1,000 + 2", "1,000 + 2 = 1002"),
        ("so 1,234 * 2", "1,234 * 2 = 2468"),
        ("1,000,000 / 4 = ?", "1,000,000 / 4 = 250000"),
        ("2 ^ 3 + 1", "2 ^ 3 + 1 = 9"),  # not 3 + 1
        ("20% - 5", None),  # no remainder
        ("17 % 5", "17 % 5 = 2"),
        ("x2 + 3", None),
        ("\uff15 \u00d7 \uff16", "5 * 6 = 30"),
        ("on 2026-11-25", "2026-11-25 = 1990"),
    ],
)
def test_a_turn_is_answered_with_the_value_of_its_last_expression(turn, answer):
    assert plain("p", ["earlier 3 * 3", turn], answer="x") == answer


def test_it_has_been_used_where_it_has_answered():
    said = [{"role": "assistant", "content": "2 * 3"}]
    for role in ("user", "tool"):
        answered = [*said, {"role": role, "content": "2 * 3 = 6"}, {"role": "assistant", "content": "6"}]
        assert used(["p"] * 3, ["", "", ""], messages=[said, answered, []], answer=["6"] * 3) == [0.0, 1.0, 0.0]


def test_digits_grouped_in_no_known_way_are_told_and_never_cut():
    said = plain("p", ["3,5 + 2"])
    assert said.startswith("3,5 + 2: ") and "=" not in said.replace("3,5 + 2", "")


@pytest.mark.parametrize(
    "flood", ["(" * 30_000, "1" * 30_000, "1 + " * 8000, "1,1" * 10_000, "-" * 30_000, "1)" * 15_000]
)
def test_time_to_find_an_expression_grows_with_the_length_alone(flood):
    began = time.process_time()
    plain("p", [flood])
    assert time.process_time() - began < 1.0
