r"""Scorer of mathematical answers: the reward function "math".

The library math_verify reads and simplifies formulas. The rules of this module decide these cases:

    the answer         ``scoring.answers`` finds it: the last <answer> or the last box; an empty answer is wrong
    numbers            numbers of both sides are compared as exact fractions, with their units
    other values       constant formulas are compared by relative size, so that 1e-31 and 1e-19 differ
    bases              10_3 differs from 10_2 and from 10
    brackets           a pair, an interval and a set are different

Owns: how a completion is compared with column ``answer``. Does not know: where questions come from.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from jaxrl_llm.scoring import answers
from jaxrl_llm.scoring.formula_size import is_computable, name_of
from jaxrl_llm.scoring.quantities import Quantity, number_beside_words, quantity, same_quantity
from jaxrl_llm.scoring.reward_worker import one_by_one
from jaxrl_llm.scoring.typography import plain, unstyled
from jaxrl_llm.settings.schema import ConfigError

try:
    import sympy
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ModuleNotFoundError as error:
    raise ConfigError(f"rewards.functions='math' needs {error.name}: pip install 'jaxrl_llm[math]'") from error

# Silence the warning that no timeout is set. math_verify's timeout uses a signal, which fails silently outside the main
# thread. The deadline of the reward pool is enforced instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)

NO_TIMEOUT: Any = None  # math_verify documents None as no timeout, but its annotation is int

# Priority: the last \boxed{}, then "the answer is ...", then any other formula or number.
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

_SCIENTIFIC = re.compile(r"(?<![\w.])(\d++(?:\.\d*+)?|\.\d++)[eE]([+-]?\d{1,3})(?!\w|\.\d)")
_TINY = re.compile(r"(?<![\d.])0?\.(0{6,})[1-9]")  # math_verify would round these numbers to 0
_DECIMALS = 6  # math_verify rounds to this number of decimals
# The dollar sign of a price; after a line break (two backslashes) a dollar sign opens a formula.
_DOLLAR = re.compile(r"(?<!\\)\\\$")

# math_verify reads formulas in boxes and between dollars or brackets. In prose it reads numbers with operators.
_FORMULAS = [
    re.compile(r"(\$\$)([^$]+)(\$\$)"),
    re.compile(r"(?<!\$)(\$)([^$\n]+)(\$)(?!\$)"),
    re.compile(r"(\\\[)((?:(?!\\[\[\]]).)+)(\\\])", re.DOTALL),
    re.compile(r"(\\\()((?:(?!\\[()]).)+)(\\\))"),
    re.compile(r"(\s\[)([^\n\[\]]+)(\]\s)"),
    re.compile(r"()((?:[\d.,\s+\-*\u00d7/^()\u00f7!]|(?<=\d)[eE](?=[+-]?\d)){3,}+)()"),
]
_BOX = r"\boxed{"

# Words that math_verify would read as products of one-letter symbols. "ab" and "abcd" may really be such products.
_WORDS = re.compile(r"N/A|(?i:none|null|nan|true|false)|(?=.*[A-Za-z]{3})[A-Za-z ]{5,}")

# "3 L", "10 m^2", "72 km/h". Single letters are included only if they are more often units than unknowns.
_UNIT = r"(?:[A-Za-z]{2,}|[mgshlLVANJWKCF])(?:\^[23])?"
_QUANTITY = re.compile(rf"[-+]?[\d.,]+\s+{_UNIT}(?:/{_UNIT})?\.?")

# Matches "It is 7" and "10 cm^2", but not "2ab" or "3 or 4". math_verify would read such words as products of letters.
_PROSE = re.compile(r"(?<!\S)(?!(?:and|or)\b)[A-Za-z]{2,}(?![^\s.,:;!?^])")


EXACT_DIGITS = 40  # precision for constants without decimals, such as \sqrt{2}


class _Label(NamedTuple):
    """Label in the form used for comparison: the formulas from math_verify, and the values from this module's rules."""

    forms: list
    decimals: int
    number: Quantity | None
    base: tuple[str, int] | None
    brackets: str


@one_by_one  # score completions one by one, so that only a completion that takes too long fails
def reward(prompts: list, completions: list[str], *, answer: list, **columns) -> list[float]:
    r"""Return 1.0 if the completion's answer is mathematically equal to ``answer``, else 0.0.

    Args:
        answer: a number, or text: plain ("1/2", "6.02e23"), LaTeX with or without dollars, or a worked solution that
            ends in ``\boxed{}`` or "#### 72".

    Raises:
        ValueError: an ``answer`` is not mathematics but null, true or plain words. The data is wrong, not the
            completion.
    """
    labels = {repr(right): _label(right) for right in answer}
    scores = []
    for text, right in zip(completions, answer, strict=True):
        is_right = _equals(text, labels[repr(right)])
        scores.append(float(is_right))
    return scores


def _equals(text: str, label: _Label) -> bool:
    marked = answers.marked(text)
    if marked == "":
        return False
    answer = marked if marked is not None else answers.answer_of(text)
    number = quantity(answer)
    # Read numbers first, because math_verify prefers formulas if no answer is marked.
    if number is None and (marked is not None or not _has_formula(text)):
        number = number_beside_words(answer)
    if label.number is not None and number is not None:
        return _same_number(number, label.number)
    base = answers.in_base(answer)
    if base is not None or label.base is not None:
        return base == label.base
    brackets = answers.brackets(answer) if marked is not None else ""
    if brackets and label.brackets and brackets != label.brackets:
        return False
    return _same_formula(label, _parse_completion(text, marked))


def _same_number(answer: Quantity, right: Quantity) -> bool:
    """Compare numbers. Decimals may be rounded to six digits; integers may not."""
    if same_quantity(answer, right):
        return True
    if answer.unit and right.unit and answer.unit != right.unit:
        return False
    if answer.value.denominator == right.value.denominator == 1:
        return False
    scale = min(Fraction(1), 10 * abs(right.value))
    return abs(answer.value - right.value) <= scale * Fraction(1, 2 * 10**_DECIMALS)


def _same_formula(label: _Label, forms: list) -> bool:
    """Compare the formulas that math_verify read. Constants are compared by relative size, not by math_verify."""
    pairs = [(left, right) for left in label.forms for right in forms]
    constants = [(left, right) for left, right in pairs if _is_constant(left) and _is_constant(right)]
    if constants:
        return any(_same_constant(left, right) for left, right in constants)
    if not verify(label.forms, forms, float_rounding=label.decimals, timeout_seconds=NO_TIMEOUT):
        return False
    formulas = [(left, right) for left, right in pairs if not isinstance(left, str) and not isinstance(right, str)]
    return not formulas or any(_may_be_equal(left, right) for left, right in formulas)


def _may_be_equal(left: Any, right: Any) -> bool:
    """Return False if constants in two forms differ. math_verify rounds them to six decimals before it compares."""
    if _is_constant(left) and _is_constant(right):
        return _same_constant(left, right)
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        minuend: Any = left  # a type checker does not see the types of sympy's decorated operators
        difference = minuend - right
        return not difference.is_Rational or difference == 0
    left_elements = _elements(left)
    right_elements = _elements(right)
    if not left_elements or len(left_elements) != len(right_elements):
        return True
    if isinstance(left, sympy.FiniteSet) or isinstance(right, sympy.FiniteSet):
        return all(any(_may_be_equal(x, y) for y in right_elements) for x in left_elements)
    return all(map(_may_be_equal, left_elements, right_elements))


def _elements(form: Any) -> list:
    """Return the elements of a set, a tuple or a matrix, and the ends of an interval; [] for other forms."""
    if isinstance(form, sympy.Interval):
        return [form.start, form.end]
    if isinstance(form, sympy.FiniteSet | sympy.Tuple):
        return list(form.args)
    if isinstance(form, sympy.MatrixBase):
        return form.flat()
    return []


def _is_constant(form: Any) -> bool:
    if not isinstance(form, sympy.Expr) or not form.is_number:
        return False
    return bool(getattr(form, "is_finite", None))  # sympy defines the attribute when a class is created


def _same_constant(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Compare rational numbers exactly, other exact constants to 35 digits, and constants with decimals to six."""
    if left.is_Rational and right.is_Rational:
        return bool(left == right)
    left_value = sympy.N(left, EXACT_DIGITS)
    right_value = sympy.N(right, EXACT_DIGITS)
    difference = abs(left_value - right_value)
    size = max(abs(left_value), abs(right_value))
    if left.has(sympy.Float) or right.has(sympy.Float):
        return bool(difference <= min(1, 10 * size) / (2 * 10**_DECIMALS))
    return bool(difference <= size / sympy.Integer(10) ** (EXACT_DIGITS - 5))


def _label(answer: Any) -> _Label:
    """Read a label with math_verify and with the rules of this module."""
    text = str(answer).rpartition("####")[2]
    right = answers.answer_of(text)
    forms, decimals = _gold(text, answer)
    return _Label(
        forms,
        decimals,
        quantity(right),
        answers.in_base(right),
        answers.brackets(right),
    )


def _gold(text: str, answer: Any) -> tuple[list, int]:
    """Return the formulas that a completion may equal, and the number of decimals to compare."""
    text = _plain(text).strip()
    text = text if "$" in text or r"\boxed" in text else f"${text}$"
    parsed = _parse(text)
    if not parsed:
        raise ValueError(f"column answer={answer!r:.80} holds no mathematics to compare with")
    if _WORDS.fullmatch(parsed[-1].strip()):
        raise ValueError(
            f"column answer={answer!r:.80} has words instead of mathematics: rewards.functions="
            r"'jaxrl_llm.scoring.scores:exact' compares words, and 'math' compares the words in \text{}"
        )
    # math_verify does not treat 6.02*10^23 as equal to its digits. A completion may contain either form.
    digits = _digits(text)
    powers = _SCIENTIFIC.sub(lambda found: rf"{found[1]}\times 10^{{{int(found[2])}}}", text)
    if digits != text:
        parsed = [*parsed, *_parse(digits), *_parse(powers)]
    tiny = _TINY.search(digits)
    return parsed, _DECIMALS + len(tiny[1]) if tiny else _DECIMALS


def _has_formula(text: str) -> bool:
    return "$" in text.replace(r"\$", "") or r"\boxed" in text


def _plain(text: str) -> str:
    """Return the text with plain minus signs and without the dollars of prices."""
    return _DOLLAR.sub("", plain(text))


def _parse_completion(text: str, marked: str | None) -> list:
    """Parse the marked answer, or the whole completion if no answer is marked.

    A marked answer is parsed as a formula. If it looks like words about a number, it is also parsed as prose.
    """
    if marked is None:
        return _read(_plain(answers.without_thought(text)))
    inside = _plain(unstyled(marked)).strip()
    if _has_formula(inside):
        return _read(inside)
    formula = _read(f"${inside.removesuffix('.')}$")
    is_read = not all(isinstance(x, str) for x in formula)
    is_text = _PROSE.search(inside) or _QUANTITY.fullmatch(inside)
    return formula if is_read and not is_text else _read(inside) + formula


def _read(text: str) -> list:
    digits = _digits(text)
    forms = _parse(digits)
    if digits != text and _has_formula(text):  # in a formula, 2e-1 may also mean 2 times Euler's number minus 1
        forms = forms + _parse(text)
    return forms


def _digits(text: str) -> str:
    """Return the text with scientific numbers such as 1e-5 written as 0.00001."""
    return _SCIENTIFIC.sub(lambda found: format(Decimal(found[0]), "f"), text)


def _parse(text: str) -> list:
    return parse(
        _without_large_formulas(text),
        extraction_config=_EXTRACTION,
        parsing_timeout=NO_TIMEOUT,
    )


def _without_large_formulas(text: str) -> str:
    r"""Replace each formula that is too large to compute by a name, ``\text{too large 3f..}``.

    The replacement is needed because math_verify computes what it reads. Such a name is never equal to a number. It
    equals only the name of a label with the same text.
    """
    for pattern in _FORMULAS:
        text = pattern.sub(lambda found: found[1] + _named_if_large(found[2]) + found[3], text)
    before, *boxes = text.split(_BOX)
    parts = [before]
    while boxes:
        inside = _BOX.join(boxes)
        end = _end_of_braces(inside)
        parts.append(_named_if_large(inside[:end]))
        boxes = inside[end:].split(_BOX)
        parts[-1] += boxes.pop(0)
    return _BOX.join(parts)


def _named_if_large(formula: str) -> str:
    return formula if is_computable(formula) else rf"\text{{{name_of(formula)}}}"


def _end_of_braces(text: str) -> int:
    """Return the index of the brace that closes a brace opened before the text, or the length of the text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return i
    return len(text)
