"""Figures of studies/replay_study.md, drawn only from arms (studies.arms).

Owns: the content and the look of the figures. Does not know: raw files, how runs were made.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.sweeps import intervals
from jaxrl_llm.sweeps.intervals import Interval
from studies.arms import DECLARED, Arm, Way
from studies.design import COST_RATIO

STYLE = {"svg.hashsalt": "replay", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
COLUMNS = 3  # panels per row
COLOURS = [f"C{i}" for i in (0, 1, 2, 3, 4, 5, 6, 8, 9)]  # without grey, the colour of the threshold
Grid = Mapping[tuple[int, int], Arm]


def grid_of(arms: Sequence[Arm]) -> Grid:
    """Return the arms by (replay ratio, ring in batches), which are read from their names."""
    found = {}
    for arm in arms:
        ratio, batches = re.match(r"y (\d+), N (\d+) B", arm.name).groups()
        found[int(ratio), int(batches)] = arm
    return dict(sorted(found.items()))


def save(figure: Figure, out: pathlib.Path) -> None:
    figure.savefig(out, metadata={"Date": None})


def _band(axes: Any, x: np.ndarray, curves: np.ndarray, **how: Any) -> Any:
    """Draw the smoothed mean curve with a 95 % band of its draws, and return the line of the mean."""
    curves = intervals.smooth(curves)
    low, high = np.quantile(curves[1:], (0.025, 0.975), axis=0)
    axes.fill_between(x[0], low, high, alpha=0.1, linewidth=0, color=how["color"])
    return axes.plot(x[0], curves[0], linewidth=1.4, **how)[0]


def accuracy(grid: Grid, out: pathlib.Path, *, over: Way, x_label: str) -> None:
    """Draw the held-out pass rate over a cost: one panel per ring, one curve per replay ratio."""
    rings, ratios = (sorted(set(values)) for values in zip(*((n, y) for y, n in grid), strict=True))
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
                how = {"color": "black", "linestyle": ":"} if is_base else {"color": f"C{ratios.index(ratio)}"}
                _band(axes, over(arm), arm.curves, label="on-policy" if is_base else f"y = {ratio}", **how)
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
    ways = [(DECLARED, f"batches, mu = {COST_RATIO:g}", ".0f")]
    if all(arm.times for arm in grid.values()):
        ways.append((Arm.over_seconds, "seconds on this machine", ".1f"))
    rings, ratios = (sorted(set(values)) for values in zip(*((n, y) for y, n in grid), strict=True))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(ways), 3.2), layout="constrained")
        for axes, (way, title, form) in zip(figure.subplots(1, len(ways), squeeze=False)[0], ways, strict=True):
            cost = np.full((len(ratios), len(rings)), np.nan)
            for (ratio, ring), arm in grid.items():
                value = arm.to(threshold, way(arm))[0]
                cost[ratios.index(ratio), rings.index(ring)] = value if np.isfinite(value) else np.nan
            middle = (np.nanmin(cost) + np.nanmax(cost)) / 2
            for (i, j), value in np.ndenumerate(cost):
                colour = "white" if value < middle else "black"
                shown = format(value, form) if np.isfinite(value) else "never"
                axes.text(j, i, shown, ha="center", va="center", fontsize=8, color=colour)
            axes.imshow(cost, cmap="YlGn_r", aspect="auto", origin="lower")
            axes.set_xticks(range(len(rings)), [f"{n} B" for n in rings])
            axes.set_yticks(range(len(ratios)), map(str, ratios))
            axes.set_xlabel("ring N")
            axes.set_ylabel("replay ratio y")
            axes.set_title(f"to {threshold:.2f}: {title}", fontsize=9)
        save(figure, out)


def diversity(grid: Grid, out: pathlib.Path, *, ring: int = 8) -> None:
    """Draw pass@k at the end over k, for the on-policy arm and for each replay ratio with the given ring."""
    shown = {f"y = {y}": arm for (y, n), arm in grid.items() if n == ring}
    shown = {"on-policy": grid[1, 1], **shown}
    ks = [2**i for i in range(6)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.2), layout="constrained")
        axes = figure.subplots()
        for i, (name, arm) in enumerate(shown.items()):
            rates = [arm.pass_at(k) for k in ks]
            how = {"color": "black", "linestyle": ":"} if i == 0 else {"color": f"C{i - 1}"}
            axes.plot(ks, [rate.value for rate in rates], label=name, marker="o", markersize=3, linewidth=1.4, **how)
            axes.fill_between(
                ks,
                [rate.low for rate in rates],
                [rate.high for rate in rates],
                alpha=0.12,
                linewidth=0,
                color=how["color"],
            )
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
            axes.plot(
                arm.end_by_run(),
                [i] * len(arm.runs),
                "|",
                color="0.5",
            )
        axes.set_yticks(range(len(ordered)), [arm.name for arm in ordered], fontsize=7)
        axes.set_xlabel("held-out pass rate at the end: mean, 95 % interval, and each seed")
        axes.grid(alpha=0.3, axis="x")
        save(figure, out)


def curves(
    families: Mapping[str, Mapping[str, Arm]], out: pathlib.Path, *, over: Mapping[str, Way], threshold: float
) -> None:
    """Draw the held-out pass rate over costs, and the threshold: one row per family of arms, one panel per cost.

    The first arm is black and dotted. An arm has the same colour in all panels. Panels over seconds show only arms that
    were timed.
    """
    names = list(dict.fromkeys(name for shown in families.values() for name in shown))
    with matplotlib.rc_context(STYLE):
        size = 1.6 + 3.8 * len(over), 2.8 * len(families) + 0.25 * -(-len(names) // len(over))
        figure = Figure(figsize=size, layout="constrained")
        rows, lines = figure.subplots(len(families), len(over), sharey=True, sharex="col", squeeze=False), {}
        for panels, (family, shown) in zip(rows, families.items(), strict=True):
            for axes, way in zip(panels, over.values(), strict=True):
                timed = {name: arm for name, arm in shown.items() if arm.times or way is not Arm.over_seconds}
                for name, arm in timed.items():
                    i = names.index(name)
                    how = {"color": "black", "linestyle": ":"} if i == 0 else {"color": COLOURS[i - 1]}
                    lines[name] = _band(axes, way(arm), arm.curves, **how)
                axes.axhline(threshold, color="0.6", linewidth=0.8)
                axes.set_title(family if len(timed) == len(shown) else f"{family}: those that were timed", fontsize=9)
                axes.grid(alpha=0.3)
            panels[0].set_ylabel("held-out pass rate")
        for axes, x_label in zip(rows[-1], over, strict=True):
            axes.set_xlabel(x_label)
        figure.legend([lines[name] for name in names], names, frameon=False, loc="outside lower left", ncols=len(over))
        save(figure, out)
