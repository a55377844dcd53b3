"""Figures of a sweep, from the metrics of its runs, and their table (table.csv).

Runs of one stage whose points differ only in the seed form a group. The curves of a group are the median over seeds,
with the inter-quartile range as a band. Both are taken at every x over the seeds that reached it. In a sweep with two
stages, ``then`` chooses settings from the runs of the first stage. The results of the chosen settings do not include
these runs.

Owns: these figures, table.csv. Does not know: where runs come from, the page (sweeps.page).
"""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.runtime import bucket
from jaxrl_llm.sweeps.points import SEED, Point, Sweep

ITERATION = "iteration"
# Stages: the points that the sweep lists, and the points from its ``then``.
FIRST = "first"
THEN = "then"

Numbers = Mapping[str, float | None]  # by name; None = the run does not have the number


@dataclasses.dataclass(frozen=True)
class Run:
    """Point with its results. ``status`` is "finished", "failed", "unfinished", or "" (not begun)."""

    name: str
    point: Point
    status: str
    rows: Sequence[Mapping[str, Any]]  # rows of metrics.jsonl
    made_with: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # from config.json: versions, commit
    after: Numbers = dataclasses.field(default_factory=dict)  # result of the sweep's ``after``
    before: Numbers = dataclasses.field(default_factory=dict)  # metrics before any training
    stage: str = FIRST
    lost_rows: int = 0  # number of rows on another machine's disk, because the run was resumed from a bucket


@dataclasses.dataclass(frozen=True)
class Band:
    """Median and quartiles over seeds at each x. All arrays have the same length."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray


QUARTILES = (0.25, 0.5, 0.75)

# Arrays x and y of the same length.
Curve = tuple[np.ndarray, np.ndarray]


# ---- figures ---------------------------------------------------------------------------------------------------


def curve(run: Run, metric: str, x_axis: str) -> Curve:
    """Return (x, value) of the rows that have a number for both."""
    all_x = []
    values = []
    for row in run.rows:
        x = row.get(x_axis)
        value = row.get(metric)
        if x is None or value is None:
            continue
        all_x.append(x)
        values.append(value)
    return np.array(all_x, float), np.array(values, float)


def figures(run: Run, sweep: Sweep) -> dict[str, float | None]:
    """Return {column: number} of a run.

    A number is None if the run does not have it, or if a threshold may have been reached in lost rows.
    """
    numbers: dict[str, float | None] = {}
    for metric in sweep.named_metrics():
        _, y = curve(run, metric, ITERATION)
        last = None
        best = None
        if len(y):
            last = float(y[-1])
            is_lower_better = metric in sweep.lower_is_better
            best = float(y.min() if is_lower_better else y.max())
        numbers[f"{metric} last"] = last
        if metric in sweep.metrics:
            numbers[f"{metric} best"] = best
    for metric, threshold in sweep.thresholds.items():
        column = f"{sweep.x_axis} to {metric} {threshold:g}"
        numbers[column] = _first_x(run, sweep, metric, threshold)
    return numbers | dict(run.after)


def _first_x(run: Run, sweep: Sweep, metric: str, threshold: float) -> float | None:
    """Return the x at which a metric first reaches a threshold; None if it does not, or may have in lost rows."""
    x, y = curve(run, metric, sweep.x_axis)
    is_reached = y <= threshold if metric in sweep.lower_is_better else y >= threshold
    if run.lost_rows or not is_reached.any():
        return None
    return float(x[is_reached][0])


def groups(runs: Sequence[Run]) -> dict[tuple, list[Run]]:
    """Return the runs by stage and by point without the seed, in the order of each group's first run."""
    members: dict[tuple, list[Run]] = {}
    for run in runs:
        key = (run.stage, *_settings_without(run.point, SEED))
        members.setdefault(key, []).append(run)
    return members


def _settings_without(point: Point, *fields: str) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a point without ``fields``, sorted by name, as a key of a dictionary."""
    settings = []
    for field, value in sorted(point.items()):
        if field not in fields:
            settings.append((field, hashable(value)))
    return tuple(settings)


def best_points(runs: Sequence[Run], field: str, metric: str) -> list[Point]:
    """Return, for every experiment, the point with the best value of ``field``, without the seed.

    An experiment is a set of runs that differ only in ``field`` and the seed. The score of a run is the mean of its
    metric over the run, the area under its curve. The best value has the largest mean score over its runs, so that a
    value that learns fast and falls back does not win. The first of equal values wins.

    Runs with lost rows have only the end of their curve. They are left out, with a warning. A value that has only such
    runs wins only if no value has other runs.

    Raises:
        ValueError: no run has the field, or no run has the metric.
    """
    has_field = any(field in run.point for run in runs)
    has_metric = any(_has_metric(run, metric) for run in runs)
    if not has_field or not has_metric:
        raise ValueError(f"field={field!r} and metric={metric!r} must each be in some run")
    _warn_about_lost_rows(runs, field)
    experiments: dict[tuple, list[_Candidate]] = {}
    for members in groups(runs).values():
        point = dict(members[0].point)
        point.pop(SEED, None)
        complete = [run for run in members if not run.lost_rows]
        scores = [_mean_metric(run, metric) for run in complete or members]
        candidate = _Candidate(
            point,
            is_complete=len(complete) > 0,
            score=float(np.mean(scores)),
        )
        experiment = _settings_without(point, field)
        experiments.setdefault(experiment, []).append(candidate)
    best = []
    for candidates in experiments.values():
        chosen = max(candidates, key=_complete_then_score)
        best.append(chosen.point)
    return best


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A point with the mean score of its runs. ``is_complete``: some runs of the point have no lost rows."""

    point: Point
    is_complete: bool
    score: float


def _complete_then_score(candidate: _Candidate) -> tuple[bool, float]:
    return candidate.is_complete, candidate.score


def _warn_about_lost_rows(runs: Sequence[Run], field: str) -> None:
    """Print a warning that names the runs with lost rows."""
    incomplete = [run.name for run in runs if run.lost_rows]
    if not incomplete:
        return
    message = f"{len(incomplete)} runs have lost rows, so that they do not help to choose {field} if other runs can"
    names = ", ".join(incomplete)
    print(f"warning: {message}: {names}", file=sys.stderr)


def _has_metric(run: Run, metric: str) -> bool:
    _, y = curve(run, metric, ITERATION)
    return len(y) > 0


def _mean_metric(run: Run, metric: str) -> float:
    """Return the mean of a metric over a run; minus infinity if the run does not have the metric."""
    _, y = curve(run, metric, ITERATION)
    if len(y) == 0:
        return -np.inf
    return float(np.mean(y))


def hashable(value: Any) -> Any:
    """Return a value of a setting as a key of a dictionary."""
    if isinstance(value, (int, float, str, bool)):
        return value
    return repr(value)


def band(curves: Sequence[Curve]) -> Band | None:
    """Return the quartiles of the curves at every x of any curve.

    Each curve is interpolated linearly between its points. Return None if no curve has a point. Each curve's x must
    increase.
    """
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return None
    all_x = np.unique(np.concatenate([x for x, _ in curves]))
    values = []
    for x, y in curves:
        interpolated = np.interp(all_x, x, y, left=np.nan, right=np.nan)
        values.append(interpolated)
    low, median, high = np.nanquantile(np.stack(values), QUARTILES, axis=0)
    return Band(all_x, low, median, high)


def median_curve(curves: Sequence[Curve]) -> Curve:
    """Return x and y [points]: the median of the curves at the x of the first curve, within the range of all curves."""
    first_x, _ = curves[0]
    low = max(x[0] for x, _ in curves)
    high = min(x[-1] for x, _ in curves)
    is_common = (first_x >= low) & (first_x <= high)
    common_x = first_x[is_common]
    interpolated = [np.interp(common_x, x, y) for x, y in curves]
    return common_x, np.median(interpolated, axis=0)


XY = tuple[float, float]  # a point of two figures


def front(points: Sequence[XY], *, lower_x: bool, lower_y: bool) -> list[int]:
    """Return the indices of the Pareto-optimal points, sorted by the first figure."""
    # Change signs so that less is better for both figures.
    x_sign = 1 if lower_x else -1
    y_sign = 1 if lower_y else -1
    costs = [(x_sign * x, y_sign * y) for x, y in points]
    optimal = []
    for i, cost in enumerate(costs):
        is_dominated = any(_dominates(other, cost) for other in costs)
        if not is_dominated:
            optimal.append(i)
    return sorted(optimal, key=points.__getitem__)


def _dominates(cost: XY, other: XY) -> bool:
    """Return whether a point is at least as good as another one in both figures, and differs from it."""
    x, y = cost
    other_x, other_y = other
    is_no_worse = x <= other_x and y <= other_y
    return is_no_worse and cost != other


# ---- table.csv -------------------------------------------------------------------------------------------------

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_table(path: pathlib.Path, runs: Sequence[Run], sweep: Sweep) -> None:
    """Write one line per point: its settings, its progress, its figures. A missing value is an empty cell."""
    has_lost_rows = any(run.lost_rows for run in runs)
    lines = []
    for run in runs:
        num_iterations = 0
        if run.rows:
            num_iterations = run.rows[-1][ITERATION]
        line: dict[str, Any] = {
            "point": run.name,
            "label": sweep.name_of(run.point),
            "status": run.status,
            "iterations": num_iterations,
        }
        if has_lost_rows:
            line["lost_rows"] = run.lost_rows
        if sweep.then:
            line["stage"] = run.stage
        for field in sweep.fields():
            line[field] = run.point.get(field)
        line |= figures(run, sweep)
        for column, value in line.items():
            line[column] = _without_formula(value)
        lines.append(line)
    text = io.StringIO()
    columns = list(lines[0])
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(lines)
    bucket.write_whole(path, text.getvalue())


def _without_formula(value: Any) -> Any:
    """Return the value of a cell. A text that a spreadsheet would compute gets an apostrophe before it."""
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return value
