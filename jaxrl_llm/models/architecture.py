"""Shapes of models, as read from a file's header or a preset, without any arrays.

Letters: D width, N heads or value heads, H and V sizes of keys and values, C channels of a convolution.
Owns: ``Architecture`` and its allowed numbers, the kinds of layers, the presets of random models.
Does not know: parameters, files, devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxrl_llm.settings.schema import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rope to longer contexts: a kind of ``rope.KINDS``, and its numbers with their names in config.json."""

    kind: str
    numbers: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Delta:
    """Sizes of a gated delta rule, which has one state per value head.

    Each key head serves value_heads / key_heads consecutive value heads.

    Attributes:
        taps: width of the causal convolution before the rule: the token itself and the taps - 1 tokens before it.
        is_grouped: layout of the input projections. True: all rows of one key head are contiguous, as in Qwen3-Next.
            False: queries of all heads, then keys, then values; gates have separate projections, as in Qwen3.5.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    is_grouped: bool

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"a gated delta rule: value_heads={self.value_heads} must be a multiple of key_heads={self.key_heads}"
            )
        if self.taps < 2:
            raise ConfigError(f"a gated delta rule: taps={self.taps} must be at least 2")

    @property
    def channels(self) -> int:
        """Return C, the number of channels of queries, keys and values together."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def num_params(self, width: int) -> int:
        """Return the number of parameters of the rule in one layer."""
        values = self.value_heads * self.value_size
        inputs = (self.channels + values + 2 * self.value_heads) * width  # queries, keys, values; output gates; b and a
        convolution = self.channels * self.taps
        vectors = 2 * self.value_heads + self.value_size  # rates and biases of the decay; scales of the norm
        return inputs + convolution + vectors + values * width


class MixerKind(NamedTuple):
    """Static properties of a mixer, the part of a block in which tokens read earlier tokens of their row."""

    names: frozenset[str]  # each of its parameters has one of these words as its name, or begins with it and "_"
    is_recurrent: bool  # True: a row has states of fixed size. False: every token of a row has keys and values.


# Kinds of mixers; ``mixers.MIXERS`` has the computation of each kind.
MIXER_KINDS = {
    "attention": MixerKind(frozenset({"q", "k", "v", "o", "sinks"}), is_recurrent=False),
    "delta_rule": MixerKind(frozenset({"delta"}), is_recurrent=True),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The kind of one layer: the properties in which layers of a model can differ."""

    window: int = 0  # a token attends to itself and the window - 1 tokens before it; 0 = to all tokens before it
    rope: int = 0  # 0 = rope with rope_theta, 1 = rope with local_rope_theta, -1 = no rope
    mixer: str = "attention"  # a key of ``MIXER_KINDS``

    @property
    def is_recurrent(self) -> bool:
        """Return whether the layer has states of fixed size in place of keys and values of tokens."""
        return MIXER_KINDS[self.mixer].is_recurrent

    def has(self, name: str) -> bool:
        """Return whether the layer has this parameter of a block.

        The parameters of a mixer exist only in layers with this mixer. Other parameters exist in all layers.
        """
        first_word = name.partition("_")[0]
        owners = [mixer for mixer, kind in MIXER_KINDS.items() if first_word in kind.names]
        return not owners or self.mixer in owners


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
    activation: str = "silu"  # a key of dense_mlp.ACTIVATIONS
    embedding_scale: float = 1.0  # factor of the embeddings before the first block
    score_width: float = 0.0  # attention scores are divided by the root of this number; 0 = the head size
    local_rope_theta: float = 10000.0
    rotary_size: int = 0  # number of dimensions of a head that rope rotates, from the first on; 0 = all
    sinks: bool = False  # attention sinks: the softmax of each head has one more learned score, without a value
    output_gate: bool = False  # a head's output is multiplied by the sigmoid of a second projection of the input
    delta: Delta | None = None  # sizes of the gated delta rule, for layers with this mixer
    num_experts: int = 0  # 0 = one MLP for all tokens
    experts_per_token: int = 0
    norm_topk: bool = False  # normalise the chosen experts' probabilities to a sum of 1
    shared_ffn: int = 0  # hidden size of the shared expert, which has its own sigmoid gate; 0 = no shared expert
    experts_bias: bool = False  # biases of the router and of the experts' matrices
    glu_limit: float = 0.0  # limit of the experts' gates and ups, as in GPT-OSS (dense_mlp.gated); 0 = no limit
    layers: tuple[Layer, ...] = ()  # the kind of each layer; () = all layers have the kind Layer()
    family: str = "llama"  # model_type in config.json; the computation does not depend on it

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            sizes = f"{self.num_heads} heads, {self.num_kv_heads} key heads of size {self.head_size}"
            raise ConfigError(f"a model of {sizes}: heads must be a multiple of key heads, and their size be even")

    @property
    def by_layer(self) -> tuple[Layer, ...]:
        return self.layers or (Layer(),) * self.num_layers

    @property
    def mlp(self) -> str:
        """Return the kind of the blocks' MLP, a key of ``mlps.MLPS``."""
        return "experts" if self.num_experts else "dense"

    def layers_with(self, name: str) -> tuple[int, ...]:
        """Return the indices of the layers that have this parameter, in the order in which they are stacked."""
        return tuple(i for i, layer in enumerate(self.by_layer) if layer.has(name))

    @property
    def num_params(self) -> int:
        D = self.width
        num_attention = len(self.layers_with("q"))
        num_delta = len(self.layers_with("delta_out"))
        mixers = num_attention * self._num_attention_params
        if self.delta is not None:
            mixers += num_delta * self.delta.num_params(D)
        num_tables = 1 if self.tied else 2
        norms_of_block = 2 * D * (self.pre_norm + self.post_norm)
        block = norms_of_block + self._num_mlp_params
        return self.num_layers * block + mixers + num_tables * self.vocab_size * D + D

    @property
    def _num_attention_params(self) -> int:
        """Return the number of parameters of attention in one layer."""
        N = self.num_heads
        K = self.num_kv_heads
        H = self.head_size
        D = self.width
        queries = N * (1 + self.output_gate)  # heads of the query projection, with output gates
        count = D * H * (queries + N + 2 * K)
        if self.qkv_bias:
            count += (queries + 2 * K) * H
        if self.o_bias:
            count += D
        if self.sinks:
            count += N
        return count + {"": 0, "head": 2 * H, "all": (N + K) * H}[self.qk_norm]

    @property
    def _num_mlp_params(self) -> int:
        """Return the number of parameters of the MLP, or of the experts and their router, in one layer."""
        D = self.width
        E = self.num_experts
        count = 3 * D * self.ffn * max(E, 1) + D * E
        if self.shared_ffn:
            count += 3 * D * self.shared_ffn + D
        if self.mlp_bias:
            count += 2 * self.ffn + D
        if self.experts_bias:
            count += E * (1 + 2 * self.ffn + D)
        return count


def positive(path: Any, key: str, value: Any, *, whole: bool = True, most: float = 2**31 - 1) -> Any:
    """Return the value of ``key`` in the file ``path`` after a check.

    Raises:
        ConfigError: the value is not a (whole) number above 0 and at most ``most``.
    """
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{path}: {key}={value!r:.60} must be {kind} above 0 and at most {most}")
    return value if whole else float(value)


# Models with random weights and a byte tokenizer (260 ids), which need no download. For tests and first experiments.
PRESETS = {
    "debug": Architecture(
        vocab_size=260,
        width=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        ffn=128,
    ),
    # For the replay study: arithmetic at character level on a CPU.
    "study": Architecture(
        vocab_size=260,
        width=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_size=16,
        ffn=256,
    ),
    "debug_experts": Architecture(
        vocab_size=260,
        width=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        ffn=48,
        tied=False,
        num_experts=6,
        experts_per_token=2,
        norm_topk=True,
        qk_norm="head",
        family="qwen3_moe",
    ),
    # Eight heads can be split over any mesh of eight devices.
    "debug_wide": Architecture(
        vocab_size=264,
        width=128,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        head_size=16,
        ffn=256,
        tied=False,
    ),
    "debug_hybrid": Architecture(  # like Qwen3-Next
        vocab_size=260,
        width=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        rotary_size=4,
        num_experts=6,
        experts_per_token=2,
        norm_topk=True,
        ffn=48,
        shared_ffn=48,
        qk_norm="head",
        norm_offset=1.0,
        output_gate=True,
        delta=Delta(2, 4, 16, 16, 4, is_grouped=True),
        layers=(*(Layer(mixer="delta_rule"),) * 3, Layer()),
        family="qwen3_next",
    ),
}
