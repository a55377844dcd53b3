"""A table of docs/replay_study.md from the runs of a sweep: its arms, the best first.

    python -m studies.arms --config=configs/sweeps/league.py --runs=runs/league [--threshold=0.48]

Owns: what of the runs is shown. Does not know: how they were made (jaxrl_llm.sweep).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import runpy
import statistics
from collections.abc import Sequence

from jaxrl_llm.points import freeze_points
from jaxrl_llm.sweep import read_sweep, runs_of
from jaxrl_llm.sweep_report import Run, groups, label
from studies.replay_figure import BATCH, COST, compute_to, end, last_tenth


def table(labelled: Sequence[tuple[str, Sequence[Run]]], pass_at_32: dict[str, float], threshold: float) -> str:
    """Markdown: medians over seeds, with lowest and highest where there are several.

    Args:
        labelled: of each arm what it is called, and its runs.
        pass_at_32: by run, of the last evaluation.
        threshold: held-out pass rate up to which compute is counted.
    """
    lines = [
        f"| arm | seeds | held-out pass rate | best | pass@32 | batches to {threshold:.2f} | spent | entropy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in sorted(labelled, key=lambda arm: -statistics.median(end(run) for run in arm[1])):
        ends = [end(run) for run in runs]
        spread = f" ({min(ends):.2f}-{max(ends):.2f})" if len(ends) > 1 else ""
        best = statistics.median(max(row.get("eval/pass_rate") or 0.0 for row in run.rows) for run in runs)
        times = [time for run in runs if (time := compute_to(run, threshold)) is not None]
        reached = f"{statistics.median(times):.0f}" if times else "never"
        if 0 < len(times) < len(runs):
            reached += f" ({len(times)} of {len(runs)})"
        any_right = statistics.median(pass_at_32[run.name] for run in runs)
        entropy = statistics.median(last_tenth(run, "update/entropy_nats") for run in runs)
        spent = statistics.median(run.rows[-1][COST] for run in runs) / BATCH
        cells = (name, len(runs), f"{statistics.median(ends):.2f}{spread}", f"{best:.2f}", f"{any_right:.2f}")
        lines.append("| " + " | ".join(map(str, (*cells, reached, f"{spent:.0f}", f"{entropy:.2f}"))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--runs", type=pathlib.Path, required=True)
    parser.add_argument("--threshold", type=float, default=0.48)
    given = parser.parse_args()
    sweep = read_sweep(given.config)
    points = freeze_points(runpy.run_path(given.config)["get_config"]().to_dict(), sweep.points)
    runs = [run for run in runs_of(given.runs, points, {}) if run.status == "finished"]
    if not runs:
        raise SystemExit(f"--runs={given.runs} has no finished run of {given.config}")
    named = [(label(members[0], sweep), members) for members in groups(runs).values()]
    pass_at_32 = {
        run.name: json.loads((given.runs / run.name / "eval_after.json").read_text())["pass_at_k"]["32"] for run in runs
    }
    print(table(named, pass_at_32, given.threshold))
    print(f"\nBatches are of {BATCH} trained rollouts: compute = trained + mu * generated.")


if __name__ == "__main__":
    main()
