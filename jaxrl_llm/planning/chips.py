"""Chip data: TPU generations and GPUs that the compilers support, their public rates, and Cloud's names of slices.

Owns: public numbers of chips with their sources, names of slices, devices to compile for. Does not know: programs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl_llm.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
    """TPU generation or GPU: the memory that one program may use, and the peak rates of the hardware.

    Attributes:
        hbm_gib: GiB of device memory for one program.
        tflops: dense bfloat16 peak, 1e12 operations per second.
        hbm_gb: memory bandwidth, 1e9 bytes per second.
        link_gb: 1e9 bytes per second that a chip sends over all its links together: the links of a torus, or NVLink in
            one direction.
        host_gb: 1e9 bytes per second to the host's memory, and the same rate from the host's memory at the same time.
        options: compiler options.
    """

    hbm_gib: float
    tflops: float
    hbm_gb: float
    link_gb: float
    host_gb: float = 16.0
    options: dict[str, str] = dataclasses.field(default_factory=dict)


def _chips(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))


def _nvidia(
    gib: float,
    generation: int,
    cores: int,
    shared_kib: int,
    l2_mib: int,
    bandwidth_gb: int,
    **rates: float,
) -> Chip:
    """Return a GPU with the description that XLA's compiler needs (GpuTargetConfigProto).

    JAX uses three quarters of its memory.
    """
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
    return Chip(0.75 * gib, hbm_gb=bandwidth_gb, options={"target_config": target}, **rates)


# Memory: the limit of the compiler (libtpu 0.0.51) for one program.
# Rates: docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e ("Peak compute per chip (bf16)", "HBM bandwidth").
# Links: the "interchip interconnect bandwidth" of 2400, 1600, 4800 and 3200 Gbit/s in each direction is for all links
# of a chip, six in a 3-D torus and four in a 2-D torus. A collective uses only the links of the dimensions that its
# group spans, and half of them if the slice is not a torus.
# Host: PCIe in each direction (jax-ml.github.io/scaling-book). v6e has PCIe generation 5, at most 16 lanes per slot.
CHIPS = {
    # "megacore": JAX uses both cores as one device.
    "v4": Chip(
        30.75,
        tflops=275,
        hbm_gb=1228,
        link_gb=300,
        options={"chip_config_name": "megacore"},
    ),
    "v5e": Chip(15.75, tflops=197, hbm_gb=819, link_gb=200),
    "v5p": Chip(95.73, tflops=459, hbm_gb=2765, link_gb=600),
    "v6e": Chip(31.24, tflops=918, hbm_gb=1638, link_gb=400, host_gb=64),
}

# Rates: NVIDIA's data sheets of the SXM boards (dense bfloat16; half of the total for NVLink and PCIe).
GPUS = {
    "a100": _nvidia(80.0, 8, 108, 164, 40, 2039, tflops=312, link_gb=300, host_gb=32),
    "h100": _nvidia(79.6, 9, 132, 228, 50, 3352, tflops=989, link_gb=450, host_gb=64),
    "h200": _nvidia(140.4, 9, 132, 228, 50, 4800, tflops=989, link_gb=450, host_gb=64),
}

GPUS_OF_HOST = 8  # GPUs of one NVLink domain, on DGX and HGX boards

# Slices with Cloud's names ("Configurations" on the same pages): number of chips -> shape. Names of v4 and v5p count
# cores, two per chip. Names of v5e (also "v5litepod") and v6e count chips.
FLAT = {_chips(shape): shape for shape in ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]}
CUBES = ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x12", "8x8x16", "8x16x16"]
CUBES += ["16x16x16", "16x16x24"]
SOLID = {_chips(shape): shape for shape in CUBES}
ALLOWED = "v5e:2x4, v5e:16x16, v6e:4x8, v4:2x2x4 or v5p:2x2x4"
SLICES = {"v4": SOLID, "v5p": SOLID, "v5e": FLAT, "v6e": FLAT}
CORES = {"v4": 2, "v5p": 2, "v5e": 1, "v6e": 1}

# Without these variables libtpu queries Google's metadata server and reports an error if there is none. The last
# variable allows two plans to run at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def shape_of(name: str) -> str:
    """Return the topology that a Cloud name means, "v5p:4x4x4" for "v5p-128". Return any other name unchanged.

    Raises:
        ConfigError: the generation has no default shape for this number.
    """
    generation, dash, number = name.replace("v5litepod", "v5e").partition("-")
    if not dash or generation not in SLICES or not number.isdecimal():
        return name
    per_chip = CORES[generation]
    shapes = SLICES[generation]
    if int(number) / per_chip not in shapes:
        unit = "cores" if per_chip > 1 else "chips"
        names = ", ".join(f"{generation}-{num_chips * per_chip}" for num_chips in shapes)
        raise ConfigError(f"--topology={name!r} must be a slice with its {unit}: {names}; or a shape: {ALLOWED}")
    return f"{generation}:{shapes[int(number) // per_chip]}"


def devices_of(topology: str) -> tuple[list[Any], Chip]:
    """Return the devices of a topology and their chip.

    Args:
        topology: a slice, such as "v5e:2x4", "v5p:2x2x4" or "v5p-32", or the GPUs of a host, such as "h100:8".

    Raises:
        ConfigError: the devices do not exist, or their compiler is not installed.
    """
    shape = shape_of(topology)
    generation, _, count = shape.partition(":")
    if generation in GPUS and re.fullmatch(r"[1-9]\d*", count):
        if int(count) > GPUS_OF_HOST:
            raise ConfigError(
                f"--topology={topology!r} must be at most {generation}:{GPUS_OF_HOST}, the GPUs of one host: the links "
                "between hosts are not known to plan"
            )
        return _gpus(GPUS[generation], count), GPUS[generation]
    if generation not in CHIPS or not re.fullmatch(r"\w+:\d+x\d+(x\d+)?", shape):
        raise ConfigError(
            f"--topology={topology!r} must be {', '.join(CHIPS)} with a shape in chips, such as {ALLOWED}, a Cloud "
            f"name, such as v5litepod-256 or v5p-128, or {', '.join(GPUS)} with a number of GPUs, such as h100:8"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("plan needs the TPU compiler libtpu (Linux x86-64): pip install 'jaxrl_llm[plan]'")
    os.environ.update(ENVIRONMENT)
    os.environ.pop("XLA_FLAGS", None)  # libtpu ends the process if it does not know a flag of another compiler
    chip = CHIPS[generation]
    try:
        pod = topologies.get_topology_desc(topology_name=shape, platform="tpu", **chip.options)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--topology={topology!r}: {str(error).splitlines()[0]}") from error
    return list(pod.devices), chip


def _gpus(chip: Chip, count: str) -> list[Any]:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ConfigError("plan needs NVIDIA's compiler (Linux x86-64): pip install 'jaxrl_llm[plan-gpu]'")
    # Compiling for cuDNN does not need the library. JAX checks its version anyway, and no setting turns the check off.
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 91200
    topology = f"1x1x{count}"  # process groups x processes x devices of each
    return list(topologies.get_topology_desc(platform="cuda", topology=topology, **chip.options).devices)
