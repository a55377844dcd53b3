"""Publish: the learner's weights become the sampler's, in one compiled cast, reshard and split by layer.

The learner scans over stacked blocks. The sampler holds every block's weights apart and runs the blocks one after
another in its program: a scan copies a layer's weights before it multiplies by them, and a decode step is bound by
the weights it reads. For the same reason its projections lie output first, as in files (layout): few rows times such
weights take XLA's CPU backend less time (measured).

Owns: the form, layout and dtype of the sampler's weights, the program that makes them. Does not know: what they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.models import layout
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.programs import Program


def sampler_form(params: Params) -> Params:
    """Parameters with "layers", one dict for each block, in place of the stacked "blocks"; projections output first."""
    num_layers = jax.tree.leaves(params["blocks"])[0].shape[0]

    def layer(i: int) -> Params:
        return {name: x[i].transpose(layout.order(f"blocks.{name}")) for name, x in params["blocks"].items()}

    others = {name: x for name, x in params.items() if name != "blocks"}
    return others | {"layers": tuple(layer(i) for i in range(num_layers))}


def abstract_params(model: Model, mesh: Mesh) -> Params:
    """Shapes of the sampler's weights with their shardings: in the compute dtype, whole along ``fsdp``."""
    dtype = jnp.dtype(model.compute_dtype)
    stacked = model.abstract_params(mesh, rules=sharding.SAMPLER_RULES, dtype=dtype)

    def one(path: str, x: Any) -> jax.ShapeDtypeStruct:
        dims = [1 + dim for dim in layout.order(path)]
        spec = (*x.sharding.spec, *(None,) * x.ndim)  # it may end early
        place = NamedSharding(mesh, PartitionSpec(*(spec[dim] for dim in dims)))
        return jax.ShapeDtypeStruct(tuple(x.shape[dim] for dim in dims), x.dtype, sharding=place)

    layer = {name: one(f"blocks.{name}", x) for name, x in stacked["blocks"].items()}
    others = {name: x for name, x in stacked.items() if name != "blocks"}
    return others | {"layers": (layer,) * model.arch.num_layers}


def program(model: Model, mesh: Mesh) -> Program:
    """From the learner's parameters, which it leaves alone, to the sampler's."""
    sampler = abstract_params(model, mesh)

    def publish(params: Params) -> Params:
        return jax.tree.map(lambda x, to: x.astype(to.dtype), sampler_form(params), sampler)

    return Program(publish, (model.abstract_params(mesh),), jax.tree.map(lambda x: x.sharding, sampler))
