"""Table and page of a sweep, from the metrics of its runs.

Runs of one stage whose points differ only in the seed form a group. The curves of a group are the median over seeds,
with the inter-quartile range as a band. Both are taken at every x over the seeds that reached it. In a sweep with two
stages, the runs that ``then`` used to choose are not part of the results reported for its choice.

Owns: these figures, table.csv, sweep.html. Does not know: where runs come from.
"""

from __future__ import annotations

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
FIRST, THEN = "first", "then"  # stages: the sweep's own points, and the points from its ``then``


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
    lost_rows: int = 0  # rows on another machine's disk: the run was resumed from a bucket


@dataclasses.dataclass(frozen=True)
class Band:
    """Median and quartiles over seeds at each x. All arrays have the same length."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray


# ---- figures ---------------------------------------------------------------------------------------------------


def curve(run: Run, metric: str, x_axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, value) of the rows that have a number for both."""
    pairs = [(row.get(x_axis), row.get(metric)) for row in run.rows]
    pairs = [pair for pair in pairs if None not in pair]
    return np.array([x for x, _ in pairs], float), np.array([y for _, y in pairs], float)


def figures(run: Run, sweep: Sweep) -> dict[str, float | None]:
    """Return {column: number} of a run.

    A number is None if the run does not have it, or if a threshold may have been reached in lost rows.
    """
    found: dict[str, float | None] = {}
    for metric in sweep.named_metrics():
        _, y = curve(run, metric, ITERATION)
        best = np.min if metric in sweep.lower_is_better else np.max
        found[f"{metric} last"] = float(y[-1]) if len(y) else None
        if metric in sweep.metrics:
            found[f"{metric} best"] = float(best(y)) if len(y) else None
    for metric, threshold in sweep.thresholds.items():
        x, y = curve(run, metric, sweep.x_axis)
        reached = y <= threshold if metric in sweep.lower_is_better else y >= threshold
        is_known = reached.any() and not run.lost_rows
        found[f"{sweep.x_axis} to {metric} {threshold:g}"] = float(x[reached][0]) if is_known else None
    return found | dict(run.after)


def groups(runs: Sequence[Run]) -> dict[tuple, list[Run]]:
    """Return the runs by stage and by point without the seed, in the order of each group's first run."""
    found: dict[tuple, list[Run]] = {}
    for run in runs:
        settings = ((k, _hashable(v)) for k, v in sorted(run.point.items()) if k != SEED)
        found.setdefault((run.stage, *settings), []).append(run)
    return found


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
    if not any(field in run.point for run in runs) or not any(len(curve(run, metric, ITERATION)[1]) for run in runs):
        raise ValueError(f"field={field!r} and metric={metric!r} must each be in some run")
    if lost := [run.name for run in runs if run.lost_rows]:
        said = f"{len(lost)} runs have lost rows, and choose no {field} where others can: {', '.join(lost)}"
        print(f"warning: {said}", file=sys.stderr)
    scores: dict[tuple, list[tuple[tuple[bool, float], Point]]] = {}
    for members in groups(runs).values():
        point = {k: v for k, v in members[0].point.items() if k != SEED}
        rest = tuple((k, _hashable(v)) for k, v in sorted(point.items()) if k != field)
        whole = [run for run in members if not run.lost_rows]
        values = [curve(run, metric, ITERATION)[1] for run in whole or members]
        score = float(np.mean([float(np.mean(y)) if len(y) else -np.inf for y in values]))
        scores.setdefault(rest, []).append(((bool(whole), score), point))
    return [max(found, key=lambda scored: scored[0])[1] for found in scores.values()]


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool)) else repr(value)


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band | None:
    """Return the quartiles of the curves at every x of any curve.

    Each curve is interpolated linearly between its points. Return None if no curve has a point. Each curve's x must
    increase.
    """
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return None
    x = np.unique(np.concatenate([x for x, _ in curves]))
    at = np.stack([np.interp(x, own_x, y, left=np.nan, right=np.nan) for own_x, y in curves])
    return Band(x, *np.nanquantile(at, (0.25, 0.5, 0.75), axis=0))


def _median(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y [points]: the median of the curves at the first curve's own x, within the range of all curves."""
    x = curves[0][0]
    x = x[(x >= max(own[0] for own, _ in curves)) & (x <= min(own[-1] for own, _ in curves))]
    return x, np.median([np.interp(x, *each) for each in curves], axis=0)


def front(points: Sequence[tuple[float, float]], *, lower_x: bool, lower_y: bool) -> list[int]:
    """Return the indices of the Pareto-optimal points, sorted by the first figure."""
    signed = [(x if lower_x else -x, y if lower_y else -y) for x, y in points]
    return sorted(
        (i for i, p in enumerate(signed) if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in signed)),
        key=lambda i: points[i],
    )


@dataclasses.dataclass(frozen=True)
class Knob:
    """Effect of a setting on a figure, over all runs that differ in the setting.

    Attributes:
        rows: (value, runs, mean, low, high) of each value. low and high bound 95 % of the resampled means. They are NaN
            for fewer than ``FEWEST_RUNS`` runs.
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

    Runs are resampled with replacement, whatever their other settings. With randomly drawn settings, the other settings
    are alike on average. The best and the worst value are chosen on the original runs, which favours one of several
    similar values a little.

    Args:
        column: a column of ``figures``; runs without a number are left out.

    Source: percentile bootstrap, Efron 1979; for settings of reinforcement learning, after the statistical diagnosis of
        1,370 random configurations of web agents.
    """
    measured = [(run, value) for run in runs if (value := figures(run, sweep)[column]) is not None]
    y, found = np.array([value for _, value in measured]), []
    picks = np.random.default_rng(0).integers(0, len(y), (RESAMPLES, len(y))) if len(y) else None
    for field in sweep.fields():
        values = _bins([run.point.get(field) for run, _ in measured])
        names = list(dict.fromkeys(values))
        if field == SEED or not 2 <= len(names) <= MOST_NAMES:
            continue
        member = np.array([[value == name for value in values] for name in names])
        means = member @ y / member.sum(axis=1)
        drawn = member[:, picks]  # [names, resamples, runs]
        with np.errstate(invalid="ignore"):
            resampled = (drawn * y[picks]).sum(axis=2) / drawn.sum(axis=2)
        enough = member.sum(axis=1) >= FEWEST_RUNS
        bounds = np.where(enough, np.nanquantile(resampled, (0.025, 0.975), axis=1), np.nan)
        rows = list(zip(names, member.sum(axis=1).tolist(), means.tolist(), *bounds.tolist(), strict=True))
        best, worst = means.argmax(), means.argmin()
        if column.removesuffix(" last").removesuffix(" best") in sweep.lower_is_better:
            best, worst = worst, best
        spread = np.nanquantile(resampled[best] - resampled[worst], (0.025, 0.975))
        spread = np.where(enough[best] and enough[worst], spread, np.nan).tolist()
        found.append(Knob(field, rows, (float(means[best] - means[worst]), *spread)))
    return sorted(found, key=lambda knob: -abs(knob.effect[0]))


def _bins(values: Sequence[Any]) -> list[str]:
    """Return a name for each value: the value itself, or its third if there are many different numbers."""
    numbers = [value for value in values if value is not None]  # None: the point does not set it
    if len(set(map(_hashable, values))) <= MOST_VALUES or not all(isinstance(v, (int, float)) for v in numbers):
        return [str(value) for value in values]
    edges = np.quantile(numbers, (0, 1 / 3, 2 / 3, 1))
    names = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    third = lambda value: names[int(np.searchsorted(edges[1:3], value, side="right"))]
    return [str(value) if value is None else third(value) for value in values]


# ---- table.csv -------------------------------------------------------------------------------------------------


def write_table(path: pathlib.Path, runs: Sequence[Run], sweep: Sweep) -> None:
    """Write one line per point: its settings, its progress, its figures. A missing value is an empty cell."""
    fields = sweep.fields()
    lines = []
    for run in runs:
        settings = {field: run.point.get(field) for field in fields}
        done = run.rows[-1][ITERATION] if run.rows else 0
        about = {"point": run.name, "label": sweep.called(run.point), "status": run.status, "iterations": done}
        about |= {"lost_rows": run.lost_rows} if any(run.lost_rows for run in runs) else {}
        line = about | ({"stage": run.stage} if sweep.then else {}) | settings | figures(run, sweep)
        lines.append({column: _no_formula(value) for column, value in line.items()})
    writer = csv.DictWriter(text := io.StringIO(), list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    bucket.write_whole(path, text.getvalue())


def _no_formula(value: Any) -> Any:
    """Return the value of a cell. A text that a spreadsheet would compute gets an apostrophe before it."""
    return "'" + value if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else value


# ---- sweep.html ------------------------------------------------------------------------------------------------


def write_page(path: pathlib.Path, runs: Sequence[Run], sweep: Sweep, units: Mapping[str, str]) -> pathlib.Path:
    """Write the page. ``units`` maps a metric's name to its unit."""
    begun, ended = [run for run in runs if run.rows], [run for run in runs if run.status == "finished"]
    counts = {status: sum(run.status == status for run in runs) for status in ("finished", "unfinished", "failed")}
    note = f"{len(runs)} points: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if lost := sum(run.lost_rows > 0 for run in runs):
        note += f"; {lost} without rows that another machine's disk has: see their status"
    title = path.resolve().parent.name
    sections = [
        page.header(title, note),
        page.section("Median over the seeds that have ended", _group_table(ended, sweep)),
        page.section(f"What each setting does to {page.text(sweep.metrics[0])}", _knob_table(ended, sweep)),
        *_curve_sections(begun, sweep, units),
        page.section("Trade-offs of last values", _trade_offs(ended, sweep, units)),
        page.section(
            f"Sigmoids of {page.text(sweep.metrics[0])} over {page.text(sweep.x_axis)}", _fit_table(ended, sweep, units)
        ),
        page.section("Made with", _record_table(begun)),
        page.section("Points", _point_table(runs, sweep)),
    ]
    return page.write_page(path, title, sections)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _shown(run: Run, sweep: Sweep, *, without: str = "") -> str:
    return page.text(f"{run.stage}: " * bool(sweep.then) + sweep.called(run.point, without=without))


def _group_table(runs: Sequence[Run], sweep: Sweep) -> str:
    if not runs:
        return ""
    rows = []
    columns = list(figures(runs[0], sweep))
    for members in groups(runs).values():
        cells = [_shown(members[0], sweep), str(len(members))]
        all_figures = [figures(run, sweep) for run in members]
        for column in columns:
            numbers = [number for row in all_figures if (number := row[column]) is not None]
            cells.append(_quartiles(numbers, len(members)))
        rows.append(page.row(*cells))
    return page.table(("settings", "seeds", *map(page.text, columns)), rows, "groups")


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

    It uses the first stage, which tried all values. It is empty if only the seed differs.
    """
    rows, first = [], [run for run in runs if run.stage == FIRST]
    for knob in knobs(first, sweep, f"{sweep.metrics[0]} last"):
        effect, bounds = _bounded(*knob.effect)
        about = f"<td rowspan={len(knob.rows)}>{page.text(knob.field)}</td>"
        about += f"<td rowspan={len(knob.rows)}>{effect}{bounds}</td>"
        for name, count, *numbers in knob.rows:
            cells = f"<td>{page.text(name)}</td><td>{count}</td><td>{''.join(_bounded(*numbers))}</td>"
            rows.append(f"<tr>{about}{cells}</tr>")
            about = ""
    head = ("setting", "best less worst", "value", "runs", "mean, and 95 % of bootstrapped means")
    return page.table(head, rows, "knobs")


def _bounded(value: float, low: float, high: float) -> tuple[str, str]:
    bounds = f" <small>{_number(low)} to {_number(high)}</small>" if math.isfinite(low + high) else ""
    return _number(value), bounds or " <small>too few runs</small>"


def _fit_table(runs: Sequence[Run], sweep: Sweep, units: Mapping[str, str]) -> str:
    """Return a table of sigmoids fitted to each group's median curve of the first metric, the highest ceiling first.

    Every run of a group needs enough points of its own. The median is fitted at the x of the first run, within the
    range of all runs. R0 is the median of the runs' start values. Groups with an unknown start value are listed below
    the table.
    """
    metric = sweep.metrics[0]
    found = []
    unknown = []
    highest = 1.0 if units.get(metric) == "fraction" else np.inf
    for members in groups(runs).values():
        curves = [curve(run, metric, sweep.x_axis) for run in members]
        if metric in sweep.lower_is_better or not all(fits.is_long_enough(x) for x, _ in curves):
            continue
        x, y = _median(curves)
        starts = [start for run in members if (start := run.before.get(metric)) is not None]
        if len(starts) < len(members):
            unknown.append(_shown(members[0], sweep))
        elif sigmoid := fits.fit(x, y, start=float(np.median(starts)), highest=highest):
            found.append((_shown(members[0], sweep), sigmoid))
    found.sort(key=lambda pair: -pair[1].ceiling)
    rows = [page.row(name, *map(_number, (f.ceiling, f.middle, f.steepness, f.error))) for name, f in found]
    head = ("settings", "ceiling A", "middle", "steepness B", "error on the second half, from the first")
    left_out = f"<p>Not fitted, for no file says what they began with: {'; '.join(unknown)}.</p>" if unknown else ""
    return page.table(head, rows, "fits") + left_out


def _record_table(runs: Sequence[Run]) -> str:
    """Return a table of runs by version. Several lines mean that the sweep mixes commits or versions."""
    records: dict[str, list[Run]] = {}
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.made_with.get("versions", {}).items())
        commit, devices = (run.made_with.get(name) or "unknown" for name in ("commit", "devices"))
        records.setdefault(f"commit {commit}; {devices}; {versions}", []).append(run)
    return page.table(
        ("runs", "made with"), [page.row(str(len(of)), page.text(record)) for record, of in records.items()]
    )


def _point_table(runs: Sequence[Run], sweep: Sweep) -> str:
    head = ("point", "status", *sweep.fields(), *figures(runs[0], sweep))
    rows = []
    for run in runs:
        settings = [page.text(run.point.get(field, "")) for field in sweep.fields()]
        numbers = [_number(value) for value in figures(run, sweep).values()]
        status = run.status + (f", {run.lost_rows} rows lost" if run.lost_rows else "")
        rows.append(page.row(f"<code>{page.text(run.name)}</code>", status, *settings, *numbers))
    return page.folded(f"{len(runs)} points", page.table([page.text(h) for h in head], rows))


def _curve_sections(runs: Sequence[Run], sweep: Sweep, units: Mapping[str, str]) -> list[str]:
    pictures = {metric: _curves(runs, sweep, metric, units) for metric in sweep.metrics}
    if sweep.facet:
        return [page.section(page.text(metric), page.figures(some)) for metric, some in pictures.items()]
    return [page.section("Curves", page.figures(list(itertools.chain.from_iterable(pictures.values()))))]


def _curves(runs: Sequence[Run], sweep: Sweep, metric: str, units: Mapping[str, str]) -> list[str]:
    """Return one picture per x-axis and value of the facet.

    A group keeps its colour, and all pictures share their scales.
    """
    pictures = []
    for x_axis in dict.fromkeys((ITERATION, sweep.x_axis)):
        facets: dict[Any, dict[str, Band]] = {}
        for members in groups(runs).values():
            drawn = band([curve(run, metric, x_axis) for run in members])
            if drawn is not None:
                label = _shown(members[0], sweep, without=sweep.facet)
                facets.setdefault(_hashable(members[0].point.get(sweep.facet, "")), {})[label] = drawn
        labels = list(dict.fromkeys(label for bands in facets.values() for label in bands))
        every = [b for bands in facets.values() for b in bands.values()]
        limits = _limits([b.x for b in every]), _limits([edge for b in every for edge in (b.low, b.high)])
        for number, (value, bands) in enumerate(facets.items()):
            draw = functools.partial(_draw_bands, bands=bands, labels=labels, limits=limits)
            svg = page.picture(
                draw,
                label=f"{metric} over {x_axis}",
                x_label=x_axis,
                salt=f"{metric} {x_axis} {number}",
                whole_x=x_axis == ITERATION,
            )
            title = page.text(f"{sweep.facet.rsplit('.', 1)[-1]} {value}" if sweep.facet else metric)
            if len(bands) == 1 < len(labels):
                title += f" | {next(iter(bands))}"  # a picture with one line has no legend
            keys = [(i, label, "line") for i, label in enumerate(labels) if label in bands]
            pictures.append(page.figure(title, page.text(units.get(metric, "")), page.legend(keys), svg))
    return pictures


def _limits(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the ends of an axis that contains all values, with a margin."""
    low, high = min((v.min() for v in values), default=0.0), max((v.max() for v in values), default=1.0)
    margin = 0.05 * (high - low) or 0.5
    return float(low - margin), float(high + margin)


def _draw_bands(axes: Any, *, bands: Mapping[str, Band], labels: Sequence[str], limits: Sequence[tuple]) -> None:
    for i, label in enumerate(labels):
        if label in bands:
            b, (colour, dash) = bands[label], page.stroke(i)
            marker = "o" if len(b.x) < 3 else ""
            axes.plot(b.x, b.median, color=colour, linestyle=dash, linewidth=1.6, marker=marker, markersize=4)
            axes.fill_between(b.x, b.low, b.high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])


def _trade_offs(runs: Sequence[Run], sweep: Sweep, units: Mapping[str, str]) -> str:
    pictures = []
    for across, up in sweep.pareto:
        spots = {}
        for members in groups(runs).values():
            pairs = []
            for run in members:
                numbers = figures(run, sweep)
                x = numbers[f"{across} last"]
                y = numbers[f"{up} last"]
                if x is not None and y is not None:
                    pairs.append((x, y))
            if pairs:
                spots[_shown(members[0], sweep)] = np.quantile(pairs, (0.25, 0.5, 0.75), axis=0)
        if spots:
            draw = functools.partial(_draw_trade_off, spots=spots, sweep=sweep, across=across, up=up)
            svg = page.picture(
                draw, label=f"{up} against {across}", x_label=across, salt=f"{across} {up}", whole_x=False
            )
            pictures.append(page.figure(page.text(up), page.text(units.get(up, "")), "", svg))
    return page.figures(pictures)


def _draw_trade_off(axes: Any, *, spots: Mapping[str, np.ndarray], sweep: Sweep, across: str, up: str) -> None:
    """Draw every group with its quartiles. The Pareto-optimal groups are connected and labelled."""
    medians = [(q[1, 0], q[1, 1]) for q in spots.values()]
    best = front(medians, lower_x=across in sweep.lower_is_better, lower_y=up in sweep.lower_is_better)
    for i, (label, q) in enumerate(spots.items()):
        (x, y), spread = q[1], np.abs(q[[0, 2]] - q[1])
        colour = SERIES[0] if i in best else FAINT
        axes.errorbar(x, y, xerr=spread[:, :1].reshape(2, 1), yerr=spread[:, 1:], fmt="o", color=colour, markersize=4)
        if i in best:
            # Shorten long names, which would fill the picture. The table has the full name.
            name = textwrap.shorten(html.unescape(label), 40, placeholder=" ...")
            axes.annotate(
                name, (x, y), xytext=(3, 4), textcoords="offset points", fontsize=6, color=INK, parse_math=False
            )
    x, y = zip(*(medians[i] for i in best), strict=True)
    axes.plot(x, y, color=SERIES[0], linewidth=1)
