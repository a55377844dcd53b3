"""Sums of whole numbers, as plain text: "37+85=" has the answer "122", "37+85 mod 10=" the answer "2". No dependency.

``prompts.arguments``, all whole numbers:

    terms      2; number of terms, at least 2
    largest    99; terms are drawn from 0 to this number
    modulus    0; 0 = no modulus

``prompts.name`` selects a part of the questions: "" for all, "train", or "test" (an eighth of all, for ``eval.name``).
The parts "train" and "test" have no question in common and do not depend on the seed. Runs with different seeds
therefore hold out the same questions, and so does the run that trained their starting model.

With three or more terms the column ``key_steps`` contains the partial sums: for "3+4+5=" it is ["7"].

Owns: the questions, their parts, their answers, exact match. Does not know: tokenizers, models.
"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked
from jaxrl_llm.settings.schema import ConfigError

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = "jaxrl_llm.questions.tasks.arithmetic:reward"

# argument -> (default, least, most)
ARGUMENTS = {
    "terms": (2, 2, 100),
    "largest": (99, 1, 10**9),
    "modulus": (0, 0, 10**9),
}
# Part of the questions -> remainders of a question's checksum that belong to this part.
PARTS = {
    "": range(8),
    "train": range(1, 8),
    "test": range(1),
}


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Draw ``config.size`` sums from ``seed`` and return the sums that belong to the part ``config.name``.

    Sums may repeat; the part "test" contains each sum once. Host; ``columns`` is ``{"answer": str}``. With more than
    two terms ``columns`` also has ``"key_steps": list[str]``.

    Raises:
        ConfigError: an argument that is not in ``ARGUMENTS``, a value that is not allowed, an unknown part, or a part
            without questions.
    """
    from jaxrl_llm.types import Example  # imported here because reward workers import this module without jax

    terms, largest, modulus = checked(config.arguments, ARGUMENTS).values()
    if config.name not in PARTS:
        raise ConfigError(
            f"prompts.name={config.name!r} is no part of the sums: prompts.name and eval.name take '', 'train', 'test'"
        )
    examples = []
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, largest + 1, (config.size, terms)).tolist()
    for i, row in enumerate(rows, start=1):
        question = "+".join(map(str, row))
        total = sum(row)
        if modulus:
            question += f" mod {modulus}"
            total %= modulus
        question += "="
        checksum = zlib.crc32(question.encode())
        if checksum % 8 not in PARTS[config.name]:
            continue
        columns: dict[str, Any] = {"answer": str(total)}
        partial_sums = list(itertools.accumulate(row))[1:-1]
        if partial_sums:
            columns["key_steps"] = [str(partial_sum) for partial_sum in partial_sums]
        examples.append(Example(question, columns, f"arithmetic:{i}"))
    if config.name == "test":  # keep the last copy of each sum
        last_copies = {example.prompt: example for example in reversed(examples)}
        examples = list(last_copies.values())[::-1]
    if not examples:
        raise ConfigError(f"prompts.size={config.size} is too small: none of the sums is of the part {config.name!r}")
    return Loaded(tuple(examples))


def reward(prompts: list, completions: list[str], *, answer: list[str], **columns) -> list[float]:
    """Return 1.0 if the completion is exactly the answer (surrounding spaces are ignored), else 0.0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
