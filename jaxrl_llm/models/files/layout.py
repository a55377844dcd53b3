"""Layout of parameters in files, and their transfer between files and shards.

Files store one matrix per layer, [out, in], with heads and head size folded into one dimension. The parameters of this
package are stacked: [layers, out, ..., in]. Each shard is built from the slices of the stored tensors that it needs.
Therefore the host holds at most one shard of one parameter in addition to the arrays themselves.

Owns: which dimensions of a parameter are which dimensions of a stored tensor. Does not know: file formats, names of
tensors.
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
from jaxrl_llm.models.lora import FoldedDims
from jaxrl_llm.models.transformer import Params

_VECTOR = ((0,),)
_MATRIX = ((0,), (1,))
_HEADS = ((0, 1),)
_FROM_WIDTH_TO_HEADS = ((0, 1), (2,))
_FROM_HEADS_TO_WIDTH = ((0,), (1, 2))
_STACKED_AXES = ("layer", "expert")
# For each dimension of a stored tensor, the parameter's dimensions that are folded into it. The parameter's dimensions
# are counted without the stacked axes of layers and experts.
LAYOUT: dict[str, FoldedDims] = {
    "embedding": _MATRIX,
    "head": _MATRIX,
    "final_norm": _VECTOR,
    "blocks.attention_norm": _VECTOR,
    "blocks.attention_post_norm": _VECTOR,
    "blocks.mlp_norm": _VECTOR,
    "blocks.mlp_post_norm": _VECTOR,
    # Attention
    "blocks.q": _FROM_WIDTH_TO_HEADS,
    "blocks.k": _FROM_WIDTH_TO_HEADS,
    "blocks.v": _FROM_WIDTH_TO_HEADS,
    "blocks.o": _FROM_HEADS_TO_WIDTH,
    "blocks.q_bias": _HEADS,
    "blocks.k_bias": _HEADS,
    "blocks.v_bias": _HEADS,
    "blocks.o_bias": _VECTOR,
    "blocks.q_norm": _VECTOR,
    "blocks.k_norm": _VECTOR,
    "blocks.sinks": _VECTOR,
    # The dense MLP
    "blocks.gate": _MATRIX,
    "blocks.up": _MATRIX,
    "blocks.down": _MATRIX,
    "blocks.gate_bias": _VECTOR,
    "blocks.up_bias": _VECTOR,
    "blocks.down_bias": _VECTOR,
    # Experts
    "blocks.router": _MATRIX,
    "blocks.experts_gate": _MATRIX,
    "blocks.experts_up": _MATRIX,
    "blocks.experts_down": _MATRIX,
    "blocks.router_bias": _VECTOR,
    "blocks.experts_gate_bias": _VECTOR,
    "blocks.experts_up_bias": _VECTOR,
    "blocks.experts_down_bias": _VECTOR,
    "blocks.shared_router": _MATRIX,
    "blocks.shared_gate": _MATRIX,
    "blocks.shared_up": _MATRIX,
    "blocks.shared_down": _MATRIX,
    # The gated delta rule
    "blocks.delta_in": _FROM_WIDTH_TO_HEADS,
    "blocks.delta_gates": _FROM_WIDTH_TO_HEADS,
    "blocks.delta_z": _FROM_WIDTH_TO_HEADS,
    "blocks.delta_qkv": _MATRIX,
    "blocks.delta_b": _MATRIX,
    "blocks.delta_a": _MATRIX,
    "blocks.delta_conv": ((0,), (1,), (2,)),
    "blocks.delta_rate": _VECTOR,
    "blocks.delta_bias": _VECTOR,
    "blocks.delta_norm": _VECTOR,
    "blocks.delta_out": _FROM_HEADS_TO_WIDTH,
}
LAYOUT |= lora.layout(LAYOUT)


class TensorFile(Protocol):
    """Tensors of a file or folder, read in parts."""

    @property
    def path(self) -> str:
        """Path of the file, for error messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by its name."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of one tensor in float32."""
        ...


def load(file: TensorFile, names: Mapping[str, str], shapes: Params, contents: str) -> Params:
    """Read parameters from a file. Each shard is read separately and copied directly to its device.

    Args:
        names: tensor name of each parameter of ``LAYOUT``, with "{layer}" and "{expert}" in place of numbers.
        shapes: shapes, dtypes and shardings of the parameters.
        contents: description of the expected contents, for error messages.

    Raises:
        ConfigError: a tensor is missing, has the wrong shape, or belongs to another kind of model.
    """
    check(file, names, shapes, contents)
    loaded = []
    for path, leaf in _by_path(shapes).items():
        loaded.append(_load_one(file, names[path], path, leaf))
    return jax.tree.unflatten(jax.tree.structure(shapes), loaded)


def check(file: TensorFile, names: Mapping[str, str], shapes: Params, contents: str) -> None:
    """Compare the file's tensors with the parameters by name and shape, without reading weights.

    Raises:
        ConfigError: as ``load``.
    """
    expected = {name: shape for name, shape, _, _ in _tensors(_by_path(shapes), names)}
    for name, shape in expected.items():
        if name not in file.shapes:
            raise ConfigError(f"{file.path}: tensor {name} is missing")
        stored = tuple(file.shapes[name])
        if stored != shape:
            raise ConfigError(f"{file.path}: tensor {name} has shape {stored}, not {shape}")
    # If a weight (a bias, an expert) were ignored, a different model would run without an error.
    # A tied head may be stored too, because it equals the embedding.
    extra = [name for name in file.shapes if name not in expected and name != names["head"]]
    if extra:
        per_layer = sum(path.startswith("blocks.") for path in _by_path(shapes))
        raise ConfigError(
            f"{file.path}: tensor {extra[0]} ({len(extra)} like it) is not part of {contents} with {per_layer} tensors "
            "per layer"
        )


def _by_path(params: Params) -> dict[str, Any]:
    """Return every parameter, or its shape, by its path in the tree's order."""
    leaves = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = ".".join(key.key for key in keys)
        leaves[path] = leaf
    return leaves


Stored = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]


@jax.jit
def _of_layer(x: jax.Array, layer: int) -> jax.Array:
    """Return one layer of a stacked parameter, with the parameter's sharding."""
    return jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)


def stored_tensors(params: Params, names: Mapping[str, str], *, num_held: int = 1) -> Iterator[Stored]:
    """Yield every tensor of a file that holds ``params``: its name, its shape and a function that fetches it.

    If tensors are fetched in this order, each stacked parameter moves to the host once. The host keeps the last
    ``num_held`` parameters. Arrays that are split over hosts are gathered by all hosts, one layer at a time, because
    every device holds the gathered array.
    """
    arrays = _by_path(params)

    def is_on_this_host(path: str) -> bool:
        return getattr(arrays[path], "is_fully_addressable", True)

    @functools.lru_cache(num_held)
    def fetch(path: str, *layer: int) -> np.ndarray:
        part = _of_layer(arrays[path], *layer) if layer else arrays[path]
        if not is_on_this_host(path):
            part = multihost_utils.process_allgather(part, tiled=True)
        return np.asarray(part, np.float32)

    def tensor(path: str, index: tuple[int, ...]) -> np.ndarray:
        num_fetched = 0 if is_on_this_host(path) else 1  # stacked axes of which one index is fetched
        fetched = fetch(path, *index[:num_fetched])
        value = fetched[index[num_fetched:]]
        stored = value.reshape(stored_shape(path, value.shape))
        return np.ascontiguousarray(stored)

    for name, shape, path, index in _tensors(arrays, names):
        yield name, shape, functools.partial(tensor, path, index)


def _tensors(
    by_path: Mapping[str, Any], names: Mapping[str, str]
) -> Iterator[tuple[str, tuple[int, ...], str, tuple[int, ...]]]:
    """Yield name and shape of every tensor in a file, the parameter's path, and the index in its stacked axes."""
    for path, leaf in by_path.items():
        num_stacked = _num_stacked(path, len(leaf.shape))
        shape = stored_shape(path, leaf.shape[num_stacked:])
        for index in np.ndindex(leaf.shape[:num_stacked]):
            numbers = dict(zip(_STACKED_AXES, index, strict=False))
            yield names[path].format(**numbers), shape, path, index


def _num_stacked(path: str, ndim: int) -> int:
    """Return the number of stacked axes, of layers and experts, of a parameter with ``ndim`` dimensions."""
    return ndim - sum(len(group) for group in LAYOUT[path])


def stored_dims(path: str, ndim: int) -> tuple[tuple[int, ...], ...]:
    """Return for each stored dimension the parameter's dimensions that are folded into it.

    Stacked dimensions come first, each by itself.
    """
    num_stacked = _num_stacked(path, ndim)
    dims: list[tuple[int, ...]] = [(dim,) for dim in range(num_stacked)]
    for group in LAYOUT[path]:
        folded_dims = tuple(num_stacked + dim for dim in group)
        dims.append(folded_dims)
    return tuple(dims)


def stored_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter in files. ``shape`` is the parameter's shape of one layer."""
    sizes = []
    for group in stored_dims(path, len(shape)):
        folded_sizes = [shape[dim] for dim in group]
        sizes.append(math.prod(folded_sizes))
    return tuple(sizes)


Ranges = tuple[tuple[int, int], ...]  # start and end of a shard in each dimension


def _load_one(file: TensorFile, name: str, path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Read one parameter. Devices that hold the same part share one read."""
    devices_by_part: dict[Ranges, list[jax.Device]] = collections.defaultdict(list)
    index_by_device = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    for device, index in index_by_device.items():
        assert index is not None, "this host's devices have parts"
        limits = [part.indices(size) for part, size in zip(index, leaf.shape, strict=True)]
        ranges = tuple((start, stop) for start, stop, _ in limits)
        devices_by_part[ranges].append(device)
    shards = []
    for ranges, devices in devices_by_part.items():
        value = _load_part(file, name, path, leaf, ranges)
        # Wait for the transfer, so that the host holds one part at a time.
        copies = [jax.device_put(value, device) for device in devices]
        shards += jax.block_until_ready(copies)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _load_part(file: TensorFile, name: str, path: str, leaf: jax.ShapeDtypeStruct, ranges: Ranges) -> np.ndarray:
    """Read one part of a parameter, tensor by tensor."""
    index = tuple(slice(start, stop) for start, stop in ranges)
    num_stacked = _num_stacked(path, len(ranges))

    def read(tensor_name: str) -> np.ndarray:
        value = _read(file, tensor_name, path, index[num_stacked:], leaf.shape[num_stacked:])
        return value.astype(leaf.dtype, copy=False)

    if num_stacked == 0:
        return read(name)
    sizes = [stop - start for start, stop in ranges]
    out = np.empty(sizes, leaf.dtype)
    starts = [start for start, _ in ranges[:num_stacked]]
    for offsets in np.ndindex(out.shape[:num_stacked]):
        numbers = [start + offset for start, offset in zip(starts, offsets, strict=True)]
        number_by_axis = dict(zip(_STACKED_AXES, numbers, strict=False))
        out[offsets] = read(name.format(**number_by_axis))
    return out


def _read(
    file: TensorFile,
    name: str,
    path: str,
    index: tuple[slice, ...],
    shape: tuple[int, ...],
) -> np.ndarray:
    """Read a part of one tensor in float32. Check that its values are finite.

    Args:
        index: the part, in the parameter's dimensions of one layer.
        shape: the parameter's shape of one layer.
    """
    stored_index = []
    for first, *folded in LAYOUT[path]:
        inner = math.prod(shape[dim] for dim in folded)
        for dim in folded:
            assert index[dim] == slice(0, shape[dim]), "heads are not split inside"
        part = index[first]
        stored_index.append(slice(part.start * inner, part.stop * inner))
    value = file.read(name, tuple(stored_index))
    if not np.isfinite(value.min()) or not np.isfinite(value.max()):
        raise ConfigError(f"{file.path}: tensor {name} has values that are NaN or infinite")
    sizes = [part.stop - part.start for part in index]
    return value.reshape(sizes)
