"""Gathering: weights that devices have parts of, once for all uses; what their gradients are.

Owns: where XLA would gather them more often, or sum up gradients otherwise. Does not know: who asks for them, how
weights lie (sharding).
"""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.runtime import sharding

# Logical axes of a layer's matrices that have heads, these and their size as one dimension.
OF_HEADS = {"q": ("heads", "embed"), "k": ("kv_heads", "embed"), "v": ("kv_heads", "embed"), "o": ("embed", "heads")}


def _whole(spec: PartitionSpec) -> PartitionSpec:
    """The layout of what is whole along ``TOKEN_AXES``."""
    return PartitionSpec(*(None if {*sharding.axes_of(axis)} & {*sharding.TOKEN_AXES} else axis for axis in spec))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, _whole(spec))


_gathered.defvjp(
    lambda x, spec: (_gathered(x, spec), None),
    lambda spec, _, gradient: (jax.lax.with_sharding_constraint(gradient, spec),),
)


def gathered(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """A weight that lies by these axes, whole along ``TOKEN_AXES``, for all its uses; its gradient lies as it did.

    A matrix whose heads and their size are made one dimension XLA would gather for the forward pass that is computed
    again, and once more for its gradient.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty or mesh.size == 1 else _gathered(x, sharding.partition_spec(x.shape, logical_axes, mesh))


def copies(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """A copy of an array that lies as ``spec`` for each device along ``TOKEN_AXES``, [n, ...]: for ``by_device``.

    The gradient is a reduce-scatter. In rings of up to four: of more devices the TPU compiler sums it whole on all, for
    twice the bytes.
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
    x = jax.lax.with_sharding_constraint(x, spec)  # as it lies: jax 0.12 adds no gradient to a ref from a shard_map
    return jax.shard_map(gather, in_specs=here, out_specs=PartitionSpec(sharding.TOKEN_AXES, *others), check_vma=False)(
        x
    )
