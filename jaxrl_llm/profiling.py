"""What a run costs beside its algorithm: programs compiled and memory used.

Owns: the counters. Does not know: what runs.
"""

from __future__ import annotations

import resource
from typing import Any

import jax


class CompileCounter:
    """Counts programs XLA compiles once the first iteration is over."""

    def __init__(self):
        self.count = 0
        self.warm = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def after_warmup(self) -> int:
        """Call once per iteration; the first call ends the warm-up."""
        if self.warm is None:
            self.warm = self.count
        return self.count - self.warm


def peak_memory_bytes(mesh: jax.sharding.Mesh) -> int:
    """Peak of the fullest device; of this process where devices do not say (CPU)."""
    peaks = [stats["peak_bytes_in_use"] for d in mesh.local_devices if (stats := d.memory_stats())]
    return max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
