"""Scorer of mathematical answers: the reward function "math".

Owns: how a completion is compared with column ``answer``. Does not know: where questions come from.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from jaxrl_llm.questions.tasks.scores import MINUS, TAGGED
from jaxrl_llm.runtime.nested import ConfigError
from jaxrl_llm.scoring.formula_size import is_computable, name_of

try:
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


def reward(prompts: list, completions: list[str], *, answer: list, **columns) -> list[float]:
    r"""1.0 where the completion's answer equals ``answer`` as mathematics, else 0.0.

    The answer of a completion is looked for in its last <answer></answer>, where it has one.

    Args:
        answer: a number, or text: plain ("1/2", "6.02e23"), LaTeX with or without dollars, or a worked solution that
            ends in ``\boxed{}`` or "#### 72".

    Raises:
        ValueError: an ``answer`` holds no mathematics, as null, true and plain words do not: a fault of the data, not
            of the completion.
    """
    gold = {repr(right): _gold(right) for right in answer}
    return [float(_equals(text, *gold[repr(right)])) for text, right in zip(completions, answer, strict=True)]


def _equals(text: str, forms: list, decimals: int) -> bool:
    return verify(forms, _parse_completion(text), float_rounding=decimals, timeout_seconds=None)


def _gold(answer: Any) -> tuple[list, int]:
    """What a completion may equal, and to how many decimals."""
    text = _plain(str(answer).rpartition("####")[2]).strip()
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
    """Text without what math_verify reads in formulas alone: U+2212 as a minus, the dollars of prices."""
    return _DOLLAR.sub("", text.replace(MINUS, "-"))


def _parse_completion(text: str) -> list:
    """Of the last <answer></answer>, which is a formula or has one, or words about a number; else of the whole."""
    text = _plain(text)
    tagged = TAGGED.findall(text)
    inside = tagged[-1].strip() if tagged else text
    if not tagged or _has_formula(inside):
        return _read(inside)
    formula = _read(f"${inside}$")
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
