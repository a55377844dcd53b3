"""Grouped-query attention as a block's mixer: projections, rotary embedding, attention, output projection.

Letters: B rows, T tokens, D width, N query heads, K key heads, H head size.
Owns: the parameters of attention and the caches of its keys and values. Does not know: the arithmetic (attention).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import Architecture, Layer
from jaxrl_llm.models.attention import attend, attend_next, block_shapes, rotate
from jaxrl_llm.models.blocks import CacheSizes, LayerParameters, MixerInputs, Parameter, States
from jaxrl_llm.models.kernels import context
from jaxrl_llm.runtime import sharding

Heads = tuple[jax.Array, jax.Array, jax.Array]


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """Yield the parameters of attention: matrices, then biases, norms and sinks."""
    D = arch.width
    H = arch.head_size
    N = arch.num_heads
    K = arch.num_kv_heads
    query_size = H * (1 + arch.output_gate)
    heads = ("heads", "head_size")
    kv_heads = ("kv_heads", "head_size")
    yield Parameter("q", (N, query_size, D), (*heads, "embed"))
    yield Parameter("k", (K, H, D), (*kv_heads, "embed"))
    yield Parameter("v", (K, H, D), (*kv_heads, "embed"))
    yield Parameter("o", (D, N, H), ("embed", *heads))
    if arch.qkv_bias:
        yield Parameter("q_bias", (N, query_size), heads, 0.0)
        yield Parameter("k_bias", (K, H), kv_heads, 0.0)
        yield Parameter("v_bias", (K, H), kv_heads, 0.0)
    if arch.o_bias:
        yield Parameter("o_bias", (D,), ("activation",), 0.0)
    scale = 1.0 - arch.norm_offset
    if arch.qk_norm == "head":
        yield Parameter("q_norm", (H,), ("head_size",), scale)
        yield Parameter("k_norm", (H,), ("head_size",), scale)
    elif arch.qk_norm == "all":
        yield Parameter("q_norm", (N * H,), ("heads",), scale)
        yield Parameter("k_norm", (K * H,), ("kv_heads",), scale)
    if arch.sinks:
        yield Parameter("sinks", (N,), ("heads",), 0.0)


def apply(x_BTD: jax.Array, parameters: LayerParameters, inputs: MixerInputs) -> tuple[jax.Array, States]:
    """Return attention of whole rows or prompts, and their keys and values [B,K,T,H]."""
    (q_BTNH, k_BKTH, v_BKTH), gate = _project(x_BTD, parameters, inputs)
    out_BTNH = attend(
        *context.to_heads(q_BTNH, k_BKTH, v_BKTH),
        prompt=inputs.prompt,
        visible=inputs.visible_in_window,
        window=inputs.layer.window,
        positions=inputs.positions,
        sinks=_sinks(parameters),
        implementation=parameters.implementation,
    )
    return _output(context.to_tokens(out_BTNH), gate, parameters), (k_BKTH, v_BKTH)


def apply_next(x_B1D: jax.Array, parameters: LayerParameters, inputs: MixerInputs) -> tuple[jax.Array, States]:
    """Return attention of one new token per row, and the cache's keys and values with the new token."""
    assert inputs.prompt is not None and inputs.cache is not None, "a decode step has prompts and a cache"
    (q_B1NH, k_BK1H, v_BK1H), gate = _project(x_B1D, parameters, inputs)
    out_B1NH, cache = attend_next(
        q_B1NH,
        k_BK1H,
        v_BK1H,
        prompt=inputs.prompt,
        cache=inputs.cache,
        window=inputs.layer.window,
        positions=inputs.positions,
        sinks=_sinks(parameters),
        implementation=parameters.implementation,
    )
    return _output(out_B1NH, gate, parameters), cache


def _project(x_BTD: jax.Array, parameters: LayerParameters, inputs: MixerInputs) -> tuple[Heads, jax.Array | None]:
    """Return queries [B,T,N,H], keys and values [B,K,T,H], and the output gates [B,T,N*H] if the model has them."""
    arch = parameters.arch
    q = parameters.project(x_BTD, "q")
    k = parameters.project(x_BTD, "k")
    v = parameters.project(x_BTD, "v")
    gate = None
    if arch.output_gate:
        q, gate = _queries_and_gates(q, arch)
    q_BTNH = _rotate(_heads(q, "q_norm", parameters), inputs)
    k_BTKH = _rotate(_heads(k, "k_norm", parameters), inputs)
    v_BTKH = v.reshape(*v.shape[:2], -1, arch.head_size)
    if arch.score_width not in (0.0, arch.head_size):  # attention divides scores by the root of the head size
        factor = (arch.head_size / arch.score_width) ** 0.5
        q_BTNH = q_BTNH * factor
    q_BTNH = sharding.constrain(q_BTNH, "batch", "length", "heads", "head_size")
    heads = (q_BTNH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2))
    return heads, gate


def _queries_and_gates(x_BTO: jax.Array, arch: Architecture) -> tuple[jax.Array, jax.Array]:
    """Split the query projection into queries and output gates, each [B,T,N*H].

    Each head's projection has twice the head size: first the query, then the gate.
    """
    B, T, _ = x_BTO.shape
    halves = x_BTO.reshape(B, T, -1, 2, arch.head_size)
    queries = halves[..., 0, :].reshape(B, T, -1)
    gates = halves[..., 1, :].reshape(B, T, -1)
    return queries, gates


def _heads(x_BTO: jax.Array, norm: str, parameters: LayerParameters) -> jax.Array:
    """Split a projection into heads [B,T,N,H], and apply the norm to all heads together or to each head."""
    arch = parameters.arch
    if arch.qk_norm == "all":
        x_BTO = parameters.norm(x_BTO, norm)
    x_BTNH = x_BTO.reshape(*x_BTO.shape[:2], -1, arch.head_size)
    if arch.qk_norm == "head":
        x_BTNH = parameters.norm(x_BTNH, norm)
    return x_BTNH


def _rotate(x_BTNH: jax.Array, inputs: MixerInputs) -> jax.Array:
    return x_BTNH if inputs.rope is None else rotate(x_BTNH, *inputs.rope)


def _sinks(parameters: LayerParameters) -> jax.Array | None:
    return parameters.weight("sinks") if parameters.arch.sinks else None


def _output(out_BTNH: jax.Array, gate_BTO: jax.Array | None, parameters: LayerParameters) -> jax.Array:
    """Return the projection of the heads' outputs, after the output gates if the model has them."""
    out_BTO = out_BTNH.reshape(*out_BTNH.shape[:2], -1)
    if gate_BTO is not None:
        out_BTO = out_BTO * jax.nn.sigmoid(gate_BTO)
    return parameters.project(out_BTO, "o")


def empty_cache(arch: Architecture, layer: Layer, sizes: CacheSizes) -> States:
    """Return the cache blocks of all decode slots, as in ``attention.Cache``.

    The cache of a layer with a window holds only the window and the spare positions.
    """
    window = layer.window or sizes.completion
    tokens = sizes.spare + min(sizes.completion, window)
    count, key_shape, value_shape = block_shapes(tokens, arch.head_size, sizes.implementation)

    def blocks(shape: tuple[int, int]) -> tuple[jax.Array, ...]:
        block_shape = (sizes.slots, arch.num_kv_heads, *shape)
        return tuple(jnp.zeros(block_shape, sizes.dtype) for _ in range(count))

    return blocks(key_shape), blocks(value_shape)


def empty_prompts(arch: Architecture, layer: Layer, sizes: CacheSizes) -> States:
    """Return keys and values of all prompts, as in ``attention.Prompt``."""
    shape = (
        sizes.prompts,
        arch.num_kv_heads,
        sizes.prompt_width,
        arch.head_size,
    )
    return jnp.zeros(shape, sizes.dtype), jnp.zeros(shape, sizes.dtype)


def begin(cache: Any, prompts: Any, entry_MZ: jax.Array, takes_MZ: jax.Array) -> Any:
    """Return the cache unchanged. The rows of a group read the keys and values of their prompt in place."""
    return cache
