"""Publish: the learner's weights become the sampler's, in one compiled cast, reshard, split by layer and transpose.

The learner scans over stacked blocks. The sampler holds every block's weights apart and runs the blocks one after
another in its program: a scan copies a layer's weights before it multiplies by them, and a decode step is bound by
the weights it reads. The blocks' matrices lie input first: a CPU multiplies few rows by such where they lie, and lays
out anew, in every step, what lies as in the learner. The head does: it is the embedding too, where it is tied.

Owns: the form and dtype of the sampler's weights, the program that makes them. Does not know: what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.files.layout import LAYOUT, stored_shape
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import Program


def _turned(name: str, x: jax.Array, i: int) -> jax.Array:
    return x[i].reshape(stored_shape(f"blocks.{name}", x.shape[1:])).T


def sampler_form(params: Params, take: Callable[[str, Any, int], Any] = _turned) -> Params:
    """Parameters with "layers", one dict for each block, in place of the stacked "blocks"; matrices are [I,O].

    Args:
        take: (name, stacked parameter, i) -> that of the i-th layer.
    """
    num_layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    layers = tuple({name: take(name, x, i) for name, x in params["blocks"].items()} for i in range(num_layers))
    return {name: x for name, x in params.items() if name != "blocks"} | {"layers": layers}


def abstract_params(model: Model, mesh: Mesh) -> Params:
    """Shapes of the sampler's weights with their shardings: in the compute dtype, whole along ``fsdp``."""

    def take(name: str, x: jax.ShapeDtypeStruct, _: int) -> jax.ShapeDtypeStruct:
        path, spec = f"blocks.{name}", tuple(x.sharding.spec)[1:]
        layout = PartitionSpec(*(spec[first] for first, *_ in reversed(LAYOUT[path])))
        shape = stored_shape(path, x.shape[1:])[::-1]
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, layout))

    dtype = jnp.dtype(model.compute_dtype)
    return sampler_form(model.abstract_params(mesh, rules=sharding.OF_SAMPLER, dtype=dtype), take)


def program(model: Model, mesh: Mesh) -> Program:
    """From the learner's parameters, which it leaves alone, to the sampler's."""
    sampler = abstract_params(model, mesh)

    def publish(params: Params) -> Params:
        return jax.tree.map(lambda x, to: x.astype(to.dtype), sampler_form(params), sampler)

    return Program(publish, (model.abstract_params(mesh),), jax.tree.map(lambda x: x.sharding, sampler))
