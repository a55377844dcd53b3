"""The figure and the table of docs/replay_study.md, from the runs of sweep E2.

    python -m studies.replay_figure --runs=runs/e2 --out=docs/replay_study.svg [--mu=1.05]

With another mu the same runs are counted anew: what they did does not depend on it.

Owns: what of the runs is shown. Does not know: how they were made (jaxrl_llm.sweep).
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics

from jaxrl_llm.metrics import read_metrics
from jaxrl_llm.sweep_report import Run, band, curve
from studies.design import COST_RATIO, GROUP, SUMS

BATCH = SUMS.batch
METRIC, COST = "eval/pass_rate", "time/compute_rollouts"


def finished(folder: pathlib.Path, mu: float) -> dict[tuple[int, int], list[Run]]:
    """Finished runs by (replay ratio, ring in batches), their compute counted with ``mu``."""
    arms = collections.defaultdict(list)
    for path in sorted(folder.glob("*/config.json")):
        config = json.loads(path.read_text())
        rows = read_metrics(path.parent)
        if rows and rows[-1]["iteration"] == config["num_iterations"]:
            generated = config["rollout"]["prompts_per_iteration"] * GROUP
            ratio = BATCH // generated
            rows = [row | {COST: row["iteration"] * (BATCH + mu * generated)} for row in rows]
            arms[ratio, config["replay"]["capacity"] // BATCH].append(Run(path.parent.name, {}, "finished", rows))
    return dict(sorted(arms.items()))


def last_tenth(run: Run, metric: str) -> float:
    """Mean over the last tenth of the iterations that have it."""
    values = [row[metric] for row in run.rows if row.get(metric) is not None]
    return statistics.mean(values[-max(1, len(values) // 10) :])


def end(run: Run) -> float:
    """Held-out pass rate, mean of the last three evaluations."""
    return statistics.mean(curve(run, METRIC, COST)[1][-3:])


def compute_to(run: Run, threshold: float) -> float | None:
    """Compute in batches at which the held-out pass rate is first at the threshold."""
    x, y = curve(run, METRIC, COST)
    return next((float(a) / BATCH for a, b in zip(x, y, strict=True) if b >= threshold), None)


def table(arms: dict[tuple[int, int], list[Run]]) -> str:
    """Markdown: medians over seeds, lowest and highest in brackets; the threshold is where the first arm ends."""
    threshold = statistics.median(end(run) for run in next(iter(arms.values())))
    spread = lambda v: f"{statistics.median(v):.2f} ({min(v):.2f}-{max(v):.2f})"  # noqa: E731
    lines = [
        f"| y | N | seeds | held-out pass rate | compute to {threshold:.2f} | of all | entropy | training pass rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (ratio, batches), runs in arms.items():
        spent = max(row[COST] for row in runs[0].rows) / BATCH
        reached = [compute_to(run, threshold) for run in runs]
        times = [r for r in reached if r is not None]
        to = statistics.median(times) if times else float("nan")
        missed = f" (never: {len(runs) - len(times)} of {len(runs)})" if len(times) < len(runs) else ""
        share = f"{to:.0f}{missed} | {to / spent:.0%}"
        entropy, train = (
            statistics.median(last_tenth(run, name) for run in runs)
            for name in ("update/entropy_nats", "rollout/pass_rate")
        )
        ends = spread([end(run) for run in runs])
        lines.append(f"| {ratio} | {batches} B | {len(runs)} | {ends} | {share} | {entropy:.2f} | {train:.2f} |")
    return "\n".join(lines)


def draw(arms: dict[tuple[int, int], list[Run]], out: pathlib.Path, mu: float) -> None:
    """Held-out pass rate over compute: medians and quartiles over seeds, a panel for each ring."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rings = sorted({batches for _, batches in arms if batches > 1})
    with matplotlib.rc_context({"svg.hashsalt": "replay", "font.size": 9}):
        figure = Figure(figsize=(4.2 * len(rings), 3.2), layout="constrained")
        for axes, ring in zip(figure.subplots(1, len(rings), sharey=True, squeeze=False)[0], rings, strict=True):
            for i, ((ratio, batches), runs) in enumerate(arms.items()):
                if batches not in (1, ring):
                    continue
                shown = band([curve(run, METRIC, COST) for run in runs])
                colour = f"C{(1, 2, 4, 8, 16).index(ratio)}" if ratio in (1, 2, 4, 8, 16) else f"C{i}"
                axes.plot(shown.x / BATCH, shown.median, color=colour, label=f"y = {ratio}, N = {batches} B")
                axes.fill_between(shown.x / BATCH, shown.low, shown.high, color=colour, alpha=0.15, linewidth=0)
            axes.set_xlabel(f"compute: trained + {mu:g} generated, in batches")
            axes.legend(frameon=False, fontsize=8)
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("held-out pass rate")
        figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--mu", type=float, default=COST_RATIO)
    given = parser.parse_args()
    arms = finished(given.runs, given.mu)
    if not arms:
        raise SystemExit(f"--runs={given.runs} has no finished run")
    print(table(arms))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw(arms, given.out, given.mu)


if __name__ == "__main__":
    main()
