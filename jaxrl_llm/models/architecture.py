"""Shapes of the models: what a file's header or a preset name says, and nothing about arrays.

Owns: ``Architecture``, what its numbers may be, the named random models. Does not know: parameters, files, devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.models.delta import Delta
from jaxrl_llm.runtime.nested import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """What rope was stretched by: a kind of ``rope.KINDS``, and its numbers as config.json names them."""

    kind: str
    numbers: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer has of its own."""

    window: int = 0  # a token sees itself and the window - 1 before it; 0 = all before it
    rope: int = 0  # 0 = that of rope_theta, 1 = that of local_rope_theta, -1 = the layer knows no positions
    is_delta: bool = False  # a gated delta rule (models.delta) in place of attention

    def has(self, name: str) -> bool:
        """Whether a block's parameter is there: attention's in layers that attend, and the rule's in its own."""
        kind = name.partition("_")[0]
        return self.is_delta if kind == "delta" else not (self.is_delta and kind in ("q", "k", "v", "o", "sinks"))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a decoder: Llama's where nothing else is said."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int  # of an expert where there are such
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = True
    max_positions: int = 2048
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # of queries and keys before rope: "head" = of each head's, "all" = of all heads' together
    pre_norm: bool = True  # of what attention and MLP take
    post_norm: bool = False  # of what they give
    norm_offset: float = 0.0  # is added to every norm's stored scale
    activation: str = "silu"  # a key of variants.ACTIVATIONS
    embedding_scale: float = 1.0  # of the embeddings where the blocks take them
    score_width: float = 0.0  # scores are divided by its root; 0 = the head's size
    local_rope_theta: float = 10000.0
    rotary_size: int = 0  # rope turns the first so many dimensions of a head; 0 = all
    sinks: bool = False  # each head's softmax has a learned score beside the keys', which weighs no value
    output_gate: bool = False  # what a head gives is multiplied by the sigmoid of a second projection like queries'
    delta: Delta | None = None  # of the layers that have it
    num_experts: int = 0  # 0 = one MLP for all tokens
    experts_per_token: int = 0
    norm_topk: bool = False  # the chosen experts' probabilities are scaled to a sum of 1
    shared_ffn: int = 0  # of an expert that every token has, weighed by a sigmoid of its own; 0 = there is none
    experts_bias: bool = False  # of the router's and the experts' matrices
    glu_limit: float = 0.0  # of experts' gates and ups, in GPT-OSS's way (variants.gated); 0 = none
    layers: tuple[Layer, ...] = ()  # () = all alike and plain
    family: str = "llama"  # the model_type that files of it have; nothing is computed by it

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            sizes = f"{self.num_heads} heads, {self.num_kv_heads} key heads of size {self.head_size}"
            raise ConfigError(f"a model of {sizes}: heads must be a multiple of key heads, and their size be even")

    @property
    def by_layer(self) -> tuple[Layer, ...]:
        return self.layers or (Layer(),) * self.num_layers

    def layers_with(self, name: str) -> tuple[int, ...]:
        """Which layers have a block's parameter, in the order that they are stacked in."""
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
    "debug_experts": Architecture(
        **dict(vocab_size=260, width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16, ffn=48, tied=False),
        **dict(num_experts=6, experts_per_token=2, norm_topk=True, qk_norm="head", family="qwen3_moe"),
    ),
    # Eight heads divide over any mesh of eight devices.
    "debug_wide": Architecture(
        vocab_size=264, width=128, num_layers=4, num_heads=8, num_kv_heads=8, head_size=16, ffn=256, tied=False
    ),
    "debug_hybrid": Architecture(  # as Qwen3-Next
        **dict(vocab_size=260, width=64, num_layers=4, num_heads=4, num_kv_heads=2, head_size=16, rotary_size=4),
        **dict(num_experts=6, experts_per_token=2, norm_topk=True, ffn=48, shared_ffn=48),
        **dict(qk_norm="head", norm_offset=1.0, output_gate=True, delta=Delta(2, 4, 16, 16, 4, is_grouped=True)),
        **dict(layers=(*(Layer(is_delta=True),) * 3, Layer()), family="qwen3_next"),
    ),
}
