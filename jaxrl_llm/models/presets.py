"""Model presets: the facts about a model that a plan needs, from its files or from a table of public models.

The shapes are from the models' ``config.json`` on the Hugging Face hub (organisations meta-llama, HuggingFaceTB, Qwen,
google, allenai, mistralai and openai).
Owns: this table. Does not know: weights, compilers.
"""

from __future__ import annotations

import dataclasses

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models.architecture import Architecture, Delta, Layer, RopeScaling
from jaxrl_llm.models.files import pretrained

_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(
    width: int,
    layers: int,
    heads: int,
    ffn: int,
    *,
    head_size: int = 128,
    factor: float = 8.0,
) -> Architecture:
    """Return the architecture of Llama 3.1, or of Llama 3.2 if the factor is 32. Llama 3.2 ties its embeddings."""
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


def _smollm2(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    theta: float = 100000.0,
) -> Architecture:
    return Architecture(
        vocab_size=49152,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=64,
        ffn=ffn,
        rope_theta=theta,
        max_positions=8192,
    )


def _qwen3(width: int, layers: int, heads: int, ffn: int, *, kv_heads: int = 8, tied: bool = False) -> Architecture:
    return Architecture(
        vocab_size=151936,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=128,
        ffn=ffn,
        tied=tied,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_positions=40960,
        qk_norm="head",
        family="qwen3",
    )


def _qwen3_moe(width: int, layers: int, heads: int, ffn: int) -> Architecture:
    """Return a Qwen3 mixture of experts. ``ffn`` is the width of each of the 128 experts; a token uses 8 of them."""
    return dataclasses.replace(
        _qwen3(width, layers, heads, ffn, kv_heads=4),
        num_experts=128,
        experts_per_token=8,
        norm_topk=True,
        family="qwen3_moe",
    )


def _hybrid(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    values: int,
    *,
    vocab_size: int,
    family: str,
    num_experts: int = 0,
    experts_per_token: int = 0,
    norm_topk: bool = False,
    shared_ffn: int = 0,
) -> Architecture:
    """Return a Qwen3-Next or Qwen3.5 model.

    Three gated delta layers with ``values`` heads precede each attention layer.
    """
    kinds = tuple(Layer(mixer="attention" if i % 4 == 3 else "delta_rule") for i in range(layers))
    return Architecture(
        vocab_size=vocab_size,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=256,
        ffn=ffn,
        tied=False,
        rope_theta=1e7,
        rotary_size=64,
        max_positions=262144,
        norm_eps=1e-6,
        norm_offset=1.0,
        qk_norm="head",
        output_gate=True,
        layers=kinds,
        delta=Delta(16, values, 128, 128, 4, is_grouped=family == "qwen3_next"),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        norm_topk=norm_topk,
        shared_ffn=shared_ffn,
        family=family,
    )


def _gpt_oss(layers: int, experts: int) -> Architecture:
    """Return a gpt-oss model. Its layers alternate between a window of 128 tokens and full attention.

    A token uses 4 experts.
    """
    yarn = {
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return Architecture(
        vocab_size=201088,
        width=2880,
        num_layers=layers,
        num_heads=64,
        num_kv_heads=8,
        head_size=64,
        ffn=2880,
        tied=False,
        rope_theta=150000.0,
        rope_scaling=RopeScaling("yarn", tuple(yarn.items())),
        max_positions=131072,
        num_experts=experts,
        experts_per_token=4,
        norm_topk=True,
        experts_bias=True,
        glu_limit=7.0,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        layers=(Layer(window=128), Layer()) * (layers // 2),
        family="gpt_oss",
    )


def _qwen25(width: int, layers: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False) -> Architecture:
    return Architecture(
        vocab_size=151936 if tied else 152064,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=width // heads,
        ffn=ffn,
        tied=tied,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_positions=32768,
        qkv_bias=True,
        family="qwen2",
    )


def _gemma3(width: int, layers: int, ffn: int) -> Architecture:
    """Return a Gemma 3 text model: five layers with a window of 512 tokens, then one layer with full attention."""
    return Architecture(
        vocab_size=262144,
        width=width,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=1,
        head_size=256,
        ffn=ffn,
        norm_eps=1e-6,
        norm_offset=1.0,
        qk_norm="head",
        post_norm=True,
        rope_theta=1e6,
        local_rope_theta=1e4,
        max_positions=32768,
        activation="gelu_tanh",
        embedding_scale=width**0.5,
        score_width=256,
        layers=tuple(Layer() if i % 6 == 5 else Layer(window=512, rope=1) for i in range(layers)),
        family="gemma3_text",
    )


_SMOLLM3 = Architecture(
    vocab_size=128256,
    width=2048,
    num_layers=36,
    num_heads=16,
    num_kv_heads=4,
    head_size=128,
    ffn=11008,
    rope_theta=5e6,
    norm_eps=1e-6,
    max_positions=65536,
    family="smollm3",
    layers=tuple(Layer(rope=-1 if i % 4 == 3 else 0) for i in range(36)),
)
_OLMO2 = Architecture(
    vocab_size=100352,
    width=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=16,
    head_size=128,
    ffn=8192,
    rope_theta=5e5,
    norm_eps=1e-6,
    max_positions=4096,
    tied=False,
    family="olmo2",
    qk_norm="all",
    pre_norm=False,
    post_norm=True,
)

_MIXTRAL = Architecture(
    vocab_size=32000,
    width=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    ffn=14336,
    rope_theta=1e6,
    norm_eps=1e-5,
    max_positions=32768,
    tied=False,
    family="mixtral",
    num_experts=8,
    experts_per_token=2,
    norm_topk=True,
)

PRESETS = {
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, 130000.0),
    "llama-3.2-1b": _llama(2048, 16, 32, 8192, head_size=64, factor=32.0),
    "llama-3.2-3b": _llama(3072, 28, 24, 8192, factor=32.0),
    "llama-3.1-8b": _llama(4096, 32, 32, 14336),
    "llama-3.1-70b": _llama(8192, 80, 64, 28672),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "qwen2.5-0.5b": _qwen25(896, 24, 14, 2, 4864, tied=True),
    "qwen2.5-1.5b": _qwen25(1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen25(2048, 36, 16, 2, 11008, tied=True),
    "qwen2.5-7b": _qwen25(3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _qwen25(5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _qwen25(5120, 64, 40, 8, 27648),
    "smollm3-3b": _SMOLLM3,
    "gemma-3-270m": _gemma3(640, 18, 2048),
    "gemma-3-1b": _gemma3(1152, 26, 6912),
    "olmo-2-1b": _OLMO2,
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 1536),
    "qwen3-next-80b-a3b": _hybrid(
        width=2048,
        layers=48,
        heads=16,
        kv_heads=2,
        ffn=512,
        values=32,
        vocab_size=151936,
        num_experts=512,
        experts_per_token=10,
        norm_topk=True,
        shared_ffn=512,
        family="qwen3_next",
    ),
    "qwen3.5-27b": _hybrid(5120, 64, 24, 4, 17408, 48, vocab_size=248320, family="qwen3_5_text"),
    "qwen3.5-35b-a3b": _hybrid(
        width=2048,
        layers=40,
        heads=16,
        kv_heads=2,
        ffn=512,
        values=32,
        vocab_size=248320,
        num_experts=256,
        experts_per_token=8,
        norm_topk=True,
        shared_ffn=512,
        family="qwen3_5_moe_text",
    ),
    "mixtral-8x7b": _MIXTRAL,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}

# Tokens that end a completion of the instruction-tuned models.
EOS_IDS = {
    "smollm2": (2,),
    "llama": (128001, 128008, 128009),
    "smollm3": (128012,),
    "gemma": (1, 106),
}
EOS_IDS |= {
    "qwen3": (151645, 151643),
    "qwen2.5": (151645, 151643),
    "qwen3.5": (248046, 248044),
    "olmo": (100257,),
    "mixtral": (2,),
    "gpt": (200002, 199999, 200012),
}


def eos_ids(name: str) -> tuple[int, ...]:
    return EOS_IDS[name.partition("-")[0]]


@dataclasses.dataclass(frozen=True)
class Model:
    """Facts about a model that a run needs in order to be compiled."""

    name: str
    arch: Architecture
    eos_ids: tuple[int, ...]
    reference: Architecture


def model_of(config: Config, preset: str = "") -> Model:
    """Return the model of a config, or the preset that replaces it.

    Raises:
        ConfigError: the preset or model does not exist, or a preset is combined with settings that need a model's
            files.
    """
    if not preset:
        source = pretrained.resolve(config.model.path)
        reference = pretrained.resolve_reference(config.model, source)
        ids = source.tokenizer().ending_at(config.sampling.stop_tokens).eos_ids
        return Model(config.model.path, source.architecture(), ids, reference.architecture())
    if preset not in PRESETS:
        raise ConfigError(f"--preset={preset!r} must be one of {', '.join(PRESETS)}")
    if config.model.reference_path:
        named = f"model.reference_path={config.model.reference_path!r:.200}"
        raise ConfigError(f"{named} must be '' with --preset={preset!r}, which takes the place of model.path")
    if config.sampling.stop_tokens:
        named = f"sampling.stop_tokens={config.sampling.stop_tokens!r:.200}"
        raise ConfigError(f"{named} must be () with --preset={preset!r}, which has no tokenizer")
    arch = PRESETS[preset]
    return Model(preset, arch, eos_ids(preset), arch)
