"""Parts of blocks that some families have and Llama lacks: biases, further norms, activations, several layer kinds.

Owns: shapes and logical axes of their parameters, their computation, the scan over several kinds of layers.
Does not know: names of families.
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

GLU_ALPHA = 1.702  # factor in the sigmoid of ``gated``


def vectors(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], float]]:
    """Yield the norms, biases and sinks of a block: name, shape, logical axes (without layers), initial value."""
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
    """Return the hidden activations of a gated MLP, the input of its last matrix: act(gate) up.

    With a limit c (``arch.glu_limit``), the formula is that of GPT-OSS:

    g sigmoid(1.702 g) (u + 1),  g = min(gate, c),  u = min(max(up, -c), c).
    """
    if not arch.glu_limit:
        return ACTIVATIONS[arch.activation](gate) * up
    gate, up = jnp.minimum(gate, arch.glu_limit), jnp.clip(up, -arch.glu_limit, arch.glu_limit)
    return gate * jax.nn.sigmoid(GLU_ALPHA * gate) * (up + 1)


def queries_and_gates(x_BTO: jax.Array, arch: Architecture) -> tuple[jax.Array, jax.Array]:
    """Split the query projection into queries and output gates, each [B,T,N*H].

    Each head's projection has twice the head size: first the query, then the gate.
    """
    halves = x_BTO.reshape(*x_BTO.shape[:2], -1, 2, arch.head_size)
    return tuple(halves[..., i, :].reshape(*x_BTO.shape[:2], -1) for i in (0, 1))


def attend_sinks(q_BKXH: jax.Array, sinks_N: jax.Array | None) -> tuple[Any, ...]:
    """Return a piece (``attention._merge``) with one score per head and no value, or () without sinks."""
    if sinks_N is None:
        return ()
    B, K, X, _ = q_BKXH.shape
    score_BKX = jnp.repeat(sinks_N.astype(jnp.float32).reshape(1, K, -1), X * K // sinks_N.size, axis=2)
    score_BKX = jnp.broadcast_to(score_BKX, (B, K, X))
    return ((jnp.zeros_like(q_BKXH), jnp.ones_like(score_BKX), score_BKX),)


def turn(w: jax.Array) -> jax.Array:
    """Transpose the last two dimensions of an array. A vector is unchanged."""
    return w.mT if w.ndim > 1 else w


def turned(dims: Sequence[Any]) -> tuple[Any, ...]:
    """Return per-dimension entries, such as a shape or logical axes, in the order after ``turn``."""
    return (*dims[:-2], *reversed(dims[-2:]))


Block = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def scan(blocks: dict[Layer, Block], by_layer: tuple[Layer, ...], x: jax.Array, stacked: Any) -> tuple[jax.Array, Any]:
    """Run the layers one after the other by ``lax.scan``, also if the layers are of several kinds.

    One step of the scan runs one period of the pattern of kinds. The kind at each place of a step is therefore static,
    and the program is only as long as one period. Layers after the last whole period run after the scan.

    Args:
        blocks: for each kind, (x, inputs of this layer) -> (x, outputs of this layer).
        by_layer: the kind of each layer.
        stacked: inputs of all layers, with a leading layer axis. The first entry is a dict of parameters. A parameter
            is stacked only over the layers that have it (``Layer.has``); the other layers receive None.

    Returns:
        x, and the stacked outputs of the layers.
    """
    if len(blocks) == 1:
        return jax.lax.scan(*blocks.values(), x, stacked)
    period = next(p for p in range(1, len(by_layer) + 1) if by_layer[p:] == by_layer[:-p])
    steps, left = divmod(len(by_layer), period)
    whole, last = by_layer[:period], by_layer[len(by_layer) - left :]
    paths, tree = jax.tree_util.tree_flatten_with_path(stacked)
    of_block = (jax.tree_util.SequenceKey(0),)
    has = [functools.partial(Layer.has, name=path[1].key if path[:1] == of_block else "") for path, _ in paths]

    def parts(a, *at):  # no slices: their gradients cannot be added to the refs in which the learner sums gradients
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
