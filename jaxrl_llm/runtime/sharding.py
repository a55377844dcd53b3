"""The mesh, and the one place where names of array dimensions become mesh axes.

Every parameter and activation names its dimensions by logical axes ("vocab", "embed", "batch", ...);
``RULES`` says which mesh axis each lies on. Weights of the learner are split over ``fsdp``; the
sampler's copy is whole along it, for a decode step would otherwise gather every weight for one token.

Owns: mesh construction, logical rules, constraints. Does not know: what the arrays mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import Config, ConfigError, MeshConfig, flatten

MESH_AXES = ("data", "fsdp", "tensor")
# Rows of a batch, sampler slots and ring shards are split over both of these.
BATCH_AXES = ("data", "fsdp")

RULES = {
    "batch": BATCH_AXES,
    "shards": BATCH_AXES,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    "layers": None,
    "length": None,
    "head_size": None,
    "activation": None,
}
SAMPLER_RULES = {**RULES, "embed": None}
# JAX's name of the host memory that a device reads and writes by itself.
HOST_MEMORY = "pinned_host"


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """The mesh of ``config`` over ``devices`` (default: all).

    Raises:
        ConfigError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    data, fsdp, tensor = config.data, config.fsdp, config.tensor
    if data == 0:
        data = max(1, len(devices) // (fsdp * tensor))
    if data * fsdp * tensor != len(devices):
        raise ConfigError(
            f"mesh.data={config.data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} must use all {len(devices)} devices"
        )
    return Mesh(
        np.asarray(devices).reshape(data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def check_divisible(config: Config, mesh: Mesh) -> None:
    """ConfigError that names every number that does not split evenly over the devices, with the nearest that do."""
    devices, shards, draw = num_data_shards(mesh), num_ring_shards(config, mesh), config.rows_per_draw
    rollout = ("rollout.prompts_per_iteration", "rollout.lookahead_prompts", "rollout.slots")
    parts = dict.fromkeys((*rollout, "external.groups_per_iteration", "replay.shards"), devices)
    parts |= dict.fromkeys(("update.batch_size", "replay.capacity"), shards * draw)
    parts["rollouts of an iteration"] = shards * draw if config.replay.shards else 1  # as the prompts divide
    parts["update.micro_batch_size"] = shards * (draw if config.algorithm.surrogate.needs.siblings else 1)
    parts["update.micro_batch_tokens"] = shards * max(config.line_tokens, 1)
    values, wrong = flatten(config) | {"rollouts of an iteration": config.rows_per_iteration}, []
    for path, n in parts.items():
        if rest := (value := values[path]) % n:
            batch = config.update.batch_size if path == "update.micro_batch_size" else 0  # which it must divide too
            near = " or ".join(str(x) for x in (value - rest, value - rest + n) if x and batch % x == 0)
            wrong.append(f"{path}={value} must be a multiple of {n}" + f" ({near})" * bool(near))
    if wrong:
        why = f"{devices} data-parallel devices, {shards} ring shards (replay.shards), groups of {draw} (replay.unit)"
        raise ConfigError(f"{'; '.join(wrong)}: over {why}")


def num_data_shards(mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def num_ring_shards(config: Config, mesh: Mesh) -> int:
    return config.replay.shards or num_data_shards(mesh)


def partition_spec(shape: tuple[int, ...], logical_axes: tuple[str | None, ...], mesh, rules=RULES) -> PartitionSpec:
    """Mesh axes of an array; a dimension that its axis does not divide stays whole."""
    assert len(shape) == len(logical_axes), (shape, logical_axes)
    spec = []
    for size, name in zip(shape, logical_axes, strict=True):
        axis = None if name is None else rules[name]
        parts = math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))
        spec.append(axis if parts > 1 and size % parts == 0 else None)
    return PartitionSpec(*spec)


def named(mesh: Mesh, shape: tuple[int, ...], logical_axes: tuple[str | None, ...], rules=RULES) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(shape, logical_axes, mesh, rules))


def leading(mesh: Mesh, tree: Any, dim: int = 0) -> Any:
    """Shardings of a pytree whose dimension ``dim`` is rows, slots or ring shards: split over the batch axes."""

    def one(x):
        axes = tuple("batch" if d == dim else None for d in range(len(x.shape)))
        return named(mesh, x.shape, axes)

    return jax.tree.map(one, tree)


def by_device(function: Callable, is_split: tuple[bool, ...]) -> Callable:
    """``function`` run by each data-parallel device on its own ring shards, its control flow its own.

    Args:
        function: of arrays whose leading dimension is ring shards, and whose results' is; no shard's result depends
            on another shard.
        is_split: of each argument, whether it has that dimension; the others are whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    rows = PartitionSpec(BATCH_AXES)
    in_specs = tuple(rows if split else PartitionSpec() for split in is_split)
    return jax.shard_map(function, in_specs=in_specs, out_specs=rows)


def replicated(mesh: Mesh, tree: Any) -> Any:
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)


def on_host(tree: Any) -> Any:
    """The same shardings in the pinned memory of the devices' hosts."""
    return jax.tree.map(lambda x: x.with_memory_kind(HOST_MEMORY), tree)


def check_host_memory(mesh: Mesh, setting: str, value: Any, otherwise: Any) -> None:
    """A setting that keeps arrays in host memory needs devices that can address it.

    Raises:
        ConfigError: they cannot.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise ConfigError(
            f"{setting}={value!r} must be {otherwise!r} on {device.device_kind}: it has no memory {HOST_MEMORY!r}, "
            f"only {', '.join(map(repr, kinds))}"
        )


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Pin an activation's layout inside a jitted function; no-op where no mesh is active."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(x.shape, logical_axes, mesh))
