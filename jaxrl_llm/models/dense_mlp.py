"""One gated MLP for all tokens (SwiGLU and its relatives), and the activations of gated MLPs.

    y = W_down (act(W_gate x) * W_up x)

Letters: B rows, T tokens, D width, F ffn.
Owns: the MLP's parameters and its computation. Does not know: experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.blocks import LayerParameters, Parameter, Routing
from jaxrl_llm.runtime import sharding

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}

GLU_ALPHA = 1.702  # factor in the sigmoid of ``gated``


def matrices(width: int, ffn: int, prefix: str = "") -> Iterator[Parameter]:
    """Yield the three matrices of a gated MLP."""
    yield Parameter(prefix + "gate", (ffn, width), ("mlp", "embed"))
    yield Parameter(prefix + "up", (ffn, width), ("mlp", "embed"))
    yield Parameter(prefix + "down", (width, ffn), ("embed", "mlp"))


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """Yield the MLP's parameters."""
    yield from matrices(arch.width, arch.ffn)
    if arch.mlp_bias:
        yield Parameter("gate_bias", (arch.ffn,), ("mlp",), 0.0)
        yield Parameter("up_bias", (arch.ffn,), ("mlp",), 0.0)
        yield Parameter("down_bias", (arch.width,), ("activation",), 0.0)


def apply(x_BTD: jax.Array, parameters: LayerParameters, routing: Routing) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the MLP's output [B,T,D], and no further results."""
    return compute(x_BTD, parameters), ()


def compute(x_BTD: jax.Array, parameters: LayerParameters, prefix: str = "") -> jax.Array:
    """Return the output [B,T,D] of the MLP whose matrices have names with this prefix."""
    activation = ACTIVATIONS[parameters.arch.activation]
    gate_BTF = checkpoint_name(parameters.project(x_BTD, prefix + "gate"), "mlp")
    up_BTF = checkpoint_name(parameters.project(x_BTD, prefix + "up"), "mlp")
    hidden_BTF = activation(gate_BTF) * up_BTF
    hidden_BTF = sharding.constrain(hidden_BTF, "batch", "length", "mlp")
    return parameters.project(hidden_BTF, prefix + "down")


def gated(gate: jax.Array, up: jax.Array, arch: Architecture) -> jax.Array:
    """Return the hidden activations of an expert, the input of its last matrix: act(gate) up.

    With a limit c (``arch.glu_limit``), the formula is that of GPT-OSS:

    g sigmoid(1.702 g) (u + 1),  g = min(gate, c),  u = min(max(up, -c), c).
    """
    if not arch.glu_limit:
        return ACTIVATIONS[arch.activation](gate) * up
    gate = jnp.minimum(gate, arch.glu_limit)
    up = jnp.clip(up, -arch.glu_limit, arch.glu_limit)
    return gate * jax.nn.sigmoid(GLU_ALPHA * gate) * (up + 1)
