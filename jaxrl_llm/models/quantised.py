"""Matrices of the blocks in a byte a weight or less: int8 or float8, with a float32 scale for each output (qwix).

    w[o,i] ~ q[o,i] * s[o],     s[o] = max_i |w[o,i]| / (127 or 448),     y[o] = s[o] * sum_i x[i] q[o,i]

or float4, whose scales s[o,i/16] are of 16 inputs each, as NVFP4's, but float32: their largest / 6.

Activations stay in the compute dtype, and q is exact in it: what is lost is lost in rounding w, once. An expert's
matrices are multiplied by their scales first, in the compute dtype, for a grouped matmul has rows of many experts: they
take a byte each in memory, and are written out whole in each layer; so are those of four bits. Embedding, head, norms,
routers, biases, and the delta rule's gates and decays stay as they are. The learner that rounds its own w in its
forward pass computes the very same y, and its gradient goes to w as if nothing had been rounded (straight through).

Source: the same rounded forward on both sides, Jet-RL, 2026, arXiv:2601.14243. Differs: weights alone are rounded, and
the backward pass multiplies by the rounded ones too. Four bits in the sampler alone: FP4-explore's first half, Sol-RL.
Owns: which weights, how they are rounded. Does not know: when, and where they lie.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models.architecture import Architecture

MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "delta_in", "delta_qkv", "delta_z", "delta_out")
OF_EXPERTS = tuple(f"{kind}_{name}" for kind in ("experts", "shared") for name in ("gate", "up", "down"))
# By its name in the settings; "compute" has no other dtype than that of the arithmetic.
KINDS = {"compute": None, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "fp4": jnp.float4_e2m1fn}
PER_SCALE = {"fp4": 16}  # inputs; else all


def kinds(config: Config, arch: Architecture, who: str, mesh: Mesh) -> tuple[str, str]:
    """What a run's learner, and its sampler, round to.

    Args:
        who: "model", or "reference": it rounds as the policy does where it is the policy as training found it.
        mesh: the learner's or the sampler's.

    Raises:
        ConfigError: qwix is not installed, or inputs do not divide.
    """
    kind, wanted = config.rollout.weights, config.update.weights
    if KINDS[kind] and importlib.util.find_spec("qwix") is None:
        raise ConfigError(f"rollout.weights={kind!r} wants the package qwix: pip install 'jaxrl_llm[quant]'")
    each, tensor = PER_SCALE.get(kind, 1), mesh.shape["tensor"]
    split = {arch.num_heads * arch.head_size, arch.ffn, arch.shared_ffn}
    split |= {arch.delta.value_heads * arch.delta.value_size} if arch.delta else set()
    if uneven := [size for size in sorted(split | {arch.width}) if size % each]:
        raise ConfigError(
            f"rollout.weights={kind!r} wants multiples of {each}; the {who} has matrices of {uneven[0]} inputs"
        )
    # Two lie in a byte; what ``tensor`` does not divide stays whole.
    if uneven := [size for size in sorted(split) if each > 1 and size % tensor == 0 and size // tensor % 2]:
        name = "tensor" if tensor == config.mesh.tensor else "sampler_tensor"
        raise ConfigError(
            f"rollout.weights={kind!r} wants an even number of inputs on every device: mesh.{name}={tensor} leaves "
            f"{uneven[0] // tensor} of the {uneven[0]} of the {who}'s matrices"
        )
    rounds = wanted == "rollout" and (who == "model" or not config.model.reference_path)
    return kind if rounds else "compute", kind


def _is_rounded(name: str, kind: str) -> bool:
    return KINDS[kind] is not None and name in MATRICES + OF_EXPERTS


def multiply(
    linear: Callable[[jax.Array, jax.Array], jax.Array], x_BTI: jax.Array, name: str, w: Any, kind: str
) -> jax.Array:
    """``linear(x, w)``, of a weight published rounded, or rounded to ``kind`` here where its name is of such."""
    w_OI, scale_O = factors(w, x_BTI.shape[-1], kind if _is_rounded(name, kind) else "compute")
    out_BTO = linear(x_BTI, w_OI)
    return out_BTO if scale_O is None else (out_BTO * scale_O.reshape(1, 1, -1)).astype(x_BTI.dtype)


def rounded(name: str, w_OI: jax.Array, kind: str) -> Any:
    """A block's parameter as a ``QArray`` of values [O,I] and float32 scales [O,1], or itself where it is none.

    Of experts [E,O,I] and [E,O,1]; in four bits [...,O,I/2] bytes of two, and scales [...,O,I/16].
    """
    if not _is_rounded(name, kind):
        return w_OI
    made = _round(w_OI, kind)
    return made.replace(qvalue=_packed(made.qvalue)) if kind == "fp4" else made


def _packed(values: jax.Array) -> jax.Array:
    """Two of four bits in a byte (a sign, two of exponent, one of mantissa), the first in its lower half.

    Arrays of float4 do not go from one program to another in JAX 0.10 on CPUs, and XLA's bitcasts of them fail there.
    """
    x = values.astype(jnp.float32)
    bits = 8 * (x < 0) + sum((jnp.abs(x) >= least).astype(jnp.int32) for least in (0.5, 1, 1.5, 2, 3, 4, 6))
    return (bits[..., ::2] + 16 * bits[..., 1::2]).astype(jnp.uint8)


def _values(w: Any) -> jax.Array:
    """Of a weight that was published rounded."""
    if w.qvalue.dtype != jnp.uint8:
        return w.qvalue
    bits = w.qvalue.astype(jnp.int32)
    bits = jnp.stack([bits & 15, bits >> 4], axis=-1).reshape(*bits.shape[:-1], -1)
    exponent, half = (bits >> 1) & 3, 0.5 * (bits & 1)
    size = jnp.where(exponent == 0, half, (1 + half) * (1 << exponent) / 2)
    return jnp.where(bits > 7, -size, size)


def _round(w_OI: jax.Array, kind: str) -> Any:
    import qwix  # an extra, and slow to import

    # Its own bound, 127.5, has each row's largest weight halfway between two integers, where two programs' divisions
    # may part; with this it is 127.
    how = f"absmax,{127.5 / 127}" if kind == "int8" else "absmax"
    tiles = {w_OI.ndim - 1: PER_SCALE[kind]} if kind in PER_SCALE else {}
    given = {"channelwise_axes": list(range(w_OI.ndim - 1)), "tiled_axes": tiles, "calibration_method": how}
    return qwix.quantize(w_OI.astype(jnp.float32), KINDS[kind], **given)


def shape(name: str, w_IO: jax.ShapeDtypeStruct, layout: NamedSharding, kind: str) -> Any:
    """Of what ``rounded`` makes of a parameter, turned to [I,O], or [E,I,O], from its shape in the compute dtype.

    Args:
        layout: how it lies; its scales [1,O] or [E,1,O] lie as its outputs do.
    """
    if not _is_rounded(name, kind):
        return w_IO
    import qwix

    *expert, _, out = layout.spec
    qtype, of_scales = KINDS[kind], NamedSharding(layout.mesh, PartitionSpec(*expert, None, out))
    dtype, each = (jnp.uint8, 2) if kind == "fp4" else (qtype, 1)
    size = (*w_IO.shape[:-2], w_IO.shape[-2] // each, w_IO.shape[-1])
    values = jax.ShapeDtypeStruct(size, dtype, sharding=w_IO.format)
    parts = w_IO.shape[-2] // PER_SCALE.get(kind, w_IO.shape[-2])
    scales = jax.ShapeDtypeStruct((*w_IO.shape[:-2], parts, w_IO.shape[-1]), jnp.float32, sharding=of_scales)
    return qwix.QArray(values, scales, qtype=qtype)


def factors(w: Any, inputs: int, kind: str = "compute") -> tuple[jax.Array, jax.Array | None]:
    """The matrix [O,I] to multiply by, and the scales [O] to multiply its outputs by; None where there are none.

    Args:
        w: a weight as published: an array or a ``QArray``; or one that is learned, [O,I] whose O or I may be heads by
            head size, to be rounded to ``kind`` here, straight through.
        inputs: I.
    """
    if hasattr(w, "qvalue"):
        values, scale = _values(w), w.scale
    elif KINDS[kind] is None:
        return w, None
    else:
        values, scale = _through(w.reshape(-1, inputs).astype(jnp.float32), kind)
    if scale.shape[-1] > 1:  # several in the sum
        return values.astype(jnp.float32) * _each(scale, inputs), None
    return values, scale.reshape(-1)


def of_experts(w: Any, dtype: Any, kind: str = "compute") -> jax.Array:
    """The matrices [E,O,I] to multiply by, values times scales; ``w`` and ``kind`` as of ``factors``."""
    if not hasattr(w, "qvalue") and KINDS[kind] is None:
        return w.astype(dtype)
    values, scale = (_values(w), w.scale) if hasattr(w, "qvalue") else _through(w.astype(jnp.float32), kind)
    return (values.astype(jnp.float32) * _each(scale, values.shape[-1])).astype(dtype)


def _each(scale: jax.Array, inputs: int) -> jax.Array:
    """Of each input; [...,1] where all have one."""
    return scale if scale.shape[-1] == 1 else jnp.repeat(scale, inputs // scale.shape[-1], axis=-1)


def _through(w: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Rounded values and their scales, whose product has the gradient of w."""
    made = jax.lax.stop_gradient(_round(w, kind))
    # Of value exactly q: the difference is of a number to itself.
    own = w / _each(made.scale, w.shape[-1])
    return made.qvalue.astype(jnp.float32) + (own - jax.lax.stop_gradient(own)), made.scale
