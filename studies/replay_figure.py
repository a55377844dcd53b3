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
COLUMNS = 3  # of the figure
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

    rings, ratios = (sorted(set(values)) for values in zip(*((n, y) for y, n in arms), strict=True))
    num_rows = -(-len(rings) // COLUMNS)
    with matplotlib.rc_context({"svg.hashsalt": "replay", "font.size": 9}):
        figure = Figure(figsize=(3.6 * min(COLUMNS, len(rings)), 2.9 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, min(COLUMNS, len(rings)), sharex=True, sharey=True, squeeze=False).ravel()
        for axes, ring in zip(panels, rings, strict=False):
            for (ratio, batches), runs in arms.items():
                on_policy = (ratio, batches) == (1, 1)
                if batches != ring and not on_policy:
                    continue
                shown = band([curve(run, METRIC, COST) for run in runs])
                how = {"color": "black", "linestyle": ":"} if on_policy else {"color": f"C{ratios.index(ratio)}"}
                axes.plot(shown.x / BATCH, shown.median, label="on-policy" if on_policy else f"y = {ratio}", **how)
                axes.fill_between(shown.x / BATCH, shown.low, shown.high, alpha=0.15, linewidth=0, color=how["color"])
            axes.set_title(f"ring of {ring} B", fontsize=9)
            axes.legend(frameon=False, fontsize=7)
            axes.grid(alpha=0.3)
        for axes in panels[len(rings) :]:
            axes.set_visible(False)
        figure.supxlabel(f"compute: trained + {mu:g} generated, in batches")
        figure.supylabel("held-out pass rate")
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
