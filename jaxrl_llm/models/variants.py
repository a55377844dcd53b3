"""What some families' blocks have and Llama's have not: biases, further norms, other activations, unlike layers.

Owns: their parameters' shapes with logical axes, what they compute, the scan over several kinds of layers. Does not
know: families' names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import Architecture, Layer

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}

GLU_ALPHA = 1.702  # of ``gated``


def vectors(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], float]]:
    """Norms and biases of a block: name, shape and logical axes without the layers', and what it holds at first."""
    D, F, H, N, K = arch.width, arch.ffn, arch.head_size, arch.num_heads, arch.num_kv_heads
    Q, E = H * (1 + arch.output_gate), arch.num_experts
    heads, kv_heads, one = ("heads", "head_size"), ("kv_heads", "head_size"), 1.0 - arch.norm_offset
    for name, is_there, size, axes, constant in (
        ("attention_norm", arch.pre_norm, (D,), ("activation",), one),
        ("mlp_norm", arch.pre_norm, (D,), ("activation",), one),
        ("attention_post_norm", arch.post_norm, (D,), ("activation",), one),
        ("mlp_post_norm", arch.post_norm, (D,), ("activation",), one),
        ("q_norm", arch.qk_norm == "head", (H,), ("head_size",), one),
        ("k_norm", arch.qk_norm == "head", (H,), ("head_size",), one),
        ("q_norm", arch.qk_norm == "all", (N * H,), ("heads",), one),
        ("k_norm", arch.qk_norm == "all", (K * H,), ("kv_heads",), one),
        ("sinks", arch.sinks, (N,), ("heads",), 0.0),
        ("q_bias", arch.qkv_bias, (N, Q), heads, 0.0),
        ("k_bias", arch.qkv_bias, (K, H), kv_heads, 0.0),
        ("v_bias", arch.qkv_bias, (K, H), kv_heads, 0.0),
        ("o_bias", arch.o_bias, (D,), ("activation",), 0.0),
        ("gate_bias", arch.mlp_bias, (F,), ("mlp",), 0.0),
        ("up_bias", arch.mlp_bias, (F,), ("mlp",), 0.0),
        ("down_bias", arch.mlp_bias, (D,), ("activation",), 0.0),
        ("router_bias", arch.experts_bias, (E,), ("activation",), 0.0),
        ("experts_gate_bias", arch.experts_bias, (E, F), ("expert", "mlp"), 0.0),
        ("experts_up_bias", arch.experts_bias, (E, F), ("expert", "mlp"), 0.0),
        ("experts_down_bias", arch.experts_bias, (E, D), ("activation",) * 2, 0.0),
    ):
        if is_there:
            yield name, size, axes, constant


def gated(gate: jax.Array, up: jax.Array, arch: Architecture) -> jax.Array:
    """What of a gated MLP goes to its last matrix: act(gate) up; with a limit c, as GPT-OSS has it,

    g sigmoid(1.702 g) (u + 1),  g = min(gate, c),  u = up, no further than c from 0.
    """
    if not arch.glu_limit:
        return ACTIVATIONS[arch.activation](gate) * up
    gate, up = jnp.minimum(gate, arch.glu_limit), jnp.clip(up, -arch.glu_limit, arch.glu_limit)
    return gate * jax.nn.sigmoid(GLU_ALPHA * gate) * (up + 1)


def queries_and_gates(x_BTO: jax.Array, arch: Architecture) -> tuple[jax.Array, jax.Array]:
    """Of each head's projection, twice a head's size, the first half and the second, each [B,T,N*H]."""
    halves = x_BTO.reshape(*x_BTO.shape[:2], -1, 2, arch.head_size)
    return tuple(halves[..., i, :].reshape(*x_BTO.shape[:2], -1) for i in (0, 1))


def attend_sinks(q_BKXH: jax.Array, sinks_N: jax.Array | None) -> tuple[Any, ...]:
    """A piece (attention) of one key for each head: its score and no value; () where there are none."""
    if sinks_N is None:
        return ()
    B, K, X, _ = q_BKXH.shape
    score_BKX = jnp.repeat(sinks_N.astype(jnp.float32).reshape(1, K, -1), X * K // sinks_N.size, axis=2)
    score_BKX = jnp.broadcast_to(score_BKX, (B, K, X))
    return ((jnp.zeros_like(q_BKXH), jnp.ones_like(score_BKX), score_BKX),)


def turn(w: jax.Array) -> jax.Array:
    """A matrix the other way round, or each of several; a vector as it is."""
    return w.mT if w.ndim > 1 else w


def turned(dims: Sequence[Any]) -> tuple[Any, ...]:
    """What is of the dimensions of an array, as they are after ``turn``."""
    return (*dims[:-2], *reversed(dims[-2:]))


Block = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def scan(blocks: dict[Layer, Block], by_layer: tuple[Layer, ...], x: jax.Array, stacked: Any) -> tuple[jax.Array, Any]:
    """``lax.scan`` of layers, of several kinds too, one after the other.

    It takes as many layers a step as their kinds need to come again, so that a kind is static in its place and a
    program no longer than a period; layers left over follow the scan.

    Args:
        blocks: of each kind; (x, what is of this layer) -> (x, what it made).
        stacked: what is of each layer, with a leading layer axis; first a dict, whose entries are of the layers alone
            that have such a parameter (``Layer.has``). Where a layer has not, None is its own.

    Returns:
        x, and what the layers made, stacked.
    """
    if len(blocks) == 1:
        return jax.lax.scan(*blocks.values(), x, stacked)
    period = next(p for p in range(1, len(by_layer) + 1) if by_layer[p:] == by_layer[:-p])
    steps, left = divmod(len(by_layer), period)
    whole, last = by_layer[:period], by_layer[len(by_layer) - left :]
    paths, tree = jax.tree_util.tree_flatten_with_path(stacked)
    of_block = (jax.tree_util.SequenceKey(0),)
    has = [functools.partial(Layer.has, name=path[1].key if path[:1] == of_block else "") for path, _ in paths]

    def parts(a, *at):  # not a slice: its gradient cannot be added to a ref, where the learner keeps the sum of all
        return jax.lax.split(a, at, 0)

    def some(x, leaves, kinds):
        split = [() if a is None else iter(parts(a, *(1,) * len(a))) for a in leaves]
        made = []
        for kind in kinds:
            of_layer = (next(a) if is_there(kind) else None for a, is_there in zip(split, has, strict=True))
            of_layer = tree.unflatten(a if a is None else a.reshape(a.shape[1:]) for a in of_layer)
            x, new = blocks[kind](x, of_layer)
            made.append(new)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *made)

    leaves, rest = [], []
    for (_, a), is_there in zip(paths, has, strict=True):
        of_rest = sum(map(is_there, last))
        a, of_last = parts(a, len(a) - of_rest, of_rest) if of_rest else (a, None)
        leaves.append(a.reshape(steps, -1, *a.shape[1:]))
        rest.append(of_last)
    x, made = jax.lax.scan(functools.partial(some, kinds=whole), x, leaves)
    made = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), made)
    if left:
        x, last_made = some(x, rest, last)
        made = jax.tree.map(lambda *a: jnp.concatenate(a), made, last_made)
    return x, made
