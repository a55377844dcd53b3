"""Calculator, as an environment (``environments.factory``) in two forms:

    python -m jaxrl_llm.train --config=configs/calculator_smollm2_135m.py --workdir=runs/calculator

    jaxrl_llm.examples.calculator:Calculator   a tool, ``calculate(expression)``
    jaxrl_llm.examples.calculator:plain        replies to the last expression that a turn writes: "12 * 34" with
                                               "12 * 34 = 408". For models that cannot call tools.

This example shows the smallest environment: a class whose methods are tools, or a function of the policy's turns.

``:used`` is a reward for the first thing to learn, the use of the calculator.

Expressions contain numbers, + - * / // % ** and parentheses, and no names. "x" between numbers multiplies. The signs of
multiplication and division are read too.

Owns: the syntax of expressions, their value. Does not know: questions, rewards.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from jaxrl_llm.scoring import typography
from jaxrl_llm.scoring.quantities import digits_of

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
SIGNS: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_CHARS = 200
MAX_DIGITS = 200  # maximum digits of the result of a power
# At least two numbers with operators between them. Digits may be grouped ("1,000").
NUMBER = r"[0-9]+(?:[.,'][0-9]+)*"
OPERATOR = r"(?:\*\*|//|\^|[-+*/x]|%(?!\s?-))"
EXPRESSION = re.compile(rf"(?<![-(\w.,'])[-(]*{NUMBER}(?:[ )]*{OPERATOR}[ (-]*{NUMBER})+\)*")


class Calculator:
    """Environment with one tool that computes expressions of numbers."""

    def reset(self, **columns: Any) -> None:
        """Accept any question. The calculator needs no column."""

    def calculate(self, expression: str) -> str:
        """The value of an expression of numbers, such as "(12 + 3) * 4"."""
        return value(expression)


def plain(prompt: Any, turns: list[str], **columns: Any) -> str | None:
    """Return the last expression of the newest turn with its value.

    The result is None, which ends the completion, if the turn has no expression.
    """
    expressions = EXPRESSION.findall(plain_text(turns[-1]))
    if not expressions:
        return None
    expression = expressions[-1].strip()
    try:
        return f"{expression} = {value(expression)}"
    except (ArithmeticError, ValueError, SyntaxError) as error:
        return f"{expression}: {error}"


def used(
    prompts: list,
    completions: list[str],
    messages: list[list[dict[str, str]]],
    **columns: Any,
) -> list[float]:
    """Return 1.0 for each completion that used the calculator, else 0.0. A reply with an error counts too."""
    scores = []
    for conversation in messages:
        roles = {message["role"] for message in conversation}
        has_reply = bool(roles - {"assistant"})
        scores.append(float(has_reply))
    return scores


def value(expression: str) -> str:
    """Return the value of an expression: exact if it is whole, else in 12 digits.

    Raises:
        ValueError, SyntaxError: the text is not an expression, is too long, or groups digits wrongly ("1,00").
        ZeroDivisionError: the expression divides by zero.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression of {len(expression)} characters; {MAX_CHARS} are allowed")
    text = plain_text(expression).replace("^", "**")
    text = re.sub(NUMBER, _without_groups, text)
    text = re.sub(r"(?<=[\d) ])x(?=[ (\d-])", "*", text)
    tree = ast.parse(text.strip(), mode="eval")
    result = _value(tree.body)
    if result.denominator == 1:
        return str(result.numerator)
    return f"{float(result):.12g}"


def plain_text(text: str) -> str:
    """Return a text with ASCII digits and operators; raised digits are powers."""
    plain_characters = typography.plain(text)
    return re.sub(r"\^\{(-?[0-9]{1,9})\}", r"^\1", plain_characters)


def _without_groups(numeral: re.Match) -> str:
    """Return a number without the signs that group its digits, such as "1000" for "1,000"."""
    digits = digits_of(numeral[0])
    if digits is None:
        raise ValueError(f"{numeral[0]!r:.50} is no number: write thousands as 1,000 and decimals as 0.5")
    return digits


def _value(node: ast.expr) -> Fraction:
    """Return the exact value of an expression's syntax tree."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        sign = SIGNS[type(node.op)]
        return sign(_value(node.operand))
    if isinstance(node, ast.BinOp):
        left = _value(node.left)
        right = _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
            raise ZeroDivisionError("division by zero")
        if type(node.op) in OPERATORS:
            operation = OPERATORS[type(node.op)]
            return Fraction(operation(left, right))
    raise ValueError(f"no expression of numbers: {ast.unparse(node)[:50]}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return ``base`` to a whole exponent whose result has at most about ``MAX_DIGITS`` digits."""
    base_bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    result_bits = base_bits * abs(exponent.numerator)
    if exponent.denominator != 1 or result_bits > MAX_DIGITS * 3.33:
        raise ValueError("a power that is not whole, or too large")
    return base ** int(exponent)
