"""Sizes of the gated delta rule: its parameters and what they are called in files, its states.

Letters: D width, N value heads, H and V sizes of keys and values, C channels of the convolution.
Owns: those numbers. Does not know: what is computed (delta_rule), which layers have it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.runtime.nested import ConfigError

# How files store a parameter (layout.LAYOUT): dimensions of ours that are folded into each of theirs.
LAYOUT = {
    **{f"blocks.delta_{name}": ((0,),) for name in ("rate", "bias", "norm")},
    **{f"blocks.delta_{name}": ((0, 1), (2,)) for name in ("in", "gates", "z")},
    **{f"blocks.delta_{name}": ((0,), (1,)) for name in ("qkv", "b", "a")},
    "blocks.delta_conv": ((0,), (1,), (2,)),
    "blocks.delta_out": ((0,), (1, 2)),
}


@dataclasses.dataclass(frozen=True)
class Delta:
    """A state of each value head; each key head serves as many neighbours of them.

    Attributes:
        taps: tokens that the convolution before the rule reads, each one's own the last.
        is_grouped: what is of one key head is one run of the projection, as in Qwen3-Next's files; else queries' of all
            heads, keys' and values' follow each other, and gates have projections of their own, as in Qwen3.5's.
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
        """C: queries', keys' and values'."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def parameters(self, width: int) -> Iterator[tuple[Any, ...]]:
        """Name, shape and logical axes without the layers', and what a vector holds at first."""
        share, matrix = self.value_heads // self.key_heads, ("embed",)
        if self.is_grouped:  # of a key head: query, key, its heads' values and output gates; its heads' b and a
            of_head = 2 * self.key_size + 2 * share * self.value_size
            yield "delta_in", (self.key_heads, of_head, width), ("kv_heads", "head_size", *matrix)
            yield "delta_gates", (self.key_heads, 2 * share, width), ("kv_heads", "head_size", *matrix)
        else:
            yield "delta_qkv", (self.channels, width), ("head_size", *matrix)
            yield "delta_z", (self.value_heads, self.value_size, width), ("heads", "head_size", *matrix)
            yield "delta_b", (self.value_heads, width), ("heads", *matrix)
            yield "delta_a", (self.value_heads, width), ("heads", *matrix)
        yield "delta_conv", (self.channels, 1, self.taps), ("head_size",) * 3, 0.5
        yield "delta_rate", (self.value_heads,), ("heads",), 0.0  # with the bias, a state is halved in 14 tokens
        yield "delta_bias", (self.value_heads,), ("heads",), -3.0
        yield "delta_norm", (self.value_size,), ("head_size",), 1.0
        yield "delta_out", (width, self.value_heads, self.value_size), ("embed", "heads", "head_size")

    def num_params(self, width: int) -> int:
        return sum(math.prod(shape) for _, shape, *_ in self.parameters(width))

    def empty(self, rows: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """States before a row's first token: [rows,N,H,V] float32, and the last inputs of channels [rows,taps-1,C]."""
        state = jnp.zeros((rows, self.value_heads, self.key_size, self.value_size), jnp.float32)
        return state, jnp.zeros((rows, self.taps - 1, self.channels), dtype)
