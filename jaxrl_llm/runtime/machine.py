"""The processor of the machine that this process runs on, by name and number.

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
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
