"""A table of docs/replay_study.md from the raw metrics of a sweep (studies.raw): a line for each of its arms.

    python -m studies.arms --config=configs/sweeps/e2_replay_ratio.py --raw=docs/raw/e2.json.xz [--mu=1.2]

Medians over seeds, with lowest and highest where there are several. With --mu the runs' compute is counted anew: what
they did does not depend on it.

Owns: figures of a run, the table of them. Does not know: how runs were made (jaxrl_llm.sweep).
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from collections.abc import Sequence

from jaxrl_llm.sweep.__main__ import read_sweep
from jaxrl_llm.sweep.table import Run, curve, groups, label
from studies import raw
from studies.design import GROUP, SUMS

BATCH = SUMS.batch
METRIC, COST = "eval/pass_rate", "time/compute_rollouts"


def last_tenth(run: Run, metric: str) -> float:
    """Mean over the last tenth of the iterations that have it."""
    values = [row[metric] for row in run.rows if row.get(metric) is not None]
    return statistics.mean(values[-max(1, len(values) // 10) :])


def end(run: Run) -> float:
    """Held-out pass rate, mean of the last three evaluations."""
    return statistics.mean(curve(run, METRIC, COST)[1][-3:])


def compute_to(run: Run, threshold: float) -> float | None:
    """Compute in batches at which the held-out pass rate first reaches the threshold, on lines between evaluations."""
    x, y = (values.tolist() for values in curve(run, METRIC, COST))
    for i, value in enumerate(y):
        if value >= threshold:
            share = (threshold - y[i - 1]) / (value - y[i - 1]) if i else 1.0
            return (x[i - 1] + share * (x[i] - x[i - 1]) if i else x[0]) / BATCH
    return None


def counted(run: Run, mu: float) -> Run:
    """The run with its compute as a rollout's generation costs ``mu`` times training on one."""
    generated = run.point["rollout.prompts_per_iteration"] * GROUP
    rows = [{**row, COST: row["iteration"] * (BATCH + mu * generated)} for row in run.rows]
    return Run(run.name, run.point, run.status, rows)


def table(labelled: Sequence[tuple[str, Sequence[Run]]], pass_at_32: dict[str, float], threshold: float) -> str:
    """Markdown.

    Args:
        labelled: of each arm what it is called, and its runs.
        pass_at_32: by run, of the last evaluation.
        threshold: held-out pass rate up to which compute is counted.
    """
    lines = [
        f"| arm | seeds | held-out pass rate | best | pass@32 | batches to {threshold:.2f} | spent | entropy | train |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in labelled:
        ends = [end(run) for run in runs]
        spread = f" ({min(ends):.2f}-{max(ends):.2f})" if len(ends) > 1 else ""
        best = statistics.median(max(row.get(METRIC) or 0.0 for row in run.rows) for run in runs)
        times = [time for run in runs if (time := compute_to(run, threshold)) is not None]
        reached = f"{statistics.median(times):.0f}" if times else "never"
        if 0 < len(times) < len(runs):
            reached += f" ({len(times)} of {len(runs)})"
        any_right = statistics.median(pass_at_32[run.name] for run in runs)
        entropy, train = (
            statistics.median(last_tenth(run, metric) for run in runs)
            for metric in ("update/entropy_nats", "rollout/pass_rate")
        )
        spent = statistics.median(run.rows[-1][COST] for run in runs) / BATCH
        cells = (name, len(runs), f"{statistics.median(ends):.2f}{spread}", f"{best:.2f}", f"{any_right:.2f}", reached)
        lines.append("| " + " | ".join(map(str, (*cells, f"{spent:.0f}", f"{entropy:.2f}", f"{train:.2f}"))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--raw", type=pathlib.Path, required=True)
    parser.add_argument("--threshold", type=float, default=0.48)
    parser.add_argument("--best-first", action="store_true")
    parser.add_argument("--mu", type=float, default=0.0)
    given = parser.parse_args()
    sweep = read_sweep(given.config)
    runs, pass_at_k = raw.read(given.raw)
    runs = [counted(run, given.mu) for run in runs] if given.mu else runs
    named = [(label(members[0], sweep), members) for members in groups(runs).values()]
    if given.best_first:
        named.sort(key=lambda arm: -statistics.median(end(run) for run in arm[1]))
    print(table(named, {name: rates["32"] for name, rates in pass_at_k.items()}, given.threshold))


if __name__ == "__main__":
    main()
