"""LoRA: a learned product of low rank is added to a frozen matrix W [O,I], y = W x + s B A x.

    A [r,I], B [O,r];   s = alpha / r,  rank-stabilised alpha / sqrt(r)

DoRA also learns the length m [O] of each output's row:   y = m / |W + s B A| (W x + s B A x).

Adapters are parameters of the blocks: ``q_lora_a`` and ``q_lora_b`` in addition to ``q``. Learner and sampler add the
adapters in the same forward pass (``transformer.Blocks``). Elsewhere, adapters and base are separate.
``params["policy"]`` holds only the adapters, which are trained and saved. The base is one read-only array tree.

Source: Hu et al. 2021, arXiv:2106.09685, eq. 3; the rank-stabilised scale, Kalajdzievski 2023, arXiv:2312.03732; DoRA,
Liu et al. 2024, arXiv:2402.09353, eq. 5, with no gradient through its norm (section 4.3). Initial values: A is uniform
within 1 / sqrt(I), as in PEFT (the paper: normal), B is zero, and m is |W|. Therefore y = W x before training.

Letters: L layers, O outputs, I inputs, r rank.
Owns: shapes, names and initial values of adapters; how adapters are split from the base and joined to it; how adapters
of different configurations are converted to one. Does not know: files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import ConfigError, LoraConfig, ModelConfig
from jaxrl_llm.method_config import LORA_TARGETS
from jaxrl_llm.models.blocks import Parameter
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.runtime import rng, sharding

# Suffixes of the names of A, B and m.
A = "_lora_a"
B = "_lora_b"
M = "_lora_m"


def scale(config: LoraConfig) -> float:
    """Return s, the factor of B A x."""
    divisor = math.sqrt(config.rank) if config.rank_stabilised else config.rank
    return config.alpha / divisor


def matrices(config: LoraConfig, parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Yield the adapters of a block.

    Args:
        parameters: the block's parameters. Only parameters that ``config.targets`` names have adapters.
    """
    if not config.rank:
        return
    for name, shape, axes, _ in parameters:
        if _target(name) not in config.targets:
            continue
        num_stacked = _stacked(name)
        num_outer = len(shape) - _inputs(name)
        a_shape = (*shape[:num_stacked], config.rank, *shape[num_outer:])
        a_axes = (*axes[:num_stacked], "rank", *axes[num_outer:])
        outer_shape = shape[:num_outer]
        outer_axes = (*axes[:num_outer], "rank")
        yield Parameter(name + A, a_shape, a_axes)
        yield Parameter(name + B, (*outer_shape, config.rank), outer_axes)
        if config.dora and not num_stacked:  # experts have no m
            yield Parameter(name + M, (*outer_shape, 1), outer_axes)


# For each dimension in files, the parameter's dimensions that are folded into it.
FoldedDims = tuple[tuple[int, ...], ...]


def layout(matrix_layout: Mapping[str, FoldedDims]) -> dict[str, FoldedDims]:
    """Return the file layout of A, B and m for the blocks' matrices.

    Args:
        matrix_layout: the layout of the blocks' parameters (``files.layout.LAYOUT``). Parameters with two stored
            dimensions are matrices.
    """
    adapter_layout: dict[str, FoldedDims] = {}
    for path, dims in matrix_layout.items():
        if len(dims) != 2:
            continue
        outputs, inputs = dims
        rank_dim = len(outputs)
        inputs_of_a = tuple(dim - rank_dim + 1 for dim in inputs)
        adapter_layout[path + A] = ((0,), inputs_of_a)
        adapter_layout[path + B] = (outputs, (rank_dim,))
        adapter_layout[path + M] = ((*outputs, rank_dim),)
    return adapter_layout


def _inputs(name: str) -> int:
    """Return the number of input dimensions of a matrix: 2 for heads by head size, otherwise 1."""
    return 2 if name == "o" else 1


def _stacked(name: str) -> int:
    """Return the number of expert dimensions of a matrix and of its adapters: 1 for experts, otherwise 0."""
    return int(name.startswith("experts_"))


def _target(name: str) -> str:
    """Return the name of a matrix in ``lora.targets``. A matrix of an expert has the name of the MLP's matrix.

    Matrices of a shared expert are no targets, because peft has no adapters there.
    """
    return name.removeprefix("experts_")


def split(params: Any) -> tuple[Any, ...]:
    """Return (adapters, the other parameters), or (params,) if there are no adapters.

    Args:
        params: stacked parameters, or the sampler's weights, whose layers are separate.
    """
    if "layers" in params:
        parts = [_split_layer(layer) for layer in params["layers"]]
        if not any(adapters for adapters, _ in parts):
            return (params,)
        adapter_layers = tuple(adapters for adapters, _ in parts)
        base_layers = tuple(base for _, base in parts)
        return {"layers": adapter_layers}, {**params, "layers": base_layers}
    adapters, base = _split_layer(params["blocks"])
    if not adapters:
        return (params,)
    return {"blocks": adapters}, {**params, "blocks": base}


def _split_layer(layer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the adapters of a block, and its other parameters."""
    adapters = {name: x for name, x in layer.items() if name.endswith((A, B, M))}
    base = {name: x for name, x in layer.items() if name not in adapters}
    return adapters, base


def join(learned: Any, base: Any = None) -> Any:
    """Join the two results of ``split`` to parameters for ``Model.forward``, without copies of the arrays."""
    if base is None:
        return learned
    if "layers" in base:
        layers = []
        for base_layer, adapters in zip(base["layers"], learned["layers"], strict=True):
            layers.append({**base_layer, **adapters})
        return {**base, "layers": tuple(layers)}
    return {**base, "blocks": {**base["blocks"], **learned["blocks"]}}


def of_module(learned: Any, module: jax.Array, config: LoraConfig) -> Any:
    """Return one module of the adapters: one of ``config.modules`` equal slices of the rank.

    m has no rank dimension and is returned whole.

    Args:
        learned: adapters, or a tree of the same form.
        module: [] i32 index of the slice.
    """
    size = config.rank // config.modules

    def take(x: jax.Array, dim: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, module * size, size, dim)

    return _by_rank(take, learned)


def in_whole(part: Any, module: jax.Array, config: LoraConfig) -> Any:
    """Return adapters of full rank with the result of ``of_module`` at its place and zeros elsewhere."""

    def whole(x: jax.Array, dim: int) -> jax.Array:
        size = x.shape[dim]
        shape = (*x.shape[:dim], config.rank, *x.shape[dim + 1 :])
        zeros = jnp.zeros(shape, x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(zeros, x, module * size, dim)

    return _by_rank(whole, part)


def _by_rank(move: Callable[[jax.Array, int], jax.Array], learned: Any) -> Any:
    """Apply ``move`` to each A and B with the index of its rank dimension. m is unchanged."""

    def move_leaf(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith(M):
            return x
        rank_dim = 1 + _stacked(name) if name.endswith(A) else x.ndim - 1
        return move(x, rank_dim)

    return jax.tree_util.tree_map_with_path(move_leaf, learned)


def identity(
    base: Any = None,
    reference: Any = None,
    model: ModelConfig | None = None,
    compiled: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return checksums of the frozen weights for a checkpoint: of the adapters' base and of the reference.

    Args:
        base, reference: None = there is none. If the reference is the base, the base's checksums are enough.
        model: the settings that name the reference.
        compiled: compiled ``checksums_base`` and ``checksums_reference``, if present.
    """

    programs = compiled or {}

    def sums(part: str, arrays: Any) -> list[int]:
        program = programs.get(f"checksums_{part}", checksums)
        return jax.device_get(program(arrays)).tolist()

    entries: dict[str, Any] = {}
    if base is not None:
        entries["base"] = sums("base", base)
    if reference is None or reference is base:
        return entries
    assert model is not None, "a reference has a path"
    setting = "reference_path" if model.reference_path else "path"
    path = getattr(model, setting)
    name = f"model.{setting}={path!r:.200}"
    entries["reference"] = {name: sums("reference", reference)}
    return entries


def check_frozen(saved: Mapping[str, Any], own: Mapping[str, Any], path: str, is_merged: bool = False) -> None:
    """Raise a ``ConfigError`` if the frozen weights differ from those of the checkpoint.

    The base of adapters must be the same. The reference must be the same if both runs name it by the same setting.

    Args:
        saved: the checkpoint's entries, with those of ``identity``.
        own: the entries of this run, with those of ``identity``.
        path: ``model.path``, for error messages.
        is_merged: adapters were merged into the reference when it was loaded. The last bits of merged weights depend
            on the mesh, so the reference is not compared.
    """
    if ("base" in saved) != ("base" in own):
        adapters = "adapters: set it to their rank" if "base" in saved else "no adapters: set it to 0"
        raise ConfigError(f"model.lora.rank must be as in the checkpoint, which has {adapters}")
    if saved.get("base") != own.get("base"):
        raise ConfigError(
            f"model.path={path!r:.200} has other weights than the base of the checkpoint's adapters. Use the base that "
            "the adapters were trained on"
        )
    if is_merged:
        return
    saved_references = saved.get("reference", {})
    for setting, sums in own.get("reference", {}).items():
        if saved_references.get(setting, sums) != sums:
            raise ConfigError(f"{setting} has other weights than the reference of the checkpoint. Use the same files")


def _flat(w: jax.Array, a: jax.Array, b: jax.Array, lead: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return W [...,O,I], A [...,r,I] and B [...,O,r] in float32, with ``lead`` leading dimensions."""
    lead_shape = a.shape[:lead]
    rank = b.shape[-1]
    a = a.reshape(*lead_shape, rank, -1)
    w = w.reshape(*lead_shape, -1, a.shape[-1])
    b = b.reshape(*lead_shape, -1, rank)
    return w.astype(jnp.float32), a.astype(jnp.float32), b.astype(jnp.float32)


def _norm(w: jax.Array, a: jax.Array, b: jax.Array, config: LoraConfig) -> jax.Array:
    """Return |W + s B A| [O] of one layer, without computing the matrix W + s B A."""
    w, a, b = _flat(w, a, b)
    s = scale(config)
    matmul = functools.partial(jnp.matmul, precision="highest")
    cross_terms = 2 * matmul(w, a.mT) + s * matmul(b, matmul(a, a.mT))
    added = jnp.sum(b * cross_terms, axis=-1)
    square_norm = jnp.sum(jnp.square(w), axis=-1) + s * added
    return jnp.sqrt(jnp.maximum(square_norm, 0.0))


def _factor(m: jax.Array, norm: jax.Array) -> jax.Array:
    """Return m / |W + s B A|, or m where the norm is 0: a row of zeros does not depend on the factor."""
    return m.reshape(norm.shape) / jnp.where(norm > 0, norm, 1.0)


def _by_layer(norm: Callable[..., jax.Array], blocks: Any) -> dict[str, jax.Array]:
    """Return new values for every m in ``blocks``.

    Args:
        norm: (m, W, A, B) of one layer -> the new m.
    """

    def one_layer(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return norm(*arrays).reshape(arrays[0].shape)

    values = {}
    for name in blocks:
        if name.endswith(M):
            matrix = name.removesuffix(M)
            arrays = (
                blocks[name],
                blocks[matrix],
                blocks[matrix + A],
                blocks[matrix + B],
            )
            values[name] = jax.lax.map(one_layer, arrays)
    return values


def _row_norms(blocks: Any, config: LoraConfig) -> dict[str, jax.Array]:
    """Return |W + s B A| as the new value of every m in ``blocks``."""

    def norm(_: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return _norm(w, a, b, config)

    return _by_layer(norm, blocks)


def published(params: Any, config: LoraConfig) -> Any:
    """Return parameters with m / |W + s B A| - 1 in place of each m, so that decode steps compute no norm."""

    def excess(m: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return _factor(m, _norm(w, a, b, config)) - 1

    excesses = _by_layer(excess, params["blocks"])
    return params | {"blocks": params["blocks"] | excesses}


def add(out_BTO: jax.Array, x_BTI: jax.Array, name: str, block: Any, linear: Callable) -> jax.Array:
    """Add the adapters' output to W x, in its dtype. Without adapters, return W x.

    Args:
        out_BTO: W x.
        name: name of W.
        block: parameters of one layer (``transformer.Blocks``). An m with one dimension is ``published``.
        linear: (x, matrix) -> their product.
    """
    if not hasattr(block, name + A):
        return out_BTO
    config = block.lora

    def weight(kind: str) -> jax.Array:
        return getattr(block, name + kind)[...]

    x_BTr = linear(x_BTI, weight(A)) * scale(config)
    out_BTO += linear(x_BTr, weight(B))
    if not config.dora:
        return out_BTO
    excess = weight(M)
    if excess.ndim > 1:
        w, a, b = jax.lax.stop_gradient([weight(kind) for kind in ("", A, B)])
        excess = _factor(excess, _norm(w, a, b, config)) - 1
    return out_BTO + out_BTO * excess.astype(out_BTO.dtype).reshape(1, 1, -1)


def init(shapes: Any, config: LoraConfig, base: Any = None, *, seed: int) -> Any:
    """Return initial adapters, which leave the output unchanged.

    A is random and the same on every mesh. B is zero. m is |W| of the ``base``, which only DoRA needs.

    Args:
        shapes: abstract parameters of the model with adapters (``Model.abstract_params``).
        config: configuration of the adapters.
    """
    adapter_shapes = split(shapes)[0]

    def make(key: jax.Array, base: Any) -> Any:
        adapters = {}
        for place, (name, x) in enumerate(sorted(adapter_shapes["blocks"].items())):
            if name.endswith(A):
                num_inputs = math.prod(x.shape[2 + _stacked(name) :])
                bound = num_inputs**-0.5
                own_key = jax.random.fold_in(key, place)
                adapters[name] = jax.random.uniform(own_key, x.shape, x.dtype, -bound, bound)
            else:
                adapters[name] = jnp.zeros_like(x)
        base_blocks = base["blocks"] if base else {}
        norms = _row_norms({**base_blocks, **adapters}, config)
        return {"blocks": adapters | norms}

    program = jax.jit(make, out_shardings=sharding.of(adapter_shapes))
    return program(rng.stream(seed, "lora"), base)


def common(configs: Iterable[LoraConfig]) -> LoraConfig:
    """Return a configuration that can represent adapters of all ``configs`` (see ``fit``).

    The result has the largest rank, all targets, and a scale of 1. It uses DoRA if any of ``configs`` uses DoRA.
    """
    configs = list(configs)
    rank = max(config.rank for config in configs)
    all_targets: set[str] = set()
    for config in configs:
        all_targets.update(config.targets)
    return LoraConfig(
        rank=rank,
        alpha=float(rank),
        dora=any(config.dora for config in configs),
        targets=tuple(name for name in LORA_TARGETS if name in all_targets),
    )


def fit(learned: Any, config: LoraConfig, shapes: Any, new_config: LoraConfig, base: Any) -> Any:
    """Convert adapters of ``config`` to adapters of ``new_config`` that compute the same outputs.

    Missing adapters and additional ranks are filled with zeros. A missing m is set to |W + B A|, so that DoRA does not
    change the output.

    Args:
        learned: the adapters of ``config``; their blocks may be empty.
        shapes: abstract parameters of the model with adapters of ``new_config`` (``Model.abstract_params``).
        new_config: a result of ``common``.
        base: frozen weights under the adapters.
    """
    adapter_shapes = split(shapes)[0]

    def make(old: dict[str, jax.Array], base: Any) -> Any:
        new = {name: jnp.zeros(x.shape, x.dtype) for name, x in adapter_shapes["blocks"].items()}
        for name, x in old.items():
            x = x * scale(config) if name.endswith(B) else x
            sizes = zip(new[name].shape, x.shape, strict=True)
            padding = [(0, new_size - size) for new_size, size in sizes]
            new[name] = jnp.pad(x, padding)
        norms = _row_norms({**base["blocks"], **new}, new_config)
        missing_norms = {name: x for name, x in norms.items() if name not in old}
        return {"blocks": new | missing_norms}

    program = jax.jit(make, out_shardings=sharding.of(adapter_shapes))
    return program(learned["blocks"], base)


def merge(learned: Any, base: Any, config: LoraConfig) -> Any:
    """Merge adapters into the base: W + s B A. DoRA then scales each row to the length m.

    Sums are float32. Results have the dtype of W.
    """
    blocks = dict(base["blocks"])
    adapters = learned["blocks"]
    matrices = [name.removesuffix(A) for name in adapters if name.endswith(A)]
    for name in matrices:
        old = blocks[name]
        num_leading = 1 + _stacked(name)
        w, a, b = _flat(old, adapters[name + A], adapters[name + B], lead=num_leading)
        product = jnp.matmul(b, a, precision="highest")
        merged = w + scale(config) * product
        if name + M in adapters:
            norm = jnp.linalg.norm(merged, axis=-1, keepdims=True)
            merged *= _factor(adapters[name + M], norm)
        blocks[name] = merged.reshape(old.shape).astype(old.dtype)
    return {**base, "blocks": blocks}
