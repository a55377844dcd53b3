"""Plan: whether a run fits a TPU pod or some GPUs, found out on a machine that has none.

    python -m jaxrl_llm.plan --config=FILE --topology=v5e:2x4 [--config.mesh.fsdp=8 ...]
    python -m jaxrl_llm.plan --config=FILE --topology=h100:8

The real compiler (package libtpu, extra ``[plan]``, or jax-cuda13-pjrt, extra ``[plan-gpu]``; Linux x86-64) compiles
every program of the run for the named devices from shapes alone: no weight is read and no question is loaded. Prints
the memory of each program per chip; exit status 1 when one does not fit.

Owns: chips and topologies. Does not know: how long a step takes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags
from jax.experimental import topologies
from ml_collections import config_flags

from jaxrl_llm.config import Config, ConfigError, freeze
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.run import Run, assemble
from jaxrl_llm.runtime import cli, sharding
from jaxrl_llm.runtime.programs import MEMORY_SETTINGS, Memory, host_bytes, in_use_bytes, memory, resident_bytes


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU generation or a GPU. ``hbm_gib``: what one program may use."""

    hbm_gib: float
    options: dict[str, str] = dataclasses.field(default_factory=dict)


def _nvidia(gib: float, generation: int, cores: int, shared_kib: int, l2_mib: int, bandwidth_gb: int) -> Chip:
    """A GPU as XLA's compiler describes one (GpuTargetConfigProto). JAX takes three quarters of its memory."""
    target = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {cores}
          shared_memory_per_block: 49152 shared_memory_per_core: {shared_kib * 1024}
          shared_memory_per_block_optin: {(shared_kib - 1) * 1024} fpus_per_core: {128 if generation > 8 else 64}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {bandwidth_gb}000000000 l2_cache_size: {l2_mib * 2**20} clock_rate_ghz: 1.5
          device_memory_size: {int(gib * 2**30)} cuda_compute_capability {{ major: {generation} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
        """
    return Chip(0.75 * gib, {"target_config": target})


# What their compiler (libtpu 0.0.51) lets one program use.
CHIPS = {
    # Both cores as one device, as JAX uses the chip.
    "v4": Chip(30.75, {"chip_config_name": "megacore"}),
    "v5e": Chip(15.75),
    "v5p": Chip(95.73),
    "v6e": Chip(31.24),
}

GPUS = {
    "a100": _nvidia(80.0, 8, 108, 164, 40, 2039),
    "h100": _nvidia(79.6, 9, 132, 228, 50, 3352),
    "h200": _nvidia(140.4, 9, 132, 228, 50, 4800),
}

# Without them libtpu asks Google's metadata server who it is, and complains when there is none. Two plans may run.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One program as the compiler sees it. ``refused``: its words, where it found no way to fit; else ""."""

    name: str
    memory: Memory | None
    refused: str


def devices_of(topology: str) -> tuple[list[Any], Chip]:
    """The devices of a pod by name, such as "v5e:2x4" or "v5p:2x2x4", or GPUs of a host, "h100:8"; to compile for.

    Raises:
        ConfigError: no such devices, or no compiler for them.
    """
    generation, _, count = topology.partition(":")
    if generation in GPUS and re.fullmatch(r"[1-9]\d*", count):
        return _gpus(GPUS[generation], count), GPUS[generation]
    if generation not in CHIPS or not re.fullmatch(r"\w+:\d+x\d+(x\d+)?", topology):
        raise ConfigError(
            f"--topology={topology!r} must be {', '.join(CHIPS)} with a shape in chips, such as v5e:2x4, v5e:16x16, "
            f"v6e:4x8, v4:2x2x4 or v5p:2x2x4, or {', '.join(GPUS)} with a number of GPUs, such as h100:8"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("plan needs the TPU compiler libtpu (Linux x86-64): pip install 'jaxrl_llm[plan]'")
    os.environ.update(ENVIRONMENT)
    os.environ.pop("XLA_FLAGS", None)  # of other compilers: libtpu ends the process over one that it does not know
    chip = CHIPS[generation]
    try:
        pod = topologies.get_topology_desc(topology_name=topology, platform="tpu", **chip.options)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--topology={topology!r}: {str(error).splitlines()[0]}") from error
    return list(pod.devices), chip


def _gpus(chip: Chip, count: str) -> list[Any]:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ConfigError("plan needs NVIDIA's compiler (Linux x86-64): pip install 'jaxrl_llm[plan-gpu]'")
    # Compiling for cuDNN does not take the library, whose version JAX asks all the same, and has no setting for.
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 91200
    topology = f"1x1x{count}"  # of processes' groups, processes, and devices of each
    return list(topologies.get_topology_desc(platform="cuda", topology=topology, **chip.options).devices)


def compile_rows(run: Run) -> Iterator[Row]:
    """Every program of the run, compiled; in order, each as soon as it is known."""
    lowered = {name: program.lower(run.mesh) for name, program in run.programs().items()}

    def one(name: str) -> Row:
        try:
            return Row(name, memory(lowered[name].compile()), "")
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"Ran out of memory.*?exceeds available HBM \([^)]*\)", str(error), re.DOTALL)
            if found is None:
                raise  # ours: a program that this compiler does not take
            return Row(name, None, found.group())

    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(one, lowered)


def plan(config: Config, topology: str) -> int:
    """Compile, print, and say whether it fits.

    Returns:
        Exit status: 0 when every program fits, 1 when one does not.

    Raises:
        ConfigError: bad input.
    """
    started = time.monotonic()
    devices, chip = devices_of(topology)
    mesh = sharding.make_mesh(config.mesh, devices)
    source = pretrained.resolve(config.model.path)
    arch = source.architecture()
    reference = pretrained.resolve_reference(config.model, source).architecture()
    run = assemble(config, arch, source.tokenizer().eos_ids, mesh, reference)
    hosts = len({device.process_index for device in devices})
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    print(
        f"topology    {topology}: {len(devices)} chips, {hosts} hosts, {chip.hbm_gib:g} GiB of HBM a chip; mesh {axes}"
    )
    print(f"model       {config.model.path}: {arch.num_params / 1e6:.1f} M parameters, {config.model.compute_dtype}")
    print("program           arguments    outputs  temporary    aliased       peak  (MiB per chip)", flush=True)
    rows = []
    for row in compile_rows(run):
        rows.append(row)
        m = row.memory
        sizes = (m.arguments, m.outputs, m.temporary, m.aliased, m.peak) if m else ()
        print(f"{row.name:<16}" + ("".join(f"{n / 2**20:11.1f}" for n in sizes) or f"  {row.refused}"), flush=True)

    limit = chip.hbm_gib * 2**30
    compiled = {row.name: row.memory for row in rows if row.memory}
    keeps_slots = config.rollout.lookahead_prompts > 0
    resident = resident_bytes(compiled, keeps_slots=keeps_slots)
    need = in_use_bytes(compiled, keeps_slots=keeps_slots)
    largest = max(need, key=need.get)
    what = "learner, ring, rollouts" + (", sampler" if keeps_slots else "")
    print(f"resident    {resident / 2**20:.1f} MiB a chip between iterations: {what}")
    if on_host := host_bytes(compiled):
        print(f"on hosts    {on_host / 2**20:.1f} MiB a chip between programs, in pinned memory")
    print(f"largest     {need[largest] / 2**20:.1f} MiB of {limit / 2**20:.1f} a chip, while {largest} runs")
    print(f"compiled in {time.monotonic() - started:.0f} s")
    over = [row.name for row in rows if not row.memory or need[row.name] > limit]
    if over:
        print(f"does not fit: {', '.join(over)}; {MEMORY_SETTINGS}")
        return 1
    print("fits")
    return 0


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # it only compiles, on a machine with chips too
    sys.exit(plan(freeze(CONFIG.value), TOPOLOGY.value))


if __name__ == "__main__":
    CONFIG = config_flags.DEFINE_config_file("config", None, "Python file with get_config().")
    TOPOLOGY = flags.DEFINE_string("topology", None, "TPU pod or GPUs by name, such as v5e:2x4 or h100:8.")
    flags.mark_flags_as_required(["config", "topology"])
    cli.run(main)
