"""Figures of studies/replay_study.md, drawn only from arms (studies.arms).

Owns: the content and the look of the figures. Does not know: raw files, how runs were made.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.sweeps import intervals
from jaxrl_llm.sweeps.intervals import Interval
from studies.arms import DECLARED, Arm, CostCurve
from studies.design import COST_RATIO

STYLE = {
    "svg.hashsalt": "replay",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLUMNS = 3  # panels per row
COLOURS = [f"C{i}" for i in (0, 1, 2, 3, 4, 5, 6, 8, 9)]  # without grey, the colour of the threshold
Grid = Mapping[tuple[int, int], Arm]


def grid_of(arms: Sequence[Arm]) -> Grid:
    """Return the arms by (replay ratio, ring in batches), which are read from their names."""
    grid = {}
    for arm in arms:
        match = re.match(r"y (\d+), N (\d+) B", arm.name)
        assert match is not None, f"{arm.name!r} must begin with y NUMBER, N NUMBER B"
        ratio, batches = match.groups()
        grid[int(ratio), int(batches)] = arm
    return dict(sorted(grid.items()))


def _rings_and_ratios(grid: Grid) -> tuple[list[int], list[int]]:
    """Return the rings in batches and the replay ratios of a grid, in increasing order."""
    rings = {ring for _, ring in grid}
    ratios = {ratio for ratio, _ in grid}
    return sorted(rings), sorted(ratios)


def _base_or(colour: str, *, is_base: bool) -> dict[str, str]:
    """Return the style of a line: black and dotted for the on-policy arm, ``colour`` for the others."""
    if is_base:
        return {"color": "black", "linestyle": ":"}
    return {"color": colour, "linestyle": "-"}


def save(figure: Figure, out: pathlib.Path) -> None:
    figure.savefig(out, metadata={"Date": None})


def _band(
    axes: Any,
    x: np.ndarray,
    curves: np.ndarray,
    *,
    color: str,
    linestyle: str,
    label: str = "",
) -> Any:
    """Draw the smoothed mean curve with a 95 % band of its draws, and return the line of the mean."""
    curves = intervals.smooth(curves)
    low, high = np.quantile(curves[1:], (0.025, 0.975), axis=0)
    axes.fill_between(x[0], low, high, alpha=0.1, linewidth=0, color=color)
    (line,) = axes.plot(
        x[0],
        curves[0],
        linewidth=1.4,
        color=color,
        linestyle=linestyle,
        label=label or None,
    )
    return line


def accuracy(grid: Grid, out: pathlib.Path, *, over: CostCurve, x_label: str) -> None:
    """Draw the held-out pass rate over a cost: one panel per ring, one curve per replay ratio."""
    rings, ratios = _rings_and_ratios(grid)
    with matplotlib.rc_context(STYLE):
        num_rows = -(-len(rings) // COLUMNS)
        figure = Figure(figsize=(3.4 * COLUMNS, 2.8 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, COLUMNS, sharey=True, sharex=True, squeeze=False).ravel()
        for axes in panels[len(rings) :]:
            axes.set_visible(False)
        for axes, ring in zip(panels, rings, strict=False):
            for (ratio, batches), arm in grid.items():
                is_base = (ratio, batches) == (1, 1)
                if batches != ring and not is_base:
                    continue
                label = "on-policy" if is_base else f"y = {ratio}"
                style = _base_or(f"C{ratios.index(ratio)}", is_base=is_base)
                _band(axes, over(arm), arm.curves, label=label, **style)
            axes.set_title(f"ring of {ring} B", fontsize=9)
            axes.grid(alpha=0.3)
        panels[1].legend(frameon=False, fontsize=7)  # in panels[0], y = 1 is the on-policy arm
        figure.supxlabel(x_label)
        figure.supylabel("held-out pass rate")
        save(figure, out)


def cost_map(grid: Grid, out: pathlib.Path, *, threshold: float) -> None:
    """Draw the cost to the threshold by replay ratio and ring.

    The cost is in batches at the declared mu and, if all arms were timed, also in seconds.
    """
    cost_curves = [(DECLARED, f"batches, mu = {COST_RATIO:g}", ".0f")]
    if all(arm.times for arm in grid.values()):
        cost_curves.append((Arm.seconds, "seconds on this machine", ".1f"))
    rings, ratios = _rings_and_ratios(grid)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(cost_curves), 3.2), layout="constrained")
        panels = figure.subplots(1, len(cost_curves), squeeze=False)[0]
        for axes, (cost_curve, title, form) in zip(panels, cost_curves, strict=True):
            cost = np.full((len(ratios), len(rings)), np.nan)
            for (ratio, ring), arm in grid.items():
                value = arm.cost_to(threshold, cost_curve(arm))[0]
                if np.isfinite(value):
                    cost[ratios.index(ratio), rings.index(ring)] = value
            middle = (np.nanmin(cost) + np.nanmax(cost)) / 2
            for (i, j), value in np.ndenumerate(cost):
                colour = "white" if value < middle else "black"
                text = format(value, form) if np.isfinite(value) else "never"
                axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
            axes.imshow(cost, cmap="YlGn_r", aspect="auto", origin="lower")
            axes.set_xticks(range(len(rings)), [f"{n} B" for n in rings])
            axes.set_yticks(range(len(ratios)), map(str, ratios))
            axes.set_xlabel("ring N")
            axes.set_ylabel("replay ratio y")
            axes.set_title(f"to {threshold:.2f}: {title}", fontsize=9)
        save(figure, out)


def diversity(grid: Grid, out: pathlib.Path, *, ring: int = 8) -> None:
    """Draw pass@k at the end over k, for the on-policy arm and for each replay ratio with the given ring."""
    arms = {"on-policy": grid[1, 1]}
    for (y, n), arm in grid.items():
        if n == ring:
            arms[f"y = {y}"] = arm
    ks = [2**i for i in range(6)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.2), layout="constrained")
        axes = figure.subplots()
        for i, (name, arm) in enumerate(arms.items()):
            rates = [arm.pass_at(k) for k in ks]
            values = [rate.value for rate in rates]
            low = [rate.low for rate in rates]
            high = [rate.high for rate in rates]
            style = _base_or(f"C{i - 1}", is_base=i == 0)
            axes.plot(ks, values, label=name, marker="o", markersize=3, linewidth=1.4, **style)
            axes.fill_between(ks, low, high, alpha=0.12, linewidth=0, color=style["color"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, map(str, ks))
        axes.set_xlabel("k")
        axes.set_ylabel(f"held-out pass@k, ring of {ring} B")
        axes.legend(frameon=False, fontsize=7)
        axes.grid(alpha=0.3)
        save(figure, out)


def ends(arms: Sequence[Arm], out: pathlib.Path) -> None:
    """Draw the held-out pass rate of each arm at the end with its interval, the highest at the top."""
    ordered = sorted(arms, key=lambda arm: arm.end()[0])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 0.6 + 0.2 * len(ordered)), layout="constrained")
        axes = figure.subplots()
        for i, arm in enumerate(ordered):
            end = Interval.of(arm.end())
            axes.plot([end.low, end.high], [i, i], color="C0", linewidth=1.4)
            axes.plot(end.value, i, "o", color="C0", markersize=4)
            axes.plot(arm.end_by_run(), [i] * len(arm.runs), "|", color="0.5")
        axes.set_yticks(range(len(ordered)), [arm.name for arm in ordered], fontsize=7)
        axes.set_xlabel("held-out pass rate at the end: mean, 95 % interval, and each seed")
        axes.grid(alpha=0.3, axis="x")
        save(figure, out)


def curves(
    families: Mapping[str, Mapping[str, Arm]],
    out: pathlib.Path,
    *,
    over: Mapping[str, CostCurve],
    threshold: float,
) -> None:
    """Draw the held-out pass rate over costs, and the threshold: one row per family of arms, one panel per cost.

    The first arm is black and dotted. An arm has the same colour in all panels. Panels over seconds show only arms that
    were timed.
    """
    names = list(dict.fromkeys(itertools.chain.from_iterable(families.values())))
    with matplotlib.rc_context(STYLE):
        num_legend_rows = -(-len(names) // len(over))
        width = 1.6 + 3.8 * len(over)
        height = 2.8 * len(families) + 0.25 * num_legend_rows
        figure = Figure(figsize=(width, height), layout="constrained")
        rows = figure.subplots(len(families), len(over), sharey=True, sharex="col", squeeze=False)
        lines = {}
        for panels, (family, arms) in zip(rows, families.items(), strict=True):
            for axes, cost_curve in zip(panels, over.values(), strict=True):
                needs_times = cost_curve is Arm.seconds
                with_cost = {name: arm for name, arm in arms.items() if arm.times or not needs_times}
                for name, arm in with_cost.items():
                    i = names.index(name)
                    style = _base_or(COLOURS[i - 1], is_base=i == 0)
                    lines[name] = _band(axes, cost_curve(arm), arm.curves, **style)
                axes.axhline(threshold, color="0.6", linewidth=0.8)
                title = family if len(with_cost) == len(arms) else f"{family}: those that were timed"
                axes.set_title(title, fontsize=9)
                axes.grid(alpha=0.3)
            panels[0].set_ylabel("held-out pass rate")
        for axes, x_label in zip(rows[-1], over, strict=True):
            axes.set_xlabel(x_label)
        figure.legend(
            [lines[name] for name in names],
            names,
            frameon=False,
            loc="outside lower left",
            ncols=len(over),
        )
        save(figure, out)
