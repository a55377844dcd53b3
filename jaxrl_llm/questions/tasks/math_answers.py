"""Scorer of mathematical answers: the reward function "math".

Owns: how a completion is compared with column ``answer``. Does not know: where questions come from.
"""

from __future__ import annotations

import gc
import logging
import re
import signal
import threading
import types
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from jaxrl_llm.questions.tasks.scores import TAGGED
from jaxrl_llm.runtime.nested import ConfigError

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ModuleNotFoundError as error:
    raise ConfigError(f"rewards.functions: 'math' needs {error.name}: pip install 'jaxrl_llm[math]'") from error

# It warns that its timeouts are not set: they are of the clock, whole seconds, and for each of many comparisons.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Of one completion, by the processor's clock: a machine that is busy makes no answer wrong. Unusual right answers take
# up to 0.1 s; 16 that never end take 8 of the 10 s of rewards.timeout_s.
MAX_CPU_S = 0.5

# The last \boxed{} wins over "the answer is ...", and that over any other formula or number.
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?!\w|\.\d)")
_TINY = re.compile(r"(?<![\d.])0?\.(0{6,})[1-9]")  # 0 when rounded as math_verify does
_DECIMALS = 6  # to which it rounds

# Words that math_verify would take for products of one-letter symbols, which "ab" and "abcd" may be.
_WORDS = re.compile(r"N/A|(?i:none|null|nan|true|false)|(?=.*[A-Za-z]{3})[A-Za-z ]{5,}")

# "3 L", "10 m^2", "72 km/h": of single letters those that are units more often than unknowns.
_UNIT = r"(?:[A-Za-z]{2,}|[mgshlLVANJWKCF])(?:\^[23])?"
_QUANTITY = re.compile(rf"[-+\u2212]?[\d.,]+\s+{_UNIT}(?:/{_UNIT})?\.?")

# "It is 7", "10 cm^2", not "2ab" nor "3 or 4": as a formula the product of its letters.
_PROSE = re.compile(r"(?<!\S)(?!(?:and|or)\b)[A-Za-z]{2,}(?![^\s.,:;!?^])")


class _OutOfTime(BaseException):
    """No Exception, which sympy and math_verify would catch."""


def reward(prompts: list, completions: list[str], *, answer: list, **columns) -> list[float]:
    r"""1.0 where the completion's answer equals ``answer`` as mathematics, else 0.0, also where that takes too long.

    The answer of a completion is looked for in its last <answer></answer>, where it has one.

    Args:
        answer: a number, or text: plain ("1/2", "6.02e23"), LaTeX with or without dollars, or a worked solution that
            ends in ``\boxed{}`` or "#### 72".

    Raises:
        ValueError: an ``answer`` holds no mathematics, as null, true and plain words do not: a fault of the data, not
            of the completion.
    """
    gold = {repr(right): _gold(right) for right in answer}
    scores = []
    for text, right in zip(completions, answer, strict=True):
        scores.append(float(_in_time(_equals, text, *gold[repr(right)])))
    return scores


def _in_time(equals: Callable[..., bool], *given: Any) -> bool:
    """What it says, False after ``MAX_CPU_S``; without limit off the main thread, where Python takes no signals."""
    if threading.current_thread() is not threading.main_thread() or any(signal.getitimer(signal.ITIMER_PROF)):
        return equals(*given)
    before, collects = signal.signal(signal.SIGPROF, _stop), gc.isenabled()
    gc.disable()  # in a large process one pass takes longer than a comparison
    try:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S, MAX_CPU_S)  # again and again: a bare except may swallow one
        return _limited(equals, *given)
    except _OutOfTime:
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)
        if collects:
            gc.enable()


def _limited(equals: Callable[..., bool], *given: Any) -> bool:
    return equals(*given)


def _stop(_: int, frame: types.FrameType | None) -> None:
    """Ends what ``_limited`` has called, and nothing that comes after it, where the timer would be left on."""
    while frame is not None and frame.f_code is not _limited.__code__:
        frame = frame.f_back
    if frame is not None:
        raise _OutOfTime


def _equals(text: str, forms: list, decimals: int) -> bool:
    return verify(forms, _parse_completion(text), float_rounding=decimals, timeout_seconds=None)


def _gold(answer: Any) -> tuple[list, int]:
    """What a completion may equal, and to how many decimals."""
    text = str(answer).rpartition("####")[2].strip()
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


def _parse_completion(text: str) -> list:
    """Of the last <answer></answer>, which is a formula or has one, or words about a number; else of the whole."""
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
    return parse(text, extraction_config=_EXTRACTION, parsing_timeout=None)


# What sympy makes at its first comparisons takes up to half a second of a process, and none of a completion's.
_equals(r"\boxed{(\sin(2x), x^2-y^2)}", *_gold(r"(2\sin(x)\cos(x), (x-y)(x+y))"))
