"""Context parallelism: ``mesh.context`` splits rows over devices, by tokens outside attention and by heads inside.

    outside attention    tokens do not depend on each other. Each device computes its own tokens of every row.
    all-to-all           devices exchange tokens of some heads, as in DeepSpeed-Ulysses.
    inside attention     a query needs the keys of its whole row. Each device computes whole rows of fewer heads.
    all-to-all           each device receives the outputs of its own tokens.

Inside attention, visibility rules, kernels and windows are therefore the same as on a single device. All devices have
the same number of query-key pairs, and no sum over keys is split. A gated delta rule needs a row from its beginning. It
is split in the same way: whole rows of fewer value heads.

Shape letters: as in ``attention``. Owns: the split of heads and tokens over devices. Does not know: kernels,
parameters.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.runtime import sharding


def check(arch: Architecture, mesh: Mesh) -> None:
    """Check that the model's heads can be split over the devices that share a row.

    Raises:
        ConfigError: the number of heads, or of value heads of the gated delta rule, is not divisible.
    """
    context = mesh.shape["context"]
    tensor = mesh.shape["tensor"]
    counts = {"heads": arch.num_heads}
    if arch.delta is not None and context > 1:
        counts["value heads"] = arch.delta.value_heads
    for kind, count in counts.items():
        if count % (context * tensor):
            allowed_sizes = [n for n in range(1, count + 1) if count % (n * tensor) == 0]
            allowed = ", ".join(map(str, allowed_sizes))
            raise ConfigError(
                f"mesh.context={context} must divide the model's {count} {kind} over mesh.tensor={tensor}: "
                f"one of {allowed}"
            )


def is_split() -> bool:
    """Return whether the mesh of the function that is traced splits rows over devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape["context"] > 1


def to_heads(q_BTNH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values of whole rows, split by heads.

    If the key heads cannot be split evenly over the devices, they are repeated.

    Returns:
        [B,T,N,H] and two of [B,K,T,H]. K is the smallest multiple of the number of key heads that can be split.
    """
    if not is_split():
        return q_BTNH, k_BKTH, v_BKTH
    num_parts = sharding.parts(q_BTNH.shape[2], "attended")
    num_repeats = num_parts // math.gcd(num_parts, k_BKTH.shape[1])

    def whole_rows(x_BKTH: jax.Array) -> jax.Array:
        # Compute keys while they are split by tokens. Otherwise XLA would gather the activations and compute all keys
        # on every device.
        x_BKTH = sharding.constrain(x_BKTH, "batch", "kv_heads", "length", "head_size")
        x_BKTH = jnp.repeat(x_BKTH, num_repeats, axis=1)
        return sharding.constrain(x_BKTH, "batch", "attended", None, "head_size")

    q_BTNH = sharding.constrain(q_BTNH, "batch", None, "attended", "head_size")
    k_BKTH = whole_rows(k_BKTH)
    v_BKTH = whole_rows(v_BKTH)
    return q_BTNH, k_BKTH, v_BKTH


def to_tokens(out_BTNH: jax.Array) -> jax.Array:
    """Split the output of attention by tokens again, so that each device has its own tokens."""
    if not is_split():
        return out_BTNH
    return sharding.constrain(out_BTNH, "batch", "length", "heads", "head_size")
