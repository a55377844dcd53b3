"""Shapes of the models: what a file's header or a preset name says, and nothing about arrays.

Owns: ``Architecture`` and the named random models. Does not know: parameters, files, devices.
"""

from __future__ import annotations

import dataclasses


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
        assert self.num_heads % self.num_kv_heads == 0, "query heads share key heads evenly"

    @property
    def num_params(self) -> int:
        attention = self.width * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        block = attention + 3 * self.width * self.ffn + 2 * self.width
        embeddings = self.vocab_size * self.width * (1 if self.tied else 2)
        return self.num_layers * block + embeddings + self.width


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
