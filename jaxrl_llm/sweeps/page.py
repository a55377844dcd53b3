"""Page of a sweep: its groups, the effects of its settings, curves, trade-offs, fits and points.

Owns: the content of sweep.html. Does not know: how the figures are computed (table, fits), the style (reports.page).
"""

from __future__ import annotations

import collections
import functools
import html
import itertools
import math
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.reports import page
from jaxrl_llm.reports.page import FAINT, INK, SERIES
from jaxrl_llm.sweeps import fits
from jaxrl_llm.sweeps.effects import knobs
from jaxrl_llm.sweeps.points import Sweep
from jaxrl_llm.sweeps.table import (
    FIRST,
    ITERATION,
    QUARTILES,
    Band,
    Run,
    band,
    curve,
    figures,
    front,
    groups,
    hashable,
    median_curve,
)

Units = Mapping[str, str]  # metric -> its unit


def write_page(path: pathlib.Path, runs: Sequence[Run], sweep: Sweep, units: Units) -> pathlib.Path:
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
    by_status = ", ".join(counts)
    note = f"{len(runs)} points: {by_status}"
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
            cells.append(_quartiles(values))
        rows.append(page.row(*cells))
    head = ("settings", "seeds", *map(page.text, columns))
    return page.table(head, rows, "groups")


def _quartiles(values: Sequence[float | None]) -> str:
    """Return the median as HTML, with the quartiles and the number of runs that have a number.

    Args:
        values: one per run; None = the run does not have the number.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    low, median, high = np.quantile(numbers, QUARTILES)
    text = _number(median)
    if len(numbers) > 1:
        text += f" {_range(low, high)}"
    if len(numbers) < len(values):
        text += f" <small>{len(numbers)} of {len(values)}</small>"
    return text


def _range(low: float, high: float) -> str:
    return f"<small>{_number(low)} to {_number(high)}</small>"


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
        field = page.text(knob.field)
        effect = _with_bounds(*knob.effect)
        setting_cells = f"{span}{field}</td>{span}{effect}</td>"
        for value, count, mean, low, high in knob.rows:
            name = page.text(value)
            number = _with_bounds(mean, low, high)
            cells = f"<td>{name}</td><td>{count}</td><td>{number}</td>"
            rows.append(f"<tr>{setting_cells}{cells}</tr>")
            setting_cells = ""
    head = ("setting", "best less worst", "value", "runs", "mean, and 95 % of bootstrapped means")
    return page.table(head, rows, "knobs")


def _with_bounds(value: float, low: float, high: float) -> str:
    """Return a number and its interval as HTML. Infinite or missing bounds mean that there are too few runs."""
    if math.isfinite(low + high):
        return f"{_number(value)} {_range(low, high)}"
    return f"{_number(value)} <small>too few runs</small>"


def _fit_table(runs: Sequence[Run], sweep: Sweep, units: Units) -> str:
    """Return a table of sigmoids fitted to each group's median curve of the first metric, the highest ceiling first.

    Every run of a group needs enough points. The median is fitted at the x of the first run, within the
    range of all runs. R0 is the median of the runs' start values. Groups with an unknown start value are listed below
    the table.
    """
    metric = sweep.metrics[0]
    if metric in sweep.lower_is_better:
        return ""
    sigmoids: list[tuple[str, fits.Sigmoid]] = []
    without_start = []
    is_fraction = units.get(metric) == "fraction"
    highest = 1.0 if is_fraction else np.inf
    for members in groups(runs).values():
        curves = [curve(run, metric, sweep.x_axis) for run in members]
        if not all(fits.is_long_enough(x) for x, _ in curves):
            continue
        label = _label(members[0], sweep)
        start = _median_start(members, metric)
        if start is None:
            without_start.append(label)
            continue
        x, y = median_curve(curves)
        sigmoid = fits.fit(x, y, start=start, highest=highest)
        if sigmoid:
            sigmoids.append((label, sigmoid))
    sigmoids.sort(key=_ceiling, reverse=True)
    rows = []
    for label, sigmoid in sigmoids:
        cells = [
            _number(sigmoid.ceiling),
            _number(sigmoid.middle),
            _number(sigmoid.steepness),
            _number(sigmoid.error),
        ]
        rows.append(page.row(label, *cells))
    head = ("settings", "ceiling A", "middle", "steepness B", "error on the second half, from the first")
    text = page.table(head, rows, "fits")
    if without_start:
        labels = "; ".join(without_start)
        text += f"<p>Not fitted, because no file has their start value: {labels}.</p>"
    return text


def _median_start(runs: Sequence[Run], metric: str) -> float | None:
    """Return the median of the runs' start values, or None if a run has none."""
    starts = []
    for run in runs:
        start = run.before.get(metric)
        if start is None:
            return None
        starts.append(start)
    return float(np.median(starts))


def _ceiling(labelled: tuple[str, fits.Sigmoid]) -> float:
    _, sigmoid = labelled
    return sigmoid.ceiling


def _record_table(runs: Sequence[Run]) -> str:
    """Return a table of runs by version. Several lines mean that the sweep mixes commits or versions."""
    counts: collections.Counter[str] = collections.Counter()
    for run in runs:
        made_with = run.made_with
        packages = []
        for name, version in made_with.get("versions", {}).items():
            packages.append(f"{name} {version}")
        versions = ", ".join(packages)
        commit = made_with.get("commit") or "unknown"
        devices = made_with.get("devices") or "unknown"
        counts[f"commit {commit}; {devices}; {versions}"] += 1
    rows = []
    for record, count in counts.items():
        rows.append(page.row(str(count), page.text(record)))
    return page.table(("runs", "made with"), rows)


def _point_table(runs: Sequence[Run], sweep: Sweep) -> str:
    fields = sweep.fields()
    columns = list(figures(runs[0], sweep))
    rows = []
    for run in runs:
        settings = [page.text(run.point.get(field, "")) for field in fields]
        numbers = [_number(value) for value in figures(run, sweep).values()]
        status = run.status
        if run.lost_rows:
            status += f", {run.lost_rows} rows lost"
        name = f"<code>{page.text(run.name)}</code>"
        rows.append(page.row(name, status, *settings, *numbers))
    head = [page.text(column) for column in ("point", "status", *fields, *columns)]
    table = page.table(head, rows)
    return page.folded(f"{len(runs)} points", table)


def _curve_sections(runs: Sequence[Run], sweep: Sweep, units: Units) -> list[str]:
    """Return one section per metric if the sweep has a facet, else one section with all curves."""
    sections = []
    all_pictures = []
    for metric in sweep.metrics:
        pictures = _curves(runs, sweep, metric, units)
        sections.append(page.section(page.text(metric), page.figures(pictures)))
        all_pictures += pictures
    if sweep.facet:
        return sections
    return [page.section("Curves", page.figures(all_pictures))]


def _curves(runs: Sequence[Run], sweep: Sweep, metric: str, units: Units) -> list[str]:
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
            keys = []
            for i, label in enumerate(labels):
                if label in bands:
                    keys.append((i, label, "line"))
            pictures.append(page.figure(title, unit, page.legend(keys), svg))
    return pictures


Bands = dict[str, Band]  # by the label of the group


def _bands_by_facet(runs: Sequence[Run], sweep: Sweep, metric: str, x_axis: str) -> dict[Any, Bands]:
    """Return the band of each group by the value of the facet and by the label of the group."""
    facets: dict[Any, Bands] = {}
    for members in groups(runs).values():
        band_of_group = band([curve(run, metric, x_axis) for run in members])
        if band_of_group is None:
            continue
        label = _label(members[0], sweep, without=sweep.facet)
        value = hashable(members[0].point.get(sweep.facet, ""))
        facets.setdefault(value, {})[label] = band_of_group
    return facets


# Ends of the x-axis and of the y-axis.
Limits = tuple[tuple[float, float], tuple[float, float]]


def _limits_of_facets(facets: Mapping[Any, Bands]) -> Limits:
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


def _draw_bands(axes: Any, *, bands: Bands, labels: Sequence[str], limits: Limits) -> None:
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


def _trade_offs(runs: Sequence[Run], sweep: Sweep, units: Units) -> str:
    pictures = []
    for x_metric, y_metric in sweep.pareto:
        quartiles = {}
        for members in groups(runs).values():
            pairs = _last_pairs(members, sweep, x_metric, y_metric)
            if pairs:
                label = _label(members[0], sweep)
                quartiles[label] = np.quantile(pairs, QUARTILES, axis=0)
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
    for _, median, _ in quartiles.values():
        x, y = median
        medians.append((x, y))
    optimal = front(medians, lower_x=lower_x, lower_y=lower_y)
    for i, (label, (low, median, high)) in enumerate(quartiles.items()):
        x, y = median
        errors = np.abs(np.stack([low, high]) - median)
        x_error, y_error = errors.T
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
    front_x = [medians[i][0] for i in optimal]
    front_y = [medians[i][1] for i in optimal]
    axes.plot(front_x, front_y, color=SERIES[0], linewidth=1)
