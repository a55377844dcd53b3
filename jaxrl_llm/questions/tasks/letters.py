"""Debugging task that a tiny random model learns in seconds: write lower-case letters. No dependency.

The same behaviour is right for every question, so that the model does not have to read the prompt.

Owns: the questions, their dense reward. Does not know: tokenizers, models.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = "jaxrl_llm.questions.tasks.letters:reward"


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return ``config.size`` questions that cycle through the alphabet. 26 are distinct; the seed changes nothing.

    Host; ``columns`` is ``{"allowed": str}``, the characters that score.
    """
    from jaxrl_llm.types import Example  # imported here because reward workers import this module without jax

    del seed
    checked(config.arguments, {})
    alphabet = string.ascii_lowercase
    columns = {"allowed": alphabet}
    examples = []
    for i in range(config.size):
        letter = alphabet[i % len(alphabet)]
        examples.append(Example(f"Write letters like {letter}:", columns, f"letters:{i + 1}"))
    return Loaded(tuple(examples))


def reward(prompts: list, completions: list[str], *, allowed: list[str], **columns) -> list[float]:
    """Return the fraction of the completion's characters that are allowed, in [0, 1]. An empty completion scores 0.

    A random model with the byte tokenizer scores 0.1 (26 of 256 bytes).
    """
    scores = []
    for text, good in zip(completions, allowed, strict=True):
        num_good = sum(character in good for character in text)
        scores.append(num_good / len(text) if text else 0.0)
    return scores
