"""The machine of a measurement: its hardware, its packages, and the CPU time that other processes take.

Owns: the questions to the operating system. Does not know: the measurements.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from jaxrl_llm.runtime.machine import cpu_model, usable_cores

ROOT = Path(__file__).resolve().parents[1]


def hardware() -> dict[str, Any]:
    """Return the CPU model, usable cores, memory in bytes, and accelerator ("none" without one)."""
    import jax  # Imported here, because JAX reads JAX_PLATFORMS at its import, and callers set this variable first.

    device = jax.devices()[0]
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": "none" if device.platform == "cpu" else f"{jax.device_count()} x {device.device_kind}",
    }


def short_cpu(model: str) -> str:
    """Return the short name of a CPU model for figures and tables."""
    return model.replace("(R)", "").replace(" Processor", "")


def use_cores(number: int) -> None:
    """Restrict this process and its child processes to ``number`` cores.

    XLA starts one thread per core, so call this function before JAX is used.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])


def commit() -> str:
    """Return the commit of the checkout, with ``-dirty`` if files have changed. "" outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    if head and git("status", "--porcelain"):
        return f"{head}-dirty"
    return head


def versions(*packages: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


class CpuMeter:
    """Meter of the CPU time that other processes take while one process tree works.

    Create the meter when the work starts.

    Args:
        pid: root of the process tree.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._start = (time.monotonic(), machine_busy_s(), tree_cpu_s(pid))

    def share_of_others(self) -> float:
        """Return the share of other processes since the start (see the function ``share_of_others``)."""
        now = (time.monotonic(), machine_busy_s(), tree_cpu_s(self._pid))
        elapsed, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return share_of_others(busy_s=busy, own_s=own, elapsed_s=elapsed, num_cpus=psutil.cpu_count() or 1)


def share_of_others(*, busy_s: float, own_s: float, elapsed_s: float, num_cpus: int) -> float:
    """Return the share in [0, 1] of the machine's CPU time that processes took which are not measured.

    Args:
        busy_s: CPU seconds in which any core was busy, or taken away by a hypervisor.
        own_s: CPU seconds of the measured processes.
        elapsed_s: length of the interval.
    """
    return min(1.0, max(0.0, busy_s - own_s) / (elapsed_s * num_cpus))


def machine_busy_s() -> float:
    """Return the CPU seconds since boot in which a core was not idle. User time includes the seconds of guests."""
    times = psutil.cpu_times()._asdict()
    return sum(v for name, v in times.items() if name not in ("idle", "iowait", "guest", "guest_nice"))


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, its descendants, and the children that they waited for."""
    root = psutil.Process(pid)
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # The process has just ended.
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
