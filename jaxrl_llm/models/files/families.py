"""Families of models in Hugging Face folders: the keys of config.json, their meaning, and the names of tensors.

A family is a row of ``FAMILIES``. A row has:

- the keys of config.json with their defaults;
- the names of tensors that differ from Llama's;
- fields of ``Architecture`` that are always the same in this family;
- the layers that differ from others.

An unknown key raises an error. It may be a multiplier, a cap or a window. If it were ignored, a different model would
run without an error.

Owns: this table, the conversion between config.json and ``Architecture``. Does not know: files, weights, computation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models import rope
from jaxrl_llm.models.architecture import Architecture, Layer, positive
from jaxrl_llm.models.files import hybrids, mixtures, rope_keys

# Values of ``layer_types``.
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"

_LAYER = "model.layers.{layer}."
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "blocks.attention_norm": _LAYER + "input_layernorm.weight",
    "blocks.mlp_norm": _LAYER + "post_attention_layernorm.weight",
    **{f"blocks.{name}": f"{_LAYER}self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")},
    **{f"blocks.{name}_bias": f"{_LAYER}self_attn.{name}_proj.bias" for name in ("q", "k", "v", "o")},
    **{f"blocks.{name}_norm": f"{_LAYER}self_attn.{name}_norm.weight" for name in ("q", "k")},
    "blocks.sinks": _LAYER + "self_attn.sinks",
    **{f"blocks.{name}": f"{_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"blocks.{name}_bias": f"{_LAYER}mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_POST_NORMS = {
    "blocks.attention_post_norm": _LAYER + "post_attention_layernorm.weight",
    "blocks.mlp_post_norm": _LAYER + "post_feedforward_layernorm.weight",
}

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
}

# Keys of any family that do not change the computed logits. Some of them matter only in transformers' own training or
# generation.
INERT = re.compile(
    r"_.*|transformers.*|unsloth.*|architectures|attention_dropout|attn_implementation|auto_map|bad_words_ids"
    r"|begin_suppress_tokens|(bos|eos|pad|sep|unk|decoder_start|forced_bos|forced_eos)_token_id|cache_implementation"
    r"|chunk_size_feed_forward|diversity_penalty|do_sample|(torch_)?dtype|early_stopping|(encoder_)?no_repeat_ngram_size"
    r"|exponential_decay_length_penalty|finetuning_task|hidden_dropout|id2label|initializer_range|is_decoder"
    r"|is_encoder_decoder|is_llama_config|label2id|length_penalty|(max|min)_length|max_window_layers|model_type|num_beam_groups|num_beams"
    r"|num_return_sequences|output_(attentions|hidden_states|scores)|prefix|pretraining_tp|problem_type"
    r"|remove_invalid_values|repetition_penalty|(output_)?router_(logits|aux_loss_coef|jitter_noise)|return_dict(_in_generate)?|suppress_tokens|task_specific_params"
    r"|temperature|tf_legacy_loss|tokenizer_class|top_[kp]|torchscript|trust_remote_code|typical_p|use_bfloat16|use_cache"
)
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Keys of rope in every family, with their defaults.
_ROPE = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
}
_COMMON = {
    "num_key_value_heads": None,  # None = num_attention_heads
    "head_dim": None,  # None = hidden_size / num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "is_causal": True,
    **_ROPE,
}
_WINDOW = {"sliding_window": None, "layer_types": None}
_QWEN = {
    **_COMMON,
    **_WINDOW,
    "sliding_window": 4096,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "max_window_layers": 28,
}


@dataclass(frozen=True)
class Family:
    """A row of ``FAMILIES``: how one family's config.json and tensors map to an ``Architecture``.

    Attributes:
        class_name: name of the model's class in transformers.
        keys: keys of config.json with their defaults, which are the defaults of transformers' class.
        fixed: fields of ``Architecture`` that every model of the family has.
        derived: (function that reads a number of config.json) -> further fields of ``Architecture``.
        names: names of tensors that differ from ``NAMES``.
        is_windowed: (config, index of the layer) -> whether the layer has a window. Used if the config has no
            ``layer_types``.
        local_rope: layers with a window have a separate rope.
        only: allowed values of a key.
        experts_together: files have all experts of a layer in one tensor, in GPT-OSS's form (mixtures.Apart).
        experts_in_halves: files may have all experts of a layer in one tensor, in Qwen3.5's form (mixtures.Apart).
    """

    class_name: str
    keys: dict[str, Any]
    fixed: dict[str, Any] = field(default_factory=dict)
    derived: Callable[[Callable[..., Any]], dict[str, Any]] = lambda get: {}
    names: dict[str, str] = field(default_factory=dict)
    is_windowed: Callable[[dict[str, Any], int], bool] = lambda config, index: False
    local_rope: bool = False
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    experts_together: bool = False
    experts_in_halves: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", {**_COMMON, "attention_bias": False, "mlp_bias": False}),
    "mistral": Family(
        "MistralForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        is_windowed=lambda config, index: True,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _QWEN,
        fixed={"qkv_bias": True},
        is_windowed=lambda config, index: index >= config["max_window_layers"],
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_QWEN, "head_dim": 128, "attention_bias": False},
        fixed={"qk_norm": "head"},
        is_windowed=lambda config, index: index >= config["max_window_layers"],
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_COMMON, **mixtures.QWEN3_MOE_KEYS},
        fixed={"qk_norm": "head"},
        derived=lambda get: {
            **mixtures.sizes(get),
            "ffn": get("moe_intermediate_size"),
        },
        names=mixtures.names("mlp.", "gate_proj", "up_proj", "down_proj"),
        is_windowed=lambda config, index: True,
        only={"decoder_sparse_step": (1,), "mlp_only_layers": (None, [])},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**_COMMON, **mixtures.MIXTRAL_KEYS},
        fixed={"norm_topk": True},
        derived=mixtures.sizes,
        names=mixtures.names("block_sparse_moe.", "w1", "w3", "w2"),
        is_windowed=lambda config, index: True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {**_COMMON, **_WINDOW, **mixtures.GPT_OSS_KEYS},
        fixed={"sinks": True, "norm_topk": True, "experts_bias": True},
        derived=lambda get: {
            **mixtures.sizes(get),
            "glu_limit": get("swiglu_limit", whole=False),
        },
        names=mixtures.names("mlp.", "gate_proj", "up_proj", "down_proj", router="router"),
        is_windowed=lambda config, index: index % 2 == 0,
        only=mixtures.GPT_OSS_ONLY,
        experts_together=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            **_COMMON,
            **_WINDOW,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_bias": False,
            "mlp_bias": False,
        },
        is_windowed=lambda config, index: not config["no_rope_layers"][index],
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**_COMMON, "rms_norm_eps": 1e-5, "attention_bias": False},
        fixed={"qk_norm": "all", "pre_norm": False, "post_norm": True},
        names=_POST_NORMS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **{key: value for key, value in _COMMON.items() if key != "hidden_act"},
            **_WINDOW,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        fixed={"qk_norm": "head", "post_norm": True, "norm_offset": 1.0},
        derived=lambda get: {
            "embedding_scale": get("hidden_size") ** 0.5,
            "score_width": get("query_pre_attn_scalar"),
        },
        names={
            **_POST_NORMS,
            "blocks.mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
        },
        is_windowed=lambda config, index: bool((index + 1) % config["sliding_window_pattern"]),
        local_rope=True,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {**_COMMON, **hybrids.KEYS, **hybrids.EXPERTS_NEXT},
        fixed=hybrids.FIXED,
        names=hybrids.NAMES,
        only=hybrids.ONLY,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        {**_COMMON, **hybrids.KEYS, **hybrids.RELEASED, **hybrids.EXPERTS_5},
        fixed={**hybrids.FIXED, "norm_topk": True},
        names=hybrids.NAMES,
        only=hybrids.ONLY | hybrids.ONLY_RELEASED,
        experts_in_halves=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        {**_COMMON, **hybrids.KEYS, **hybrids.RELEASED, "num_key_value_heads": 4},
        fixed=hybrids.FIXED,
        names=hybrids.NAMES,
        only=hybrids.ONLY | hybrids.ONLY_RELEASED,
    ),
}


def names_of(arch: Architecture) -> dict[str, str]:
    """Return the tensor name of each parameter of ``layout.LAYOUT`` that the architecture may have."""
    names = {**NAMES, **FAMILIES[arch.family].names}
    if arch.delta:
        names |= hybrids.by_layer({path: name for path, name in names.items() if "." in path}, arch)
    return names


def architecture_of(stored: dict[str, Any], path: Any) -> Architecture:
    """Return the architecture that a config.json describes.

    Args:
        stored: contents of the config.json.
        path: the config.json, for error messages.

    Raises:
        ConfigError: an unknown family, an unknown key, or a value that is not allowed.
    """
    stored = hybrids.text_of(stored)
    family, config = _checked_config(stored, path)

    def get(key: str, **limits: Any) -> Any:
        return positive(path, key, config[key], **limits)

    width = get("hidden_size")
    num_heads = get("num_attention_heads")
    num_layers = get("num_hidden_layers", most=1000)
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = num_heads
    if config["head_dim"] is None:
        config["head_dim"] = width // num_heads
    head_size = get("head_dim")
    activation = _activation(path, config, family)
    rotary_size = hybrids.rotary_size(path, config, family.keys, head_size)
    ropes = rope_keys.ropes_of(
        path,
        config,
        rotary_size or head_size,
        local=family.local_rope,
        keys=family.keys,
    )
    fields = {**ropes, **_fields_of_family(path, config, family)}
    if "ffn" not in fields:
        fields["ffn"] = get("intermediate_size")
    return Architecture(
        vocab_size=get("vocab_size"),
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=get("num_key_value_heads"),
        head_size=head_size,
        norm_eps=get("rms_norm_eps", whole=False, most=1.0),
        tied=_flag(path, "tie_word_embeddings", config.get("tie_word_embeddings", False)),
        max_positions=rope.most_positions(ropes["rope_scaling"], get("max_position_embeddings")),
        activation=activation,
        layers=_layers(path, config, family),
        rotary_size=rotary_size,
        delta=hybrids.delta_of(path, config, family.keys),
        family=config["model_type"],
        **fields,
    )


def _fields_of_family(path: Any, config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of ``Architecture`` that not every family has, or that are always the same in a family."""

    def get(key: str, **limits: Any) -> Any:
        return positive(path, key, config[key], **limits)

    def flag(key: str) -> bool:
        return _flag(path, key, config.get(key, False))

    has_bias = flag("attention_bias")
    return {
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": flag("mlp_bias"),
        "norm_topk": flag("norm_topk_prob"),
        **family.fixed,
        **family.derived(get),
        **hybrids.experts_of(path, config, family.keys),
    }


def _checked_config(stored: dict[str, Any], path: Any) -> tuple[Family, dict[str, Any]]:
    """Return the family of a config.json, and its contents with the family's defaults.

    Raises:
        ConfigError: an unknown family, an unknown key, a missing size, or a value that the family does not allow.
    """
    kind = stored.get("model_type")
    if kind not in list(FAMILIES):
        raise ConfigError(f"{path}: model_type={kind!r:.60} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    for key, value in stored.items():
        is_known = key in family.keys or key in _SIZES or INERT.fullmatch(key)
        if not is_known and value is not None and value is not False:
            raise ConfigError(
                f"{path}: {key}={value!r:.60} is not supported for model_type={kind!r}, because it may change the "
                f"computation; supported: {key} absent, null or false"
            )
    config = {**family.keys, **stored}
    for key in _SIZES:
        if key not in config:
            raise ConfigError(f"{path}: {key} is missing")
    if config.get("num_local_experts") is not None:  # transformers 5 writes this key for every family
        config["num_experts"] = config["num_local_experts"]
    for key, allowed in {"is_causal": (True,), **family.only}.items():
        if config[key] not in allowed:
            raise ConfigError(f"{path}: {key}={config[key]!r:.60} is not supported; supported: {allowed[-1]!r}")
    mixtures.check_quantisation(path, config.get("quantization_config"))
    return family, config


def _activation(path: Any, config: dict[str, Any], family: Family) -> str:
    """Return the name of the MLP's activation, a key of ``dense_mlp.ACTIVATIONS``."""
    key = "hidden_act" if "hidden_act" in family.keys else "hidden_activation"
    name = config[key]
    if name not in list(ACTIVATIONS):
        raise ConfigError(f"{path}: {key}={name!r:.60} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _flag(path: Any, key: str, value: Any) -> bool:
    """Return the value of a key that must be true or false."""
    if type(value) is not bool:
        raise ConfigError(f"{path}: {key}={value!r:.60} must be true or false")
    return value


def _layers(path: Any, config: dict[str, Any], family: Family) -> tuple[Layer, ...]:
    """Return the kind of each layer, or () if all layers have the kind ``Layer()``."""
    count = config["num_hidden_layers"]
    for key in ("no_rope_layer_interval", "sliding_window_pattern"):
        if key in family.keys:
            positive(path, key, config[key])
    if "max_window_layers" in family.keys and config["max_window_layers"] != 0:
        positive(path, "max_window_layers", config["max_window_layers"])
    has_rope = _has_rope(path, config, family)
    window = config.get("sliding_window")
    if window is not None and window is not False:
        positive(path, "sliding_window", window)
    if "use_sliding_window" in family.keys and not _flag(path, "use_sliding_window", config["use_sliding_window"]):
        window = None
    kinds = _layer_types(path, {**config, "no_rope_layers": has_rope}, family)
    layers = []
    for index in range(count):
        is_sliding = kinds[index] == SLIDING
        layers.append(
            Layer(
                window=(window or 0) if is_sliding else 0,
                rope=_rope_index(has_rope[index], is_local=is_sliding and family.local_rope),
                mixer="delta_rule" if kinds[index] == LINEAR else "attention",
            )
        )
    return () if set(layers) == {Layer()} else tuple(layers)


def _rope_index(has_rope: int, *, is_local: bool) -> int:
    """Return ``Layer.rope``."""
    if not has_rope:
        return -1
    return 1 if is_local else 0


def _has_rope(path: Any, config: dict[str, Any], family: Family) -> list[int]:
    """Return for each layer 1 if it has rope, otherwise 0."""
    count = config["num_hidden_layers"]
    if "no_rope_layers" not in family.keys:
        return [1] * count
    interval = config["no_rope_layer_interval"]
    defaults = [int((index + 1) % interval != 0) for index in range(count)]
    return _values_by_layer(path, config, "no_rope_layers", (0, 1), defaults)


def _layer_types(path: Any, config: dict[str, Any], family: Family) -> list[str]:
    """Return ``layer_types``, or the family's default if the key is absent."""
    count = config["num_hidden_layers"]
    other = SLIDING
    types = [SLIDING if family.is_windowed(config, index) else FULL for index in range(count)]
    is_hybrid = "linear_num_key_heads" in family.keys
    if is_hybrid:
        other = LINEAR
        interval = positive(path, "full_attention_interval", config["full_attention_interval"])
        types = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    if "layer_types" in family.keys:
        types = _values_by_layer(path, config, "layer_types", (FULL, other), types)
    return types


def _values_by_layer(
    path: Any, config: dict[str, Any], key: str, allowed: tuple[Any, ...], defaults: list[Any]
) -> list[Any]:
    """Return the list of ``key``, one value per layer, or ``defaults`` if the key is absent.

    Raises:
        ConfigError: the value is not a list of allowed values with one value per layer.
    """
    values = config.get(key)
    if values is None:
        return defaults
    count = len(defaults)
    if not isinstance(values, list) or len(values) != count or any(value not in allowed for value in values):
        raise ConfigError(f"{path}: {key}={values!r:.60} must be a list of {count}, each one of {allowed}")
    return values


def _layer_type(layer: Layer) -> str:
    """Return the name of the layer's kind in ``layer_types``."""
    if layer.is_recurrent:
        return LINEAR
    return SLIDING if layer.window else FULL


def config_of(arch: Architecture) -> dict[str, Any]:
    """Return the contents of a config.json that every version of transformers can read."""
    family = FAMILIES[arch.family]
    windows = [layer.window for layer in arch.by_layer]
    window = max(windows) or None
    act = next(key for key, value in ACTIVATIONS.items() if value == arch.activation)
    optional_keys = {
        "hidden_act": act,
        "hidden_activation": act,
        "attention_bias": arch.o_bias,
        "mlp_bias": arch.mlp_bias,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": [_layer_type(layer) for layer in arch.by_layer],
        "max_window_layers": windows.index(window) if window else arch.num_layers,
        "no_rope_layers": [int(layer.rope >= 0) for layer in arch.by_layer],
        "rope_local_base_freq": arch.local_rope_theta,
        "query_pre_attn_scalar": arch.score_width,
        "moe_intermediate_size": arch.ffn,
        "shared_expert_intermediate_size": arch.shared_ffn,
        "num_experts": arch.num_experts,
        "num_local_experts": arch.num_experts,
        "num_experts_per_tok": arch.experts_per_token,
        "norm_topk_prob": arch.norm_topk,
        "swiglu_limit": arch.glu_limit,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **hybrids.config_of(arch),
    }
    return {
        "architectures": [family.class_name],
        "model_type": arch.family,
        "torch_dtype": "float32",
        # Write the key, because some classes of transformers otherwise set a default and do not train its row.
        "pad_token_id": None,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "intermediate_size": arch.ffn,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_size,
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tied,
        **rope_keys.keys_of(arch, family.keys),
        **{key: value for key, value in optional_keys.items() if key in family.keys},
    }
