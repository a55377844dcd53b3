"""Shapes of published models, for measurements with random weights: no file is read and none is fetched."""

from __future__ import annotations

from jaxrl_llm.models import presets
from jaxrl_llm.models.architecture import PRESETS, Architecture

SHAPES = {
    "smollm2-135m": presets.PRESETS["smollm2-135m"],
    # Qwen/Qwen2-1.5B, config.json; without its biases of q, k and v, which cost nothing.
    "qwen2-1.5b": Architecture(
        vocab_size=151936,
        width=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_size=128,
        ffn=8960,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_positions=32768,
    ),
    # For tests of the measurements themselves.
    "tiny": PRESETS["debug"],
}
