r"""Scorer of mathematical answers: the reward function "math".

The rules are ours; the library math_verify reads and simplifies formulas. What is never left to it:

    the answer         ``scoring.answers`` finds it: the last <answer> or the last box, and an empty one is wrong
    numbers            numbers of both sides are compared as exact fractions, with their units
    other values       constant formulas are compared by relative size, so that 1e-31 and 1e-19 differ
    bases              10_3 is not 10_2, and neither is 10
    brackets           a pair, an interval and a set are not each other

Owns: how a completion is compared with column ``answer``. Does not know: where questions come from.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from jaxrl_llm.runtime.nested import ConfigError
from jaxrl_llm.scoring import answers
from jaxrl_llm.scoring.formula_size import is_computable, name_of
from jaxrl_llm.scoring.quantities import Quantity, number_beside_words, quantity, same_quantity
from jaxrl_llm.scoring.typography import plain, unstyled

try:
    import sympy
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ModuleNotFoundError as error:
    raise ConfigError(f"rewards.functions: 'math' needs {error.name}: pip install 'jaxrl_llm[math]'") from error

# It warns that no timeout is set. Its own timeout is a signal, which fails silently off the main thread;
# the pool's deadline holds here.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# The last \boxed{} wins over "the answer is ...", and that over any other formula or number.
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

_SCIENTIFIC = re.compile(r"(?<![\w.])(\d++(?:\.\d*+)?|\.\d++)[eE]([+-]?\d{1,3})(?!\w|\.\d)")
_TINY = re.compile(r"(?<![\d.])0?\.(0{6,})[1-9]")  # 0 when rounded as math_verify does
_DECIMALS = 6  # to which it rounds
_DOLLAR = re.compile(r"(?<!\\)\\\$")  # of a price; after the two backslashes that end a line, a formula's

# Where math_verify reads formulas besides boxes: between dollars and brackets, and numbers with operators in prose.
_FORMULAS = [
    re.compile(r"(\$\$)([^$]+)(\$\$)"),
    re.compile(r"(?<!\$)(\$)([^$\n]+)(\$)(?!\$)"),
    re.compile(r"(\\\[)((?:(?!\\[\[\]]).)+)(\\\])", re.DOTALL),
    re.compile(r"(\\\()((?:(?!\\[()]).)+)(\\\))"),
    re.compile(r"(\s\[)([^\n\[\]]+)(\]\s)"),
    re.compile(r"()((?:[\d.,\s+\-*\u00d7/^()\u00f7!]|(?<=\d)[eE](?=[+-]?\d)){3,}+)()"),
]
_BOX = r"\boxed{"

# Words that math_verify would take for products of one-letter symbols, which "ab" and "abcd" may be.
_WORDS = re.compile(r"N/A|(?i:none|null|nan|true|false)|(?=.*[A-Za-z]{3})[A-Za-z ]{5,}")

# "3 L", "10 m^2", "72 km/h": of single letters those that are units more often than unknowns.
_UNIT = r"(?:[A-Za-z]{2,}|[mgshlLVANJWKCF])(?:\^[23])?"
_QUANTITY = re.compile(rf"[-+]?[\d.,]+\s+{_UNIT}(?:/{_UNIT})?\.?")

# "It is 7", "10 cm^2", not "2ab" nor "3 or 4": as a formula the product of its letters.
_PROSE = re.compile(r"(?<!\S)(?!(?:and|or)\b)[A-Za-z]{2,}(?![^\s.,:;!?^])")


EXACT_DIGITS = 40  # to which constants without decimals are computed, such as \sqrt{2}


class _Label(NamedTuple):
    """A label as it is compared: what math_verify read, and what our own rules read."""

    forms: list
    decimals: int
    number: Quantity | None
    base: tuple[str, int] | None
    brackets: str


def reward(prompts: list, completions: list[str], *, answer: list, **columns) -> list[float]:
    r"""Return 1.0 if the completion's answer equals ``answer`` as mathematics, else 0.0.

    Args:
        answer: a number, or text: plain ("1/2", "6.02e23"), LaTeX with or without dollars, or a worked solution that
            ends in ``\boxed{}`` or "#### 72".

    Raises:
        ValueError: an ``answer`` is no mathematics but null, true or plain words. The data is at fault, not the
            completion.
    """
    labels = {repr(right): _label(right) for right in answer}
    return [float(_equals(text, labels[repr(right)])) for text, right in zip(completions, answer, strict=True)]


reward.one_by_one = True  # a completion that takes too long fails alone


def _equals(text: str, label: _Label) -> bool:
    marked = answers.marked(text)
    if marked == "":
        return False
    said = marked if marked is not None else answers.answer_of(text)
    is_read = marked is not None or not _has_formula(text)  # without a mark math_verify prefers formulas to numbers
    number = (quantity(said) or number_beside_words(said)) if is_read else quantity(said)
    if label.number is not None and number is not None:
        return _same_number(number, label.number)
    base = answers.in_base(said)
    if base is not None or label.base is not None:
        return base == label.base
    brackets = answers.brackets(said) if marked is not None else ""
    if brackets and label.brackets and brackets != label.brackets:
        return False
    return _same_formula(label, _parse_completion(text, marked))


def _same_number(said: Quantity, right: Quantity) -> bool:
    """Compare numbers. Decimals may be rounded to six digits; integers may not."""
    if same_quantity(said, right):
        return True
    if said.unit and right.unit and said.unit != right.unit:
        return False
    if said.value.denominator == right.value.denominator == 1:
        return False
    scale = min(Fraction(1), 10 * abs(right.value))
    return abs(said.value - right.value) <= scale * Fraction(1, 2 * 10**_DECIMALS)


def _same_formula(label: _Label, forms: list) -> bool:
    """Compare what math_verify read. Constants are compared by relative size, whatever math_verify says."""
    pairs = [(one, other) for one in label.forms for other in forms]
    constants = [(one, other) for one, other in pairs if _is_constant(one) and _is_constant(other)]
    if constants:
        return any(_same_constant(one, other) for one, other in constants)
    is_equal = verify(label.forms, forms, float_rounding=label.decimals, timeout_seconds=None)
    read = [(one, other) for one, other in pairs if not isinstance(one, str) and not isinstance(other, str)]
    return is_equal and (not read or any(_may_be_equal(one, other) for one, other in read))


def _may_be_equal(one: Any, other: Any) -> bool:
    """Return False if constants in two forms differ. math_verify rounds them to six decimals before it compares."""
    if _is_constant(one) and _is_constant(other):
        return _same_constant(one, other)
    if isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr):
        difference = one - other
        return not difference.is_Rational or difference == 0
    some, others = _elements(one), _elements(other)
    if not some or len(some) != len(others):
        return True
    if isinstance(one, sympy.FiniteSet) or isinstance(other, sympy.FiniteSet):
        return all(any(_may_be_equal(element, partner) for partner in others) for element in some)
    return all(map(_may_be_equal, some, others))


def _elements(form: Any) -> list:
    """Return the elements of a set, a tuple or a matrix, and the ends of an interval; [] for other forms."""
    if isinstance(form, sympy.Interval):
        return [form.start, form.end]
    if isinstance(form, sympy.FiniteSet | sympy.Tuple | sympy.MatrixBase):
        return list(form)
    return []


def _is_constant(form: Any) -> bool:
    return isinstance(form, sympy.Expr) and bool(form.is_number) and bool(form.is_finite)


def _same_constant(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Compare rational numbers exactly, other exact constants to 35 digits, and those with decimals to six."""
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    left = sympy.N(one, EXACT_DIGITS)
    right = sympy.N(other, EXACT_DIGITS)
    size = max(abs(left), abs(right))
    if one.has(sympy.Float) or other.has(sympy.Float):
        return bool(abs(left - right) <= min(1, 10 * size) / (2 * 10**_DECIMALS))
    return bool(abs(left - right) <= size / sympy.Integer(10) ** (EXACT_DIGITS - 5))


def _label(answer: Any) -> _Label:
    """Read a label by math_verify and by our rules."""
    text = str(answer).rpartition("####")[2]
    said = answers.answer_of(text)
    forms, decimals = _gold(text, answer)
    return _Label(forms, decimals, quantity(said), answers.in_base(said), answers.brackets(said))


def _gold(text: str, answer: Any) -> tuple[list, int]:
    """Return what a completion may equal, and to how many decimals."""
    text = _plain(text).strip()
    text = text if "$" in text or r"\boxed" in text else f"${text}$"
    parsed = _parse(text)
    if not parsed:
        raise ValueError(f"column answer={answer!r:.80} holds no mathematics to compare with")
    if _WORDS.fullmatch(parsed[-1].strip()):
        raise ValueError(
            f"column answer={answer!r:.80} is no mathematics but words: rewards.functions="
            r"'jaxrl_llm.questions.tasks.scores:exact' compares words, and math those in \text{}"
        )
    # math_verify does not find 6.02*10^23 equal to its digits: a completion may have written either.
    digits = _digits(text)
    powers = _SCIENTIFIC.sub(lambda found: rf"{found[1]}\times 10^{{{int(found[2])}}}", text)
    if digits != text:
        parsed = [*parsed, *_parse(digits), *_parse(powers)]
    tiny = _TINY.search(digits)
    return parsed, _DECIMALS + len(tiny[1]) if tiny else _DECIMALS


def _has_formula(text: str) -> bool:
    return "$" in text.replace(r"\$", "") or r"\boxed" in text


def _plain(text: str) -> str:
    """Return text in which math_verify finds the minus signs and the prices that it reads in formulas alone."""
    return _DOLLAR.sub("", plain(text))


def _parse_completion(text: str, marked: str | None) -> list:
    """Parse the marked answer as a formula, and as words about a number if it reads so; without a mark all of it."""
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
    digits = _digits(text)  # in a formula 2e-1 may be Euler's number times 2, less 1
    return _parse(digits) + (_parse(text) if digits != text and _has_formula(text) else [])


def _digits(text: str) -> str:
    """Text whose numbers like 1e-5 are 0.00001."""
    return _SCIENTIFIC.sub(lambda found: format(Decimal(found[0]), "f"), text)


def _parse(text: str) -> list:
    return parse(_without_large_formulas(text), extraction_config=_EXTRACTION, parsing_timeout=None)


def _without_large_formulas(text: str) -> str:
    r"""Replace each formula that cannot be computed by a name, ``\text{too large 3f..}``.

    math_verify computes what it reads. The name equals no number, and equals the name of a label of the same text.
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
    """Return the index of the brace that closes one before the text, or the length of the text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return i
    return len(text)
