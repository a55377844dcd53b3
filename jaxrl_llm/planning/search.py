"""Layout search: find the layouts of a run (mesh, micro-batch, remat) that fit a slice, the fastest first.

Layouts whose arrays alone do not fit are removed before anything is compiled. The other layouts are sorted by an
estimate from the model's shapes. The main programs of the first layouts are compiled.

Owns: which layouts exist, the estimate. Does not know: how a program is compiled or timed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from jaxrl_llm.config import Config, ConfigError, MeshConfig
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.presets import Model
from jaxrl_llm.planning import cost, verdict
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.compiled import Row, compile_rows
from jaxrl_llm.run import Run, assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import in_use_bytes

# Programs to compile. The sampler's programs are the same for all micro-batches and remats of a mesh.
SAMPLER = ("init_sampler", "publish", "publish_base", "prefill", "decode", "collect")
LEARNER = ("init_ring", "init_state", "annotate", "update")


Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The settings that a search varies."""

    mesh: MeshConfig
    micro_batch_size: int
    remat: Remat

    def of(self, config: Config) -> Config:
        """Return the config with these settings."""
        update = dataclasses.replace(config.update, micro_batch_size=self.micro_batch_size)
        model = dataclasses.replace(config.model, remat=self.remat)
        return dataclasses.replace(config, mesh=self.mesh, update=update, model=model)

    def __str__(self) -> str:
        mesh = " ".join(f"mesh.{axis}={getattr(self.mesh, axis)}" for axis in sharding.MESH_AXES)
        return f"{mesh} update.micro_batch_size={self.micro_batch_size} model.remat={self.remat}"


def meshes(config: MeshConfig, arch: Architecture, num_devices: int) -> Iterator[MeshConfig]:
    """Yield the meshes whose axes divide the model's experts, heads and key-value heads evenly."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for fsdp, expert, context, tensor in itertools.product(divisors, repeat=4):
        num_used = fsdp * expert * context * tensor
        if num_devices % num_used or arch.num_kv_heads % tensor:
            continue
        if expert > 1 and (arch.num_experts == 0 or arch.num_experts % expert):
            continue
        if context > 1 and arch.num_heads % (context * tensor):
            continue
        data = num_devices // num_used
        yield dataclasses.replace(config, data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor)


def layouts(config: Config, mesh: MeshConfig) -> Iterator[Layout]:
    """Yield all layouts of a mesh. Many of them do not divide the run's sizes."""
    batch = config.update.batch_size
    sizes = [n for n in range(1, batch + 1) if batch % n == 0]
    if config.update.micro_batch_tokens > 0:  # with packing, the number of rows is not used
        sizes = [config.update.micro_batch_size]
    for size in sizes:
        for remat in REMATS:
            yield Layout(mesh, size, remat)


def estimate(config: Config, arch: Architecture, chip: Chip) -> float:
    """Return estimated seconds of an iteration, from the sizes of its arrays. Use them only to rank layouts."""
    update = config.update
    mesh = config.mesh
    num_chips = mesh.data * mesh.fsdp * mesh.expert * mesh.context * mesh.tensor
    recomputation = {"none": 6.0, "dots": 6.7}.get(config.model.remat, 8.0) / 6.0
    flops = cost.model_flops(config, arch) * recomputation / num_chips
    itemsize = 2 if config.model.compute_dtype == "bfloat16" else 4
    expert_params = 3 * arch.num_layers * arch.num_experts * arch.width * arch.ffn
    weight_bytes = itemsize * (arch.num_params - expert_params + expert_params / mesh.expert)
    num_rows = update.updates_per_iteration * update.batch_size
    num_micros = num_rows // update.micro_batch_size
    learner_tokens = num_rows * config.row_tokens / (num_chips / mesh.tensor)
    sent = 0.0
    if mesh.fsdp * mesh.context > 1:
        # Weights are gathered twice, gradients are reduced in float32, and publishing gathers once.
        sent = weight_bytes / mesh.tensor * (1 + 4 * num_micros)
    tensor = mesh.sampler_tensor or mesh.tensor
    sampler_weight_bytes = weight_bytes / tensor
    num_slots = config.num_slots / (num_chips / tensor)
    num_steps = cost.decode_steps(config)
    for num_tokens, num_passes, num_parts in (
        (learner_tokens, 2, mesh.tensor),
        (num_slots * num_steps, 1, tensor),
    ):
        activations = num_passes * itemsize * num_tokens * arch.num_layers
        sent += activations * arch.width * (4 * (num_parts > 1) + 2 * (mesh.expert - 1))
        if num_passes == 2 and mesh.context > 1:  # only the learner splits rows over the context axis
            sent += activations * 2 * (arch.num_heads + arch.num_kv_heads) * arch.head_size
    cache_bytes = num_slots * config.row_tokens * arch.num_kv_heads * arch.head_size * 2 * itemsize
    decode_bytes = num_steps * (sampler_weight_bytes + cache_bytes * arch.num_layers / tensor / 2)
    read = decode_bytes + 6 * weight_bytes / mesh.tensor * num_micros
    return flops / chip.tflops / 1e12 + read / chip.hbm_gb / 1e9 + sent / chip.link_gb / 1e9


def kept_for_backward(config: Config, arch: Architecture) -> float:
    """Return the least bytes per device that a micro-batch keeps for the backward pass, counting completions only.

    These are each layer's input and the MLP values that ``model.remat`` keeps.
    """
    mesh = config.mesh
    itemsize = 2 if config.model.compute_dtype == "bfloat16" else 4
    row_tokens = config.update.micro_batch_size * config.sampling.max_completion_tokens
    num_parts = mesh.data * mesh.fsdp * mesh.expert * mesh.context
    tokens = (config.update.micro_batch_tokens or row_tokens) / num_parts
    ffn = arch.ffn * max(1, arch.experts_per_token) / mesh.tensor
    mlp_values = {"none": 6, "dots": 2}.get(config.model.remat, 0) * ffn
    return itemsize * arch.num_layers * tokens * (arch.width + mlp_values)


def candidates(config: Config, model: Model, devices: list[Any], chip: Chip) -> tuple[list[Layout], int]:
    """Return the layouts that divide and whose arrays fit, by estimate, and the number that divide but do not fit."""
    found, too_large, refused = [], 0, None
    for axes in meshes(config.mesh, model.arch, len(devices)):
        mesh, there = sharding.make_mesh(axes, devices), None
        for layout in layouts(config, axes):
            of = layout.of(config)
            try:
                sharding.check_divisible(of, mesh)
            except ConfigError:
                continue
            try:
                there = there or arrays(assemble(of, model.arch, model.eos_ids, mesh, model.reference))
            except ConfigError as error:
                refused = error
                continue
            sampling, learning = there[0], there[1] + kept_for_backward(of, model.arch)
            if max(sampling, learning) > chip.hbm_gib * 2**30:
                too_large += 1
            else:
                found.append((estimate(of, model.arch, chip), learning, layout))
    if refused and not found and not too_large:
        raise refused  # no mesh is possible
    # Among equal estimates, the layout that needs less memory comes first.
    return [layout for *_, layout in sorted(found, key=lambda each: each[:2])], too_large


def arrays(run: Run) -> tuple[int, int]:
    """Return the bytes of a device's arrays while the sampler runs, and while the learner runs."""
    sampling, learning = (sum(verdict.kept(run, sampling=half).values()) for half in (True, False))
    return sampling, learning


def assembled(config: Config, model: Model, devices: list[Any]) -> Run:
    mesh = sharding.make_mesh(config.mesh, devices)
    return assemble(config, model.arch, model.eos_ids, mesh, model.reference)


def search(
    config: Config,
    model: Model,
    devices: list[Any],
    chip: Chip,
    *,
    most: int,
    shown: int = 5,
) -> int:
    """Compile the first ``most`` layouts and print the fastest that fit.

    Returns:
        Exit status: 0 if a layout fits, else 1.

    Raises:
        ConfigError: no layout divides the run's numbers.
    """
    ordered, too_large = candidates(config, model, devices, chip)
    if not ordered and not too_large:
        tensor = f", or has mesh.sampler_tensor={config.mesh.sampler_tensor}" if config.mesh.sampler_tensor else ""
        raise ConfigError(
            f"--search: no mesh of {len(devices)} devices divides rollout.prompts_per_iteration="
            f"{config.rollout.prompts_per_iteration}, update.batch_size={config.update.batch_size} and the ring{tensor}"
        )
    tried = ordered[:most]
    print(
        f"search      {len(ordered) + too_large} layouts divide; {too_large} with arrays that alone do not fit, "
        f"{len(tried)} are compiled (--search={most})",
        flush=True,
    )
    sampler: dict[str, list[Row]] = {}
    fitting = []
    for layout in tried:
        run = assembled(layout.of(config), model, devices)
        mesh = str(layout.mesh)
        programs = run.programs()
        if mesh not in sampler:
            sampler[mesh] = list(compile_rows(run, [name for name in SAMPLER if name in programs]))
        rows = sampler[mesh] + list(compile_rows(run, [name for name in LEARNER if name in programs]))
        need = in_use_bytes({row.name: row.memory for row in rows if row.memory}, **run.beside)
        refused = [row for row in rows if not row.memory or need[row.name] > chip.hbm_gib * 2**30]
        least = cost.iteration(run, chip, {row.name: row.counts for row in rows if row.counts})
        if refused:
            said = f"does not fit: {', '.join(row.name for row in refused)}"
        else:
            fitting.append((least.seconds, layout, max(need.values()), least))
            said = f"at least {least.seconds:.3g} s, {max(need.values()) / 2**30:.2f} GiB"
        print(f"  {layout}: {said}", flush=True)
    if not fitting:
        print("none of them fits")
        return 1
    print("best that fit, by the least time of an iteration:")
    for seconds, layout, peak, least in sorted(fitting, key=lambda each: each[0])[:shown]:
        print(f"{seconds:9.3g} s  MFU {least.mfu:6.1%}  {peak / 2**30:6.2f} GiB  {layout}")
    return 0
