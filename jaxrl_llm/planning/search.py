"""Search: the layouts of a run (mesh, micro-batch, remat) that fit a slice, the fastest first.

Layouts whose arrays alone do not fit are left out before anything is compiled, the others are put in the order of an
estimate by the model's algebra, and of the first of them the programs that matter are compiled.

Owns: which layouts there are, the estimate. Does not know: how a program is compiled or its time found.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.planning import cost, verdict
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.compiled import Row, compile_rows
from jaxrl_llm.planning.presets import Model
from jaxrl_llm.run import Run, assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import in_use_bytes

# Of these the sampler's are the same for all micro-batches and remats of a mesh.
SAMPLER = ("init_sampler", "publish", "prefill", "decode", "collect")
LEARNER = ("init_ring", "init_state", "annotate", "update")


@dataclasses.dataclass(frozen=True)
class Layout:
    data: int
    fsdp: int
    tensor: int
    micro_batch_size: int
    remat: str

    def of(self, config: Config) -> Config:
        mesh = dataclasses.replace(config.mesh, data=self.data, fsdp=self.fsdp, tensor=self.tensor)
        update = dataclasses.replace(config.update, micro_batch_size=self.micro_batch_size)
        model = dataclasses.replace(config.model, remat=self.remat)
        return dataclasses.replace(config, mesh=mesh, update=update, model=model)

    def __str__(self) -> str:
        mesh = f"mesh.data={self.data} mesh.fsdp={self.fsdp} mesh.tensor={self.tensor}"
        return f"{mesh} update.micro_batch_size={self.micro_batch_size} model.remat={self.remat}"


def layouts(config: Config, num_devices: int) -> Iterator[Layout]:
    """All of them; many do not divide the run's numbers."""
    num_devices //= config.mesh.context
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    batch = config.update.batch_size
    packed = config.update.micro_batch_tokens > 0
    sizes = [config.update.micro_batch_size] if packed else [n for n in range(1, batch + 1) if batch % n == 0]
    for fsdp, tensor, size, remat in itertools.product(divisors, divisors, sizes, ("none", "dots", "full")):
        if num_devices % (fsdp * tensor) == 0:
            yield Layout(num_devices // (fsdp * tensor), fsdp, tensor, size, remat)


def estimate(config: Config, arch: Architecture, mesh: Mesh, chip: Chip) -> float:
    """Seconds of an iteration by the algebra of weights alone; it puts layouts in an order."""
    chips, tensor, update = mesh.size, mesh.shape["tensor"], config.update
    repeated = {"none": 6.0, "dots": 6.7}.get(config.model.remat, 8.0) / 6.0
    flops = cost.model_flops(config, arch) * repeated / chips
    shards = chips // tensor
    size = 2 if config.model.compute_dtype == "bfloat16" else 4
    weights = size * arch.num_params / tensor
    rows = update.updates_per_iteration * update.batch_size
    tokens, micros = rows * config.row_tokens / shards, rows // update.micro_batch_size
    sent = weights * (1 + 4 * micros) * (mesh.shape["fsdp"] > 1)  # gathered twice, gradients added in float32
    sent += 8 * size * tokens * arch.width * arch.num_layers * (tensor > 1)
    cache = config.num_slots / shards * config.row_tokens * arch.num_kv_heads * arch.head_size * 2 * size
    read = cost.decode_steps(config) * (weights + cache * arch.num_layers / tensor / 2) + 6 * weights * micros
    return flops / chip.tflops / 1e12 + read / chip.hbm_gb / 1e9 + sent / chip.link_gb / 1e9


def candidates(config: Config, model: Model, devices: list[Any], chip: Chip) -> tuple[list[Layout], int]:
    """Layouts whose numbers divide and whose arrays fit, by their estimate; and how many divide but do not fit."""
    found, too_large = [], 0
    largest: dict[Mesh, float] = {}  # bytes of a device: of a mesh, whatever the micro-batch
    for layout in layouts(config, len(devices)):
        of = layout.of(config)
        mesh = sharding.make_mesh(of.mesh, devices)
        try:
            sharding.check_divisible(of, mesh)
            if mesh not in largest:
                run = assembled(of, model, devices)
                largest[mesh] = max(sum(verdict.kept(run, sampling=half).values()) for half in (True, False))
        except ConfigError:
            continue
        if largest[mesh] > chip.hbm_gib * 2**30:
            too_large += 1
        else:
            found.append((estimate(of, model.arch, mesh, chip), layout))
    return [layout for _, layout in sorted(found, key=lambda each: each[0])], too_large


def assembled(config: Config, model: Model, devices: list[Any]) -> Run:
    mesh = sharding.make_mesh(config.mesh, devices)
    return assemble(config, model.arch, model.eos_ids, mesh, model.reference)


def search(config: Config, model: Model, devices: list[Any], chip: Chip, *, most: int, shown: int = 5) -> int:
    """Compile the first ``most`` layouts, print the fastest that fit.

    Returns:
        Exit status: 0 when one fits, else 1.

    Raises:
        ConfigError: no layout divides the run's numbers.
    """
    ordered, too_large = candidates(config, model, devices, chip)
    if not ordered and not too_large:
        raise ConfigError(
            f"--search: no mesh of {len(devices)} devices divides rollout.prompts_per_iteration="
            f"{config.rollout.prompts_per_iteration}, update.batch_size={config.update.batch_size} and the ring"
        )
    tried = ordered[:most]
    print(
        f"search      {len(ordered) + too_large} layouts divide; {too_large} with arrays that alone do not fit, "
        f"{len(tried)} are compiled (--search={most})",
        flush=True,
    )
    sampler: dict[tuple[int, ...], list[Row]] = {}
    fitting = []
    for layout in tried:
        run = assembled(layout.of(config), model, devices)
        mesh = (layout.data, layout.fsdp, layout.tensor)
        programs = run.programs()
        if mesh not in sampler:
            sampler[mesh] = list(compile_rows(run, [name for name in SAMPLER if name in programs]))
        rows = sampler[mesh] + list(compile_rows(run, [name for name in LEARNER if name in programs]))
        need = in_use_bytes(
            {row.name: row.memory for row in rows if row.memory}, keeps_slots=config.rollout.lookahead_prompts > 0
        )
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
