"""The decoder-only transformer of the Llama family: RMSNorm, rotary grouped-query attention, SwiGLU.

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

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.attention import Cache, Groups, Prompt, attend, attend_next, rope_tables, rotate
from jaxrl_llm.models.kernels import context
from jaxrl_llm.models.kernels import learner as kernels
from jaxrl_llm.runtime import sharding

Params = dict[str, Any]

INIT_STDDEV = 0.02
EMBEDDING = ("vocab", "embed")  # logical axes of the embedding, and of the head


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], logical_axes: tuple[str, ...], *, norm: bool = False) -> nnx.Param:
    init = jnp.ones(shape) if norm else INIT_STDDEV * jax.random.normal(rngs.params(), shape)
    return nnx.Param(init, logical_axes=logical_axes)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dimension of [B,T,D], computed in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)[None, None, :]).astype(x.dtype)


def linear(x_BTI: jax.Array, w: jax.Array, *, merged: bool = True) -> jax.Array:
    """x w^T in the dtype of x, for a weight [O, I] whose O or I may be heads by head size: as files store it.

    Args:
        merged: rows and places are one dimension. A gradient that contracts two has XLA's CPU backend transpose x
            first, and compute what makes it with its innermost dimension strided, a SwiGLU 13 times slower (measured);
            to make one of them, XLA's TPU backend moves x and its gradient, a sixth of a layer's cycles (its estimate).

    Returns:
        [B,T,O].
    """
    w_OI = w.reshape(-1, x_BTI.shape[-1]).astype(x_BTI.dtype)
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

    def __init__(self, arch: Architecture, *, rngs: nnx.Rngs):
        layers, D, F, H = arch.num_layers, arch.width, arch.ffn, arch.head_size
        N, K = arch.num_heads, arch.num_kv_heads
        self.eps, self.head_size = arch.norm_eps, H
        self.attention_norm = _param(rngs, (layers, D), ("layers", "activation"), norm=True)
        self.q = _param(rngs, (layers, N, H, D), ("layers", "heads", "head_size", "embed"))
        self.k = _param(rngs, (layers, K, H, D), ("layers", "kv_heads", "head_size", "embed"))
        self.v = _param(rngs, (layers, K, H, D), ("layers", "kv_heads", "head_size", "embed"))
        self.o = _param(rngs, (layers, D, N, H), ("layers", "embed", "heads", "head_size"))
        self.mlp_norm = _param(rngs, (layers, D), ("layers", "activation"), norm=True)
        self.gate = _param(rngs, (layers, F, D), ("layers", "mlp", "embed"))
        self.up = _param(rngs, (layers, F, D), ("layers", "mlp", "embed"))
        self.down = _param(rngs, (layers, D, F), ("layers", "embed", "mlp"))

    def __call__(self, x_BTD, cos, sin, *, prompt=None, cache=None, visible=None, implementation="xla"):
        """One block. Returns activations and keys and values, the new tokens' [B,K,T,H] or, with them, the caches'."""
        project = functools.partial(linear, merged=implementation == "xla" and not context.is_split())
        heads = lambda x_BTO: x_BTO.reshape(*x_BTO.shape[:2], -1, self.head_size)
        h = rms_norm(x_BTD, self.attention_norm[...], self.eps)
        q_BTNH = rotate(heads(project(h, self.q[...])), cos, sin)
        k_BTKH = rotate(heads(project(h, self.k[...])), cos, sin)
        v_BTKH = heads(project(h, self.v[...]))
        q_BTNH = sharding.constrain(q_BTNH, "batch", "length", "heads", "head_size")
        k_BKTH, v_BKTH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
        kv, how = (k_BKTH, v_BKTH), {"prompt": prompt, "implementation": implementation}
        if cache is None:
            out_BTNH = context.to_tokens(attend(*context.to_heads(q_BTNH, *kv), visible=visible, **how))
        else:
            out_BTNH, kv = attend_next(q_BTNH, *kv, cache=cache, **how)
        x_BTD = x_BTD + project(out_BTNH.reshape(*out_BTNH.shape[:2], -1), self.o[...])
        x_BTD = checkpoint_name(sharding.constrain(x_BTD, "batch", "length", "activation"), "mlp")
        h = rms_norm(x_BTD, self.mlp_norm[...], self.eps)
        gate_BTF = checkpoint_name(project(h, self.gate[...]), "mlp")
        up_BTF = checkpoint_name(project(h, self.up[...]), "mlp")
        h = sharding.constrain(jax.nn.silu(gate_BTF) * up_BTF, "batch", "length", "mlp")
        x_BTD = x_BTD + project(h, self.down[...])
        return sharding.constrain(x_BTD, "batch", "length", "activation"), kv


class Transformer(nnx.Module):
    """Embedding, blocks, final norm, head (its own, or the embedding when tied)."""

    def __init__(self, arch: Architecture, *, rngs: nnx.Rngs):
        self.arch = arch
        self.embedding = _param(rngs, (arch.vocab_size, arch.width), EMBEDDING)
        self.blocks = Blocks(arch, rngs=rngs)
        self.final_norm = _param(rngs, (arch.width,), ("activation",), norm=True)
        if not arch.tied:
            self.head = _param(rngs, (arch.vocab_size, arch.width), EMBEDDING)

    def __call__(
        self,
        tokens_BT,
        positions_BT,
        *,
        compute_dtype,
        prompt=None,
        cache=None,
        visible=None,
        remat="none",
        layers=None,
        attention="xla",
        rope=None,
        spec=(None, None),
    ):
        table_VD = self.embedding[...]
        spec = sharding.on_rows(spec)  # of the table; the sampler's is whole along the axes of rows
        find = functools.partial(look_up, compute_dtype, self.arch.width, spec[1])
        if layers is None:
            axes = (("batch", "length"), jax.P(None, spec[1]))
            find = functools.partial(sharding.by_device, find, axes=axes, shared=2, over=sharding.TOKEN_AXES)
        x_BTD = find(tokens_BT, table_VD)
        x_BTD = sharding.constrain(x_BTD, "batch", "length", "activation")
        cos, sin = rope_tables(self.arch, positions_BT) if rope is None else (x[positions_BT] for x in rope)
        visible = kernels.of_lines(visible, attention)
        graph, stacked = nnx.split(self.blocks)
        before = {name: x for name, x in (("prompt", prompt), ("cache", cache)) if x is not None}
        kv = {name: (x.keys, x.values) for name, x in before.items()}

        def body(x, of_layer):
            layer_params, layer_kv = of_layer
            seen = {name: before[name].replace(keys=k, values=v) for name, (k, v) in layer_kv.items()}
            return nnx.merge(graph, layer_params)(x, cos, sin, **seen, visible=visible, implementation=attention)

        if remat != "none":
            kept = {"dots": ("mlp",), "full": ()}[remat]
            body = jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*kept), prevent_cse=False)
        if layers is None:  # else as the sampler has them (publish)
            x_BTD, new_kv = jax.lax.scan(body, x_BTD, (stacked, kv))
        else:
            made, block = [], jax.jit(body)  # traced once for all layers; XLA inlines it
            for i, turned in enumerate(layers):
                layer_params = jax.tree.map(jnp.transpose, turned)  # no copy: XLA's matmuls contract either way
                layer_kv = {name: (keys[i], values[i]) for name, (keys, values) in kv.items()}
                x_BTD, new = block(x_BTD, (layer_params, layer_kv))
                made.append(new)
            new_kv = tuple(zip(*made, strict=True))
        return rms_norm(x_BTD, self.final_norm[...], self.arch.norm_eps), new_kv


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer's static half: everything about it but the parameters."""

    arch: Architecture
    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"  # or a kernel of ``kernels.choose``
    rules: tuple[tuple[str, Any], ...] = ()  # of the weights' logical axes, where they are not as ``sharding.RULES``
    param_dtype: str = "float32"

    def abstract_params(self, mesh: Mesh, *, rules: dict[str, Any] | None = None, dtype: Any = None) -> Params:
        """Shapes of the parameters with their shardings on ``mesh``; further ``rules`` go before the model's."""
        dtype = jnp.dtype(dtype or self.param_dtype)
        rules = sharding.RULES | dict(self.rules) | (rules or {})
        _, state = _abstract(self.arch)

        def one(variable):
            shape = variable.get_value().shape
            layout = sharding.named(mesh, shape, variable.get_metadata()["logical_axes"], rules)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)

        is_variable = lambda x: isinstance(x, nnx.Variable)
        return nnx.to_pure_dict(jax.tree.map(one, state, is_leaf=is_variable))

    def init(self, key: jax.Array, mesh: Mesh) -> Params:
        """Random parameters, each born on its shard."""
        return _init_program(Model(self.arch, rules=self.rules, param_dtype=self.param_dtype), mesh)(key)

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        prompt: Prompt | None = None,
        cache: Cache | None = None,
        visible: jax.Array | Groups | None = None,
        remat: bool = False,
        rope: tuple[jax.Array, jax.Array] | None = None,
    ):
        """Hidden states after the final norm.

        Args:
            params: blocks stacked and scanned over, or apart as "layers", turned, and run one by one (publish).
            tokens: [B,T] i32.
            positions: [B,T] i32, 0-based position of each token in its row.
            prompt: what rows of a group have computed once; keys and values by layer.
            cache: each row's earlier tokens, by layer; wants T = 1.
            visible: what each token sees of the others, [B,T,T] bool or a rule; None = all up to itself.
            remat: apply the model's rematerialisation policy (for a backward pass).
            rope: cosine and sine of every position there is, each [S,H/2]; None = computed here.

        Returns:
            hidden [B,T,D] in the compute dtype, and the new tokens' (keys, values), [B,K,T,H] by layer, or the caches'
            with those: one array with a leading layer axis where blocks are stacked, a tuple where they are apart.
        """
        graph, _ = _abstract(self.arch)
        layers = params.get("layers")
        if layers is not None:  # the graph wants some blocks; their shapes it does not look at
            params = {k: v for k, v in params.items() if k != "layers"} | {"blocks": layers[0]}
        return nnx.merge(graph, params)(
            tokens,
            positions,
            compute_dtype=jnp.dtype(self.compute_dtype),
            prompt=prompt,
            cache=cache,
            visible=visible,
            remat=self.remat if remat else "none",
            layers=layers,
            attention=self.attention,
            rope=rope,
            spec=self.table_spec,
        )

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
def _abstract(arch: Architecture):
    """The static graph, and the shapes of the parameters."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(arch, rngs=nnx.Rngs(0))))


@functools.lru_cache
def _init_program(model: Model, mesh: Mesh) -> Callable[[jax.Array], Params]:
    """Kept, for a jitted closure made anew would be compiled anew."""

    def make(key):
        params = nnx.to_pure_dict(nnx.state(Transformer(model.arch, rngs=nnx.Rngs(params=key))))
        return jax.tree.map(lambda x: x.astype(model.param_dtype), params)

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, model.abstract_params(mesh)))
