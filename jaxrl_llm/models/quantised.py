"""Weight-only quantisation of the blocks' matrices: int8, float8 or float4, with float32 scales (qwix).

int8 and float8 have one scale per output:

    w[o,i] ~ q[o,i] * s[o],     s[o] = max_i |w[o,i]| / (127 or 448),     y[o] = s[o] * sum_i x[i] q[o,i]

float4 has one scale s[o,i/16] per 16 inputs, as NVFP4, but in float32: the largest of 16 absolute values, divided by 6.

Activations stay in the compute dtype, which holds q exactly. The only error is the rounding of w. Two kinds of matrices
are multiplied by their scales before the matmul. For these matrices, each layer writes the full matrix in the compute
dtype:

- matrices of experts, because a grouped matmul has rows of many experts;
- float4 matrices, because an output has several scales.

Embedding, head, norms, routers, biases, and the delta rule's gates and decays are not rounded. A learner that rounds w
in its forward pass computes the same y as the sampler. The gradient reaches w as if w were not rounded
(straight-through estimator).

Source: the same rounded forward on both sides, Jet-RL, 2026, arXiv:2601.14243. Differs: only weights are rounded, and
the backward pass also uses the rounded weights. Four bits only in the sampler: FP4-explore's first half, Sol-RL.
Owns: which weights are rounded, and how. Does not know: when weights are rounded, shardings.
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

MATRICES = (
    "q",
    "k",
    "v",
    "o",
    "gate",
    "up",
    "down",
    "delta_in",
    "delta_qkv",
    "delta_z",
    "delta_out",
)
OF_EXPERTS = (
    "experts_gate",
    "experts_up",
    "experts_down",
    "shared_gate",
    "shared_up",
    "shared_down",
)
# Dtype by the name in the settings. "compute": not rounded, in the compute dtype.
KINDS = {
    "compute": None,
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
    "fp4": jnp.float4_e2m1fn,
}
PER_SCALE = {"fp4": 16}  # inputs per scale; other kinds have one scale for all inputs


def kinds(config: Config, arch: Architecture, who: str, mesh: Mesh) -> tuple[str, str]:
    """Return the kinds (keys of ``KINDS``) that a run's learner and its sampler round to.

    Args:
        who: "model" or "reference". The reference is rounded like the policy if it is the initial policy.
        mesh: the learner's or the sampler's.

    Raises:
        ConfigError: qwix is not installed, or a matrix's number of inputs does not fit the scales or the mesh.
    """
    kind = config.rollout.weights
    if KINDS[kind] is not None and importlib.util.find_spec("qwix") is None:
        raise ConfigError(f"rollout.weights={kind!r} needs the package qwix: pip install 'jaxrl_llm[quant]'")
    inputs_per_scale = PER_SCALE.get(kind, 1)
    # Numbers of inputs that ``tensor`` may split over devices.
    split_sizes = {arch.num_heads * arch.head_size, arch.ffn, arch.shared_ffn}
    if arch.delta is not None:
        split_sizes.add(arch.delta.value_heads * arch.delta.value_size)
    for size in sorted(split_sizes | {arch.width}):
        if size % inputs_per_scale:
            raise ConfigError(
                f"rollout.weights={kind!r} needs matrices whose number of inputs is a multiple of {inputs_per_scale}; "
                f"the {who} has matrices of {size} inputs. Choose another kind of rollout.weights"
            )
    # A byte holds two float4 numbers. A dimension that ``tensor`` does not divide is not split.
    tensor = mesh.shape["tensor"]
    for size in sorted(split_sizes):
        if inputs_per_scale > 1 and size % tensor == 0 and size // tensor % 2:
            name = "tensor" if tensor == config.mesh.tensor else "sampler_tensor"
            raise ConfigError(
                f"mesh.{name}={tensor} leaves {size // tensor} of {size} inputs of the {who}'s matrices on a device; "
                f"rollout.weights={kind!r} needs an even number. Set a smaller mesh.{name}"
            )
    is_trained_rounded = config.update.weights == "rollout"
    is_policy = who == "model" or not config.model.reference_path
    learner_kind = kind if is_trained_rounded and is_policy else "compute"
    return learner_kind, kind


def _is_rounded(name: str, kind: str) -> bool:
    return KINDS[kind] is not None and name in MATRICES + OF_EXPERTS


def multiply(
    linear: Callable[[jax.Array, jax.Array], jax.Array],
    x_BTI: jax.Array,
    name: str,
    w: Any,
    kind: str,
) -> jax.Array:
    """Return ``linear(x, w)`` for a weight that was published rounded, or that is rounded to ``kind`` here.

    Other weights are used unchanged. The parameter's ``name`` decides whether it can be rounded.
    """
    if not _is_rounded(name, kind):
        kind = "compute"
    w_OI, scale_O = factors(w, x_BTI.shape[-1], kind)
    out_BTO = linear(x_BTI, w_OI)
    if scale_O is None:
        return out_BTO
    scaled_BTO = out_BTO * scale_O.reshape(1, 1, -1)
    return scaled_BTO.astype(x_BTI.dtype)


def rounded(name: str, w_OI: jax.Array, kind: str) -> Any:
    """Return a block's parameter as a ``QArray``, or unchanged if ``kind`` or ``name`` is not rounded.

    Shapes of values and float32 scales:

        matrix      [O,I], [O,1]
        experts     [E,O,I], [E,O,1]
        float4      [...,O,I/2] bytes with two values each, [...,O,I/16]
    """
    if not _is_rounded(name, kind):
        return w_OI
    rounded_OI = _round(w_OI, kind)
    if kind != "fp4":
        return rounded_OI
    return rounded_OI.replace(qvalue=_packed(rounded_OI.qvalue))


def _packed(values: jax.Array) -> jax.Array:
    """Pack pairs of float4 numbers into bytes, the first number in the lower half.

    A float4 number has a sign bit, two exponent bits and one mantissa bit. Bytes are necessary because JAX 0.10 on CPUs
    cannot pass float4 arrays between programs, and XLA's bitcasts of float4 fail there.
    """
    x = values.astype(jnp.float32)
    magnitude = sum((jnp.abs(x) >= least).astype(jnp.int32) for least in (0.5, 1, 1.5, 2, 3, 4, 6))
    bits = 8 * (x < 0) + magnitude
    pairs = bits[..., ::2] + 16 * bits[..., 1::2]
    return pairs.astype(jnp.uint8)


def _values(w: Any) -> jax.Array:
    """Return the values of a weight that was published rounded, without its scales; float4 is unpacked."""
    if w.qvalue.dtype != jnp.uint8:
        return w.qvalue
    bits = w.qvalue.astype(jnp.int32)
    pairs = jnp.stack([bits & 15, bits >> 4], axis=-1)
    bits = pairs.reshape(*bits.shape[:-1], -1)
    exponent = (bits >> 1) & 3
    mantissa = 0.5 * (bits & 1)
    magnitude = jnp.where(exponent == 0, mantissa, (1 + mantissa) * (1 << exponent) / 2)
    return jnp.where(bits > 7, -magnitude, magnitude)


def _round(w_OI: jax.Array, kind: str) -> Any:
    import qwix  # an optional dependency, and slow to import

    # qwix divides by 127.5, so that each row's largest weight is halfway between two integers. Two programs may then
    # round it differently. This factor changes the divisor to 127.
    qtype = KINDS[kind]
    assert qtype is not None, "only matrices of a rounded kind are rounded"
    method = f"absmax,{127.5 / 127}" if kind == "int8" else "absmax"
    last_axis = w_OI.ndim - 1
    return qwix.quantize(
        w_OI.astype(jnp.float32),
        qtype,
        channelwise_axes=list(range(last_axis)),
        tiled_axes={last_axis: PER_SCALE[kind]} if kind in PER_SCALE else {},
        calibration_method=method,
    )


def shape(name: str, w_IO: jax.ShapeDtypeStruct, layout: NamedSharding, kind: str) -> Any:
    """Return the shape and sharding of a published parameter: a parameter after ``rounded`` and a transposition.

    Args:
        w_IO: shape of the parameter [I,O] or [E,I,O] in the compute dtype.
        layout: its sharding. The scales [1,O] or [E,1,O] are split like its outputs.
    """
    if not _is_rounded(name, kind):
        return w_IO
    import qwix

    *expert_axes, _, out_axes = layout.spec
    *num_experts, num_inputs, num_outputs = w_IO.shape
    qtype = KINDS[kind]
    assert qtype is not None, "only matrices of a rounded kind are rounded"
    values_dtype = qtype
    values_per_element = 1
    if kind == "fp4":
        values_dtype = jnp.uint8
        values_per_element = 2
    values_shape = (*num_experts, num_inputs // values_per_element, num_outputs)
    num_scales = num_inputs // PER_SCALE.get(kind, num_inputs)
    scales_sharding = NamedSharding(layout.mesh, PartitionSpec(*expert_axes, None, out_axes))
    # qwix declares arrays; an abstract QArray has their shapes.
    values: Any = jax.ShapeDtypeStruct(values_shape, values_dtype, sharding=w_IO.format)
    scales_shape = (*num_experts, num_scales, num_outputs)
    scales: Any = jax.ShapeDtypeStruct(scales_shape, jnp.float32, sharding=scales_sharding)
    return qwix.QArray(values, scales, qtype=qtype)


def factors(w: Any, inputs: int, kind: str = "compute") -> tuple[jax.Array, jax.Array | None]:
    """Return the matrix [O,I] for the matmul, and the scales [O] of its outputs or None.

    Args:
        w: a published weight, an array or a ``QArray``. Or a learned weight [O,I], whose O or I may be heads by head
            size; it is rounded to ``kind`` here, with a straight-through gradient.
        inputs: I.
    """
    if hasattr(w, "qvalue"):
        values = _values(w)
        scale = w.scale
    elif KINDS[kind] is None:
        return w, None
    else:
        w_OI = w.reshape(-1, inputs)
        values, scale = _round_straight_through(w_OI.astype(jnp.float32), kind)
    if scale.shape[-1] > 1:  # apply the scales before the matmul, because one output has several scales
        return values.astype(jnp.float32) * _scale_by_input(scale, inputs), None
    return values, scale.reshape(-1)


def of_experts(w: Any, dtype: Any, kind: str = "compute") -> jax.Array:
    """Return the experts' matrices [E,O,I] times their scales; ``w`` and ``kind`` as in ``factors``."""
    if hasattr(w, "qvalue"):
        values = _values(w)
        scale = w.scale
    elif KINDS[kind] is None:
        return w.astype(dtype)
    else:
        values, scale = _round_straight_through(w.astype(jnp.float32), kind)
    scale_by_input = _scale_by_input(scale, values.shape[-1])
    matrices = values.astype(jnp.float32) * scale_by_input
    return matrices.astype(dtype)


def _scale_by_input(scale: jax.Array, inputs: int) -> jax.Array:
    """Return the scale of each input, or [...,1] if all inputs share one scale."""
    if scale.shape[-1] == 1:
        return scale
    return jnp.repeat(scale, inputs // scale.shape[-1], axis=-1)


def _round_straight_through(w: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Return rounded values and their scales. The gradient of their product goes straight through to w."""
    rounded_w = jax.lax.stop_gradient(_round(w, kind))
    unrounded = w / _scale_by_input(rounded_w.scale, w.shape[-1])
    # The result is exactly q, because the added difference is zero. The difference only carries the gradient.
    zero = unrounded - jax.lax.stop_gradient(unrounded)
    values = rounded_w.qvalue.astype(jnp.float32) + zero
    return values, rounded_w.scale
