"""Long rows: ``mesh.context`` splits the tokens of a row over devices, and inside attention its heads.

Outside attention each token is by itself, and a device computes its own part of every row. A query wants the keys of
its whole row: between the two, each device sends the others what they want of its tokens and gets whole rows of fewer
heads (all-to-all, as in DeepSpeed-Ulysses). So every rule of who sees whom, every kernel and every window is the one of
a single device, each device has as many pairs of query and key as any other, and sums over keys are in one place. A
gated delta rule goes through a row from its beginning, and is dealt out alike: whole rows of fewer value heads.

Letters as in attention. Owns: how heads and tokens are dealt out. Does not know: kernels, parameters.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.runtime import sharding


def check(arch: Architecture, mesh: Any) -> None:
    """Heads divide over the devices that attend to one row, or go through it; ConfigError otherwise."""
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    kinds = {"heads": arch.num_heads} | ({"value heads": arch.delta.value_heads} if arch.delta and context > 1 else {})
    for kind, count in kinds.items():
        if count % (context * tensor):
            fit = ", ".join(str(n) for n in range(1, count + 1) if count % (n * tensor) == 0)
            raise ConfigError(
                f"mesh.context={context} must divide the model's {count} {kind} over mesh.tensor={tensor}: one of {fit}"
            )


def is_split() -> bool:
    """Whether the mesh that a function is traced in has rows in parts."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape["context"] > 1


def to_heads(q_BTNH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of whole rows, split by heads; of fewer key heads than devices there are copies.

    Returns:
        [B,T,N,H] and two of [B,K,T,H], K as it is or the least multiple that divides.
    """
    if not is_split():
        return q_BTNH, k_BKTH, v_BKTH
    parts, K = sharding.parts(q_BTNH.shape[2], "attended"), k_BKTH.shape[1]

    def whole_rows(x_BKTH):
        # Made of each device's own tokens: XLA would gather their activations in place of them.
        x_BKTH = sharding.constrain(x_BKTH, "batch", "kv_heads", "length", "head_size")
        x_BKTH = jnp.repeat(x_BKTH, parts // math.gcd(parts, K), axis=1)
        return sharding.constrain(x_BKTH, "batch", "attended", None, "head_size")

    q_BTNH = sharding.constrain(q_BTNH, "batch", None, "attended", "head_size")
    return q_BTNH, whole_rows(k_BKTH), whole_rows(v_BKTH)


def to_tokens(out_BTNH: jax.Array) -> jax.Array:
    """What attention gave, each device's own tokens again."""
    return sharding.constrain(out_BTNH, "batch", "length", "heads", "head_size") if is_split() else out_BTNH
