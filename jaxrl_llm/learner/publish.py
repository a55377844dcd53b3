"""Publishing: one compiled cast, reshard, split by layer and transpose from the learner's to the sampler's weights.

The learner scans over stacked blocks. The sampler has separate weights for every block and runs the blocks one after
another without a scan. A scan copies a layer's weights before each matmul, and memory reads of weights limit a decode
step.

Layout of the matrices in memory:

    blocks          input first: [I,O]. A CPU multiplies a few rows by this layout in place. It would copy the learner's
                    layout [O,I] in every step.
    head            as in the learner, because a tied head is also the embedding
    q, k, v on TPU  as in the learner, because a TPU would otherwise transpose them back before each chunk of steps

Owns: the form and dtypes of the sampler's weights, the programs that make them. Does not know: what the weights mean.
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
from jaxrl_llm.models.blocks import transpose, transposed
from jaxrl_llm.models.files.layout import stored_dims, stored_shape
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import Program


def _stored(name: str, x: jax.Array, i: int | None) -> jax.Array:
    """Return a parameter, or layer i of a stacked parameter, in the shape that files store; i = None: not stacked."""
    return x if i is None else x[i].reshape(stored_shape(f"blocks.{name}", x.shape[1:]))


def _turned(name: str, x: jax.Array, i: int | None) -> jax.Array:
    return _stored(name, x, i) if i is None else transpose(_stored(name, x, i))


def sampler_form(params: Params, arch: Architecture, take: Callable[[str, Any, int | None], Any] = _turned) -> Params:
    """Return parameters with "layers", one dict for each block, instead of stacked "blocks". Matrices are [I,O].

    Args:
        take: (name, stacked parameter, i) -> its i-th layer; (name, parameter, None) -> a parameter outside the blocks.
    """
    rest, blocks = {name: take(name, x, None) for name, x in params.items() if name != "blocks"}, params["blocks"]
    layers = tuple(
        {name: take(name, x, arch.layers_with(name).index(n)) for name, x in blocks.items() if layer.has(name)}
        for n, layer in enumerate(arch.by_layer)
    )
    return rest | {"layers": layers}


def abstract_params(model: Model, mesh: Mesh, rules: dict[str, Any] = sharding.OF_SAMPLER) -> Params:
    """Return abstract weights of the sampler, not split along ``fsdp``.

    Matrices have the compute dtype or are quantised. Other parameters keep their dtype.
    """
    is_tpu = mesh.devices.flat[0].platform == "tpu"

    def take(name: str, x: jax.ShapeDtypeStruct, i: int | None) -> jax.ShapeDtypeStruct:
        if i is None:
            return x
        path, spec = f"blocks.{name}", tuple(x.sharding.spec)[1:]
        stored = [spec[first] for first, *_ in stored_dims(path, len(spec))]
        lies = layout = NamedSharding(mesh, PartitionSpec(*transposed(stored)))
        if is_tpu and name in ("q", "k", "v"):  # XLA would transpose these back in every chunk of steps
            layout = Format(Layout((1, 0)), lies)
        shape = jax.ShapeDtypeStruct(transposed(stored_shape(path, x.shape[1:])), x.dtype, sharding=layout)
        return quantised.shape(name, shape, lies, model.published)

    stacked = model.abstract_params(mesh, rules=rules, dtype=model.compute_dtype)
    return sampler_form(stacked, model.arch, take)


def programs(model: Model, mesh: Mesh, sampler_mesh: Mesh) -> dict[str, Program]:
    """Return programs from the learner's parameters to the sampler's, on the same devices. No argument is donated.

    "publish" takes the parts of ``lora.split`` and returns the trainable weights. With adapters, "publish_base"
    converts the frozen base, once for a run.
    """
    sampler, learner = abstract_params(model, sampler_mesh), abstract_params(model, mesh, {})
    parts = lora.split(model.abstract_params(mesh))

    def publish(params: Params) -> Params:
        # The barrier makes XLA gather one matrix at a time. A TPU gathers into a separate buffer. Without a computation
        # on the buffer, XLA would copy it at the end of the program, and all weights would exist twice.
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
            """Cast, reshard and lay out an array of a file's shape for the sampler; transpose it if ``turns``."""
            nonlocal always
            turn_of, spec_of = (transpose, transposed) if turns else (lambda x: x, tuple)
            x = x.astype(to.dtype)
            if lies.sharding == to.sharding:
                return turn_of(x)
            # Transpose after the gather. If a layer is transposed before, XLA transposes all layers for each layer.
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
