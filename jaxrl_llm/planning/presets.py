"""Presets: what a plan has to know of a model, of its files or of a public model's shape by name alone.

The shapes are from the models' ``config.json`` on the Hugging Face hub (organisations meta-llama and HuggingFaceTB).
Owns: this table. Does not know: weights, compilers.
"""

from __future__ import annotations

import dataclasses

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models.architecture import Architecture, RopeScaling
from jaxrl_llm.models.files import pretrained

_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def _llama(width: int, layers: int, heads: int, ffn: int, *, head_size: int = 128, factor: float = 8.0) -> Architecture:
    """Of Llama 3.1, or of 3.2 where the factor is 32; those have one matrix for both embeddings."""
    return Architecture(
        vocab_size=128256,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_size=head_size,
        ffn=ffn,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", tuple({**_LLAMA3, "factor": factor}.items())),
        tied=factor == 32.0,
        max_positions=131072,
    )


def _smollm2(width: int, layers: int, heads: int, kv_heads: int, ffn: int, theta: float = 100000.0) -> Architecture:
    sizes = dict(width=width, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, ffn=ffn, rope_theta=theta)
    return Architecture(vocab_size=49152, head_size=64, max_positions=8192, **sizes)


PRESETS = {
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, 130000.0),
    "llama-3.2-1b": _llama(2048, 16, 32, 8192, head_size=64, factor=32.0),
    "llama-3.2-3b": _llama(3072, 28, 24, 8192, factor=32.0),
    "llama-3.1-8b": _llama(4096, 32, 32, 14336),
    "llama-3.1-70b": _llama(8192, 80, 64, 28672),
}

# Tokens that end a completion, of the instruction-tuned models.
EOS_IDS = {"smollm2": (2,), "llama": (128001, 128008, 128009)}


def eos_ids(name: str) -> tuple[int, ...]:
    return EOS_IDS[name.partition("-")[0]]


@dataclasses.dataclass(frozen=True)
class Model:
    """What a run has to know of a model to be compiled."""

    name: str
    arch: Architecture
    eos_ids: tuple[int, ...]
    reference: Architecture


def model_of(config: Config, preset: str = "") -> Model:
    """The model of a config, or a preset in its place.

    Raises:
        ConfigError: there is no such preset or model, or a preset would need another model's files beside it.
    """
    if not preset:
        source = pretrained.resolve(config.model.path)
        reference = pretrained.resolve_reference(config.model, source)
        ids = source.tokenizer().eos_ids
        return Model(config.model.path, source.architecture(), ids, reference.architecture())
    if preset not in PRESETS:
        raise ConfigError(f"--preset={preset!r} must be one of {', '.join(PRESETS)}")
    if config.model.reference_path:
        raise ConfigError(f"--preset={preset!r} takes the place of model.path; model.reference_path must be ''")
    arch = PRESETS[preset]
    return Model(preset, arch, eos_ids(preset), arch)
