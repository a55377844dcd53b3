"""Keys of config.json and tensor names of hybrids: models that alternate attention and the gated delta rule.

Owns: the keys and tensor names of hybrids, the allowed values of the keys. Does not know: other families, any
computation.
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.architecture import Architecture, Delta, positive
from jaxrl_llm.models.files import mixtures

_OF_RULE = "model.layers.{layer}.linear_attn."
_SHARED = "model.layers.{layer}.mlp.shared_expert"
NAMES = {
    **{f"blocks.delta_{name}": f"{_OF_RULE}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")},
    "blocks.delta_in": _OF_RULE + "in_proj_qkvz.weight",
    "blocks.delta_gates": _OF_RULE + "in_proj_ba.weight",
    "blocks.delta_conv": _OF_RULE + "conv1d.weight",
    "blocks.delta_rate": _OF_RULE + "A_log",
    "blocks.delta_bias": _OF_RULE + "dt_bias",
    "blocks.delta_norm": _OF_RULE + "norm.weight",
    "blocks.delta_out": _OF_RULE + "out_proj.weight",
    **mixtures.names("mlp.", "gate_proj", "up_proj", "down_proj"),
    **{f"blocks.shared_{name}": f"{_SHARED}.{name}_proj.weight" for name in ("gate", "up", "down")},
    "blocks.shared_router": _SHARED + "_gate.weight",
}
# Keys of the gated delta rule with their defaults, in the order of Delta's sizes.
_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
KEYS = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
# Further keys in released files of Qwen3.5: about a second model, about a dtype that is always float32 here, and keys
# with only one possible value.
RELEASED = {
    "mtp_num_hidden_layers": 0,
    "mtp_use_dedicated_embeddings": False,
    "mamba_ssm_dtype": "float32",
}
RELEASED |= {"attn_output_gate": True, "mlp_only_layers": None}
ONLY_RELEASED = {"attn_output_gate": (True,), "mlp_only_layers": (None, [])}
ONLY = {"hidden_act": ("swish", "silu")}  # the rule's convolution has the same activation
# Model_type of models with images, whose text_config belongs to one of the families.
WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
FIXED = {"qk_norm": "head", "norm_offset": 1.0, "output_gate": True}
# Keys of experts with their defaults, of Qwen3.5 and of Qwen3-Next.
EXPERTS_5 = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_local_experts": None,
    "intermediate_size": None,
}
EXPERTS_NEXT = {
    **EXPERTS_5,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
# Keys in rope_parameters that are not about scaling. mrope needs no code, because for text all its sections have the
# same position.
OF_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


class _NameInSomeLayers(str):
    """Tensor name of a parameter that only some layers have. Index i means the i-th of these layers."""

    layers: tuple[int, ...]

    def format(self, *args: object, layer: int = 0, **numbers: object) -> str:
        """Return the name with the number of the layer."""
        return super().format(*args, layer=self.layers[layer], **numbers)


def by_layer(names: dict[str, str], arch: Architecture) -> dict[str, str]:
    """Return tensor names of stacked parameters that map an index in the stack to the number of the layer.

    The two numbers differ if not all layers have the parameter.
    """
    mapped: dict[str, str] = {}
    for path, name in names.items():
        mapped_name = _NameInSomeLayers(name)
        mapped_name.layers = arch.layers_with(path.removeprefix("blocks."))
        mapped[path] = mapped_name
    return mapped


def delta_of(path: Any, config: dict[str, Any], keys: dict[str, Any]) -> Delta | None:
    """Return the sizes of the gated delta rule, or None if the family's ``keys`` have no such rule.

    Raises:
        ConfigError: a size is not valid.
    """
    if "linear_num_key_heads" not in keys:
        return None
    key_heads, value_heads, key_size, value_size, taps = (positive(path, key, config[key]) for key in _SIZES)
    is_grouped = "decoder_sparse_step" in keys
    try:
        return Delta(key_heads, value_heads, key_size, value_size, taps, is_grouped)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's config if the config.json is of a model with images, else the config unchanged."""
    text = config.get("text_config")
    if config.get("model_type") not in WITH_IMAGES or not isinstance(text, dict):
        return config
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "tie_word_embeddings": tied}


def ends_of(config: dict[str, Any]) -> Any:
    """Return ``eos_token_id`` of a config.json, or else of its text model; None if both lack the key."""
    ids = config.get("eos_token_id")
    text = config.get("text_config")
    if ids is None and isinstance(text, dict):
        return text.get("eos_token_id")
    return ids


def experts_of(path: Any, config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an ``Architecture`` about experts.

    The result is {} if the family's ``keys`` have no shared experts, or if no layer has experts.

    Raises:
        ConfigError: a size is not valid, or only some of the layers have experts.
    """
    if "shared_expert_intermediate_size" not in keys or config["num_experts"] == 0:
        return {}

    def get(key: str, **limits: Any) -> Any:
        return positive(path, key, config[key], **limits)

    dense_layers = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step", 1)
    positive(path, "decoder_sparse_step", step)
    layers = range(config["num_hidden_layers"]) if isinstance(dense_layers, list) else ()
    has_experts = {i not in dense_layers and (i + 1) % step == 0 for i in layers}
    if len(has_experts) != 1:
        raise ConfigError(
            f"{path}: mlp_only_layers={dense_layers!r:.60} and decoder_sparse_step={step} must give experts to all "
            "layers or to none"
        )
    if has_experts == {False}:
        return {}
    fields = mixtures.sizes(get)
    fields["ffn"] = get("moe_intermediate_size")
    fields["shared_ffn"] = get("shared_expert_intermediate_size")
    return fields


def rotary_size(path: Any, config: dict[str, Any], keys: dict[str, Any], head_size: int) -> int:
    """Return the number of dimensions of a head that rope rotates; 0 = all.

    Only families with ``partial_rotary_factor`` among their ``keys`` can rotate a part of the head.
    """
    if "partial_rotary_factor" not in keys:
        return 0
    parameters = config["rope_scaling"] or config["rope_parameters"] or {}
    factor = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    if factor is None:
        factor = config["partial_rotary_factor"]
    size = int(head_size * positive(path, "partial_rotary_factor", factor, whole=False, most=1.0))
    if size < 2 or size % 2:
        raise ConfigError(
            f"{path}: partial_rotary_factor={factor} must rotate an even number of dimensions; of a head of "
            f"{head_size} it rotates {size}"
        )
    return 0 if size == head_size else size


def config_of(arch: Architecture) -> dict[str, Any]:
    """Return the config.json keys of an architecture's partial rotation and gated delta rule."""
    config: dict[str, Any] = {"partial_rotary_factor": (arch.rotary_size or arch.head_size) / arch.head_size}
    d = arch.delta
    if d is not None:
        sizes = (d.key_heads, d.value_heads, d.key_size, d.value_size, d.taps)
        config |= dict(zip(_SIZES, sizes, strict=True))
    return config
