"""Gathering of sharded weights once for all uses, with a defined sharding of their gradients.

Owns: the cases in which XLA would gather weights more often, or would sum gradients in another way.
Does not know: the callers, the sharding rules of weights (sharding).
"""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.runtime import sharding

# Logical axes of a layer's matrices with heads. Heads and head size count as one dimension.
OF_HEADS = {"q": ("heads", "embed"), "k": ("kv_heads", "embed"), "v": ("kv_heads", "embed"), "o": ("embed", "heads")}


def _whole(spec: PartitionSpec) -> PartitionSpec:
    """Return the sharding ``spec`` without the axes ``TOKEN_AXES``."""
    return PartitionSpec(*(None if {*sharding.axes_of(axis)} & {*sharding.TOKEN_AXES} else axis for axis in spec))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, _whole(spec))


_gathered.defvjp(
    lambda x, spec: (_gathered(x, spec), None),
    lambda spec, _, gradient: (jax.lax.with_sharding_constraint(gradient, spec),),
)


def gathered(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Gather a weight along ``TOKEN_AXES`` once for all its uses. Its gradient keeps the weight's sharding.

    XLA would otherwise gather a matrix with merged head dimensions twice: for the recomputed forward pass, and for the
    gradient.

    Args:
        logical_axes: the axes that define the weight's sharding.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty or mesh.size == 1 else _gathered(x, sharding.partition_spec(x.shape, logical_axes, mesh))


def copies(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Gather an array with sharding ``spec`` into one copy per device along ``TOKEN_AXES``, [n, ...].

    The result is an argument for ``by_device``. The gradient is a reduce-scatter. Gathers run in rings of up to four
    devices. With larger rings the TPU compiler sums the whole gradient on all devices, which sends twice the bytes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape[axis] for axis in sharding.TOKEN_AXES) == 1:
        return x[None]
    ours = sharding.on_rows(spec)
    others = _whole(spec)

    def gather(x):
        for dim, axis in (
            (dim, axis) for dim, of_dim in enumerate(ours) for axis in reversed(sharding.axes_of(of_dim))
        ):
            n, stride = mesh.shape[axis], 1
            while stride < n:
                size = next(size for size in (4, 2, n // stride) if n // stride % size == 0)
                rings = np.arange(n).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)
                x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=rings.tolist())
                stride *= size
        return x[None]

    here = PartitionSpec(*(a or b for a, b in zip(ours, others, strict=True)))
    x = jax.lax.with_sharding_constraint(x, spec)  # jax 0.12 cannot add a shard_map's gradient directly to a ref
    return jax.shard_map(gather, in_specs=here, out_specs=PartitionSpec(sharding.TOKEN_AXES, *others), check_vma=False)(
        x
    )
