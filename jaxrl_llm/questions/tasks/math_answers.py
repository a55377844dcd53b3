"""Scorer of mathematical answers: the reward function "math".

Owns: how a completion is compared with column ``answer``. Does not know: where questions come from.
"""

from __future__ import annotations

import logging

from jaxrl_llm.runtime.nested import ConfigError

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ModuleNotFoundError as error:
    raise ConfigError(f"rewards.functions: 'math' needs {error.name}: pip install 'jaxrl_llm[math]'") from error

# It warns that no timeout is set. Its own timeout is a signal, which fails silently off the main thread;
# the pool's deadline holds here.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# The last \boxed{} wins over "the answer is ...", and that over any other formula or number.
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def reward(prompts: list, completions: list[str], *, answer: list, **columns) -> list[float]:
    r"""1.0 where the completion's answer equals ``answer`` as mathematics, else 0.0.

    Args:
        answer: a number, or text: plain ("1/2"), LaTeX with or without dollars, or a worked solution that ends
            in ``\boxed{}`` or "#### 72".

    Raises:
        ValueError: an ``answer`` holds no mathematics: a fault of the data, not of the completion.
    """
    gold = {text: _gold(text) for text in set(map(str, answer))}
    return [
        float(verify(gold[str(right)], _parse(text), timeout_seconds=None))
        for text, right in zip(completions, answer, strict=True)
    ]


def _gold(answer: str) -> list:
    text = answer.rpartition("####")[2].strip()
    parsed = _parse(text if "$" in text or r"\boxed" in text else f"${text}$")
    if not parsed:
        raise ValueError(f"column answer={answer!r:.80} holds no mathematics to compare with")
    return parsed


def _parse(text: str) -> list:
    return parse(text, extraction_config=_EXTRACTION, parsing_timeout=None)
