"""Publish: the learner's weights become the sampler's, in one compiled cast, reshard, split by layer and transpose.

The learner scans over stacked blocks. The sampler holds every block's weights apart and runs the blocks one after
another in its program: a scan copies a layer's weights before it multiplies by them, and a decode step is bound by
the weights it reads. The blocks' matrices lie input first: a CPU multiplies few rows by such where they lie, and lays
out anew, in every step, what lies as in the learner. The head does: it is the embedding too, where it is tied. A TPU
would turn queries', keys' and values' matrices back before each chunk of steps: for it they lie as in the learner.

Owns: the form and dtypes of the sampler's weights, the programs that make them. Does not know: what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models import lora, quantised
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files.layout import stored_dims, stored_shape
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.models.variants import turn, turned
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import Program


def _stored(name: str, x: jax.Array, i: int | None) -> jax.Array:
    """A parameter, or of the stacked ones that of the i-th layer, as files store it."""
    return x if i is None else x[i].reshape(stored_shape(f"blocks.{name}", x.shape[1:]))


def _turned(name: str, x: jax.Array, i: int | None) -> jax.Array:
    return _stored(name, x, i) if i is None else turn(_stored(name, x, i))


def sampler_form(params: Params, arch: Architecture, take: Callable[[str, Any, int | None], Any] = _turned) -> Params:
    """Parameters with "layers", one dict for each block, in place of the stacked "blocks"; matrices are [I,O].

    Args:
        take: (name, stacked parameter, i) -> the i-th that is stacked; (name, parameter, None) -> one of no layer.
    """
    rest, blocks = {name: take(name, x, None) for name, x in params.items() if name != "blocks"}, params["blocks"]
    layers = tuple(
        {name: take(name, x, arch.layers_with(name).index(n)) for name, x in blocks.items() if layer.has(name)}
        for n, layer in enumerate(arch.by_layer)
    )
    return rest | {"layers": layers}


def abstract_params(model: Model, mesh: Mesh, rules: dict[str, Any] = sharding.OF_SAMPLER) -> Params:
    """Shapes of the sampler's weights, whole along ``fsdp``: matrices in the compute dtype or rounded, others as is."""
    is_tpu = mesh.devices.flat[0].platform == "tpu"

    def take(name: str, x: jax.ShapeDtypeStruct, i: int | None) -> jax.ShapeDtypeStruct:
        if i is None:
            return x
        path, spec = f"blocks.{name}", tuple(x.sharding.spec)[1:]
        stored = [spec[first] for first, *_ in stored_dims(path, len(spec))]
        lies = layout = NamedSharding(mesh, PartitionSpec(*turned(stored)))
        if is_tpu and name in ("q", "k", "v"):  # XLA would turn these back, in every chunk of steps
            layout = Format(Layout((1, 0)), lies)
        shape = jax.ShapeDtypeStruct(turned(stored_shape(path, x.shape[1:])), x.dtype, sharding=layout)
        return quantised.shape(name, shape, lies, model.published)

    stacked = model.abstract_params(mesh, rules=rules, dtype=model.compute_dtype)
    return sampler_form(stacked, model.arch, take)


def programs(model: Model, mesh: Mesh, sampler_mesh: Mesh) -> dict[str, Program]:
    """From the learner's parameters on its mesh, which are left alone, to the sampler's, of the same devices.

    "publish" of what learns, which takes the parts of ``lora.split``; "publish_base", once, of what adapters are of.
    """
    sampler, learner = abstract_params(model, sampler_mesh), abstract_params(model, mesh, {})
    parts = lora.split(model.abstract_params(mesh))

    def publish(params: Params) -> Params:
        # One matrix is gathered after the other, and a TPU's gather has a buffer of its own: if nothing were computed
        # of it, it would be copied at the program's end, and all weights be there twice.
        always = jax.lax.optimization_barrier(jnp.bool_(True))

        def take(name: str, x: jax.Array, i: int | None) -> Any:
            nonlocal always
            layer = None if i is None else model.arch.layers_with(name)[i]
            places = [(tree if i is None else tree["layers"][layer])[name] for tree in (learner, sampler)]
            moves = len({jax.tree.leaves(place)[0].sharding for place in places}) > 1
            if moves:
                x, always = jax.lax.optimization_barrier((x, always))
            made = quantised.rounded(name, _stored(name, x, i), model.published)
            return jax.tree.map(functools.partial(put, i is not None), made, *places)

        def put(turns: bool, x: jax.Array, lies: jax.ShapeDtypeStruct, to: jax.ShapeDtypeStruct) -> jax.Array:
            """An array as files store it, where and as the sampler has it; turned where it ``turns``."""
            nonlocal always
            turn_of, spec_of = (turn, turned) if turns else (lambda x: x, tuple)
            x = x.astype(to.dtype)
            if lies.sharding == to.sharding:
                return turn_of(x)
            # Turned when it is whole: of what is turned before, XLA would turn all layers for each.
            for layout in (lies.sharding, to.sharding):
                spec = PartitionSpec(*spec_of(layout.spec))
                x = jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))
            x = with_layout_constraint(x, plain := Layout(tuple(range(x.ndim))))
            x = with_layout_constraint(jnp.where(always, turn_of(x), 0), to.format.layout or plain)
            x, always = jax.lax.optimization_barrier((x, always))
            return x

        return sampler_form(params, model.arch, take)

    layouts = lora.split(jax.tree.map(lambda x: x.format, sampler))
    learned = lambda *given: publish(lora.split(lora.published(lora.join(*given), model.lora))[0])
    bases = {"publish_base": Program(publish, parts[1:], *layouts[1:])} if parts[1:] else {}
    return {"publish": Program(learned, parts, layouts[0])} | bases
