"""The device mesh and the rules that map logical axes of arrays to mesh axes. Only this module maps them.

Every parameter and activation names its dimensions by logical axes ("vocab", "embed", "batch", ...). ``RULES`` maps
each logical axis to mesh axes. The learner's weights are sharded over ``fsdp``. The sampler's copy is not sharded over
``fsdp``, because otherwise every decode step would gather every weight for one token.

Owns: mesh construction, logical rules, constraints. Does not know: the meaning of the arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import Config, ConfigError, MeshConfig, flatten

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
# Rows of a batch, decode slots and ring shards are split over these mesh axes.
BATCH_AXES = ("data", "fsdp", "expert")
# Along these mesh axes the devices of the learner compute different tokens: other rows, or other parts of a row.
TOKEN_AXES = (*BATCH_AXES, "context")

RULES = {
    "batch": BATCH_AXES,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": "expert",
    "embed": ("fsdp", "context"),
    "layers": None,
    "length": "context",
    "attended": ("tensor", "context"),  # heads inside attention, which needs whole rows (kernels.context)
    "head_size": None,
    "activation": None,
    "rank": None,
}
OF_SAMPLER = {"embed": None}  # only this rule is different for the sampler's weights
# Logical axes of weights, for which mesh.rules may set other mesh axes.
OF_WEIGHTS = ("vocab", "embed", "heads", "kv_heads", "mlp", "expert")
# Name of a size that is no setting, for errors.
ROLLOUTS = "rollouts of an iteration"
# JAX's name for the host memory that a device can read and write directly.
HOST_MEMORY = "pinned_host"


def rules_of(config: MeshConfig) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Return ``mesh.rules`` as pairs (logical axis of weights, its mesh axes). They replace entries of ``RULES``.

    Raises:
        ConfigError: weights do not have the logical axis, or the mesh does not have an axis or has it twice in a rule.
    """
    rules = []
    for name, axes in config.rules.items():
        if name not in OF_WEIGHTS or not _are_distinct_axes(axes):
            raise ConfigError(
                f"mesh.rules={{{name!r}: {axes!r}}} must map one of {', '.join(OF_WEIGHTS)} to None, one or different "
                f"ones of {', '.join(MESH_AXES)}"
            )
        rules.append((name, axes_of(axes) or None))
    return tuple(rules)


def _are_distinct_axes(axes: Any) -> bool:
    """Return whether the value of a rule is None, a mesh axis, or several different mesh axes."""
    if not isinstance(axes, str | list | tuple | None):
        return False
    names = axes_of(axes)
    return all(name in MESH_AXES and names.count(name) == 1 for name in names)


def axes_of(axis: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a ``PartitionSpec``: none, one or several."""
    if isinstance(axis, str):
        return (axis,)
    return tuple(axis or ())


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """Return the mesh of ``config`` over ``devices`` (default: all devices).

    Raises:
        ConfigError: the product of the mesh axes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    if config.data:
        shape = tuple(sizes.values())
        requirement = "use all"
    else:
        others = tuple(size for axis, size in sizes.items() if axis != "data")
        shape = (max(1, len(devices) // math.prod(others)), *others)
        requirement = "divide the"
    if math.prod(shape) != len(devices):
        settings = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size)
        raise ConfigError(f"{settings} must {requirement} {len(devices)} devices")
    is_tpu = devices[0].platform == "tpu"
    in_mesh = _along_torus(shape, devices) if is_tpu else np.asarray(devices).reshape(shape)
    return Mesh(in_mesh, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _along_torus(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """Return the chips of a TPU pod as an array with the shape of the mesh [data, fsdp, expert, context, tensor].

    The mesh axes follow the torus of links between the chips. Slices are connected by the network of the data center.
    They are distributed over ``data`` as far as possible, and the rest over ``fsdp``.

    Raises:
        ConfigError: the slices cannot be distributed over ``data`` and ``fsdp``.
    """
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data, fsdp, *others = shape
    of_data = math.gcd(data, num_slices)
    of_fsdp = num_slices // of_data
    if fsdp % of_fsdp:
        raise ConfigError(f"mesh.data={data} x mesh.fsdp={fsdp} must be a multiple of the {num_slices} TPU slices")
    within = (data // of_data, fsdp // of_fsdp, *others)
    slices = (of_data, of_fsdp, 1, 1, 1)
    return mesh_utils.create_hybrid_device_mesh(within, slices, devices, allow_split_physical_axes=True)


def sampler_mesh(config: MeshConfig, mesh: Mesh) -> Mesh:
    """Return the sampler's mesh: the same devices in the same order, with other sizes of the axes.

    The axis ``tensor`` may be larger and take devices from ``fsdp``. The axis ``context`` has size 1 and its devices go
    to ``fsdp``, because a decode step has one token per row: more devices can only decode more rows.

    Raises:
        ConfigError: ``fsdp``, ``context`` and ``tensor`` cannot be split this way.
    """
    data, fsdp, expert, context, tensor = mesh.shape.values()
    wanted = config.sampler_tensor or tensor
    num_devices = fsdp * context * tensor
    if wanted % tensor or num_devices % wanted:
        raise ConfigError(
            f"mesh.sampler_tensor={wanted} must be 0, or a multiple of mesh.tensor={tensor} that divides the "
            f"{num_devices} devices of mesh.fsdp={fsdp} x mesh.context={context} x mesh.tensor={tensor}"
        )
    if context == 1 and wanted == tensor:
        return mesh
    devices = mesh.devices.reshape(data, -1, expert, 1, wanted)
    return Mesh(devices, MESH_AXES, axis_types=mesh.axis_types)


def check_divisible(config: Config, mesh: Mesh) -> None:
    """Check that the sizes in a config divide evenly over the devices.

    Raises:
        ConfigError: sizes do not divide. The error names every such setting and the nearest sizes that divide.
    """
    num_shards = math.lcm(num_data_shards(mesh), num_data_shards(sampler_mesh(config.mesh, mesh)))
    divisors = _divisors(config, mesh, num_shards)
    values = flatten(config) | {ROLLOUTS: config.rows_per_iteration}
    wrong = []
    for path, divisor in divisors.items():
        if values[path] % divisor:
            # A suggested size must also divide the batch.
            batch = config.update.batch_size if path == "update.micro_batch_size" else 0
            wrong.append(_not_a_multiple(path, values[path], divisor, batch))
    if wrong:
        shards = num_ring_shards(config, mesh)
        context = mesh.shape["context"]
        reason = (
            f"{num_shards} data-parallel devices, {shards} ring shards (replay.shards), groups of "
            f"{config.rows_per_draw} (replay.unit)"
        )
        if context > 1:
            reason += f", mesh.context={context} parts of a row"
        raise ConfigError(f"{'; '.join(wrong)}: over {reason}")


def _divisors(config: Config, mesh: Mesh, num_shards: int) -> dict[str, int]:
    """Return the number that must divide each size, by setting.

    Args:
        num_shards: least common multiple of the data shards of the learner and of the sampler.
    """
    shards = num_ring_shards(config, mesh)
    rows_per_draw = config.rows_per_draw
    context = mesh.shape["context"]
    has_siblings = config.algorithm.surrogate.facts.siblings
    return {
        "rollout.prompts_per_iteration": num_shards,
        "rollout.lookahead_prompts": num_shards,
        "rollout.slots": num_shards,
        "external.groups_per_iteration": num_shards,
        "replay.shards": num_shards,
        "update.batch_size": shards * rows_per_draw,
        "replay.capacity": shards * rows_per_draw,
        # With one ring shard for each data shard, the rollouts divide evenly if the prompts do.
        ROLLOUTS: shards * rows_per_draw if config.replay.shards else 1,
        "update.micro_batch_size": shards * rows_per_draw if has_siblings else shards,
        "update.micro_batch_tokens": shards * max(config.line_tokens, 1),
        "prompts.max_tokens": context,
        "sampling.max_completion_tokens": context,
        "update.pack_width": context,
    }


def _not_a_multiple(path: str, value: int, divisor: int, batch: int) -> str:
    """Return the message about a size that is no multiple of ``divisor``, with the nearest sizes that are allowed.

    Args:
        batch: a number that the size must divide; 0 = none.
    """
    below = value - value % divisor
    nearest = [str(size) for size in (below, below + divisor) if size and batch % size == 0]
    message = f"{path}={value} must be a multiple of {divisor}"
    if nearest:
        message += f" ({' or '.join(nearest)})"
    return message


def num_data_shards(mesh: Mesh) -> int:
    """Return into how many shards the mesh splits the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def num_ring_shards(config: Config, mesh: Mesh) -> int:
    """Return the number of ring shards: ``replay.shards``, or one per data shard if it is 0."""
    return config.replay.shards or num_data_shards(mesh)


def partition_spec(shape: tuple[int, ...], logical_axes: tuple[str | None, ...], mesh, rules=RULES) -> PartitionSpec:
    """Return the mesh axes of each dimension of an array. A dimension that its mesh axes do not divide stays whole."""
    # A mesh axis can split only one dimension. The first dimension that can use the axis gets it.
    spec = []
    free = set(mesh.axis_names)
    for size, name in zip(shape, logical_axes, strict=True):
        axis = None if name is None else rules[name]
        mesh_axes = set(axes_of(axis))
        parts = math.prod(mesh.shape[mesh_axis] for mesh_axis in mesh_axes)
        if parts > 1 and size % parts == 0 and mesh_axes <= free:
            free -= mesh_axes
            spec.append(axis)
        else:
            spec.append(None)
    return PartitionSpec(*spec)


def named(
    mesh: Mesh,
    shape: tuple[int, ...],
    logical_axes: tuple[str | None, ...],
    rules=RULES,
) -> NamedSharding:
    """Return the sharding of an array with these logical axes."""
    return NamedSharding(mesh, partition_spec(shape, logical_axes, mesh, rules))


def leading(mesh: Mesh, tree: Any) -> Any:
    """Return shardings over the batch axes for arrays whose first dimension is rows, decode slots or ring shards."""

    def of_array(x: Any) -> NamedSharding:
        return named(mesh, x.shape, _padded(("batch",), len(x.shape)))

    return jax.tree.map(of_array, tree)


def _padded(names: tuple[str, ...], num_dimensions: int) -> tuple[str | None, ...]:
    """Return the logical axes of an array whose first dimensions have these names and whose other ones have none."""
    return (*names, *[None] * num_dimensions)[:num_dimensions]


def rows(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return an abstract array with the sharding of ``leading``."""
    unplaced = jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=leading(mesh, unplaced))


def undivided(mesh: Mesh, dtype: Any, shape: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
    """Return an abstract array that is replicated on every device."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh, 0))


def placed(shapes: Any, layouts: Any) -> Any:
    """Return the abstract arrays ``shapes`` with the shardings ``layouts``."""

    def of_array(x: Any, layout: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return jax.tree.map(of_array, shapes, layouts)


def of(tree: Any) -> Any:
    """Return the sharding of every array or abstract array in a tree."""
    return jax.tree.map(lambda x: x.sharding, tree)


def by_device(
    function: Callable,
    *args: Any,
    axes: tuple,
    shared: int = 1,
    over: tuple[str, ...] = MESH_AXES,
) -> Any:
    """Run ``function(*args)`` on each device with the device's parts of the arguments (``shard_map``).

    The function itself contains the collectives that it needs.

    Args:
        axes: sharding of each argument (an array or a tree of arrays): logical axes of its first dimensions, or a
            ``PartitionSpec``. Its gradients are summed over the mesh axes that do not shard it.
        shared: number of leading dimensions of the results that have the sharding of the first argument.
        over: the mesh axes that are manual in the ``shard_map``. XLA partitions ``function`` along the other axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape[axis] for axis in over) == 1:
        return function(*args)

    def split(names: Any, x: jax.Array) -> PartitionSpec:
        if isinstance(names, PartitionSpec):
            return names
        return partition_spec(x.shape, _padded(names, x.ndim), mesh)

    specs = []
    for arg, names in zip(args, axes, strict=True):
        specs.append(jax.tree.map(functools.partial(split, names), arg))
    out_spec = PartitionSpec(*specs[0][:shared])
    on_each = jax.shard_map(
        function,
        in_specs=tuple(specs),
        out_specs=out_spec,
        axis_names={*over},
        check_vma=False,
    )
    return on_each(*args)


def by_vocabulary(function: Callable, logits_ZV: jax.Array, *of_rows: jax.Array) -> Any:
    """Run ``function(logits, *of_rows, axis)`` on each device with its rows and its part of the vocabulary.

    Args:
        function: receives in ``axis`` the mesh axes that shard the vocabulary, and returns arrays of rows [Z, ...].
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = ("batch", "vocab")
    axis: tuple[str, ...] = ()
    if not mesh.empty:
        _, of_vocabulary = partition_spec(logits_ZV.shape, split, mesh)
        axis = axes_of(of_vocabulary)

    def with_axis(*arrays: jax.Array) -> Any:
        return function(*arrays, axis)

    return by_device(with_axis, logits_ZV, *of_rows, axes=(split, *[("batch",)] * len(of_rows)))


def parts(size: int, name: str) -> int:
    """Return into how many parts the active mesh splits a dimension of this size and logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    (names,) = partition_spec((size,), (name,), mesh)
    return math.prod(mesh.shape[axis] for axis in axes_of(names))


def on_rows(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec with only the entries whose mesh axes are all in ``TOKEN_AXES``. The others become None."""
    entries = []
    for entry in spec:
        entries.append(entry if set(axes_of(entry)) <= set(TOKEN_AXES) else None)
    return PartitionSpec(*entries)


def replicated(mesh: Mesh, tree: Any) -> Any:
    """Return a replicated sharding for every leaf of a tree."""
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)


def put(tree: Any, layout: Any) -> Any:
    """Copy host arrays, which are equal on every host, to the devices. Each host copies only its own shards.

    ``device_put`` would compare the arrays of all hosts, and each host would have to wait for the others.
    """

    return jax.tree.map(_put, tree, layout)


def _put(x: Any, layout: NamedSharding) -> jax.Array:
    """Copy one host array to the devices."""
    if layout.is_fully_addressable:
        return jax.device_put(x, layout)
    if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
        data = _put(jax.random.key_data(x), layout)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))

    def shard(index: Any) -> np.ndarray:
        return np.asarray(x)[index]

    return jax.make_array_from_callback(np.shape(x), layout, shard)


def own_rows(x: jax.Array) -> dict[int, np.ndarray]:
    """Return the rows of an array on this host, by row number. Only one host returns a copied row."""
    found = {}
    for shard in x.addressable_shards:
        if shard.replica_id != 0:
            continue
        first = 0
        if shard.index:
            first = shard.index[0].start or 0
        found |= enumerate(np.asarray(shard.data), first)
    return found


def on_host(tree: Any) -> Any:
    """Return the same shardings in the pinned memory of the hosts."""
    return jax.tree.map(lambda x: x.with_memory_kind(HOST_MEMORY), tree)


def device_bytes(tree: Any) -> int:
    """Return the bytes of abstract arrays on one device. Arrays in host memory do not count."""
    num_bytes = 0
    for x in jax.tree.leaves(tree):
        if x.sharding.memory_kind == HOST_MEMORY:
            continue
        shard_shape = x.sharding.shard_shape(x.shape)
        num_bytes += math.prod(shard_shape) * x.dtype.itemsize
    return num_bytes


def check_host_memory(mesh: Mesh, setting: str, value: Any, otherwise: Any) -> None:
    """Check that the devices can address host memory, for a setting that keeps arrays there.

    Args:
        otherwise: the value of the setting that needs no host memory, for the error.

    Raises:
        ConfigError: the devices cannot address host memory.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise ConfigError(
            f"{setting}={value!r} must be {otherwise!r} on {device.device_kind}: this device has no memory "
            f"{HOST_MEMORY!r}, only {', '.join(map(repr, kinds))}"
        )


def constrain(x: jax.Array, *logical_axes: str | None, rules: tuple[tuple[str, Any], ...] = ()) -> jax.Array:
    """Constrain the sharding of an array inside a jitted function. ``rules`` override ``RULES``.

    Without an active mesh of several devices the array is returned unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    spec = partition_spec(x.shape, logical_axes, mesh, RULES | dict(rules))
    return jax.lax.with_sharding_constraint(x, spec)


def gather_once(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Gather a weight along ``TOKEN_AXES`` once for all its uses. Its gradient keeps the weight's sharding.

    XLA would otherwise gather a matrix with merged head dimensions twice: for the recomputed forward pass, and for the
    gradient.

    Args:
        logical_axes: the axes that define the weight's sharding.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return _gather_once(x, partition_spec(x.shape, logical_axes, mesh))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_once(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, _without_token_axes(spec))


def _gather_once_forward(x: jax.Array, spec: PartitionSpec) -> tuple[jax.Array, None]:
    return _gather_once(x, spec), None


def _gather_once_backward(spec: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, spec),)


_gather_once.defvjp(_gather_once_forward, _gather_once_backward)


def _without_token_axes(spec: PartitionSpec) -> PartitionSpec:
    """Return the sharding ``spec`` without the entries that have mesh axes of ``TOKEN_AXES``."""
    entries = []
    for entry in spec:
        entries.append(None if set(axes_of(entry)) & set(TOKEN_AXES) else entry)
    return PartitionSpec(*entries)


def gather_copies(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Gather an array with sharding ``spec`` into one copy per device along ``TOKEN_AXES``, [n, ...].

    The result is an argument for ``by_device``. The gradient is a reduce-scatter. Gathers run in rings of up to four
    devices. With larger rings the TPU compiler sums the whole gradient on all devices, which sends twice the bytes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape[axis] for axis in TOKEN_AXES) == 1:
        return x[None]
    gathered_spec = on_rows(spec)
    other_spec = _without_token_axes(spec)

    def gather(x: jax.Array) -> jax.Array:
        for dim, axes in enumerate(gathered_spec):
            for axis in reversed(axes_of(axes)):
                for rings in _rings(mesh.shape[axis]):
                    x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=rings)
        return x[None]

    in_spec = PartitionSpec(*(gathered or other for gathered, other in zip(gathered_spec, other_spec, strict=True)))
    out_spec = PartitionSpec(TOKEN_AXES, *other_spec)
    x = jax.lax.with_sharding_constraint(x, spec)  # jax 0.12 cannot add a shard_map's gradient directly to a ref
    return jax.shard_map(gather, in_specs=in_spec, out_specs=out_spec, check_vma=False)(x)


def _rings(num_devices: int) -> Iterator[list[list[int]]]:
    """Yield the device groups of successive gathers that together gather over ``num_devices``.

    A group has four devices, or two, or all remaining devices if neither four nor two divides their number.
    """
    stride = 1
    while stride < num_devices:
        remaining = num_devices // stride
        size = next(size for size in (4, 2, remaining) if remaining % size == 0)
        devices = np.arange(num_devices).reshape(-1, size, stride)
        yield devices.swapaxes(1, 2).reshape(-1, size).tolist()
        stride *= size
