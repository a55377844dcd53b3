"""LoRA: what is learned beside a frozen matrix W [O,I] is a product of low rank, y = W x + s B A x.

    A [r,I], B [O,r];   s = alpha / r,  rank-stabilised alpha / sqrt(r)

Adapters are parameters of the blocks, ``q_lora_a`` and ``q_lora_b`` beside ``q``, and the one forward pass of learner
and sampler adds them (``transformer.Blocks``). Elsewhere they travel apart from the base: what is learned, kept and
saved is ``params["policy"]`` with the adapters alone, and the base is one array tree that nothing writes.

Source: Hu et al. 2021, arXiv:2106.09685, eq. 3; the rank-stabilised scale, Kalajdzievski 2023, arXiv:2312.03732. A
begins uniform within 1 / sqrt(I), as PEFT's does (the paper: normal), B with zeros: at first y = W x + 0.

Letters: L layers, O outputs, I inputs, r rank.
Owns: adapters' shapes, names and first values, how they part from the base and join it. Does not know: files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError, LoraConfig
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.runtime import rng

if TYPE_CHECKING:
    from jaxrl_llm.models.transformer import Model

A, B = "_lora_a", "_lora_b"


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


def layout(of_matrices: dict[str, tuple]) -> dict[str, tuple]:
    """How A and B of the blocks' matrices are folded in files, from how they are (``files.layout.LAYOUT``)."""
    found = {}
    for path, (outputs, inputs) in ((path, to) for path, to in of_matrices.items() if len(to) == 2):
        found[path + A] = ((0,), tuple(dim - len(outputs) + 1 for dim in inputs))
        found[path + B] = (outputs, (len(outputs),))
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
    """What is learned and what is not: the adapters and the rest; without adapters all, alone."""
    is_adapter = lambda name: name.endswith((A, B))
    blocks = params["blocks"]
    if not any(map(is_adapter, blocks)):
        return (params,)
    rest = {name: x for name, x in blocks.items() if not is_adapter(name)}
    return {"blocks": {name: x for name, x in blocks.items() if name not in rest}}, {**params, "blocks": rest}


def join(learned: Any, base: Any = None) -> Any:
    """Parameters as ``Model.forward`` wants them, of the two parts of ``split``."""
    return learned if base is None else {**base, "blocks": {**base["blocks"], **learned["blocks"]}}


def identity(base: Any = None, sums: Callable[[Any], jax.Array] | None = None) -> dict[str, list[int]]:
    """What a checkpoint of adapters keeps of their base: checksums of its arrays, by ``sums`` where it is compiled."""
    return {} if base is None else {"base": jax.device_get((sums or checksums)(base)).tolist()}


def check_base(saved: Mapping[str, Any], own: Mapping[str, Any], path: str) -> None:
    """Raise a ``ConfigError`` where adapters were saved over another base than that of ``model.path``.

    Args:
        saved, own: ``identity``, among others.
    """
    if ("base" in saved) != ("base" in own):
        raise ConfigError(
            f"model.lora.rank must be as in the checkpoint, which has {'' if 'base' in saved else 'no '}adapters"
        )
    if saved.get("base") != own.get("base"):
        raise ConfigError(f"model.path={path!r:.200} holds other weights than the base that the adapters learned on")


def init(model: Model, mesh: Mesh, *, seed: int) -> Any:
    """Adapters that add nothing yet: A random, the same on every mesh, B zero."""
    shapes, *_ = split(model.abstract_params(mesh))

    def make(key: jax.Array) -> Any:
        made = {}
        for place, (name, x) in enumerate(sorted(shapes["blocks"].items())):
            bound = math.prod(x.shape[2 + _stacked(name) :]) ** -0.5
            own = jax.random.fold_in(key, place)
            is_a = name.endswith(A)
            made[name] = jax.random.uniform(own, x.shape, x.dtype, -bound, bound) if is_a else jnp.zeros_like(x)
        return {"blocks": made}

    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))(rng.stream(seed, "lora"))


def merge(learned: Any, base: Any, config: LoraConfig) -> Any:
    """Parameters without adapters that compute the same: W + s B A, in float32, in the dtype of W."""
    blocks, rank = dict(base["blocks"]), config.rank
    for name in [name.removesuffix(A) for name in learned["blocks"] if name.endswith(A)]:
        a, b, w = learned["blocks"][name + A], learned["blocks"][name + B], blocks[name]
        each = a.shape[: 1 + _stacked(name)]
        flat = b.reshape(*each, -1, rank), a.reshape(*each, rank, -1)
        added = jnp.matmul(*flat, precision="highest", preferred_element_type=jnp.float32)
        blocks[name] = (w.astype(jnp.float32) + scale(config) * added.reshape(w.shape)).astype(w.dtype)
    return {**base, "blocks": blocks}
