"""A task that a tiny random model learns in seconds: write one letter. For debugging; no dependency.

Owns: its questions and their dense reward. Does not know: tokenizers, models.
"""

from __future__ import annotations

import string

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.tasks.protocol import Loaded

SCORER = "jaxrl_llm.tasks.letters:reward"


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """``config.size`` questions that walk through the alphabet; the same for every seed.

    Host; ``columns`` is ``{"letter": str}``.
    """
    from jaxrl_llm.types import Example  # here, for reward workers import this module and must not pay for jax

    del seed
    letters = [string.ascii_lowercase[i % 26] for i in range(config.size)]
    return Loaded(
        tuple(Example(f"Write only the letter {x}:", {"letter": x}, f"letters:{i}") for i, x in enumerate(letters, 1))
    )


def reward(prompts: list, completions: list[str], *, letter: list[str], **columns) -> list[float]:
    """Fraction of the completion's characters that are the letter, in [0, 1]; an empty completion scores 0."""
    return [text.count(x) / len(text) if text else 0.0 for text, x in zip(completions, letter, strict=True)]
