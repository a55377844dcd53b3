"""The processor of this machine: the model of the CPU and the number of usable cores.

Owns: queries to the operating system. Does not know: accelerators, jax.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Return the number of cores that this process may use, and the model of the CPU: "2 x AMD EPYC 7B12"."""
    return f"{usable_cores()} x {cpu_model()}"


def cpu_model() -> str:
    """Return the name of the CPU from Linux, or from Python on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        if line.startswith("model name"):
            _, _, model = line.partition(":")
            return model.strip()
    return platform.machine()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
