"""The decoder-only transformer: RMSNorm, rotary grouped-query attention, a gated MLP; what else, its shape says.

Modules are flax nnx; every parameter of a block carries a leading layer axis and the blocks run under
one ``lax.scan`` (the sampler's do not: see publish). Parameters travel as a nested dict of arrays
(``params``) beside the static graph, so optimizer, checkpoint and publish see a plain pytree.

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
from jaxrl_llm.models import delta_rule, gathering, moe, quantised, variants
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


def _param(
    rngs: nnx.Rngs, shape: tuple[int, ...], logical_axes: tuple[str, ...], constant: float | None = None
) -> nnx.Param:
    init = INIT_STDDEV * jax.random.normal(rngs.params(), shape) if constant is None else jnp.full(shape, constant)
    return nnx.Param(init, logical_axes=logical_axes)


def rms_norm(x: jax.Array, scale: jax.Array, arch: Architecture) -> jax.Array:
    """x / rms(x) * (scale + the architecture's offset) over the last dimension, computed in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + arch.norm_eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (x32 * (scale + arch.norm_offset if arch.norm_offset else scale)).astype(x.dtype)


def linear(x_BTI: jax.Array, w: jax.Array, *, merged: bool = True, axes: tuple[str | None, ...] = ()) -> jax.Array:
    """x w^T in the dtype of x, for a weight [O, I] whose O or I may be heads by head size: as files store it.

    Args:
        merged: rows and places are one dimension. A gradient that contracts two has XLA's CPU backend transpose x
            first, and compute what makes it with its innermost dimension strided, a SwiGLU 13 times slower (measured);
            to make one of them, XLA's TPU backend moves x and its gradient, a sixth of a layer's cycles (its estimate).
        axes: of w as [O, I], where it has heads by head size: XLA would gather it once more for its gradient. Not for a
            backward pass that keeps what is gathered.

    Returns:
        [B,T,O].
    """
    w_OI = w.reshape(-1, x_BTI.shape[-1]).astype(x_BTI.dtype)
    if axes and w.ndim == 3:
        w_OI = gathering.gathered(w_OI, *axes)
    if not merged:
        return jnp.einsum("BTI,OI->BTO", x_BTI, w_OI)
    x_XI, X = x_BTI.reshape(-1, x_BTI.shape[-1]), x_BTI.shape[0] * x_BTI.shape[1]
    if X == 1:  # XLA would fuse a vector's product, and read what the sampler turned (publish) with strides
        x_XI = jnp.repeat(x_XI, 2, axis=0)
    return jnp.einsum("XI,OI->XO", x_XI, w_OI)[:X].reshape(*x_BTI.shape[:2], -1)


def look_up(dtype, width: int, axes: Any, tokens_BT: jax.Array, table_VD: jax.Array) -> jax.Array:
    """The tokens' rows of the table, [B,T,D]. A device with a part of the width reads it for all along ``axes``: what
    is sent is activations, and the gradient lies where the table does, summed in its dtype.
    """
    if table_VD.shape[1] == width:
        return table_VD[tokens_BT].astype(dtype)
    part = table_VD[jax.lax.all_gather(tokens_BT, axes, tiled=True)].astype(dtype)
    return jax.lax.all_to_all(part, axes, split_axis=0, concat_axis=2, tiled=True)


class Blocks(nnx.Module):
    """All transformer blocks; parameters are stacked [layers, ...], the call sees one layer's slice."""

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
        further = (*variants.vectors(arch), *(arch.delta.parameters(D) if arch.delta else ()))
        for name, size, axes, *constant in (*matrices, *further, *adapters.matrices(lora, matrices)):
            if count := len(arch.layers_with(name)):
                setattr(self, name, _param(rngs, (count, *size), ("layers", *axes), *constant))

    def __call__(self, x_BTD, rope, layer, *, past, kv, visible, positions, implementation, weights, experts, rematted):
        """One ``layer``, by the tables of its rope; ``kv``: "prompt" and "cache", where there are such.

        Returns activations and keys and values, the new tokens' [B,K,T,H] or, with them, the caches', or of a gated
        delta rule its states after what ``past`` says of the tokens; and what ``experts`` (``moe.of_layer``) tell of
        themselves.
        """
        arch = self.arch
        act = variants.ACTIVATIONS[arch.activation]
        is_merged = implementation == "xla" and not context.is_split()

        def norm(x, name):
            return rms_norm(x, getattr(self, name)[...], arch) if hasattr(self, name) else x

        def project(x_BTI, name):
            multiply = functools.partial(linear, merged=is_merged)
            once = functools.partial(multiply, axes=gathering.OF_HEADS.get(name, ()) if rematted else ())
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
                q, gate = variants.queries_and_gates(q, arch)
            rotated = (lambda x_BTNH: x_BTNH) if rope is None else lambda x_BTNH: rotate(x_BTNH, *rope)
            q_BTNH, k_BTKH, v_BTKH = rotated(heads(q, "q")), rotated(heads(k, "k")), heads(v, "v")
            if arch.score_width not in (0.0, arch.head_size):  # attention divides by the root of the head's size
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
    """Embedding, blocks, final norm, head (its own, or the embedding when tied)."""

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
        """As ``Model.forward``; ``layers``: the blocks as the sampler has them (publish), in place of our own."""
        table_VD, dtype, attention = self.embedding[...], jnp.dtype(model.compute_dtype), model.attention
        spec = sharding.on_rows(model.table_spec)  # the sampler's is whole along the axes of rows
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
                unlike = self.arch.delta and layers is None  # which no scan stacks
                return x, (None, None, *new[2:]) if unlike else new

            if not is_rematted:
                return block
            kept = jax.checkpoint_policies.save_only_these_names(*{"dots": ("mlp",), "full": ()}[model.remat])
            return jax.checkpoint(block, policy=kept, prevent_cse=False)

        blocks = {layer: make_block(layer) for layer in dict.fromkeys(self.arch.by_layer)}
        chosen = moe.by_layer(routing, self.arch.num_layers)
        if layers is None:
            of_layers = (nnx.to_pure_dict(stacked), kv, chosen)
            x_BTD, new_kv = variants.scan(blocks, self.arch.by_layer, x_BTD, of_layers)
        else:
            made, blocks = [], {layer: jax.jit(block) for layer, block in blocks.items()}  # traced once; XLA inlines it
            for i, (layer, turned) in enumerate(zip(self.arch.by_layer, layers, strict=True)):
                layer_params = jax.tree.map(variants.turn, turned)  # no copy: XLA's matmuls contract either way
                layer_params = dict.fromkeys(stacked) | layer_params  # None is what it has not
                layer_kv = {name: (keys[i], values[i]) for name, (keys, values) in kv.items()}
                x_BTD, new = blocks[layer](x_BTD, (layer_params, layer_kv, None if chosen is None else chosen[i]))
                made.append(new)
            new_kv = tuple(zip(*made, strict=True))
        return rms_norm(x_BTD, self.final_norm[...], self.arch), new_kv


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer's static half: everything about it but the parameters."""

    arch: Architecture
    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"  # or a kernel of ``kernels.choose``
    rules: tuple[tuple[str, Any], ...] = ()  # of the weights' logical axes, where they are not as ``sharding.RULES``
    param_dtype: str = "float32"
    weights: str = "compute"  # what stacked blocks round their matrices to in the forward pass (``quantised.KINDS``)
    published: str = "compute"  # the sampler's likewise, rounded once when they are published
    lora: LoraConfig = LoraConfig()

    @property
    def base(self) -> Model:
        """The same without adapters."""
        return dataclasses.replace(self, lora=LoraConfig())

    def abstract_params(self, mesh: Mesh, *, rules: dict[str, Any] | None = None, dtype: Any = None) -> Params:
        """Shapes and layouts of the parameters: ``rules`` go before the model's own, and matrices have ``dtype``."""
        rules = sharding.RULES | dict(self.rules) | (rules or {})
        _, state = _abstract(self.arch, self.lora)

        def one(variable):
            shape, axes = variable.get_value().shape, variable.get_metadata()["logical_axes"]
            own = "float32" if "rank" in axes else self.param_dtype
            if {"embed", "rank"} & {*axes} and "activation" not in axes:  # others, as routers, are read in float32
                own = dtype or own
            return jax.ShapeDtypeStruct(shape, jnp.dtype(own), sharding=sharding.named(mesh, shape, axes, rules))

        return nnx.to_pure_dict(jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))

    def init(self, key: jax.Array, mesh: Mesh) -> Params:
        """Random parameters, each born on its shard; without adapters (``lora.init``)."""
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
        """Hidden states after the final norm.

        Args:
            params: blocks stacked and scanned over, or apart as "layers", turned, and run one by one (publish).
            tokens: [B,T] i32.
            positions: [B,T] i32, 0-based position of each token in its row.
            prompt: what rows of a group have computed once; keys and values by layer.
            cache: each row's earlier tokens, by layer; wants T = 1.
            visible: what each token sees of the others, [B,T,T] bool or a rule; None = all up to itself.
            length: [B] i32, the tokens that a gated delta rule's states are of; None = all.
            remat: apply the model's rematerialisation policy (for a backward pass).
            rope: ``rope.tables`` of every position there is; None = computed here.
            routing: what is known of the choice of experts, where there are some.

        Returns:
            hidden [B,T,D] in the compute dtype, and the new tokens' (keys, values), [B,K,T,H] by layer, or the caches'
            with those: one array with a leading layer axis where blocks are stacked, a tuple where they are apart. Of
            layers with the gated delta rule its states (``Delta.empty``); stacked, a model that has it returns none.
            Of experts more (``moe.by_token``).
        """
        graph, _ = _abstract(self.arch, self.lora)
        layers = params.get("layers")
        if layers is not None:  # the graph wants some blocks; their shapes it does not look at
            some = {name: x for layer in layers for name, x in layer.items()}
            params = {k: v for k, v in params.items() if k != "layers"} | {"blocks": some}
        how = {"prompt": prompt, "cache": cache, "visible": visible, "length": length, "routing": routing}
        return nnx.merge(graph, params)(self, tokens, positions, **how, remat=remat, rope=rope, layers=layers)

    @property
    def table_spec(self) -> jax.P:
        """How embedding and head lie in the mesh that a function is traced in."""
        mesh, shape = jax.sharding.get_abstract_mesh(), (self.arch.vocab_size, self.arch.width)
        rules = sharding.RULES | dict(self.rules)
        return jax.P(None, None) if mesh.empty else sharding.partition_spec(shape, EMBEDDING, mesh, rules)

    def head(self, params: Params) -> jax.Array:
        """The output projection [V,D], the learner's or the sampler's."""
        return params["embedding" if self.arch.tied else "head"]


@functools.lru_cache
def _abstract(arch: Architecture, lora: LoraConfig):
    """The static graph, and the shapes of the parameters."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(arch, lora, rngs=nnx.Rngs(0))))


@functools.lru_cache
def _init_program(model: Model, mesh: Mesh) -> Callable[[jax.Array], Params]:
    """Kept, for a jitted closure made anew would be compiled anew."""

    def make(key):
        params = nnx.to_pure_dict(nnx.state(Transformer(model.arch, rngs=nnx.Rngs(params=key))))
        return jax.tree.map(lambda x: x.astype(model.param_dtype), params)

    return jax.jit(make, out_shardings=sharding.of(model.abstract_params(mesh)))
