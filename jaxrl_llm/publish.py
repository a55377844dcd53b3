"""Publish: the learner's weights become the sampler's, in one compiled cast, reshard and split by layer.

The learner scans over stacked blocks. The sampler holds every block's weights apart and runs the blocks one after
another in its program: a scan copies a layer's weights before it multiplies by them, and a decode step is bound by
the weights it reads. For the same reason its projections lie output first (transformer.linear_output_first).

Owns: the form, layout and dtype of the sampler's weights, the program that makes them. Does not know: what they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.programs import Program

# How many dimensions of a projection, the first ones, are summed over.
INPUTS = {"head": 1, "q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


def sampler_form(params: Params) -> Params:
    """Parameters with "layers", one dict for each block, in place of the stacked "blocks"; projections output first."""
    num_layers = jax.tree.leaves(params["blocks"])[0].shape[0]

    def layer(i: int) -> Params:
        return {name: x[i].transpose(_output_first(name, x.ndim - 1)) for name, x in params["blocks"].items()}

    others = {name: x.transpose(_output_first(name, x.ndim)) for name, x in params.items() if name != "blocks"}
    return others | {"layers": tuple(layer(i) for i in range(num_layers))}


def _output_first(name: str, ndim: int) -> tuple[int, ...]:
    inputs = INPUTS.get(name, 0)
    return (*range(inputs, ndim), *range(inputs))


def abstract_params(model: Model, mesh: Mesh) -> Params:
    """Shapes of the sampler's weights with their shardings: in the compute dtype, whole along ``fsdp``."""
    dtype = jnp.dtype(model.compute_dtype)
    stacked = model.abstract_params(mesh, rules=sharding.SAMPLER_RULES, dtype=dtype)

    def one(name: str, x: Any, skip: int = 0) -> jax.ShapeDtypeStruct:
        shape, spec = x.shape[skip:], (*x.sharding.spec, *(None,) * x.ndim)[skip : x.ndim]
        order = _output_first(name, len(shape))
        layout = NamedSharding(mesh, PartitionSpec(*(spec[dim] for dim in order)))
        return jax.ShapeDtypeStruct(tuple(shape[dim] for dim in order), x.dtype, sharding=layout)

    layer = {name: one(name, x, skip=1) for name, x in stacked["blocks"].items()}
    others = {name: one(name, x) for name, x in stacked.items() if name != "blocks"}
    return others | {"layers": (layer,) * model.arch.num_layers}


def program(model: Model, mesh: Mesh) -> Program:
    """From the learner's parameters, which it leaves alone, to the sampler's."""
    sampler = abstract_params(model, mesh)

    def publish(params: Params) -> Params:
        return jax.tree.map(lambda x, to: x.astype(to.dtype), sampler_form(params), sampler)

    return Program(publish, (model.abstract_params(mesh),), jax.tree.map(lambda x: x.sharding, sampler))
