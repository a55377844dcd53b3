"""The fault of a run whose updates are no longer finite: when it stops, and the batch that it leaves behind.

    workdir/nonfinite_12.npz     rows of the last update of iteration 12, by field ("rollout/tokens", "advantage")

As the updates that were skipped changed no weights, those of the checkpoint that the run stops with are those that
the batch was used with.

Owns: that file, the count. Does not know: which update is skipped (update), what is done about it.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Config
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.runtime.checkpoint import by_name
from jaxrl_llm.runtime.programs import Program, compile_all
from jaxrl_llm.types import Experience, RingState, Rollout


class Faults:
    """Counts the updates in a row whose loss or gradient was not finite. Every host makes the same calls.

    Attributes:
        run: their number up to now, those of earlier iterations among them.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self._config, self._mesh = config, mesh
        self.run = 0
        self._last: tuple[int, Experience] | None = None  # iteration and rows of the last of too many

    def observe(self, sums: dict[str, Any], iteration: int, ring: RingState) -> None:
        """After the updates of an iteration (from 1), with their sums and the ring that they leave."""
        at_end, config = int(sums["nonfinite_run"]), self._config
        self.run = at_end + (self.run if at_end == config.update.updates_per_iteration else 0)
        if self.run < config.update.max_nonfinite_steps:
            return

        def whole(ring: RingState) -> Experience:
            how = {"batch_size": config.update.batch_size, "row_tokens": config.row_tokens}
            return replay.last_drawn(ring, **how)

        # Compiled now: a run that goes well has no use for it.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), ring)
        program = Program(whole, (shapes,), sharding.replicated(self._mesh, 0))
        rows = jax.device_get(compile_all({"last_drawn": program}, self._mesh)["last_drawn"](ring))
        self._last = iteration, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

    def failure(self, workdir: pathlib.Path) -> str | None:
        """What to say where there were too many, and then the first host has written the file; else None."""
        if self._last is None:
            return None
        iteration, rows = self._last
        path = workdir / f"nonfinite_{iteration}.npz"
        if hosts.is_first():
            np.savez(path, **by_name(rows))
        update = self._config.update
        return (
            f"loss or gradient was not finite in {self.run} updates in a row (update.max_nonfinite_steps="
            f"{update.max_nonfinite_steps}), the last of them update {update.updates_per_iteration} of iteration "
            f"{iteration}; its batch is in {path}"
        )


def read(path: str | os.PathLike) -> Experience:
    """The rows [B, ...] of such a file, numpy."""
    with np.load(path) as file:
        fields: dict[str, Any] = {"columns": {}, "rollout": {"columns": {}}}
        for name, value in file.items():
            *groups, last = name.split("/")
            group = fields
            for key in groups:
                group = group[key]
            group[last] = value
    return Experience(**fields | {"rollout": Rollout(**fields["rollout"])})
