"""The decoder-only transformer: RMSNorm, rotary grouped-query attention and a gated MLP.

``Architecture`` switches on further parts: biases, further norms, experts and the gated delta rule.

Modules are flax nnx. Every parameter of a block has a leading layer axis, and the blocks run under one ``lax.scan``.
The sampler is the exception: its layers are separate arrays and run one by one (see publish). Parameters are a nested
dict of arrays (``params``), separate from the static graph. The optimizer, checkpoints and publish therefore use a
plain pytree.

Letters: B rows, T tokens, D width, F ffn, N query heads, K key heads, H head size, S cached keys, V vocab.
Owns: parameter shapes with their logical axes, the forward pass. Does not know: files, sampling, losses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import lora as adapters
from jaxrl_llm.models import mixers, mlps, moe, quantised
from jaxrl_llm.models import rope as ropes
from jaxrl_llm.models.architecture import Architecture, Layer
from jaxrl_llm.models.attention import Cache, Prompt
from jaxrl_llm.models.blocks import (
    Block,
    LayerParameters,
    MixerInputs,
    Parameter,
    Routing,
    Visible,
    norms,
    scan,
    transpose,
)
from jaxrl_llm.models.kernels import context
from jaxrl_llm.models.kernels import learner as kernels
from jaxrl_llm.runtime import sharding

Params = dict[str, Any]

INIT_STDDEV = 0.02
EMBEDDING = ("vocab", "embed")  # logical axes of the embedding, and of the head
# Logical axes of a layer's matrices with heads. Heads and head size count as one dimension.
AXES_OF_HEADS = {
    "q": ("heads", "embed"),
    "k": ("kv_heads", "embed"),
    "v": ("kv_heads", "embed"),
    "o": ("embed", "heads"),
}


def _param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    logical_axes: tuple[str, ...],
    constant: float | None = None,
) -> nnx.Param:
    if constant is not None:
        return nnx.Param(jnp.full(shape, constant), logical_axes=logical_axes)
    noise = jax.random.normal(rngs.params(), shape)
    return nnx.Param(INIT_STDDEV * noise, logical_axes=logical_axes)


def rms_norm(x: jax.Array, scale: jax.Array, arch: Architecture) -> jax.Array:
    """Return x / rms(x) * (scale + ``arch.norm_offset``) over the last dimension, computed in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + arch.norm_eps)
    leading_axes = (1,) * (x.ndim - 1)
    scale = scale.astype(jnp.float32).reshape((*leading_axes, -1))
    if arch.norm_offset:
        scale = scale + arch.norm_offset
    return (x32 * scale).astype(x.dtype)


def linear(
    x_BTI: jax.Array,
    w: jax.Array,
    *,
    merged: bool = True,
    axes: tuple[str | None, ...] = (),
) -> jax.Array:
    """Return x w^T in the dtype of x.

    The weight is [O, I] as in files. O or I may be two dimensions, heads by head size.

    Args:
        merged: merge rows and positions into one dimension before the matmul. The best value depends on the backend.
            On CPU, True is faster: a gradient that contracts two dimensions makes XLA transpose x first. The
            computation of x then has a strided innermost dimension, and a SwiGLU is 13 times slower (measured).
            On TPU, False is faster: to merge the dimensions, XLA copies x and its gradient. By XLA's estimate these
            copies take a sixth of a layer's cycles.
        axes: logical axes of w as [O, I]. If w has separate head dimensions, w is gathered once for the forward pass
            and its gradient. Leave empty if the backward pass keeps the gathered weight.

    Returns:
        [B,T,O].
    """
    w_OI = w.reshape(-1, x_BTI.shape[-1]).astype(x_BTI.dtype)
    if axes and w.ndim == 3:
        w_OI = sharding.gather_once(w_OI, *axes)
    if not merged:
        return jnp.einsum("BTI,OI->BTO", x_BTI, w_OI)
    B, T, _ = x_BTI.shape
    x_XI = x_BTI.reshape(-1, x_BTI.shape[-1])
    X = B * T
    if X == 1:  # XLA would fuse a vector's product and read the sampler's transposed weights (publish) with strides
        x_XI = jnp.repeat(x_XI, 2, axis=0)
    out_XO = jnp.einsum("XI,OI->XO", x_XI, w_OI)
    return out_XO[:X].reshape(B, T, -1)


def look_up(dtype, width: int, axes: Any, tokens_BT: jax.Array, table_VD: jax.Array) -> jax.Array:
    """Return the tokens' rows of the embedding table, [B,T,D].

    If a device holds only a part of the width, it reads this part for the tokens of all devices along ``axes``. The
    devices then exchange activations. The gradient has the table's sharding and is summed in the table's dtype.
    """
    if table_VD.shape[1] == width:
        return table_VD[tokens_BT].astype(dtype)
    all_tokens = jax.lax.all_gather(tokens_BT, axes, tiled=True)
    part = table_VD[all_tokens].astype(dtype)
    return jax.lax.all_to_all(part, axes, split_axis=0, concat_axis=2, tiled=True)


def block_parameters(arch: Architecture) -> Iterator[Parameter]:
    """Yield all parameters of the blocks, without adapters.

    The order of the parameters determines their random initial values, because each parameter takes the next random
    numbers.
    """
    first, *other_mixers = mixers.MIXERS.values()
    yield from first.parameters(arch)
    yield from mlps.MLPS[arch.mlp].parameters(arch)
    for mixer in other_mixers:
        yield from mixer.parameters(arch)
    yield from norms(arch)


class Blocks(nnx.Module):
    """Parameters of all blocks, stacked [layers, ...]. A parameter is stacked over the layers that have it."""

    def __init__(self, arch: Architecture, lora: LoraConfig, *, rngs: nnx.Rngs):
        self.arch = arch
        self.lora = lora
        parameters = list(block_parameters(arch))
        all_parameters = [*parameters, *adapters.matrices(lora, parameters)]
        for name, shape, axes, constant in all_parameters:
            count = len(arch.layers_with(name))
            if count:
                stacked = _param(rngs, (count, *shape), ("layers", *axes), constant)
                setattr(self, name, stacked)


@dataclasses.dataclass(frozen=True)
class _LayerParameters:
    """One layer of ``Blocks``, with the settings of a forward pass: the interface ``blocks.LayerParameters``."""

    blocks: Blocks
    implementation: str
    rounding: str
    rules: dict[str, Any]
    is_published: bool
    is_rematted: bool  # the backward pass computes this block again

    @property
    def arch(self) -> Architecture:
        return self.blocks.arch

    @property
    def lora(self) -> LoraConfig:
        return self.blocks.lora

    def weight(self, name: str) -> jax.Array:
        return getattr(self.blocks, name)[...]

    def norm(self, x: jax.Array, name: str) -> jax.Array:
        if not hasattr(self.blocks, name):
            return x
        return rms_norm(x, self.weight(name), self.arch)

    def project(self, x_BTI: jax.Array, name: str) -> jax.Array:
        is_merged = self.implementation == "xla" and not context.is_split()
        multiply = functools.partial(linear, merged=is_merged)
        axes = AXES_OF_HEADS.get(name, ()) if self.is_rematted else ()
        multiply_base = functools.partial(multiply, axes=axes)
        out_BTO = quantised.multiply(multiply_base, x_BTI, name, self.weight(name), self.rounding)
        out_BTO = adapters.add(out_BTO, x_BTI, name, self.blocks, multiply)
        bias = getattr(self.blocks, f"{name}_bias", None)
        if bias is None:
            return out_BTO
        return out_BTO + bias[...].astype(out_BTO.dtype).reshape(1, 1, -1)


def run_block(
    x_BTD: jax.Array, parameters: LayerParameters, inputs: MixerInputs, routing: Routing
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Run one layer.

    Returns:
        The activations, and a tuple: first the mixer's two results, then the further results of the MLP. The mixer's
        results are the keys and values of the new tokens [B,K,T,H], the updated caches, or recurrent states.
    """
    mixer = mixers.MIXERS[inputs.layer.mixer]
    mlp = mlps.MLPS[parameters.arch.mlp]
    mix = mixer.apply if inputs.cache is None else mixer.apply_next
    out_BTD, states = mix(parameters.norm(x_BTD, "attention_norm"), parameters, inputs)
    x_BTD = x_BTD + parameters.norm(out_BTD, "attention_post_norm")
    x_BTD = checkpoint_name(sharding.constrain(x_BTD, "batch", "length", "activation"), "mlp")
    out_BTD, mlp_results = mlp.apply(parameters.norm(x_BTD, "mlp_norm"), parameters, routing)
    x_BTD = x_BTD + parameters.norm(out_BTD, "mlp_post_norm")
    return sharding.constrain(x_BTD, "batch", "length", "activation"), (
        *states,
        *mlp_results,
    )


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Inputs and settings of a forward pass that all layers share.

    Attributes:
        visible_by_window: ``visible`` in the form that attention's implementation expects, by the layers' windows.
        rules: sharding rules of the weights.
        is_published: the weights have the sampler's layout and sharding.
        is_rematted: the backward pass computes the blocks again.
        drops_states: return no keys, values and states, because a scan cannot stack those of several kinds of mixers.
    """

    model: Model
    positions: jax.Array
    rope: ropes.Tables
    visible: Visible
    visible_by_window: dict[int, Any]
    length: jax.Array | None
    prompt: Prompt | None
    cache: Cache | None
    routing: Routing
    rules: dict[str, Any]
    is_published: bool
    is_rematted: bool
    drops_states: bool


def _make_block(layer: Layer, graph: nnx.GraphDef, shared: _Shared) -> Block:
    """Return the function that runs one layer of this kind.

    Args:
        graph: the static graph of ``Blocks``.
    """
    model = shared.model

    def block(x: jax.Array, layer_inputs: Any) -> tuple[jax.Array, Any]:
        layer_params, layer_kv, chosen = layer_inputs
        parameters = _LayerParameters(
            nnx.merge(graph, layer_params),
            implementation=model.attention,
            rounding=model.weights,
            rules=shared.rules,
            is_published=shared.is_published,
            is_rematted=shared.is_rematted,
        )
        inputs = MixerInputs(
            layer,
            shared.positions,
            rope=None if layer.rope < 0 else shared.rope[layer.rope],
            visible=shared.visible,
            visible_in_window=shared.visible_by_window[layer.window],
            length=shared.length,
            prompt=_of_layer(shared.prompt, layer_kv.get("prompt")),
            cache=_of_layer(shared.cache, layer_kv.get("cache")),
        )
        x, results = run_block(x, parameters, inputs, Routing(chosen, shared.routing.counts))
        if shared.drops_states:
            results = (None, None, *results[2:])
        return x, results

    if not shared.is_rematted:
        return block
    kept_names = {"dots": ("mlp",), "full": ()}[model.remat]
    policy = jax.checkpoint_policies.save_only_these_names(*kept_names)
    return jax.checkpoint(block, policy=policy, prevent_cse=False)


class Transformer(nnx.Module):
    """Embedding, blocks, final norm and head. With tied embeddings, the head is the embedding."""

    def __init__(self, arch: Architecture, lora: LoraConfig = LoraConfig(), *, rngs: nnx.Rngs):
        self.arch = arch
        self.embedding = _param(rngs, (arch.vocab_size, arch.width), EMBEDDING)
        self.blocks = Blocks(arch, lora, rngs=rngs)
        self.final_norm = _param(rngs, (arch.width,), ("activation",), 1.0 - arch.norm_offset)
        if not arch.tied:
            self.head = _param(rngs, (arch.vocab_size, arch.width), EMBEDDING)

    def __call__(
        self,
        model: Model,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        prompt: Prompt | None,
        cache: Cache | None,
        visible: Visible,
        length: jax.Array | None,
        remat: bool,
        layers: tuple[Any, ...] | None,
        rope: ropes.Tables | None,
        routing: Routing | None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run the model as ``Model.forward`` describes.

        If ``layers`` is not None, it has the sampler's blocks (publish), which replace this module's blocks.
        """
        x_BTD = self._embed(model, tokens_BT, is_published=layers is not None)
        results: tuple[Any, ...] = ((), ())  # keys and values of a model without layers
        if self.arch.by_layer:
            shared = self._shared(
                model,
                positions_BT,
                prompt=prompt,
                cache=cache,
                visible=visible,
                length=length,
                is_published=layers is not None,
                is_rematted=remat and model.remat != "none",
                rope=rope,
                routing=Routing() if routing is None else routing,
            )
            x_BTD, results = self._run_layers(x_BTD, layers, shared)
        return rms_norm(x_BTD, self.final_norm[...], self.arch), results

    def _shared(
        self,
        model: Model,
        positions_BT: jax.Array,
        *,
        prompt: Prompt | None,
        cache: Cache | None,
        visible: Visible,
        length: jax.Array | None,
        is_published: bool,
        is_rematted: bool,
        rope: ropes.Tables | None,
        routing: Routing,
    ) -> _Shared:
        """Return the inputs that all layers share. Rope tables and masks are computed once, for all layers."""
        rules = sharding.RULES | dict(model.rules)
        if is_published:
            rules = rules | sharding.OF_SAMPLER
        windows = {layer.window for layer in self.arch.by_layer}
        mixer_kinds = {layer.mixer for layer in self.arch.by_layer}
        return _Shared(
            model,
            positions_BT,
            rope=ropes.tables(self.arch, positions_BT, rope),
            visible=visible,
            visible_by_window=kernels.by_window(visible, windows, positions_BT, model.attention),
            length=length,
            prompt=prompt,
            cache=cache,
            routing=routing,
            rules=rules,
            is_published=is_published,
            is_rematted=is_rematted,
            drops_states=len(mixer_kinds) > 1 and not is_published,
        )

    def _run_layers(
        self, x_BTD: jax.Array, layers: tuple[Any, ...] | None, shared: _Shared
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run all layers: ``layers`` one by one, or under a scan if ``layers`` is None."""
        graph, stacked = nnx.split(self.blocks)
        kinds = dict.fromkeys(self.arch.by_layer)
        blocks = {layer: _make_block(layer, graph, shared) for layer in kinds}
        kv: dict[str, tuple[Any, Any]] = {}
        if shared.prompt is not None:
            kv["prompt"] = (shared.prompt.keys, shared.prompt.values)
        if shared.cache is not None:
            kv["cache"] = (shared.cache.keys, shared.cache.values)
        chosen = moe.by_layer(shared.routing, self.arch.num_layers)
        if layers is None:
            inputs = (nnx.to_pure_dict(stacked), kv, chosen)
            return scan(blocks, self.arch.by_layer, x_BTD, inputs)
        return self._run_separately(blocks, x_BTD, layers, tuple(stacked), kv, chosen)

    def _embed(self, model: Model, tokens_BT: jax.Array, *, is_published: bool) -> jax.Array:
        """Return the embeddings of the tokens, [B,T,D] in the compute dtype."""
        table_VD = self.embedding[...]
        dtype = jnp.dtype(model.compute_dtype)
        spec = sharding.on_rows(model.table_spec)  # the sampler's table is not split along the axes of rows
        look_up_here = functools.partial(look_up, dtype, self.arch.width, spec[1])
        if is_published:
            x_BTD = look_up_here(tokens_BT, table_VD)
        else:
            table_VD = sharding.constrain(table_VD, *EMBEDDING, rules=model.rules)
            axes = (("batch", "length"), jax.P(None, spec[1]))
            x_BTD = sharding.by_device(
                look_up_here,
                tokens_BT,
                table_VD,
                axes=axes,
                shared=2,
                over=sharding.TOKEN_AXES,
            )
        x_BTD = sharding.constrain(x_BTD, "batch", "length", "activation")
        if self.arch.embedding_scale != 1.0:
            x_BTD = x_BTD * jnp.asarray(self.arch.embedding_scale, dtype)
        return x_BTD

    def _run_separately(
        self,
        blocks: dict[Layer, Block],
        x_BTD: jax.Array,
        layers: tuple[Any, ...],
        names: tuple[str, ...],
        kv: dict[str, tuple[Any, Any]],
        chosen: jax.Array | None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run the sampler's layers one by one.

        Args:
            layers: transposed parameters of each layer.
            names: names of all parameters of the blocks.
            kv: keys and values of prompts and caches, by layer.
            chosen: experts to replay, by layer.

        Returns:
            The activations, and the results of ``run_block``, each as a tuple with one entry per layer.
        """
        compiled = {layer: jax.jit(block) for layer, block in blocks.items()}  # one trace per kind of layer
        results = []
        for i, (layer, transposed_params) in enumerate(zip(self.arch.by_layer, layers, strict=True)):
            # This transposition does not copy, because XLA's matmuls can contract either dimension.
            params = jax.tree.map(transpose, transposed_params)
            params = dict.fromkeys(names) | params  # None: this layer has no such parameter
            layer_kv = {name: (keys[i], values[i]) for name, (keys, values) in kv.items()}
            layer_chosen = None if chosen is None else chosen[i]
            x_BTD, layer_results = compiled[layer](x_BTD, (params, layer_kv, layer_chosen))
            results.append(layer_results)
        return x_BTD, tuple(zip(*results, strict=True))


Memory = TypeVar("Memory", Prompt, Cache)


def _of_layer(memory: Memory | None, kv: tuple[Any, Any] | None) -> Memory | None:
    """Return a ``Prompt`` or ``Cache`` with the keys and values of one layer; None if there are none."""
    if memory is None or kv is None:
        return None
    keys, values = kv
    return dataclasses.replace(memory, keys=keys, values=values)


@dataclasses.dataclass(frozen=True)
class Model:
    """The static part of a transformer: everything except the parameters."""

    arch: Architecture
    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"  # implementation of attention: "xla", or a kernel of ``kernels.choose``
    rules: tuple[tuple[str, Any], ...] = ()  # sharding rules of weights that override ``sharding.RULES``
    param_dtype: str = "float32"
    weights: str = "compute"  # kind that the learner rounds matrices to in the forward pass (``quantised.KINDS``)
    published: str = "compute"  # kind that the sampler's matrices are rounded to once, when they are published
    lora: LoraConfig = LoraConfig()

    @property
    def base(self) -> Model:
        """Return the same model without adapters."""
        return dataclasses.replace(self, lora=LoraConfig())

    def abstract_params(self, mesh: Mesh, *, rules: dict[str, Any] | None = None, dtype: Any = None) -> Params:
        """Return shapes and shardings of the parameters.

        Args:
            rules: sharding rules that override the model's own rules.
            dtype: dtype of the matrices; None = ``param_dtype``, and float32 for adapters.
        """
        rules = sharding.RULES | dict(self.rules) | (rules or {})
        _, state = _abstract(self.arch, self.lora)

        def one(variable):
            shape = variable.get_value().shape
            axes = variable.get_metadata()["logical_axes"]
            own_dtype = "float32" if "rank" in axes else self.param_dtype
            # Other parameters, such as routers, are computed in float32.
            is_matrix = "embed" in axes or "rank" in axes
            if is_matrix and "activation" not in axes:
                own_dtype = dtype or own_dtype
            layout = sharding.named(mesh, shape, axes, rules)
            return jax.ShapeDtypeStruct(shape, jnp.dtype(own_dtype), sharding=layout)

        return _pure_dict(jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))

    def init(self, key: jax.Array, mesh: Mesh) -> Params:
        """Return random parameters without adapters. Each device creates its own shards (adapters: ``lora.init``)."""
        return _init_program(Model(self.arch, rules=self.rules, param_dtype=self.param_dtype), mesh)(key)

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        prompt: Prompt | None = None,
        cache: Cache | None = None,
        visible: Visible = None,
        length: jax.Array | None = None,
        remat: bool = False,
        rope: ropes.Tables | None = None,
        routing: Routing | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Return the hidden states after the final norm, with keys, values and routing.

        Args:
            params: stacked blocks, which run under a scan; or separate transposed "layers", which run one by one
                (publish).
            tokens: [B,T] i32.
            positions: [B,T] i32, 0-based position of each token in its row.
            prompt: keys and values of the group's prompt, by layer; the rows of a group share them.
            cache: keys and values of each row's earlier tokens, by layer; requires T = 1.
            visible: the tokens that each token attends to, [B,T,T] bool or a rule; None = causal attention.
            length: [B] i32, number of tokens after which recurrent states are returned; None = all.
            remat: apply the model's rematerialisation policy (for a backward pass).
            rope: ``rope.tables`` of all positions; None = computed here.
            routing: experts chosen earlier and their counts, if known.

        Returns:
            hidden [B,T,D] in the compute dtype, and a tuple (keys, values, ...) by layer.

            - Without a cache: keys and values of the new tokens, [B,K,T,H]. With a cache: the updated caches.
            - Recurrent layers: their states, as ``delta_rule.empty_states``.
            - Stacked blocks: arrays with a leading layer axis. A model with several kinds of mixers returns None here.
            - Separate layers: a tuple with one entry per layer.
            - With experts, routing results follow (``moe.by_token``).
        """
        graph, _ = _abstract(self.arch, self.lora)
        layers = params.get("layers")
        if layers is not None:  # nnx.merge needs a value for every block parameter, but ignores its shape
            placeholders = {name: x for layer in layers for name, x in layer.items()}
            params = {name: x for name, x in params.items() if name != "layers"} | {"blocks": placeholders}
        transformer = nnx.merge(graph, params)
        return transformer(
            self,
            tokens,
            positions,
            prompt=prompt,
            cache=cache,
            visible=visible,
            length=length,
            remat=remat,
            layers=layers,
            rope=rope,
            routing=routing,
        )

    @property
    def table_spec(self) -> jax.P:
        """Return the sharding of embedding and head in the mesh of the function that is traced."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return jax.P(None, None)
        shape = (self.arch.vocab_size, self.arch.width)
        rules = sharding.RULES | dict(self.rules)
        return sharding.partition_spec(shape, EMBEDDING, mesh, rules)

    def head(self, params: Params) -> jax.Array:
        """Return the output projection [V,D] from the learner's or the sampler's parameters."""
        return params["embedding" if self.arch.tied else "head"]


def _pure_dict(state: nnx.State) -> Params:
    """Return the state as a nested dict. It always has "blocks", which are empty if the model has no layers."""
    return {"blocks": {}} | nnx.to_pure_dict(state)


@functools.lru_cache
def _abstract(arch: Architecture, lora: LoraConfig):
    """Return the static graph and the shapes of the parameters."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(arch, lora, rngs=nnx.Rngs(0))))


@functools.lru_cache
def _init_program(model: Model, mesh: Mesh) -> Callable[[jax.Array], Params]:
    """Return the compiled initialiser. It is cached because each new closure would be compiled again."""

    def make(key):
        params = _pure_dict(nnx.state(Transformer(model.arch, rngs=nnx.Rngs(params=key))))
        return jax.tree.map(lambda x: x.astype(model.param_dtype), params)

    return jax.jit(make, out_shardings=sharding.of(model.abstract_params(mesh)))
