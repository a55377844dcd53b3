"""The log of a run's iterations: metrics of the current iteration, and the compute spent so far.

    record   the updates of an iteration are done: the iteration is counted, but its line is not written
    evaluate the held-out pass rate joins its metrics
    complete its line goes to metrics.jsonl and to the progress display

A run can stop between ``record`` and ``complete``, for example during an evaluation. The checkpoint then keeps the
metrics, and the resumed run completes the iteration.

Owns: the order of the steps above, the time of an iteration, the compute. Does not know: the work of an iteration.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config import Config
from jaxrl_llm.reports.metrics import MetricsWriter, Progress, cost_values, plain_numbers, update_values
from jaxrl_llm.runtime import hosts

Row = dict[str, float | None]


class IterationLog:
    """Metrics and progress of the iterations of a run.

    Args:
        config: the configuration of the run.
        writer: writes metrics.jsonl.
        progress: shows the completed iterations.
        has_evaluation: whether the run has held-out questions.

    Attributes:
        iteration: number of iterations whose updates are done.
        is_complete: whether the line of the last iteration is written. True before the first iteration.
        is_final: whether the last iteration is the end of the run, after which the run is evaluated.
        pass_rate: pass rate of the held-out questions after the last iteration, None without an evaluation.
        compute: compute of the run so far, in trained rollouts (``metrics.cost_values``).
    """

    def __init__(
        self,
        config: Config,
        writer: MetricsWriter,
        progress: Progress,
        *,
        has_evaluation: bool,
    ):
        self._config = config
        self._writer = writer
        self._progress = progress
        self._has_evaluation = has_evaluation
        self.iteration = 0
        self.is_complete = True
        self.is_final = False
        self.pass_rate: float | None = None
        self.compute = 0.0
        self._values: Row = {}  # metrics of an iteration that is not complete
        self._last_row: Row = {}  # metrics of the last complete iteration
        self._began = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether all iterations of the run are complete."""
        return self.is_complete and self.iteration >= self._config.num_iterations

    def start(self) -> None:
        """Start a new run: empty the files."""
        self._writer.restore({})

    def start_clock(self, spent_s: float) -> None:
        """Start to measure the time of the current iteration.

        Args:
            spent_s: seconds of a new iteration before the run was stopped. If the iteration is incomplete, its metrics
                have the seconds.
        """
        if not self.is_complete:
            spent_s = self._values["time/iteration_s"] or 0.0
        self._began = time.monotonic() - spent_s
        self._progress.restart_clock()

    def record(
        self,
        actor_values: Mapping[str, float],
        sums: dict[str, Any],
        *,
        peak_bytes: int,
    ) -> None:
        """Count an iteration whose updates are done, and compute its metrics.

        Args:
            actor_values: metrics of the iteration's rollouts.
            sums: sums of credit, ring and updates, the first result of ``Learner.learn``.
            peak_bytes: peak memory of a device.
        """
        self.iteration += 1
        self.is_complete = False
        self.is_final = self.iteration == self._config.num_iterations
        self.pass_rate = None
        values = {**actor_values, **update_values(self._config, sums)}
        values["memory/peak_bytes"] = peak_bytes
        values["time/iteration_s"] = time.monotonic() - self._began  # so far
        costs = cost_values(self._config, values, self.compute)
        self.compute = costs["time/compute_rollouts"]
        self._values = plain_numbers(values | costs)

    def evaluation_due(self) -> str | None:
        """Return the name of the evaluation that the incomplete iteration needs, or None if it needs no evaluation."""
        if not self._has_evaluation:
            return None
        if self.is_final:
            return "eval_after"
        every = self._config.eval.every_iterations
        if every > 0 and self.iteration % every == 0:
            return f"eval_{self.iteration}"
        return None

    def evaluate(self, values: Row) -> None:
        """Add the metrics of an evaluation to the metrics of the incomplete iteration."""
        self._values = self._values | values
        self.pass_rate = values["eval/pass_rate"]

    def stop_clock(self, *, recompiles: int) -> None:
        """Record the time of the incomplete iteration and the number of programs that were compiled again."""
        now = time.monotonic()
        self._values["compile/recompiles_after_warmup"] = recompiles
        self._values["time/iteration_s"] = now - self._began
        self._began = now

    def complete(self, checkpoint_values: dict[str, float]) -> None:
        """Write the line of the iteration and show its progress.

        Args:
            checkpoint_values: metrics of the last checkpoint.
        """
        self._values |= checkpoint_values
        self._writer.write(self.iteration, self._values)
        self._progress.update(self.iteration, self._values)
        self._last_row = self._values
        self._values = {}
        self.is_complete = True

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that ``restore`` needs, as plain JSON."""
        return {
            "compute": self.compute,
            "metrics": self._writer.state(),
            "values": self._values,
            "final": self.is_final,
            "row": self._last_row,
        }

    def restore(self, state: dict[str, Any], iteration: int) -> list[str]:
        """Restore the log from a checkpoint, and cut the files back to it.

        A run can end at an iteration that was not its end before, or on another machine than before. The last iteration
        is then incomplete, so that the resumed run evaluates it and writes its line.

        Args:
            state: host state of the checkpoint, with the entries of ``state()``.
            iteration: iteration of the checkpoint.

        Returns:
            Warnings about files whose content differs from the checkpoint.
        """
        self.iteration = iteration
        self.compute = state["compute"]
        self._values = state["values"]
        self._last_row = state.get("row", {})
        self.is_complete = not self._values
        self.is_final = state.get("final", True) or not self._has_evaluation
        warnings = self._writer.restore(state["metrics"], iteration, is_written=self.is_complete)
        if self.is_complete and iteration == self._config.num_iterations and not self._has_final_line():
            self._reopen()
        if not self.is_complete:
            self.is_final = iteration == self._config.num_iterations
        return warnings

    def _has_final_line(self) -> bool:
        """Return whether metrics.jsonl of the first host has a run's last line. The file is empty on a new machine."""
        if not self.is_final:
            return False
        sizes = hosts.exchange(self._writer.state())[0]
        return sizes["metrics.jsonl"] > 0

    def _reopen(self) -> None:
        """Make the last iteration incomplete and remove its line."""
        if not self._last_row:  # a checkpoint of an earlier version
            return
        self._values = self._last_row
        self.is_complete = False
        self._writer.restore(self._writer.state(), self.iteration, is_written=False)
