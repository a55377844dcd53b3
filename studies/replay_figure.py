"""The figure of docs/replay_study.md, from the raw metrics of sweep E2.

    python -m studies.replay_figure --raw=docs/raw/e2.json.xz --out=docs/replay_study.svg [--mu=1.2]

Owns: what of the runs is drawn. Does not know: how they were made (jaxrl_llm.sweep).
"""

from __future__ import annotations

import argparse
import collections
import pathlib

from jaxrl_llm.sweep.table import Run, band, curve
from studies import raw
from studies.arms import BATCH, COST, METRIC, counted
from studies.design import COST_RATIO, GROUP

COLUMNS = 3  # of the figure


def arms_of(runs: list[Run]) -> dict[tuple[int, int], list[Run]]:
    """Runs by (replay ratio, ring in batches)."""
    arms = collections.defaultdict(list)
    for run in runs:
        ratio = BATCH // (run.point["rollout.prompts_per_iteration"] * GROUP)
        arms[ratio, run.point["replay.capacity"] // BATCH].append(run)
    return dict(sorted(arms.items()))


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
    parser.add_argument("--raw", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--mu", type=float, default=COST_RATIO)
    given = parser.parse_args()
    runs, _ = raw.read(given.raw)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw(arms_of([counted(run, given.mu) for run in runs]), given.out, given.mu)


if __name__ == "__main__":
    main()
