"""Sizes of the gated delta rule: shapes of its parameters, their layout in files, and shapes of its states.

Letters: D width, N value heads, H and V sizes of keys and values, C channels of the convolution.
Owns: shapes and sizes. Does not know: the computation (delta_rule), which layers have the rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.settings.schema import ConfigError

# File layout of each parameter (layout.LAYOUT): for each stored dimension, our dimensions that are folded into it.
LAYOUT = {
    **{f"blocks.delta_{name}": ((0,),) for name in ("rate", "bias", "norm")},
    **{f"blocks.delta_{name}": ((0, 1), (2,)) for name in ("in", "gates", "z")},
    **{f"blocks.delta_{name}": ((0,), (1,)) for name in ("qkv", "b", "a")},
    "blocks.delta_conv": ((0,), (1,), (2,)),
    "blocks.delta_out": ((0,), (1, 2)),
}


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
        if self.value_heads % self.key_heads or self.taps < 2:
            sizes = f"{self.value_heads} value heads, {self.key_heads} key heads and {self.taps} taps"
            raise ConfigError(
                f"a gated delta rule of {sizes}: value heads must be a multiple of key heads, and taps at least 2"
            )

    @property
    def channels(self) -> int:
        """Return C, the number of channels of queries, keys and values together."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def parameters(self, width: int) -> Iterator[tuple[Any, ...]]:
        """Yield name, shape and logical axes (without the layer axis), and the initial value if it is a constant."""
        share, matrix = self.value_heads // self.key_heads, ("embed",)
        if self.is_grouped:  # rows of a key head: query, key, values and output gates; then b and a
            of_head = 2 * self.key_size + 2 * share * self.value_size
            yield "delta_in", (self.key_heads, of_head, width), ("kv_heads", "head_size", *matrix)
            yield "delta_gates", (self.key_heads, 2 * share, width), ("kv_heads", "head_size", *matrix)
        else:
            yield "delta_qkv", (self.channels, width), ("head_size", *matrix)
            yield "delta_z", (self.value_heads, self.value_size, width), ("heads", "head_size", *matrix)
            yield "delta_b", (self.value_heads, width), ("heads", *matrix)
            yield "delta_a", (self.value_heads, width), ("heads", *matrix)
        yield "delta_conv", (self.channels, 1, self.taps), ("head_size",) * 3, 0.5
        yield "delta_rate", (self.value_heads,), ("heads",), 0.0  # with this bias, a state's half-life is 14 tokens
        yield "delta_bias", (self.value_heads,), ("heads",), -3.0
        yield "delta_norm", (self.value_size,), ("head_size",), 1.0
        yield "delta_out", (width, self.value_heads, self.value_size), ("embed", "heads", "head_size")

    def num_params(self, width: int) -> int:
        return sum(math.prod(shape) for _, shape, *_ in self.parameters(width))

    def empty(self, rows: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return the states before a row's first token.

        These are the rule's state [rows,N,H,V] float32, and the convolution's last inputs [rows,taps-1,C] in ``dtype``.
        """
        state = jnp.zeros((rows, self.value_heads, self.key_size, self.value_size), jnp.float32)
        return state, jnp.zeros((rows, self.taps - 1, self.channels), dtype)
