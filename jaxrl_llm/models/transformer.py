"""The decoder-only transformer: RMSNorm, rotary grouped-query attention and a gated MLP.

``Architecture`` switches on further parts: biases, further norms, experts and the gated delta rule.

Modules are flax nnx. Every parameter of a block has a leading layer axis, and the blocks run under one ``lax.scan``.
The sampler is the exception: its layers are separate arrays and run one by one (see publish). Parameters are a nested
dict of arrays (``params``) beside the static graph, so the optimizer, checkpoints and publish use a plain pytree.

Letters: B rows, T tokens, D width, F ffn, N query heads, K key heads, H head size, S cached keys, V vocab.
Owns: parameter shapes with their logical axes, the forward pass. Does not know: files, sampling, losses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import block_parts, delta_rule, moe, quantised
from jaxrl_llm.models import lora as adapters
from jaxrl_llm.models import rope as ropes
from jaxrl_llm.models.architecture import Architecture, Layer
from jaxrl_llm.models.attention import Cache, Groups, Prompt, attend, attend_next, rotate
from jaxrl_llm.models.kernels import context
from jaxrl_llm.models.kernels import learner as kernels
from jaxrl_llm.ops.packing import Line
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
    rngs: nnx.Rngs, shape: tuple[int, ...], logical_axes: tuple[str, ...], constant: float | None = None
) -> nnx.Param:
    init = INIT_STDDEV * jax.random.normal(rngs.params(), shape) if constant is None else jnp.full(shape, constant)
    return nnx.Param(init, logical_axes=logical_axes)


def rms_norm(x: jax.Array, scale: jax.Array, arch: Architecture) -> jax.Array:
    """Return x / rms(x) * (scale + ``arch.norm_offset``) over the last dimension, computed in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + arch.norm_eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (x32 * (scale + arch.norm_offset if arch.norm_offset else scale)).astype(x.dtype)


def linear(x_BTI: jax.Array, w: jax.Array, *, merged: bool = True, axes: tuple[str | None, ...] = ()) -> jax.Array:
    """Return x w^T in the dtype of x.

    The weight is [O, I] as in files. O or I may be two dimensions, heads by head size.

    Args:
        merged: merge rows and positions into one dimension before the matmul. The best value depends on the backend.
            On CPU, True is faster: a gradient that contracts two dimensions makes XLA transpose x first. The
            computation of x then has a strided innermost dimension, and a SwiGLU is 13 times slower (measured).
            On TPU, False is faster: to merge the dimensions, XLA copies x and its gradient. The copies take a sixth
            of a layer's cycles (XLA's estimate).
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
    x_XI, X = x_BTI.reshape(-1, x_BTI.shape[-1]), x_BTI.shape[0] * x_BTI.shape[1]
    if X == 1:  # XLA would fuse a vector's product and read the sampler's transposed weights (publish) with strides
        x_XI = jnp.repeat(x_XI, 2, axis=0)
    return jnp.einsum("XI,OI->XO", x_XI, w_OI)[:X].reshape(*x_BTI.shape[:2], -1)


def look_up(dtype, width: int, axes: Any, tokens_BT: jax.Array, table_VD: jax.Array) -> jax.Array:
    """Return the tokens' rows of the embedding table, [B,T,D].

    If a device holds only a part of the width, it reads this part for the tokens of all devices along ``axes``. The
    devices then exchange activations. The gradient has the table's sharding and is summed in the table's dtype.
    """
    if table_VD.shape[1] == width:
        return table_VD[tokens_BT].astype(dtype)
    part = table_VD[jax.lax.all_gather(tokens_BT, axes, tiled=True)].astype(dtype)
    return jax.lax.all_to_all(part, axes, split_axis=0, concat_axis=2, tiled=True)


class Blocks(nnx.Module):
    """All transformer blocks. Parameters are stacked [layers, ...]; a call uses the slice of one layer."""

    def __init__(self, arch: Architecture, lora: LoraConfig, *, rngs: nnx.Rngs):
        D, H, N, K = arch.width, arch.head_size, arch.num_heads, arch.num_kv_heads
        self.arch, self.lora = arch, lora
        matrices = (
            ("q", (N, H * (1 + arch.output_gate), D), ("heads", "head_size", "embed")),
            ("k", (K, H, D), ("kv_heads", "head_size", "embed")),
            ("v", (K, H, D), ("kv_heads", "head_size", "embed")),
            ("o", (D, N, H), ("embed", "heads", "head_size")),
            *moe.parameters(arch),
        )
        further = (*block_parts.vectors(arch), *(arch.delta.parameters(D) if arch.delta else ()))
        for name, size, axes, *constant in (*matrices, *further, *adapters.matrices(lora, matrices)):
            if count := len(arch.layers_with(name)):
                setattr(self, name, _param(rngs, (count, *size), ("layers", *axes), *constant))

    def __call__(self, x_BTD, rope, layer, *, past, kv, visible, positions, implementation, weights, experts, rematted):
        """Run one layer.

        Args:
            rope: cosines and sines of this layer's rope; None = the layer has no rope.
            layer: the kind of this layer.
            past: "visible" and "length", as in ``Model.forward``.
            kv: "prompt" and "cache" of this layer, if present.
            experts: the mixture of experts (``moe.of_layer``); None = a dense MLP.
            rematted: the backward pass computes this block again.

        Returns:
            The activations, and a tuple. The tuple begins with keys and values: of the new tokens [B,K,T,H], or the
            updated caches if ``kv`` has a cache. A gated delta rule has its two states in their place. With experts,
            the results of ``moe.mlp`` about routing follow.
        """
        arch = self.arch
        act = block_parts.ACTIVATIONS[arch.activation]
        is_merged = implementation == "xla" and not context.is_split()

        def norm(x, name):
            return rms_norm(x, getattr(self, name)[...], arch) if hasattr(self, name) else x

        def project(x_BTI, name):
            multiply = functools.partial(linear, merged=is_merged)
            once = functools.partial(multiply, axes=AXES_OF_HEADS.get(name, ()) if rematted else ())
            out_BTO = quantised.multiply(once, x_BTI, name, getattr(self, name)[...], weights)
            out_BTO = adapters.add(out_BTO, x_BTI, name, self, multiply)
            bias = getattr(self, f"{name}_bias", None)
            return out_BTO if bias is None else out_BTO + bias[...].astype(out_BTO.dtype).reshape(1, 1, -1)

        def heads(x_BTO, name):
            normed = f"{name}_norm"
            x_BTO = norm(x_BTO, normed) if arch.qk_norm == "all" else x_BTO
            x_BTNH = x_BTO.reshape(*x_BTO.shape[:2], -1, arch.head_size)
            return norm(x_BTNH, normed) if arch.qk_norm == "head" else x_BTNH

        def attention(h):
            q, k, v = (project(h, name) for name in ("q", "k", "v"))
            if arch.output_gate:
                q, gate = block_parts.queries_and_gates(q, arch)
            rotated = (lambda x_BTNH: x_BTNH) if rope is None else lambda x_BTNH: rotate(x_BTNH, *rope)
            q_BTNH, k_BTKH, v_BTKH = rotated(heads(q, "q")), rotated(heads(k, "k")), heads(v, "v")
            if arch.score_width not in (0.0, arch.head_size):  # attention divides scores by the root of the head size
                q_BTNH = q_BTNH * (arch.head_size / arch.score_width) ** 0.5
            q_BTNH = sharding.constrain(q_BTNH, "batch", "length", "heads", "head_size")
            new = (k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2))
            how = {"window": layer.window, "positions": positions, "implementation": implementation}
            how |= {"sinks": self.sinks[...]} if arch.sinks else {}
            if "cache" in kv:
                out_BTNH, new = attend_next(q_BTNH, *new, **kv, **how)
            else:
                out_BTNH = context.to_tokens(attend(*context.to_heads(q_BTNH, *new), visible=visible, **kv, **how))
            out_BTO = out_BTNH.reshape(*out_BTNH.shape[:2], -1)
            return project(out_BTO * jax.nn.sigmoid(gate) if arch.output_gate else out_BTO, "o"), new

        def mlp(h, begin=""):
            gate_BTF, up_BTF = (checkpoint_name(project(h, begin + name), "mlp") for name in ("gate", "up"))
            return project(sharding.constrain(act(gate_BTF) * up_BTF, "batch", "length", "mlp"), begin + "down")

        h = norm(x_BTD, "attention_norm")
        if layer.is_delta:
            own = lambda name: getattr(self, name)[...]
            out_BTD, new = delta_rule.mix(h, project, own, arch, positions=positions, **past, **kv)
        else:
            out_BTD, new = attention(h)
        x_BTD = x_BTD + norm(out_BTD, "attention_post_norm")
        x_BTD = checkpoint_name(sharding.constrain(x_BTD, "batch", "length", "activation"), "mlp")
        h = norm(x_BTD, "mlp_norm")
        if experts is None:
            out_BTD, chosen = mlp(h), ()
        else:
            out_BTD, chosen = experts(h, lambda name: getattr(self, name)[...], mlp)
        x_BTD = x_BTD + norm(out_BTD, "mlp_post_norm")
        return sharding.constrain(x_BTD, "batch", "length", "activation"), (*new, *chosen)


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
        self, model: Model, tokens_BT, positions_BT, *, prompt, cache, visible, length, remat, layers, rope, routing
    ):
        """Run the model as ``Model.forward`` describes.

        If ``layers`` is not None, these are the sampler's blocks (publish), and they replace this module's blocks.
        """
        table_VD, dtype, attention = self.embedding[...], jnp.dtype(model.compute_dtype), model.attention
        spec = sharding.on_rows(model.table_spec)  # the sampler's table is not split along the axes of rows
        find = functools.partial(look_up, dtype, self.arch.width, spec[1])
        if layers is None:
            axes = (("batch", "length"), jax.P(None, spec[1]))
            find = functools.partial(sharding.by_device, find, axes=axes, shared=2, over=sharding.TOKEN_AXES)
            table_VD = sharding.constrain(table_VD, *EMBEDDING, rules=model.rules)
        x_BTD = find(tokens_BT, table_VD)
        x_BTD = sharding.constrain(x_BTD, "batch", "length", "activation")
        if self.arch.embedding_scale != 1.0:
            x_BTD = x_BTD * jnp.asarray(self.arch.embedding_scale, dtype)
        tables = ropes.tables(self.arch, positions_BT, rope)
        graph, stacked = nnx.split(self.blocks)
        before = {name: x for name, x in (("prompt", prompt), ("cache", cache)) if x is not None}
        kv = {name: (x.keys, x.values) for name, x in before.items()}
        past, windows = {"visible": visible, "length": length}, {layer.window for layer in self.arch.by_layer}
        seen = kernels.by_window(visible, windows, positions_BT, attention)

        is_rematted = remat and model.remat != "none"

        def make_block(layer: Layer):
            def block(x, of_layer):
                layer_params, layer_kv, chosen = of_layer
                own = {name: before[name].replace(keys=k, values=v) for name, (k, v) in layer_kv.items()}
                how = {"visible": seen[layer.window], "positions": positions_BT, "implementation": attention}
                how |= {"weights": model.weights, "rematted": is_rematted}
                how["experts"] = moe.of_layer(model, routing, chosen, of_sampler=layers is not None)
                rope = None if layer.rope < 0 else tables[layer.rope]
                x, new = nnx.merge(graph, layer_params)(x, rope, layer, past=past, kv=own, **how)
                unlike = self.arch.delta and layers is None  # a scan cannot stack keys and values with states
                return x, (None, None, *new[2:]) if unlike else new

            if not is_rematted:
                return block
            kept = jax.checkpoint_policies.save_only_these_names(*{"dots": ("mlp",), "full": ()}[model.remat])
            return jax.checkpoint(block, policy=kept, prevent_cse=False)

        blocks = {layer: make_block(layer) for layer in dict.fromkeys(self.arch.by_layer)}
        chosen = moe.by_layer(routing, self.arch.num_layers)
        if layers is None:
            of_layers = (nnx.to_pure_dict(stacked), kv, chosen)
            x_BTD, new_kv = block_parts.scan(blocks, self.arch.by_layer, x_BTD, of_layers)
        else:
            made, blocks = [], {layer: jax.jit(block) for layer, block in blocks.items()}  # one trace per kind of layer
            for i, (layer, turned) in enumerate(zip(self.arch.by_layer, layers, strict=True)):
                layer_params = jax.tree.map(block_parts.turn, turned)  # no copy: XLA's matmuls contract either way
                layer_params = dict.fromkeys(stacked) | layer_params  # None: this layer has no such parameter
                layer_kv = {name: (keys[i], values[i]) for name, (keys, values) in kv.items()}
                x_BTD, new = blocks[layer](x_BTD, (layer_params, layer_kv, None if chosen is None else chosen[i]))
                made.append(new)
            new_kv = tuple(zip(*made, strict=True))
        return rms_norm(x_BTD, self.final_norm[...], self.arch), new_kv


@dataclasses.dataclass(frozen=True)
class Model:
    """The static part of a transformer: everything except the parameters."""

    arch: Architecture
    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"  # or a kernel of ``kernels.choose``
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
            shape, axes = variable.get_value().shape, variable.get_metadata()["logical_axes"]
            own = "float32" if "rank" in axes else self.param_dtype
            if {"embed", "rank"} & {*axes} and "activation" not in axes:  # others, such as routers, are read in float32
                own = dtype or own
            return jax.ShapeDtypeStruct(shape, jnp.dtype(own), sharding=sharding.named(mesh, shape, axes, rules))

        return nnx.to_pure_dict(jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))

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
        visible: jax.Array | Groups | kernels.Units | Line | None = None,
        length: jax.Array | None = None,
        remat: bool = False,
        rope: ropes.Tables | None = None,
        routing: moe.Routing | None = None,
    ):
        """Return the hidden states after the final norm, with keys, values and routing.

        Args:
            params: stacked blocks, which run under a scan; or separate transposed "layers", which run one by one
                (publish).
            tokens: [B,T] i32.
            positions: [B,T] i32, 0-based position of each token in its row.
            prompt: keys and values of the group's prompt, by layer; the rows of a group share them.
            cache: keys and values of each row's earlier tokens, by layer; requires T = 1.
            visible: the tokens that each token attends to, [B,T,T] bool or a rule; None = causal attention.
            length: [B] i32, number of tokens after which a gated delta rule's states are returned; None = all.
            remat: apply the model's rematerialisation policy (for a backward pass).
            rope: ``rope.tables`` of all positions; None = computed here.
            routing: experts chosen earlier and their counts, if known.

        Returns:
            hidden [B,T,D] in the compute dtype, and a tuple (keys, values, ...) by layer.

            - Without a cache: keys and values of the new tokens, [B,K,T,H]. With a cache: the updated caches.
            - Layers with the gated delta rule: their states (``Delta.empty``).
            - Stacked blocks: arrays with a leading layer axis. A model with the gated delta rule returns None here.
            - Separate layers: a tuple with one entry per layer.
            - With experts, routing results follow (``moe.by_token``).
        """
        graph, _ = _abstract(self.arch, self.lora)
        layers = params.get("layers")
        if layers is not None:  # nnx.merge needs a value for every block parameter, but ignores its shape
            some = {name: x for layer in layers for name, x in layer.items()}
            params = {k: v for k, v in params.items() if k != "layers"} | {"blocks": some}
        how = {"prompt": prompt, "cache": cache, "visible": visible, "length": length, "routing": routing}
        return nnx.merge(graph, params)(self, tokens, positions, **how, remat=remat, rope=rope, layers=layers)

    @property
    def table_spec(self) -> jax.P:
        """Return the sharding of embedding and head in the mesh of the function that is traced."""
        mesh, shape = jax.sharding.get_abstract_mesh(), (self.arch.vocab_size, self.arch.width)
        rules = sharding.RULES | dict(self.rules)
        return jax.P(None, None) if mesh.empty else sharding.partition_spec(shape, EMBEDDING, mesh, rules)

    def head(self, params: Params) -> jax.Array:
        """Return the output projection [V,D] from the learner's or the sampler's parameters."""
        return params["embedding" if self.arch.tied else "head"]


@functools.lru_cache
def _abstract(arch: Architecture, lora: LoraConfig):
    """Return the static graph and the shapes of the parameters."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(arch, lora, rngs=nnx.Rngs(0))))


@functools.lru_cache
def _init_program(model: Model, mesh: Mesh) -> Callable[[jax.Array], Params]:
    """Return the compiled initialiser. It is cached because each new closure would be compiled again."""

    def make(key):
        params = nnx.to_pure_dict(nnx.state(Transformer(model.arch, rngs=nnx.Rngs(params=key))))
        return jax.tree.map(lambda x: x.astype(model.param_dtype), params)

    return jax.jit(make, out_shardings=sharding.of(model.abstract_params(mesh)))
