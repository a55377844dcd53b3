"""Shapes of the models: what a file's header or a preset name says, and nothing about arrays.

Owns: ``Architecture``, what its numbers may be, the named random models. Does not know: parameters, files, devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.runtime.nested import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3 frequency scaling (``rope_type: llama3`` in a Hugging Face config)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a Llama-family decoder."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = True
    max_positions: int = 2048

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            sizes = f"{self.num_heads} heads, {self.num_kv_heads} key heads of size {self.head_size}"
            raise ConfigError(f"a model of {sizes}: heads must be a multiple of key heads, and their size be even")

    @property
    def num_params(self) -> int:
        attention = self.width * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        block = attention + 3 * self.width * self.ffn + 2 * self.width
        embeddings = self.vocab_size * self.width * (1 if self.tied else 2)
        return self.num_layers * block + embeddings + self.width


def positive(path: Any, key: str, value: Any, *, whole: bool = True, most: float = 2**31 - 1) -> Any:
    """The value that the file ``path`` has for ``key``; ConfigError where it is no (whole) number above 0."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value <= most:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{path}: {key}={value!r:.60} must be {kind} above 0 and at most {most}")
    return value if whole else float(value)


# Random weights and a byte tokenizer (260 ids): no download. Sizes for tests and a first look.
PRESETS = {
    "debug": Architecture(vocab_size=260, width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16, ffn=128),
    # The replay study's: arithmetic at character level on a CPU.
    "study": Architecture(vocab_size=260, width=64, num_layers=2, num_heads=4, num_kv_heads=4, head_size=16, ffn=256),
    # Eight heads divide over any mesh of eight devices.
    "debug_wide": Architecture(
        vocab_size=264, width=128, num_layers=4, num_heads=8, num_kv_heads=8, head_size=16, ffn=256, tied=False
    ),
}
