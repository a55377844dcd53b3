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
        settings = [f"mesh.{axis}={getattr(self.mesh, axis)}" for axis in sharding.MESH_AXES]
        settings.append(f"update.micro_batch_size={self.micro_batch_size}")
        settings.append(f"model.remat={self.remat}")
        return " ".join(settings)


def meshes(config: MeshConfig, arch: Architecture, num_devices: int) -> Iterator[MeshConfig]:
    """Yield the meshes whose axes divide the model's experts, heads and key-value heads evenly."""
    divisors = _divisors(num_devices)
    for fsdp, expert, context, tensor in itertools.product(divisors, repeat=4):
        num_used = fsdp * expert * context * tensor
        if num_devices % num_used or arch.num_kv_heads % tensor:
            continue
        if expert > 1 and (arch.num_experts == 0 or arch.num_experts % expert):
            continue
        if context > 1 and arch.num_heads % (context * tensor):
            continue
        data = num_devices // num_used
        yield dataclasses.replace(
            config,
            data=data,
            fsdp=fsdp,
            expert=expert,
            context=context,
            tensor=tensor,
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def layouts(config: Config, mesh: MeshConfig) -> Iterator[Layout]:
    """Yield all layouts of a mesh. Many of them do not divide the run's sizes."""
    sizes = _divisors(config.update.batch_size)
    if config.update.micro_batch_tokens > 0:  # with packing, the number of rows is not used
        sizes = [config.update.micro_batch_size]
    for size in sizes:
        for remat in REMATS:
            yield Layout(mesh, size, remat)


def estimate(config: Config, arch: Architecture, chip: Chip) -> float:
    """Return estimated seconds of an iteration, from the sizes of its arrays. Use them only to rank layouts."""
    mesh = config.mesh
    num_chips = mesh.data * mesh.fsdp * mesh.expert * mesh.context * mesh.tensor
    # Passes over the weights: 2 forward and 4 backward, without rematerialisation.
    num_passes = {"none": 6.0, "dots": 6.7}.get(config.model.remat, 8.0)
    recomputation = num_passes / 6.0
    flops = cost.model_flops(config, arch) * recomputation / num_chips
    read_bytes, sent_bytes = _bytes_moved(config, arch, num_chips)
    operation_seconds = flops / chip.tflops / 1e12
    memory_seconds = read_bytes / chip.hbm_gb / 1e9
    link_seconds = sent_bytes / chip.link_gb / 1e9
    return operation_seconds + memory_seconds + link_seconds


def _bytes_moved(config: Config, arch: Architecture, num_chips: int) -> tuple[float, float]:
    """Return the bytes that a chip reads from its memory and sends over its links in an iteration."""
    update = config.update
    mesh = config.mesh
    itemsize = _itemsize(config)
    expert_params = 3 * arch.num_layers * arch.num_experts * arch.width * arch.ffn
    weight_bytes = itemsize * (arch.num_params - expert_params + expert_params / mesh.expert)
    num_rows = update.updates_per_iteration * update.batch_size
    num_micros = num_rows // update.micro_batch_size
    sampler_tensor = mesh.sampler_tensor or mesh.tensor
    num_slots = config.num_slots / (num_chips / sampler_tensor)
    num_steps = cost.decode_steps(config)

    sent_bytes = 0.0
    if mesh.fsdp * mesh.context > 1:
        # Weights are gathered twice, gradients are reduced in float32, and publishing gathers once.
        sent_bytes = weight_bytes / mesh.tensor * (1 + 4 * num_micros)
    # The learner passes each token forward and backward.
    learner_tokens = num_rows * config.row_tokens / (num_chips / mesh.tensor)
    learner_activations = 2 * itemsize * learner_tokens * arch.num_layers
    sent_bytes += _activation_bytes(learner_activations, arch, mesh, tensor=mesh.tensor)
    if mesh.context > 1:  # only the learner splits rows over the context axis
        num_heads = arch.num_heads + arch.num_kv_heads
        sent_bytes += learner_activations * 2 * num_heads * arch.head_size
    sampler_activations = itemsize * (num_slots * num_steps) * arch.num_layers
    sent_bytes += _activation_bytes(sampler_activations, arch, mesh, tensor=sampler_tensor)

    cache_bytes = num_slots * config.row_tokens * arch.num_kv_heads * arch.head_size * 2 * itemsize
    mean_cache_bytes = cache_bytes * arch.num_layers / sampler_tensor / 2
    decode_bytes = num_steps * (weight_bytes / sampler_tensor + mean_cache_bytes)
    learner_bytes = 6 * weight_bytes / mesh.tensor * num_micros
    return decode_bytes + learner_bytes, sent_bytes


def _activation_bytes(activations: float, arch: Architecture, mesh: MeshConfig, *, tensor: int) -> float:
    """Return the bytes of activations that a chip sends over the tensor axis and the expert axis.

    Args:
        activations: bytes of one number of every token, layer and pass.
        tensor: size of the tensor axis.
    """
    over_tensor = 4 if tensor > 1 else 0
    over_experts = 2 * (mesh.expert - 1)
    return activations * arch.width * (over_tensor + over_experts)


def _itemsize(config: Config) -> int:
    """Return the bytes of a number of the forward pass."""
    return 2 if config.model.compute_dtype == "bfloat16" else 4


def kept_for_backward(config: Config, arch: Architecture) -> float:
    """Return the least bytes per device that a micro-batch keeps for the backward pass, counting completions only.

    These are each layer's input and the MLP values that ``model.remat`` keeps.
    """
    mesh = config.mesh
    row_tokens = config.update.micro_batch_size * config.sampling.max_completion_tokens
    num_parts = mesh.data * mesh.fsdp * mesh.expert * mesh.context
    tokens = (config.update.micro_batch_tokens or row_tokens) / num_parts
    num_experts = max(1, arch.experts_per_token)
    ffn = arch.ffn * num_experts / mesh.tensor
    num_arrays = {"none": 6, "dots": 2}.get(config.model.remat, 0)
    mlp_values = num_arrays * ffn
    return _itemsize(config) * arch.num_layers * tokens * (arch.width + mlp_values)


def candidates(config: Config, model: Model, devices: list[Any], chip: Chip) -> tuple[list[Layout], int]:
    """Return the layouts that divide and whose arrays fit, by estimate, and the number that divide but do not fit."""
    fitting: list[tuple[float, float, Layout]] = []  # estimated seconds, bytes while the learner runs
    num_too_large = 0
    refusal = None
    for axes in meshes(config.mesh, model.arch, len(devices)):
        mesh = sharding.make_mesh(axes, devices)
        array_bytes = None  # the same for all layouts of a mesh
        for layout in layouts(config, axes):
            layout_config = layout.of(config)
            try:
                sharding.check_divisible(layout_config, mesh)
            except ConfigError:
                continue
            try:
                if array_bytes is None:
                    run = assemble(layout_config, model.arch, model.eos_ids, mesh, model.reference)
                    array_bytes = arrays(run)
            except ConfigError as error:
                refusal = error
                continue
            sampler_bytes, learner_arrays = array_bytes
            learner_bytes = learner_arrays + kept_for_backward(layout_config, model.arch)
            if max(sampler_bytes, learner_bytes) > chip.hbm_gib * 2**30:
                num_too_large += 1
            else:
                seconds = estimate(layout_config, model.arch, chip)
                fitting.append((seconds, learner_bytes, layout))
    if refusal and not fitting and not num_too_large:
        raise refusal  # no mesh is possible
    fitting.sort(key=_seconds_then_bytes)
    return [layout for _, _, layout in fitting], num_too_large


def _seconds_then_bytes(fitting: tuple[float, float, Layout]) -> tuple[float, float]:
    """Return the sort key of a layout. Among equal estimates, the layout that needs less memory comes first."""
    seconds, learner_bytes, _ = fitting
    return seconds, learner_bytes


def arrays(run: Run) -> tuple[int, int]:
    """Return the bytes of a device's arrays while the sampler runs, and while the learner runs."""
    sampler_bytes = sum(verdict.kept(run, sampling=True).values())
    learner_bytes = sum(verdict.kept(run, sampling=False).values())
    return sampler_bytes, learner_bytes


def assembled(config: Config, model: Model, devices: list[Any]) -> Run:
    mesh = sharding.make_mesh(config.mesh, devices)
    return assemble(config, model.arch, model.eos_ids, mesh, model.reference)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of compiling the programs of one layout.

    Attributes:
        refused: programs that do not fit.
        peak_bytes: memory in use while the largest program runs, including the resident arrays.
    """

    layout: Layout
    refused: list[str]
    peak_bytes: int
    iteration: cost.Iteration

    def __str__(self) -> str:
        if self.refused:
            return f"{self.layout}: does not fit: {', '.join(self.refused)}"
        return f"{self.layout}: at least {self.iteration.seconds:.3g} s, {self.peak_gib:.2f} GiB"

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / 2**30


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
    ordered, num_too_large = candidates(config, model, devices, chip)
    if not ordered and not num_too_large:
        tensor = f", or has mesh.sampler_tensor={config.mesh.sampler_tensor}" if config.mesh.sampler_tensor else ""
        raise ConfigError(
            f"--search: no mesh of {len(devices)} devices divides rollout.prompts_per_iteration="
            f"{config.rollout.prompts_per_iteration}, update.batch_size={config.update.batch_size} and the ring{tensor}"
            ". Change these numbers, or plan for another number of devices"
        )
    tried = ordered[:most]
    print(
        f"search      {len(ordered) + num_too_large} layouts divide; {num_too_large} with arrays that alone do not "
        f"fit, {len(tried)} are compiled (--search={most})",
        flush=True,
    )
    sampler_rows: dict[MeshConfig, list[Row]] = {}
    fitting = []
    for layout in tried:
        run = assembled(layout.of(config), model, devices)
        if layout.mesh not in sampler_rows:
            sampler_rows[layout.mesh] = _compile(run, SAMPLER)
        rows = sampler_rows[layout.mesh] + _compile(run, LEARNER)
        trial = _trial(run, layout, rows, chip)
        if not trial.refused:
            fitting.append(trial)
        print(f"  {trial}", flush=True)
    if not fitting:
        print("none of them fits")
        return 1
    print("best that fit, by the least time of an iteration:")
    fitting.sort(key=_least_seconds)
    for trial in fitting[:shown]:
        least = trial.iteration
        print(f"{least.seconds:9.3g} s  MFU {least.mfu:6.1%}  {trial.peak_gib:6.2f} GiB  {trial.layout}")
    return 0


def _compile(run: Run, names: tuple[str, ...]) -> list[Row]:
    """Compile the programs with these names that the run has."""
    programs = run.programs()
    present = [name for name in names if name in programs]
    return list(compile_rows(run, present))


def _trial(run: Run, layout: Layout, rows: list[Row], chip: Chip) -> Trial:
    """Return the result of a layout from its compiled programs."""
    memories = {row.name: row.memory for row in rows if row.memory}
    in_use = in_use_bytes(memories, **run.beside)
    limit = chip.hbm_gib * 2**30
    refused = []
    for row in rows:
        if not row.memory or in_use[row.name] > limit:
            refused.append(row.name)
    counts = {row.name: row.counts for row in rows if row.counts}
    return Trial(
        layout,
        refused=refused,
        peak_bytes=max(in_use.values(), default=0),
        iteration=cost.iteration(run, chip, counts),
    )


def _least_seconds(trial: Trial) -> float:
    return trial.iteration.seconds
