"""Layout of parameters in files, and their transfer between files and shards.

Files store one matrix per layer, [out, in], with heads and head size folded into one dimension. Our parameters are
stacked: [layers, out, ..., in]. Each shard is built from the slices of the stored tensors that it needs. Therefore the
host holds at most one shard of one parameter in addition to the arrays themselves.

Owns: the correspondence of dimensions. Does not know: file formats, names of tensors.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Params

# For each dimension of a stored tensor, our dimensions that are folded into it.
# Our dimensions are counted without the stacked axes of layers and experts.
_VECTOR, _MATRIX, _AXES = ((0,),), ((0,), (1,)), ("layer", "expert")
_EXPERTS = ("experts_gate", "experts_up", "experts_down")
LAYOUT = {
    **{name: _MATRIX for name in ("embedding", "head", "blocks.gate", "blocks.up", "blocks.down")},
    **{f"blocks.{name}": ((0, 1), (2,)) for name in ("q", "k", "v")},
    "blocks.o": ((0,), (1, 2)),
    **{f"blocks.{name}": _MATRIX for name in ("router", *_EXPERTS)},
    **{f"blocks.shared_{name}": _MATRIX for name in ("router", "gate", "up", "down")},
    **{f"blocks.{name}_bias": _VECTOR for name in ("router", *_EXPERTS)},
    "final_norm": _VECTOR,
    **{f"blocks.{of}{post}": _VECTOR for of in ("attention", "mlp") for post in ("_norm", "_post_norm")},
    **{f"blocks.{name}": _VECTOR for name in ("q_norm", "k_norm", "o_bias", "gate_bias", "up_bias", "down_bias")},
    **{f"blocks.{name}": ((0, 1),) for name in ("q_bias", "k_bias", "v_bias")},
    "blocks.sinks": _VECTOR,
    **{f"blocks.delta_{name}": _VECTOR for name in ("rate", "bias", "norm")},
    **{f"blocks.delta_{name}": ((0, 1), (2,)) for name in ("in", "gates", "z")},
    **{f"blocks.delta_{name}": _MATRIX for name in ("qkv", "b", "a")},
    "blocks.delta_conv": ((0,), (1,), (2,)),
    "blocks.delta_out": ((0,), (1, 2)),
}
LAYOUT |= lora.layout(LAYOUT)


class TensorFile(Protocol):
    """Tensors of a file or folder, read in parts."""

    path: str  # for error messages
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor by its name

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of one tensor in float32."""


def load(file: TensorFile, names: Mapping[str, str], shapes: Params, what: str) -> Params:
    """Read parameters from a file. Each shard is read separately and copied directly to its device.

    Args:
        names: tensor name of each parameter of ``LAYOUT``, with "{layer}" and "{expert}" in place of numbers.
        shapes: shapes, dtypes and shardings of the parameters.
        what: description of the expected contents, for error messages.

    Raises:
        ConfigError: a tensor is missing, has the wrong shape, or belongs to another kind of model.
    """
    check(file, names, shapes, what)
    loaded = [_load_one(file, names[path], path, leaf) for path, leaf in _by_path(shapes).items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), loaded)


def check(file: TensorFile, names: Mapping[str, str], shapes: Params, what: str) -> None:
    """Compare the file's tensors with the parameters by name and shape, without reading weights.

    Raises:
        ConfigError: as ``load``.
    """
    expected = {name: shape for name, shape, _, _ in _tensors(_by_path(shapes), names)}
    for name, shape in expected.items():
        if name not in file.shapes:
            raise ConfigError(f"{file.path}: tensor {name} is missing")
        if tuple(file.shapes[name]) != shape:
            raise ConfigError(f"{file.path}: tensor {name} has shape {tuple(file.shapes[name])}, not {shape}")
    # If a weight (a bias, an expert) were ignored, a different model would run without an error.
    # A tied head may be stored too, because it equals the embedding.
    extra = [name for name in file.shapes if name not in expected and name != names["head"]]
    if extra:
        raise ConfigError(
            f"{file.path}: tensor {extra[0]} ({len(extra)} like it) is not part of {what} with "
            f"{sum(path.startswith('blocks.') for path in _by_path(shapes))} tensors per layer"
        )


def _by_path(params: Params) -> dict[str, Any]:
    """Return every parameter, or its shape, by its path in the tree's order."""
    return {".".join(key.key for key in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}


Stored = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]
# Return one layer of a stacked parameter, with the parameter's sharding.
_of_layer = jax.jit(lambda x, layer: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False))


def stored_tensors(params: Params, names: Mapping[str, str], *, num_held: int = 1) -> Iterator[Stored]:
    """Yield every tensor of a file that holds ``params``: its name, its shape and a function that fetches it.

    If tensors are fetched in this order, each stacked parameter moves to the host once. The host keeps the last
    ``num_held`` parameters. Arrays that are split over hosts are gathered by all hosts, one layer at a time, because
    every device holds the gathered array.
    """
    flat = _by_path(params)
    is_here = lambda path: getattr(flat[path], "is_fully_addressable", True)

    @functools.lru_cache(num_held)
    def fetch(path: str, *layer: int) -> np.ndarray:
        part = _of_layer(flat[path], *layer) if layer else flat[path]
        return np.asarray(part if is_here(path) else multihost_utils.process_allgather(part, tiled=True), np.float32)

    def one(path: str, at: tuple[int, ...]) -> np.ndarray:
        n = 0 if is_here(path) else 1
        value = fetch(path, *at[:n])[at[n:]]
        return np.ascontiguousarray(value.reshape(stored_shape(path, value.shape)))

    for name, shape, path, at in _tensors(flat, names):
        yield name, shape, functools.partial(one, path, at)


def _tensors(by_path: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple]:
    """Yield name and shape of every tensor in a file, the parameter's path, and the index in its stacked axes."""
    for path, leaf in by_path.items():
        n = _num_stacked(path, len(leaf.shape))
        for at in np.ndindex(leaf.shape[:n]):
            yield names[path].format(**dict(zip(_AXES, at, strict=False))), stored_shape(path, leaf.shape[n:]), path, at


def _num_stacked(path: str, ndim: int) -> int:
    return ndim - sum(map(len, LAYOUT[path]))


def stored_dims(path: str, ndim: int) -> tuple[tuple[int, ...], ...]:
    """Return for each stored dimension the parameter's dimensions that are folded into it.

    Stacked dimensions come first, each by itself.
    """
    n = _num_stacked(path, ndim)
    return (*((dim,) for dim in range(n)), *(tuple(n + dim for dim in group) for group in LAYOUT[path]))


def stored_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter in files. ``shape`` is our shape of one layer."""
    return tuple(math.prod(shape[dim] for dim in group) for group in stored_dims(path, len(shape)))


def _load_one(file: TensorFile, name: str, path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    devices_of = collections.defaultdict(list)  # part -> its devices; replicas share one read
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        devices_of[tuple(s.indices(size)[:2] for s, size in zip(index, leaf.shape, strict=True))].append(device)

    def part(ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
        index, n = tuple(slice(*r) for r in ranges), _num_stacked(path, len(ranges))
        read = lambda name: _read(file, name, path, index[n:], leaf.shape[n:]).astype(leaf.dtype, copy=False)
        if not n:
            return read(name)
        out = np.empty([r[1] - r[0] for r in ranges], leaf.dtype)
        for at in np.ndindex(out.shape[:n]):
            number = {axis: r[0] + i for axis, r, i in zip(_AXES, ranges, at, strict=False)}
            out[at] = read(name.format(**number))
        return out

    def put(ranges: tuple[tuple[int, int], ...]) -> list[jax.Array]:
        value = part(ranges)  # the host holds one part at a time
        return jax.block_until_ready([jax.device_put(value, device) for device in devices_of[ranges]])

    shards = [shard for ranges in devices_of for shard in put(ranges)]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _read(file: TensorFile, name: str, path: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
    stored_index = []
    for first, *folded in LAYOUT[path]:
        inner = math.prod(shape[dim] for dim in folded)
        assert all(index[dim] == slice(0, shape[dim]) for dim in folded), "heads are not split inside"
        stored_index.append(slice(index[first].start * inner, index[first].stop * inner))
    value = file.read(name, tuple(stored_index))
    if not np.isfinite(value.min()) or not np.isfinite(value.max()):
        raise ConfigError(f"{file.path}: tensor {name} holds values that are no numbers (NaN or infinite)")
    return value.reshape([part.stop - part.start for part in index])
