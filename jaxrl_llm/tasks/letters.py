"""A task that a tiny random model learns in seconds: letters of the case asked for. For debugging; no dependency.

Owns: its questions and their dense reward. Does not know: tokenizers, models.
"""

from __future__ import annotations

import string

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.tasks.protocol import Loaded

SCORER = "jaxrl_llm.tasks.letters:reward"


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """``config.size`` questions that walk through the alphabet, lower case and upper case in turn; no randomness.

    Host; ``columns`` is ``{"case": "lower" or "upper"}``. There are 52 distinct questions.
    """
    from jaxrl_llm.types import Example  # here, for reward workers import this module and must not pay for jax

    del seed
    both = [x for pair in zip(string.ascii_lowercase, string.ascii_uppercase, strict=True) for x in pair]
    letters = [both[i % 52] for i in range(config.size)]
    cases = {x: "lower" if x.islower() else "upper" for x in both}
    return Loaded(
        tuple(
            Example(f"Write {cases[x]}-case letters like {x}:", {"case": cases[x]}, f"letters:{i}")
            for i, x in enumerate(letters, 1)
        )
    )


def reward(prompts: list, completions: list[str], *, case: list[str], **columns) -> list[float]:
    """Fraction of the completion's characters that are ASCII letters of the case, in [0, 1]; empty scores 0."""
    wanted = {"lower": string.ascii_lowercase, "upper": string.ascii_uppercase}
    return [
        sum(x in wanted[c] for x in text) / len(text) if text else 0.0
        for text, c in zip(completions, case, strict=True)
    ]
