"""Table and page of a sweep, from the metrics of its runs.

Runs of one stage whose points differ only in the seed form a group. The curves of a group are the median over seeds,
with the inter-quartile range as a band. Both are taken at every x over the seeds that reached it. In a sweep with two
stages, ``then`` chooses settings from the runs of the first stage. The results of the chosen settings do not include
these runs.

Owns: these figures, table.csv, sweep.html. Does not know: where runs come from.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import html
import io
import itertools
import math
import pathlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.reports import page
from jaxrl_llm.reports.page import FAINT, INK, SERIES
from jaxrl_llm.runtime import bucket
from jaxrl_llm.sweeps import fits
from jaxrl_llm.sweeps.points import SEED, Point, Sweep

ITERATION = "iteration"
# Stages: the points that the sweep lists, and the points from its ``then``.
FIRST = "first"
THEN = "then"


@dataclasses.dataclass(frozen=True)
class Run:
    """Point with its results. ``status`` is "finished", "failed", "unfinished", or "" (not begun)."""

    name: str
    point: Point
    status: str
    rows: Sequence[Mapping[str, Any]]  # rows of metrics.jsonl
    made_with: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # from config.json: versions, commit
    after: Mapping[str, float | None] = dataclasses.field(default_factory=dict)  # result of the sweep's ``after``
    before: Mapping[str, float | None] = dataclasses.field(default_factory=dict)  # metrics before any training
    stage: str = FIRST
    lost_rows: int = 0  # number of rows on another machine's disk, because the run was resumed from a bucket


@dataclasses.dataclass(frozen=True)
class Band:
    """Median and quartiles over seeds at each x. All arrays have the same length."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray


# Arrays x and y of the same length.
Curve = tuple[np.ndarray, np.ndarray]


# ---- figures ---------------------------------------------------------------------------------------------------


def curve(run: Run, metric: str, x_axis: str) -> Curve:
    """Return (x, value) of the rows that have a number for both."""
    xs = []
    values = []
    for row in run.rows:
        x = row.get(x_axis)
        value = row.get(metric)
        if x is not None and value is not None:
            xs.append(x)
            values.append(value)
    return np.array(xs, float), np.array(values, float)


def figures(run: Run, sweep: Sweep) -> dict[str, float | None]:
    """Return {column: number} of a run.

    A number is None if the run does not have it, or if a threshold may have been reached in lost rows.
    """
    numbers: dict[str, float | None] = {}
    for metric in sweep.named_metrics():
        _, y = curve(run, metric, ITERATION)
        best = np.min if metric in sweep.lower_is_better else np.max
        numbers[f"{metric} last"] = float(y[-1]) if len(y) else None
        if metric in sweep.metrics:
            numbers[f"{metric} best"] = float(best(y)) if len(y) else None
    for metric, threshold in sweep.thresholds.items():
        x, y = curve(run, metric, sweep.x_axis)
        is_reached = y <= threshold if metric in sweep.lower_is_better else y >= threshold
        first_x = None
        if is_reached.any() and not run.lost_rows:
            first_x = float(x[is_reached][0])
        numbers[f"{sweep.x_axis} to {metric} {threshold:g}"] = first_x
    return numbers | dict(run.after)


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
            settings.append((field, _hashable(value)))
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
    has_metric = any(len(curve(run, metric, ITERATION)[1]) for run in runs)
    if not has_field or not has_metric:
        raise ValueError(f"field={field!r} and metric={metric!r} must each be in some run")
    incomplete = [run.name for run in runs if run.lost_rows]
    if incomplete:
        message = f"{len(incomplete)} runs have lost rows, so that they do not help to choose {field} if other runs can"
        print(f"warning: {message}: {', '.join(incomplete)}", file=sys.stderr)
    experiments: dict[tuple, list[tuple[bool, float, Point]]] = {}
    for members in groups(runs).values():
        point = {name: value for name, value in members[0].point.items() if name != SEED}
        complete = [run for run in members if not run.lost_rows]
        score = float(np.mean([_mean_metric(run, metric) for run in complete or members]))
        experiment = _settings_without(point, field)
        experiments.setdefault(experiment, []).append((bool(complete), score, point))
    best = []
    for candidates in experiments.values():
        _, _, point = max(candidates, key=lambda candidate: candidate[:2])
        best.append(point)
    return best


def _mean_metric(run: Run, metric: str) -> float:
    """Return the mean of a metric over a run; minus infinity if the run does not have the metric."""
    _, y = curve(run, metric, ITERATION)
    return float(np.mean(y)) if len(y) else -np.inf


def _hashable(value: Any) -> Any:
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
    interpolated = np.stack([np.interp(all_x, x, y, left=np.nan, right=np.nan) for x, y in curves])
    low, median, high = np.nanquantile(interpolated, (0.25, 0.5, 0.75), axis=0)
    return Band(all_x, low, median, high)


def _median(curves: Sequence[Curve]) -> Curve:
    """Return x and y [points]: the median of the curves at the x of the first curve, within the range of all curves."""
    first_x, _ = curves[0]
    low = max(x[0] for x, _ in curves)
    high = min(x[-1] for x, _ in curves)
    common_x = first_x[(first_x >= low) & (first_x <= high)]
    interpolated = [np.interp(common_x, x, y) for x, y in curves]
    return common_x, np.median(interpolated, axis=0)


def front(points: Sequence[tuple[float, float]], *, lower_x: bool, lower_y: bool) -> list[int]:
    """Return the indices of the Pareto-optimal points, sorted by the first figure."""
    # Change signs so that less is better for both figures.
    costs = [(x if lower_x else -x, y if lower_y else -y) for x, y in points]
    optimal = []
    for i, cost in enumerate(costs):
        if not any(_dominates(other, cost) for other in costs):
            optimal.append(i)
    return sorted(optimal, key=lambda i: points[i])


def _dominates(cost: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether a point is at least as good as another one in both figures, and differs from it."""
    return cost != other and cost[0] <= other[0] and cost[1] <= other[1]


@dataclasses.dataclass(frozen=True)
class Knob:
    """Effect of a setting on a figure, over all runs that differ in the setting.

    Attributes:
        rows: (value, runs, mean, low, high) of each value. low and high bound 95 % of the resampled means. Both are NaN
            for a value with fewer than ``FEWEST_RUNS`` runs.
        effect: (mean of the best value minus mean of the worst value, low, high). If 0 lies between low and high, the
            effect may be chance. low and high are NaN if one of the two values has too few runs.
    """

    field: str
    rows: list[tuple[str, int, float, float, float]]
    effect: tuple[float, float, float]


RESAMPLES = 2000
# Fewer runs get no interval, because resampling a single run gives no spread.
FEWEST_RUNS = 3
# A setting with more different numbers than this is binned into thirds.
MOST_VALUES = 6
# A setting with more values than this that are not numbers is left out.
MOST_NAMES = 50


def knobs(runs: Sequence[Run], sweep: Sweep, column: str) -> list[Knob]:
    """Return the settings of a sweep by their effect on a figure, the largest first, with bootstrap intervals.

    Runs with any other settings are resampled with replacement. With randomly drawn settings, the other settings
    are alike on average. The best and the worst value are chosen on the original runs, which favours one of several
    similar values a little.

    Args:
        column: a column of ``figures``; runs without a number are left out.

    Source: percentile bootstrap, Efron 1979; for settings of reinforcement learning, after the statistical diagnosis of
        1,370 random configurations of web agents.
    """
    measured_runs = []
    measured_values = []
    for run in runs:
        value = figures(run, sweep)[column]
        if value is not None:
            measured_runs.append(run)
            measured_values.append(value)
    if not measured_runs:
        return []
    y = np.array(measured_values)
    picks = np.random.default_rng(0).integers(0, len(y), (RESAMPLES, len(y)))
    is_lower_better = column.removesuffix(" last").removesuffix(" best") in sweep.lower_is_better
    effects = []
    for field in sweep.fields():
        names = _bins([run.point.get(field) for run in measured_runs])
        if field != SEED and 2 <= len(set(names)) <= MOST_NAMES:
            effects.append(_knob(field, names, y, picks, is_lower_better=is_lower_better))
    return sorted(effects, key=lambda knob: -abs(knob.effect[0]))


def _knob(
    field: str,
    names_of_runs: Sequence[str],
    y: np.ndarray,
    picks: np.ndarray,
    *,
    is_lower_better: bool,
) -> Knob:
    """Return the effect of one setting.

    Args:
        names_of_runs: [runs] names of the setting's values.
        y: [runs] the figure.
        picks: [resamples, runs] numbers of the runs of each resample.
    """
    names = list(dict.fromkeys(names_of_runs))
    is_member = np.array([[value == name for value in names_of_runs] for name in names])
    counts = is_member.sum(axis=1)
    means = is_member @ y / counts
    drawn = is_member[:, picks]  # [names, resamples, runs]
    with np.errstate(invalid="ignore"):
        resampled = (drawn * y[picks]).sum(axis=2) / drawn.sum(axis=2)
    has_enough_runs = counts >= FEWEST_RUNS
    bounds = np.where(has_enough_runs, np.nanquantile(resampled, (0.025, 0.975), axis=1), np.nan)
    rows = list(zip(names, counts.tolist(), means.tolist(), *bounds.tolist(), strict=True))
    best = means.argmin() if is_lower_better else means.argmax()
    worst = means.argmax() if is_lower_better else means.argmin()
    difference = float(means[best] - means[worst])
    if not has_enough_runs[best] or not has_enough_runs[worst]:
        return Knob(field, rows, (difference, math.nan, math.nan))
    low, high = np.nanquantile(resampled[best] - resampled[worst], (0.025, 0.975)).tolist()
    return Knob(field, rows, (difference, low, high))


def _bins(values: Sequence[Any]) -> list[str]:
    """Return a name for each value: the value itself, or its third if there are many different numbers."""
    numbers = [value for value in values if value is not None]  # None if the point does not have the setting
    num_values = len({_hashable(value) for value in values})
    are_numbers = all(isinstance(number, (int, float)) for number in numbers)
    if num_values <= MOST_VALUES or not are_numbers:
        return [str(value) for value in values]
    edges = np.quantile(numbers, (0, 1 / 3, 2 / 3, 1))
    thirds = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    names = []
    for value in values:
        if value is None:
            names.append(str(value))
        else:
            third = int(np.searchsorted(edges[1:3], value, side="right"))
            names.append(thirds[third])
    return names


# ---- table.csv -------------------------------------------------------------------------------------------------


def write_table(path: pathlib.Path, runs: Sequence[Run], sweep: Sweep) -> None:
    """Write one line per point: its settings, its progress, its figures. A missing value is an empty cell."""
    has_lost_rows = any(run.lost_rows for run in runs)
    lines = []
    for run in runs:
        line: dict[str, Any] = {
            "point": run.name,
            "label": sweep.name_of(run.point),
            "status": run.status,
            "iterations": run.rows[-1][ITERATION] if run.rows else 0,
        }
        if has_lost_rows:
            line["lost_rows"] = run.lost_rows
        if sweep.then:
            line["stage"] = run.stage
        for field in sweep.fields():
            line[field] = run.point.get(field)
        line |= figures(run, sweep)
        lines.append({column: _without_formula(value) for column, value in line.items()})
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    bucket.write_whole(path, text.getvalue())


def _without_formula(value: Any) -> Any:
    """Return the value of a cell. A text that a spreadsheet would compute gets an apostrophe before it."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return "'" + value
    return value


# ---- sweep.html ------------------------------------------------------------------------------------------------


def write_page(path: pathlib.Path, runs: Sequence[Run], sweep: Sweep, units: Mapping[str, str]) -> pathlib.Path:
    """Write the page. ``units`` maps a metric's name to its unit."""
    started = [run for run in runs if run.rows]
    finished = [run for run in runs if run.status == "finished"]
    title = path.resolve().parent.name
    metric = page.text(sweep.metrics[0])
    x_axis = page.text(sweep.x_axis)
    sections = [
        page.header(title, _note(runs)),
        page.section("Median over the seeds that have ended", _group_table(finished, sweep)),
        page.section(f"What each setting does to {metric}", _knob_table(finished, sweep)),
        *_curve_sections(started, sweep, units),
        page.section("Trade-offs of last values", _trade_offs(finished, sweep, units)),
        page.section(f"Sigmoids of {metric} over {x_axis}", _fit_table(finished, sweep, units)),
        page.section("Made with", _record_table(started)),
        page.section("Points", _point_table(runs, sweep)),
    ]
    return page.write_page(path, title, sections)


def _note(runs: Sequence[Run]) -> str:
    """Return the line below the title: the number of points by status."""
    counts = []
    for status in ("finished", "unfinished", "failed"):
        count = sum(run.status == status for run in runs)
        if count:
            counts.append(f"{count} {status}")
    note = f"{len(runs)} points: " + ", ".join(counts)
    num_incomplete = sum(run.lost_rows > 0 for run in runs)
    if num_incomplete:
        note += f"; {num_incomplete} without rows that another machine's disk has: see their status"
    return note


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _label(run: Run, sweep: Sweep, *, without: str = "") -> str:
    """Return the name of a run's point as HTML, with its stage if the sweep has two stages."""
    name = sweep.name_of(run.point, without=without)
    if sweep.then:
        name = f"{run.stage}: {name}"
    return page.text(name)


def _group_table(runs: Sequence[Run], sweep: Sweep) -> str:
    if not runs:
        return ""
    rows = []
    columns = list(figures(runs[0], sweep))
    for members in groups(runs).values():
        cells = [_label(members[0], sweep), str(len(members))]
        figures_of_members = [figures(run, sweep) for run in members]
        for column in columns:
            values = [numbers[column] for numbers in figures_of_members]
            cells.append(_quartiles([value for value in values if value is not None], len(members)))
        rows.append(page.row(*cells))
    head = ("settings", "seeds", *map(page.text, columns))
    return page.table(head, rows, "groups")


def _quartiles(numbers: Sequence[float], num_runs: int) -> str:
    """Return the median as HTML, with the quartiles and the number of runs that have a number."""
    if not numbers:
        return ""
    low, median, high = np.quantile(numbers, (0.25, 0.5, 0.75))
    text = _number(median)
    if len(numbers) > 1:
        text += f" <small>{_number(low)} to {_number(high)}</small>"
    if len(numbers) < num_runs:
        text += f" <small>{len(numbers)} of {num_runs}</small>"
    return text


def _knob_table(runs: Sequence[Run], sweep: Sweep) -> str:
    """Return a table of each setting's effect on the last value of the first metric.

    The table uses the first stage, because only this stage tried all values. The table is empty if only the seed
    differs.
    """
    first_stage = [run for run in runs if run.stage == FIRST]
    rows = []
    for knob in knobs(first_stage, sweep, f"{sweep.metrics[0]} last"):
        # The cells of the setting span the rows of its values. Only the first row contains them.
        span = f"<td rowspan={len(knob.rows)}>"
        setting_cells = f"{span}{page.text(knob.field)}</td>{span}{_with_bounds(*knob.effect)}</td>"
        for name, count, mean, low, high in knob.rows:
            cells = f"<td>{page.text(name)}</td><td>{count}</td><td>{_with_bounds(mean, low, high)}</td>"
            rows.append(f"<tr>{setting_cells}{cells}</tr>")
            setting_cells = ""
    head = ("setting", "best less worst", "value", "runs", "mean, and 95 % of bootstrapped means")
    return page.table(head, rows, "knobs")


def _with_bounds(value: float, low: float, high: float) -> str:
    """Return a number and its interval as HTML. Infinite or missing bounds mean that there are too few runs."""
    if math.isfinite(low + high):
        return f"{_number(value)} <small>{_number(low)} to {_number(high)}</small>"
    return f"{_number(value)} <small>too few runs</small>"


def _fit_table(runs: Sequence[Run], sweep: Sweep, units: Mapping[str, str]) -> str:
    """Return a table of sigmoids fitted to each group's median curve of the first metric, the highest ceiling first.

    Every run of a group needs enough points. The median is fitted at the x of the first run, within the
    range of all runs. R0 is the median of the runs' start values. Groups with an unknown start value are listed below
    the table.
    """
    metric = sweep.metrics[0]
    if metric in sweep.lower_is_better:
        return ""
    sigmoids = []
    without_start = []
    highest = 1.0 if units.get(metric) == "fraction" else np.inf
    for members in groups(runs).values():
        curves = [curve(run, metric, sweep.x_axis) for run in members]
        if not all(fits.is_long_enough(x) for x, _ in curves):
            continue
        label = _label(members[0], sweep)
        starts = [run.before.get(metric) for run in members]
        numbers = [start for start in starts if start is not None]
        if len(numbers) < len(members):
            without_start.append(label)
            continue
        x, y = _median(curves)
        sigmoid = fits.fit(x, y, start=float(np.median(numbers)), highest=highest)
        if sigmoid:
            sigmoids.append((label, sigmoid))
    sigmoids.sort(key=lambda pair: -pair[1].ceiling)
    rows = []
    for label, sigmoid in sigmoids:
        parameters = (sigmoid.ceiling, sigmoid.middle, sigmoid.steepness, sigmoid.error)
        rows.append(page.row(label, *map(_number, parameters)))
    head = ("settings", "ceiling A", "middle", "steepness B", "error on the second half, from the first")
    text = page.table(head, rows, "fits")
    if without_start:
        text += f"<p>Not fitted, for no file says what they began with: {'; '.join(without_start)}.</p>"
    return text


def _record_table(runs: Sequence[Run]) -> str:
    """Return a table of runs by version. Several lines mean that the sweep mixes commits or versions."""
    counts: collections.Counter[str] = collections.Counter()
    for run in runs:
        packages = run.made_with.get("versions", {})
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        commit = run.made_with.get("commit") or "unknown"
        devices = run.made_with.get("devices") or "unknown"
        counts[f"commit {commit}; {devices}; {versions}"] += 1
    rows = [page.row(str(count), page.text(record)) for record, count in counts.items()]
    return page.table(("runs", "made with"), rows)


def _point_table(runs: Sequence[Run], sweep: Sweep) -> str:
    head = ("point", "status", *sweep.fields(), *figures(runs[0], sweep))
    rows = []
    for run in runs:
        settings = [page.text(run.point.get(field, "")) for field in sweep.fields()]
        numbers = [_number(value) for value in figures(run, sweep).values()]
        status = run.status
        if run.lost_rows:
            status += f", {run.lost_rows} rows lost"
        name = f"<code>{page.text(run.name)}</code>"
        rows.append(page.row(name, status, *settings, *numbers))
    table = page.table([page.text(column) for column in head], rows)
    return page.folded(f"{len(runs)} points", table)


def _curve_sections(runs: Sequence[Run], sweep: Sweep, units: Mapping[str, str]) -> list[str]:
    pictures = {metric: _curves(runs, sweep, metric, units) for metric in sweep.metrics}
    if sweep.facet:
        return [page.section(page.text(metric), page.figures(of_metric)) for metric, of_metric in pictures.items()]
    every_picture = list(itertools.chain.from_iterable(pictures.values()))
    return [page.section("Curves", page.figures(every_picture))]


def _curves(runs: Sequence[Run], sweep: Sweep, metric: str, units: Mapping[str, str]) -> list[str]:
    """Return one picture per x-axis and value of the facet.

    A group keeps its colour, and all pictures share their scales.
    """
    pictures = []
    for x_axis in dict.fromkeys((ITERATION, sweep.x_axis)):
        facets = _bands_by_facet(runs, sweep, metric, x_axis)
        labels = list(dict.fromkeys(itertools.chain.from_iterable(facets.values())))
        limits = _limits_of_facets(facets)
        for number, (value, bands) in enumerate(facets.items()):
            draw = functools.partial(_draw_bands, bands=bands, labels=labels, limits=limits)
            svg = page.picture(
                draw,
                label=f"{metric} over {x_axis}",
                x_label=x_axis,
                salt=f"{metric} {x_axis} {number}",
                whole_x=x_axis == ITERATION,
            )
            title = page.text(metric)
            if sweep.facet:
                facet = sweep.facet.rsplit(".", 1)[-1]
                title = page.text(f"{facet} {value}")
            if len(bands) == 1 < len(labels):
                title += f" | {next(iter(bands))}"  # a picture with one line needs no legend
            unit = page.text(units.get(metric, ""))
            keys = [(i, label, "line") for i, label in enumerate(labels) if label in bands]
            pictures.append(page.figure(title, unit, page.legend(keys), svg))
    return pictures


def _bands_by_facet(runs: Sequence[Run], sweep: Sweep, metric: str, x_axis: str) -> dict[Any, dict[str, Band]]:
    """Return the band of each group by the value of the facet and by the label of the group."""
    facets: dict[Any, dict[str, Band]] = {}
    for members in groups(runs).values():
        band_of_group = band([curve(run, metric, x_axis) for run in members])
        if band_of_group is None:
            continue
        label = _label(members[0], sweep, without=sweep.facet)
        value = _hashable(members[0].point.get(sweep.facet, ""))
        facets.setdefault(value, {})[label] = band_of_group
    return facets


# Ends of the x-axis and of the y-axis.
Limits = tuple[tuple[float, float], tuple[float, float]]


def _limits_of_facets(facets: Mapping[Any, Mapping[str, Band]]) -> Limits:
    """Return the ends of the axes that all pictures of the facets share."""
    x = []
    y = []
    for bands in facets.values():
        for band_of_group in bands.values():
            x.append(band_of_group.x)
            y += [band_of_group.low, band_of_group.high]
    return _limits(x), _limits(y)


def _limits(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the ends of an axis that contains all values, with a margin."""
    low = min((array.min() for array in values), default=0.0)
    high = max((array.max() for array in values), default=1.0)
    margin = 0.05 * (high - low) or 0.5
    return float(low - margin), float(high + margin)


def _draw_bands(axes: Any, *, bands: Mapping[str, Band], labels: Sequence[str], limits: Limits) -> None:
    for i, label in enumerate(labels):
        if label not in bands:
            continue
        quartiles = bands[label]
        x = quartiles.x
        colour, dash = page.stroke(i)
        marker = "o" if len(x) < 3 else ""
        axes.plot(
            x,
            quartiles.median,
            color=colour,
            linestyle=dash,
            linewidth=1.6,
            marker=marker,
            markersize=4,
        )
        axes.fill_between(x, quartiles.low, quartiles.high, color=colour, alpha=0.15, linewidth=0)
    x_limits, y_limits = limits
    axes.set_xlim(*x_limits)
    axes.set_ylim(*y_limits)


def _trade_offs(runs: Sequence[Run], sweep: Sweep, units: Mapping[str, str]) -> str:
    pictures = []
    for x_metric, y_metric in sweep.pareto:
        quartiles = {}
        for members in groups(runs).values():
            pairs = _last_pairs(members, sweep, x_metric, y_metric)
            if pairs:
                quartiles[_label(members[0], sweep)] = np.quantile(pairs, (0.25, 0.5, 0.75), axis=0)
        if not quartiles:
            continue
        draw = functools.partial(
            _draw_trade_off,
            quartiles=quartiles,
            lower_x=x_metric in sweep.lower_is_better,
            lower_y=y_metric in sweep.lower_is_better,
        )
        svg = page.picture(
            draw,
            label=f"{y_metric} against {x_metric}",
            x_label=x_metric,
            salt=f"{x_metric} {y_metric}",
            whole_x=False,
        )
        unit = page.text(units.get(y_metric, ""))
        pictures.append(page.figure(page.text(y_metric), unit, "", svg))
    return page.figures(pictures)


def _last_pairs(runs: Sequence[Run], sweep: Sweep, x_metric: str, y_metric: str) -> list[tuple[float, float]]:
    """Return the last values of two metrics, of the runs that have both."""
    pairs = []
    for run in runs:
        numbers = figures(run, sweep)
        x = numbers[f"{x_metric} last"]
        y = numbers[f"{y_metric} last"]
        if x is not None and y is not None:
            pairs.append((x, y))
    return pairs


def _draw_trade_off(axes: Any, *, quartiles: Mapping[str, np.ndarray], lower_x: bool, lower_y: bool) -> None:
    """Draw every group with its quartiles. The Pareto-optimal groups are connected and labelled.

    Args:
        quartiles: [3, 2] quartiles of x and y, by the label of the group.
    """
    medians = []
    for of_group in quartiles.values():
        x, y = of_group[1]
        medians.append((x, y))
    optimal = front(medians, lower_x=lower_x, lower_y=lower_y)
    for i, (label, of_group) in enumerate(quartiles.items()):
        low, median, high = of_group
        x_error, y_error = np.abs(np.stack([low, high]) - median).T
        x, y = median
        colour = SERIES[0] if i in optimal else FAINT
        axes.errorbar(
            x,
            y,
            xerr=x_error[:, None],
            yerr=y_error[:, None],
            fmt="o",
            color=colour,
            markersize=4,
        )
        if i not in optimal:
            continue
        # Shorten long names, which would fill the picture. The table has the full name.
        name = textwrap.shorten(html.unescape(label), 40, placeholder=" ...")
        axes.annotate(
            name,
            (x, y),
            xytext=(3, 4),
            textcoords="offset points",
            fontsize=6,
            color=INK,
            parse_math=False,
        )
    front_x, front_y = zip(*(medians[i] for i in optimal), strict=True)
    axes.plot(front_x, front_y, color=SERIES[0], linewidth=1)
