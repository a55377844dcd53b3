"""Publishing: one compiled cast, reshard, split by layer and transpose from the learner's to the sampler's weights.

The learner scans over stacked blocks. The sampler has separate weights for every block and runs the blocks one after
another without a scan. A scan copies a layer's weights before each matmul, and memory reads of weights limit a decode
step.

Layout of the matrices in memory:

    blocks          input first: [I,O]. A CPU multiplies a few rows by this layout in place. It would copy the learner's
                    layout [O,I] in every step.
    head            as in the learner, because a tied head is also the embedding
    q, k, v on TPU  as in the learner, because a TPU would otherwise transpose them back before each chunk of steps

Owns: the form and dtypes of the sampler's weights, the programs that make them. Does not know: what the
weights compute.
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
    """Return a parameter, or layer i of a stacked parameter, in the shape of model files; i = None: not stacked."""
    if i is None:
        return x
    return x[i].reshape(stored_shape(f"blocks.{name}", x.shape[1:]))


def _transposed(name: str, x: jax.Array, i: int | None) -> jax.Array:
    """Return a parameter as ``_stored`` does, but the matrices of blocks as [inputs, outputs]."""
    stored = _stored(name, x, i)
    return stored if i is None else transpose(stored)


def sampler_form(
    params: Params,
    arch: Architecture,
    take: Callable[[str, Any, int | None], Any] = _transposed,
) -> Params:
    """Return parameters with "layers", one dict for each block, instead of stacked "blocks". Matrices are [I,O].

    Args:
        take: (name, stacked parameter, i) -> its i-th layer; (name, parameter, None) -> a parameter outside the blocks.
    """
    outside = {}
    for name, x in params.items():
        if name != "blocks":
            outside[name] = take(name, x, None)
    layers = []
    for number, layer in enumerate(arch.by_layer):
        parameters = {}
        for name, x in params["blocks"].items():
            if layer.has(name):
                i = arch.layers_with(name).index(number)
                parameters[name] = take(name, x, i)
        layers.append(parameters)
    return outside | {"layers": tuple(layers)}


def abstract_params(
    model: Model,
    mesh: Mesh,
    rules: dict[str, Any] = sharding.OF_SAMPLER,
) -> Params:
    """Return abstract weights of the sampler, not split along ``fsdp``.

    Matrices have the compute dtype or are quantised. Other parameters keep their dtype.
    """
    is_tpu = mesh.devices.flat[0].platform == "tpu"

    def take(name: str, x: jax.ShapeDtypeStruct, i: int | None) -> jax.ShapeDtypeStruct:
        if i is None:
            return x
        path = f"blocks.{name}"
        _, *layer_spec = x.sharding.spec
        stored_spec = [layer_spec[first] for first, *_ in stored_dims(path, len(layer_spec))]
        place = NamedSharding(mesh, PartitionSpec(*transposed(stored_spec)))
        layout: NamedSharding | Format = place
        if is_tpu and name in ("q", "k", "v"):  # XLA would transpose these back in every chunk of steps
            layout = Format(Layout((1, 0)), place)
        matrix_shape = transposed(stored_shape(path, x.shape[1:]))
        matrix = jax.ShapeDtypeStruct(matrix_shape, x.dtype, sharding=layout)
        return quantised.shape(name, matrix, place, model.published)

    stacked = model.abstract_params(mesh, rules=rules, dtype=model.compute_dtype)
    return sampler_form(stacked, model.arch, take)


def programs(model: Model, mesh: Mesh, sampler_mesh: Mesh) -> dict[str, Program]:
    """Return programs from the learner's parameters to the sampler's, on the same devices. No argument is donated.

    "publish" takes the parts of ``lora.split`` and returns the trainable weights. With adapters, "publish_base"
    converts the frozen base, once for a run.
    """
    sampler = abstract_params(model, sampler_mesh)
    learner = abstract_params(model, mesh, {})
    parts = lora.split(model.abstract_params(mesh))

    def publish(params: Params) -> Params:
        return _to_sampler(params, model, learner, sampler)

    def publish_trained(*parts: Params) -> Params:
        # Split before publishing: on a split mesh the compiler would gather the base too, and drop it afterwards.
        trainable, *_ = lora.split(lora.published(lora.join(*parts), model.lora))
        return publish(trainable)

    layouts = lora.split(jax.tree.map(lambda x: x.format, sampler))
    programs = {"publish": Program(publish_trained, parts, layouts[0])}
    if parts[1:]:
        programs["publish_base"] = Program(publish, parts[1:], *layouts[1:])
    return programs


def _to_sampler(
    params: Params,
    model: Model,
    learner: Params,
    sampler: Params,
) -> Params:
    """Return the learner's parameters cast, resharded and laid out for the sampler.

    Args:
        learner, sampler: abstract parameters of both halves in the sampler's form.
    """
    # The barrier makes XLA gather one matrix at a time. A TPU gathers into a separate buffer. Without a computation on
    # the buffer, XLA would copy it at the end of the program, and all weights would exist twice.
    always = jax.lax.optimization_barrier(jnp.bool_(True))

    def take(name: str, x: jax.Array, i: int | None) -> Any:
        nonlocal always
        before = _of_layer(learner, name, i, model.arch)
        after = _of_layer(sampler, name, i, model.arch)
        if jax.tree.leaves(before)[0].sharding != jax.tree.leaves(after)[0].sharding:
            x, always = jax.lax.optimization_barrier((x, always))
        rounded = quantised.rounded(name, _stored(name, x, i), model.published)
        put_array = functools.partial(put, i is not None)
        return jax.tree.map(put_array, rounded, before, after)

    def put(
        is_matrix: bool,
        x: jax.Array,
        before: jax.ShapeDtypeStruct,
        after: jax.ShapeDtypeStruct,
    ) -> jax.Array:
        """Cast, reshard and lay out an array of a file's shape for the sampler. Transpose a matrix of a block."""
        nonlocal always
        x = x.astype(after.dtype)
        if before.sharding == after.sharding:
            return transpose(x) if is_matrix else x
        # Transpose after the gather. If a layer is transposed before, XLA transposes all layers for each layer.
        for layout in (before.sharding, after.sharding):
            spec = tuple(layout.spec)
            file_spec = transposed(spec) if is_matrix else spec
            file_layout = NamedSharding(layout.mesh, PartitionSpec(*file_spec))
            x = jax.lax.with_sharding_constraint(x, file_layout)
        row_major = Layout(tuple(range(x.ndim)))
        x = with_layout_constraint(x, row_major)
        x = jnp.where(always, transpose(x) if is_matrix else x, 0)
        x = with_layout_constraint(x, after.format.layout or row_major)
        x, always = jax.lax.optimization_barrier((x, always))
        return x

    return sampler_form(params, model.arch, take)


def _of_layer(params: Params, name: str, i: int | None, arch: Architecture) -> Any:
    """Return a parameter of the i-th layer that has the parameter; i = None: a parameter outside the blocks."""
    if i is None:
        return params[name]
    number = arch.layers_with(name)[i]
    return params["layers"][number][name]
