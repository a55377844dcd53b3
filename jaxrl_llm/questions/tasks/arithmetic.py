"""Sums of whole numbers, as plain text: "37+85=" has the answer "122", "37+85 mod 10=" the answer "2". No dependency.

``prompts.arguments``, all whole numbers: ``terms`` (2; at least 2), ``largest`` (99; terms are drawn from 0 to it) and
``modulus`` (0 = none). ``prompts.name`` is "" for every question, or one of two parts without a question in common,
whatever the seed: "train" and "test" (an eighth of all questions, for ``eval.name``). So runs of different seeds, and
the run that made the model they start from, hold the same questions out. Sums on the way to that of all terms, where
there are any, are the column ``key_steps``: of "3+4+5=" it is ["7"].

Owns: its questions, their parts, their answers and exact match. Does not know: tokenizers, models.
"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked
from jaxrl_llm.runtime.nested import ConfigError

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = "jaxrl_llm.questions.tasks.arithmetic:reward"

# argument -> (default, least, most)
ARGUMENTS = {"terms": (2, 2, 100), "largest": (99, 1, 10**9), "modulus": (0, 0, 10**9)}
PARTS = {"": range(8), "train": range(1, 8), "test": range(1)}  # remainders of the question's checksum


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Of ``config.size`` sums drawn from ``seed``, repetitions included, those of the part; the test's each once.

    Host; ``columns`` is ``{"answer": str}``, with more than two terms ``"key_steps": list[str]`` besides.

    Raises:
        ConfigError: an argument that is none of ``ARGUMENTS``, its value, an unknown part, or one without a question.
    """
    from jaxrl_llm.types import Example  # here, for reward workers import this module and must not pay for jax

    terms, largest, modulus = checked(config.arguments, ARGUMENTS).values()
    if config.name not in PARTS:
        raise ConfigError(
            f"{config.name!r} is no part of the sums; prompts.name and eval.name take '', 'train', 'test'"
        )
    examples = []
    for i, row in enumerate(np.random.default_rng(seed).integers(0, largest + 1, (config.size, terms)).tolist(), 1):
        total = sum(row) % modulus if modulus else sum(row)
        question = "+".join(map(str, row)) + (f" mod {modulus}=" if modulus else "=")
        if zlib.crc32(question.encode()) % 8 in PARTS[config.name]:
            steps = [str(x) for x in itertools.accumulate(row)][1:-1]
            columns = {"answer": str(total)} | ({"key_steps": steps} if steps else {})
            examples.append(Example(question, columns, f"arithmetic:{i}"))
    if config.name == "test":
        examples = list({example.prompt: example for example in reversed(examples)}.values())[::-1]
    if not examples:
        raise ConfigError(f"prompts.size={config.size} is too small: none of the sums is of the part {config.name!r}")
    return Loaded(tuple(examples))


def reward(prompts: list, completions: list[str], *, answer: list[str], **columns) -> list[float]:
    """1.0 where the completion is the answer and nothing else (spaces around it do no harm), else 0.0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
