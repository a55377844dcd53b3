"""Shapes of models, as read from a file's header or a preset, without any arrays.

Owns: ``Architecture`` and its allowed numbers, the presets of random models. Does not know: parameters, files, devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.models.delta import Delta
from jaxrl_llm.settings.schema import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rope to longer contexts: a kind of ``rope.KINDS``, and its numbers with their names in config.json."""

    kind: str
    numbers: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The kind of one layer: the properties in which layers of a model can differ."""

    window: int = 0  # a token attends to itself and the window - 1 tokens before it; 0 = to all tokens before it
    rope: int = 0  # 0 = rope with rope_theta, 1 = rope with local_rope_theta, -1 = no rope
    is_delta: bool = False  # a gated delta rule (models.delta) replaces attention

    def has(self, name: str) -> bool:
        """Return whether the layer has this parameter of a block.

        Parameters of attention are in layers with attention. Parameters of the gated delta rule are in layers with the
        rule. Other parameters are in all layers.
        """
        kind = name.partition("_")[0]
        return self.is_delta if kind == "delta" else not (self.is_delta and kind in ("q", "k", "v", "o", "sinks"))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a decoder-only transformer. The default values describe Llama."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int  # hidden size of the MLP, or of one expert
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = True
    max_positions: int = 2048
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # RMSNorm of queries and keys before rope: "head" = per head, "all" = over all heads, "" = none
    pre_norm: bool = True  # RMSNorm of the inputs of attention and MLP
    post_norm: bool = False  # RMSNorm of the outputs of attention and MLP
    norm_offset: float = 0.0  # added to the stored scale of every norm
    activation: str = "silu"  # a key of variants.ACTIVATIONS
    embedding_scale: float = 1.0  # factor of the embeddings before the first block
    score_width: float = 0.0  # attention scores are divided by the root of this number; 0 = the head size
    local_rope_theta: float = 10000.0
    rotary_size: int = 0  # number of dimensions of a head that rope rotates, from the first on; 0 = all
    sinks: bool = False  # the softmax of each head has one more learned score, without a value
    output_gate: bool = False  # a head's output is multiplied by the sigmoid of a second projection of the input
    delta: Delta | None = None  # sizes of the gated delta rule, for layers with ``is_delta``
    num_experts: int = 0  # 0 = one MLP for all tokens
    experts_per_token: int = 0
    norm_topk: bool = False  # normalise the chosen experts' probabilities to a sum of 1
    shared_ffn: int = 0  # hidden size of the shared expert, which has its own sigmoid gate; 0 = no shared expert
    experts_bias: bool = False  # biases of the router and of the experts' matrices
    glu_limit: float = 0.0  # limit of the experts' gates and ups, as in GPT-OSS (variants.gated); 0 = no limit
    layers: tuple[Layer, ...] = ()  # the kind of each layer; () = all layers have the kind Layer()
    family: str = "llama"  # model_type in config.json; the computation does not depend on it

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            sizes = f"{self.num_heads} heads, {self.num_kv_heads} key heads of size {self.head_size}"
            raise ConfigError(f"a model of {sizes}: heads must be a multiple of key heads, and their size be even")

    @property
    def by_layer(self) -> tuple[Layer, ...]:
        return self.layers or (Layer(),) * self.num_layers

    def layers_with(self, name: str) -> tuple[int, ...]:
        """Return the indices of the layers that have this parameter, in the order in which they are stacked."""
        return tuple(i for i, layer in enumerate(self.by_layer) if layer.has(name))

    @property
    def num_params(self) -> int:
        N, K, H, D, E = self.num_heads, self.num_kv_heads, self.head_size, self.width, self.num_experts
        Q = N * (1 + self.output_gate)
        block = 3 * D * self.ffn * max(E, 1) + D * E + 2 * D * (self.pre_norm + self.post_norm)
        block += (3 * D * self.shared_ffn + D) * bool(self.shared_ffn)
        block += self.mlp_bias * (2 * self.ffn + D) + self.experts_bias * E * (1 + 2 * self.ffn + D)
        attention = D * H * (Q + N + 2 * K) + self.qkv_bias * (Q + 2 * K) * H + self.o_bias * D + self.sinks * N
        attention += {"": 0, "head": 2 * H, "all": (N + K) * H}[self.qk_norm]
        of_kinds = len(self.layers_with("q")) * attention
        of_kinds += len(self.layers_with("delta_out")) * (self.delta.num_params(D) if self.delta else 0)
        return self.num_layers * block + of_kinds + self.vocab_size * D * (1 if self.tied else 2) + D


def positive(path: Any, key: str, value: Any, *, whole: bool = True, most: float = 2**31 - 1) -> Any:
    """Return the value of ``key`` in the file ``path`` after a check.

    Raises:
        ConfigError: the value is not a (whole) number above 0 and at most ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value <= most:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{path}: {key}={value!r:.60} must be {kind} above 0 and at most {most}")
    return value if whole else float(value)


# Models with random weights and a byte tokenizer (260 ids), which need no download. For tests and first experiments.
PRESETS = {
    "debug": Architecture(vocab_size=260, width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16, ffn=128),
    # For the replay study: arithmetic at character level on a CPU.
    "study": Architecture(vocab_size=260, width=64, num_layers=2, num_heads=4, num_kv_heads=4, head_size=16, ffn=256),
    "debug_experts": Architecture(
        **dict(vocab_size=260, width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16, ffn=48, tied=False),
        **dict(num_experts=6, experts_per_token=2, norm_topk=True, qk_norm="head", family="qwen3_moe"),
    ),
    # Eight heads can be split over any mesh of eight devices.
    "debug_wide": Architecture(
        vocab_size=264, width=128, num_layers=4, num_heads=8, num_kv_heads=8, head_size=16, ffn=256, tied=False
    ),
    "debug_hybrid": Architecture(  # like Qwen3-Next
        **dict(vocab_size=260, width=64, num_layers=4, num_heads=4, num_kv_heads=2, head_size=16, rotary_size=4),
        **dict(num_experts=6, experts_per_token=2, norm_topk=True, ffn=48, shared_ffn=48),
        **dict(qk_norm="head", norm_offset=1.0, output_gate=True, delta=Delta(2, 4, 16, 16, 4, is_grouped=True)),
        **dict(layers=(*(Layer(is_delta=True),) * 3, Layer()), family="qwen3_next"),
    ),
}
