"""LoRA: what is learned beside a frozen matrix W [O,I] is a product of low rank, y = W x + s B A x.

    A [r,I], B [O,r];   s = alpha / r,  rank-stabilised alpha / sqrt(r)

and in DoRA the length of each output's row is learned too, m [O]:   y = m / |W + s B A| (W x + s B A x).

Adapters are parameters of the blocks, ``q_lora_a`` and ``q_lora_b`` beside ``q``, and the one forward pass of learner
and sampler adds them (``transformer.Blocks``). Elsewhere they travel apart from the base: what is learned, kept and
saved is ``params["policy"]`` with the adapters alone, and the base is one array tree that nothing writes.

Source: Hu et al. 2021, arXiv:2106.09685, eq. 3; the rank-stabilised scale, Kalajdzievski 2023, arXiv:2312.03732; DoRA,
Liu et al. 2024, arXiv:2402.09353, eq. 5, its norm a constant to gradients (section 4.3). A begins uniform within
1 / sqrt(I), as PEFT's does (the paper: normal), B with zeros, m with |W|: at first y = W x + 0.

Letters: L layers, O outputs, I inputs, r rank.
Owns: adapters' shapes, names and first values, how they part from the base and join it, how unlike ones are computed
alike. Does not know: files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError, LoraConfig, ModelConfig
from jaxrl_llm.method_config import LORA_TARGETS
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.runtime import rng, sharding

if TYPE_CHECKING:
    from jaxrl_llm.models.transformer import Model

A, B, M = "_lora_a", "_lora_b", "_lora_m"


def scale(config: LoraConfig) -> float:
    """s."""
    return config.alpha / (math.sqrt(config.rank) if config.rank_stabilised else config.rank)


def matrices(config: LoraConfig, table: tuple) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Adapters of a block as name, shape and logical axes; ``table`` has those of its matrices."""
    for name, size, axes in table if config.rank else ():
        if _target(name) in config.targets:
            outer, each = len(size) - _inputs(name), _stacked(name)
            yield name + A, (*size[:each], config.rank, *size[outer:]), (*axes[:each], "rank", *axes[outer:])
            yield name + B, (*size[:outer], config.rank), (*axes[:outer], "rank")
            if config.dora and not each:  # experts have none
                yield name + M, (*size[:outer], 1), (*axes[:outer], "rank")


def layout(of_matrices: dict[str, tuple]) -> dict[str, tuple]:
    """How A, B and m of the blocks' matrices are folded in files, from how they are (``files.layout.LAYOUT``)."""
    found = {}
    for path, (outputs, inputs) in ((path, to) for path, to in of_matrices.items() if len(to) == 2):
        found[path + A] = ((0,), tuple(dim - len(outputs) + 1 for dim in inputs))
        found[path + B] = (outputs, (len(outputs),))
        found[path + M] = ((*outputs, len(outputs)),)
    return found


def _inputs(name: str) -> int:
    """How many dimensions of a matrix are its input: heads by head size, or one."""
    return 2 if name == "o" else 1


def _stacked(name: str) -> int:
    """How many dimensions of a matrix, or of its adapters, number the experts."""
    return int(name.startswith("experts_"))


def _target(name: str) -> str:
    """What settings call a matrix: an expert's as an MLP's. A shared expert's are no target: peft has none there."""
    return name.removeprefix("experts_")


def split(params: Any) -> tuple[Any, ...]:
    """What is learned and what is not: the adapters and the rest; without adapters all, alone.

    Of parameters, or of the sampler's weights, whose layers lie apart.
    """
    is_apart = "layers" in params
    layers = params["layers"] if is_apart else (params["blocks"],)
    own = tuple({name: x for name, x in layer.items() if name.endswith((A, B, M))} for layer in layers)
    if not any(own):
        return (params,)
    both = zip(layers, own, strict=True)
    rest = tuple({name: x for name, x in layer.items() if name not in adapters} for layer, adapters in both)
    form = lambda of: {"layers": of} if is_apart else {"blocks": of[0]}
    return form(own), {**params, **form(rest)}


def join(learned: Any, base: Any = None) -> Any:
    """Parameters as ``Model.forward`` wants them, of the two parts of ``split``; the same arrays."""
    if base is None:
        return learned
    if "layers" in base:
        return {**base, "layers": tuple({**x, **y} for x, y in zip(base["layers"], learned["layers"], strict=True))}
    return {**base, "blocks": {**base["blocks"], **learned["blocks"]}}


def of_module(learned: Any, module: jax.Array, config: LoraConfig) -> Any:
    """One part [] i32 of the rank (``config.modules``) of adapters, or of what is as they are; m is every part's."""
    size = config.rank // config.modules
    return _by_rank(lambda x, dim: jax.lax.dynamic_slice_in_dim(x, module * size, size, dim), learned)


def in_whole(part: Any, module: jax.Array, config: LoraConfig) -> Any:
    """What ``of_module`` has taken out, among zeros."""

    def whole(x: jax.Array, dim: int) -> jax.Array:
        size = x.shape[dim]
        zeros = jnp.zeros((*x.shape[:dim], config.rank, *x.shape[dim + 1 :]), x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(zeros, x, module * size, dim)

    return _by_rank(whole, part)


def _by_rank(move: Callable[[jax.Array, int], jax.Array], learned: Any) -> Any:
    """Of each adapter and the dimension that is its rank what ``move`` makes of them."""

    def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = path[-1].key
        return x if name.endswith(M) else move(x, 1 + _stacked(name) if name.endswith(A) else x.ndim - 1)

    return jax.tree_util.tree_map_with_path(one, learned)


def identity(
    base: Any = None, reference: Any = None, model: ModelConfig | None = None, compiled: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a checkpoint keeps of the weights that stay: checksums of the base of adapters, and of the reference.

    Args:
        base, reference: None = there is none; the reference may be the base.
        model: whose setting the reference is from.
        compiled: ``checksums_base`` and ``checksums_reference``, where they are compiled.
    """
    sums = lambda part, arrays: jax.device_get((compiled or {}).get(f"checksums_{part}", checksums)(arrays)).tolist()
    found = {} if base is None else {"base": sums("base", base)}
    if reference is None or reference is base:
        return found
    setting = "reference_path" if model.reference_path else "path"
    name = f"model.{setting}={getattr(model, setting)!r:.200}"
    return found | {"reference": {name: sums("reference", reference)}}


def check_frozen(saved: Mapping[str, Any], own: Mapping[str, Any], path: str, is_merged: bool = False) -> None:
    """Raise a ``ConfigError`` where adapters were saved over another base than that of ``model.path``, or a run with
    another reference than the same setting names now.

    Args:
        saved, own: ``identity``, among others.
        is_merged: whether adapters were merged into the reference as it was loaded: on another mesh the same files have
            other last bits, so they are not compared.
    """
    if ("base" in saved) != ("base" in own):
        raise ConfigError(
            f"model.lora.rank must be as in the checkpoint, which has {'' if 'base' in saved else 'no '}adapters"
        )
    if saved.get("base") != own.get("base"):
        raise ConfigError(f"model.path={path!r:.200} holds other weights than the base that the adapters learned on")
    for setting, sums in own.get("reference", {}).items():
        if not is_merged and saved.get("reference", {}).get(setting, sums) != sums:
            raise ConfigError(f"{setting} holds other weights than the reference of the checkpoint")


def _flat(w: jax.Array, a: jax.Array, b: jax.Array, lead: int = 0) -> tuple[jax.Array, ...]:
    """W [...,O,I], A [...,r,I] and B [...,O,r], float32, with so many leading dimensions."""
    each, rank = a.shape[:lead], b.shape[-1]
    a = a.reshape(*each, rank, -1)
    flat = w.reshape(*each, -1, a.shape[-1]), a, b.reshape(*each, -1, rank)
    return tuple(x.astype(jnp.float32) for x in flat)


def _norm(w: jax.Array, a: jax.Array, b: jax.Array, config: LoraConfig) -> jax.Array:
    """|W + s B A| [O] of one layer, whose sum is never there."""
    (w, a, b), s, times = _flat(w, a, b), scale(config), functools.partial(jnp.matmul, precision="highest")
    added = jnp.sum(b * (2 * times(w, a.mT) + s * times(b, times(a, a.mT))), axis=-1)
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(w), axis=-1) + s * added, 0.0))


def _factor(m: jax.Array, norm: jax.Array) -> jax.Array:
    """m / |W + s B A|; of a row of zeros, which every factor leaves as it is, m."""
    return m.reshape(norm.shape) / jnp.where(norm > 0, norm, 1.0)


def _by_layer(norm: Callable[..., jax.Array], blocks: Any) -> dict[str, jax.Array]:
    """m and W, A, B of each layer -> what takes the place of its m."""
    of = lambda name: tuple(blocks[name.removesuffix(M) + kind] for kind in (M, "", A, B))
    whole = lambda name: jax.lax.map(lambda x: norm(*x).reshape(x[0].shape), of(name))
    return {name: whole(name) for name in blocks if name.endswith(M)}


def published(params: Any, config: LoraConfig) -> Any:
    """Parameters with m / |W + s B A| - 1 in place of each m: a decode step takes no norm."""
    excesses = _by_layer(lambda m, *of: _factor(m, _norm(*of, config)) - 1, params["blocks"])
    return params | {"blocks": params["blocks"] | excesses}


def add(out_BTO: jax.Array, x_BTI: jax.Array, name: str, block: Any, linear: Callable) -> jax.Array:
    """y of out = W x, in its dtype; out where W has no adapters.

    Args:
        block: parameters of one layer (``transformer.Blocks``); an m that has one dimension is ``published``.
        linear: (x, matrix) -> their product.
    """
    if not hasattr(block, name + A):
        return out_BTO
    config, weight = block.lora, lambda name: getattr(block, name)[...]
    out_BTO += linear(linear(x_BTI, weight(name + A)) * scale(config), weight(name + B))
    if not config.dora:
        return out_BTO
    excess = weight(name + M)
    if excess.ndim > 1:
        of = jax.lax.stop_gradient([weight(name + kind) for kind in ("", A, B)])
        excess = _factor(excess, _norm(*of, config)) - 1
    return out_BTO + out_BTO * excess.astype(out_BTO.dtype).reshape(1, 1, -1)


def init(model: Model, mesh: Mesh, base: Any = None, *, seed: int) -> Any:
    """Adapters that add nothing yet: A random, the same on every mesh, B zero; m, which wants the ``base``, |W|."""
    shapes, *_ = split(model.abstract_params(mesh))

    def make(key: jax.Array, base: Any) -> Any:
        made = {}
        for place, (name, x) in enumerate(sorted(shapes["blocks"].items())):
            bound = math.prod(x.shape[2 + _stacked(name) :]) ** -0.5
            own = jax.random.fold_in(key, place)
            is_a = name.endswith(A)
            made[name] = jax.random.uniform(own, x.shape, x.dtype, -bound, bound) if is_a else jnp.zeros_like(x)
        whole = {**(base["blocks"] if base else {}), **made}
        return {"blocks": made | _by_layer(lambda _, *of: _norm(*of, model.lora), whole)}

    return jax.jit(make, out_shardings=sharding.of(shapes))(rng.stream(seed, "lora"), base)


def common(configs: Iterable[LoraConfig]) -> LoraConfig:
    """What adapters of all of these can be computed as (``fit``): the largest rank, all targets, a scale of 1."""
    configs = list(configs)
    rank, named = max(config.rank for config in configs), {name for config in configs for name in config.targets}
    targets = tuple(name for name in LORA_TARGETS if name in named)
    return LoraConfig(rank=rank, alpha=float(rank), dora=any(config.dora for config in configs), targets=targets)


def fit(learned: Any, config: LoraConfig, model: Model, mesh: Mesh, base: Any) -> Any:
    """Adapters of ``config``, or none, as those of ``model`` that compute the same: zeros where they have nothing."""
    shapes, *_ = split(model.abstract_params(mesh))

    def make(own: dict[str, jax.Array], base: Any) -> Any:
        made = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes["blocks"].items()}
        for name, x in own.items():
            x = x * scale(config) if name.endswith(B) else x
            made[name] = jnp.pad(x, [(0, to - size) for to, size in zip(made[name].shape, x.shape, strict=True)])
        norms = _by_layer(lambda _, *of: _norm(*of, model.lora), {**base["blocks"], **made})
        return {"blocks": made | {name: x for name, x in norms.items() if name not in own}}

    return jax.jit(make, out_shardings=sharding.of(shapes))(learned["blocks"], base)


def merge(learned: Any, base: Any, config: LoraConfig) -> Any:
    """Parameters without adapters that compute the same: W + s B A, in float32, in the dtype of W; of DoRA scaled."""
    blocks = dict(base["blocks"])
    for name in [name.removesuffix(A) for name in learned["blocks"] if name.endswith(A)]:
        w, a, b = _flat(blocks[name], *(learned["blocks"][name + kind] for kind in (A, B)), lead=1 + _stacked(name))
        whole = w + scale(config) * jnp.matmul(b, a, precision="highest")
        if name + M in learned["blocks"]:
            whole *= _factor(learned["blocks"][name + M], jnp.linalg.norm(whole, axis=-1, keepdims=True))
        blocks[name] = whole.reshape(blocks[name].shape).astype(blocks[name].dtype)
    return {**base, "blocks": blocks}
