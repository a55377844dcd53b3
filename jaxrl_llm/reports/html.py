"""The report of a run: DIR/report.html, one self-contained page.

Reads metrics.jsonl of the run. If they exist, also reads config.json, eval_before.json, eval_after.json and
samples.jsonl.

Owns: the content of the page. Does not know: its appearance (page), how the run was made.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.config import Config, ConfigError, flatten, recorded
from jaxrl_llm.reports import page
from jaxrl_llm.reports.charts import CHARTS, Chart
from jaxrl_llm.reports.metrics import METRICS, read_metrics
from jaxrl_llm.reports.page import SERIES
from jaxrl_llm.reports.records import ANSWER_FIELDS, read_evaluation, read_samples
from jaxrl_llm.runtime.checkpoint_files import step_of
from jaxrl_llm.runtime.run_record import read_run_record
from jaxrl_llm.settings.schema import function_defaults

Rows = list[dict[str, Any]]
Series = tuple[str, list[tuple[int, float]]]  # the colour and the points (iteration, value) of a line
# Shown below the iteration axis, because iterations that reuse rollouts cost less compute than other iterations.
COMPUTE_AXIS = "iteration / compute until then: sum of B + mu R, in rollouts trained"


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
    """Write ``workdir/report.html`` from the files of the run and return its path.

    Raises:
        ConfigError: metrics.jsonl is missing or empty, or a file of the run cannot be read.
    """
    workdir = pathlib.Path(workdir)
    metrics = read_metrics(workdir)
    if not metrics:
        raise ConfigError(f"{workdir / 'metrics.jsonl'} is empty: no iteration was finished")
    record_path = workdir / "config.json"
    record = read_run_record(record_path) if record_path.is_file() else None
    try:
        config = recorded(record.settings) if record is not None else None
    except ConfigError as error:
        raise ConfigError(f"{record_path}: {error}") from None
    before = read_evaluation(workdir / "eval_before.json")
    after = read_evaluation(workdir / "eval_after.json")
    samples = read_samples(workdir / "samples.jsonl")
    last = max(metrics[-1]["iteration"], _newest_checkpoint(workdir))
    subtitle = ""
    if config is not None:
        if last < config.num_iterations:
            after = None  # the run is not finished: the file comes from an earlier, shorter run
        subtitle = f"{config.model.path} on {config.prompts.name or config.prompts.source}, seed {config.seed}"
    made_with = (record.made_with or {}) if record is not None else {}
    title = workdir.resolve().name
    sections = [
        page.header(title, subtitle),
        _cards(metrics, config, before, after, last),
        page.section("Curves", _charts(metrics)),
        page.section("Before and after", _before_after(before, after)),
        page.section("Rollouts during training", _rollouts(samples)),
        page.section("Settings", _settings(config) if config is not None else ""),
        page.section("Made with", _made_with(made_with)),
        page.section("What the metrics mean", _glossary()),
    ]
    return page.write_page(workdir / "report.html", title, sections)


def _newest_checkpoint(workdir: pathlib.Path) -> int:
    """Return the iteration of the newest checkpoint, 0 if there is none."""
    newest = 0
    for path in workdir.glob("checkpoints/*"):
        step = step_of(path.name)
        if step is not None:
            newest = max(newest, step)
    return newest


def _made_with(made_with: Mapping[str, Any]) -> str:
    """Return a table of versions, commit, devices and processor, as recorded in config.json."""
    named = dict(made_with.get("versions", {}))
    for name in ("commit", "devices", "processor"):
        named[name] = made_with.get(name, "")
    rows = []
    for name, value in named.items():
        if value:
            rows.append(page.row(page.text(name), page.text(value)))
    return page.table(("package", "version"), rows)


def _glossary() -> str:
    """Return a folded table of all metrics."""
    rows = []
    for name, metric in METRICS.items():
        rows.append(page.row(f"<code>{name}</code>", page.text(metric.unit), page.text(metric.meaning)))
    return page.folded(f"{len(METRICS)} metrics", page.table(("name", "unit", "meaning"), rows))


def _points(metrics: Rows, name: str) -> list[tuple[int, float]]:
    """Return (iteration, value) for each row in which the metric is a number."""
    points = []
    for row in metrics:
        value = row.get(name)
        if value is not None:
            points.append((row["iteration"], value))
    return points


def _values(metrics: Rows, name: str) -> list[float]:
    """Return the values of a metric that are numbers, in the order of the iterations."""
    return [value for _, value in _points(metrics, name)]


def _cards(
    metrics: Rows,
    config: Config | None,
    before: dict | None,
    after: dict | None,
    last: int,
) -> str:
    """Return the cards with the most important numbers. ``last`` is the last finished iteration."""
    pass_rates, note = _pass_rates(metrics, before, after)
    cards = [
        _first_and_last("Pass rate", pass_rates, ".0%", note),
        _first_and_last("Reward", _values(metrics, "rollout/reward_mean"), ".2f"),
        _first_and_last("Entropy, nats", _values(metrics, "update/entropy_nats"), ".2f"),
        _first_and_last("Completion, tokens", _values(metrics, "rollout/completion_length_tokens"), ".1f"),
    ]
    planned = f"of {config.num_iterations} planned" if config is not None else ""
    num_missing = last - len(metrics)
    if num_missing:
        planned += f"; {num_missing} more are not in metrics.jsonl"
    cards.append(_card("Iterations", f"{len(metrics)}", planned))
    seconds = sum(_values(metrics, "time/iteration_s"))
    if seconds:
        generated = sum(_values(metrics, "tokens/generated"))
        note = f"{generated:,.0f} tokens generated" if generated else ""
        cards.append(_card("Wall time", _duration(seconds), note))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(title: str, value: str, note: str = "") -> str:
    return f'<div class="card"><span>{title}</span><b>{value}</b><small>{note}</small></div>'


def _first_and_last(title: str, values: list[float], form: str, note: str = "first and last iteration") -> str:
    """Return a card with the first and the last value, with the only value, or "" without values."""
    if not values:
        return ""
    ends = [values[0]]
    if len(values) > 1:
        ends.append(values[-1])
    return _card(title, " <i>&rarr;</i> ".join(format(value, form) for value in ends), note)


def _pass_rates(metrics: Rows, before: dict | None, after: dict | None) -> tuple[list[float], str]:
    """Return the pass rates of the first source that has two values, and its name.

    If no source has two values, the first source with one value is used.
    """
    evaluated = []
    for evaluation in (before, after):
        if evaluation is not None and evaluation.get("pass_rate") is not None:
            evaluated.append(evaluation["pass_rate"])
    by_source = {
        "held-out, before and after": evaluated,
        "held-out, first and last": _values(metrics, "eval/pass_rate"),
        "training rollouts, first and last": _values(metrics, "rollout/pass_rate"),
    }
    for num_values in (2, 1):
        for source, rates in by_source.items():
            if len(rates) >= num_values:
                return rates, source
    return [], ""


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {seconds} s"
    return f"{seconds} s"


def _compute_at(metrics: Rows) -> Callable[[float], str] | None:
    """Return a function from an iteration to the compute spent until then, as text.

    The text is "" for a number that is not an iteration. Return None if the run did not measure its compute.
    """
    compute = dict(_points(metrics, "time/compute_rollouts"))
    if not compute:
        return None

    def shown(x: float) -> str:
        if x not in compute:
            return ""
        spent = compute[x]
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if spent >= size:
                return f"{spent / size:.3g}{unit}"
        return f"{spent:.3g}"

    return shown


def _charts(metrics: Rows) -> str:
    figures = []
    compute_at = _compute_at(metrics)
    axis = COMPUTE_AXIS if compute_at else "iteration"
    for chart in CHARTS:
        series: list[Series] = []
        keys = []
        for number, (label, name) in enumerate(chart.lines.items()):
            points = _points(metrics, name)
            if points:
                series.append((SERIES[number], points))
                keys.append((number, label, "line"))
        if not series:
            continue
        if chart.dots and _points(metrics, chart.dots[1]):
            keys.append((len(chart.lines), chart.dots[0], "dot"))
        draw = functools.partial(_draw, chart=chart, metrics=metrics, series=series)
        svg = page.picture(draw, label=chart.title, x_label=axis, salt=chart.title, second_x=compute_at)
        figures.append(page.figure(chart.title, chart.unit, page.legend(keys), svg))
    return page.figures(figures)


def _draw(axes: Any, *, chart: Chart, metrics: Rows, series: list[Series]) -> None:
    """Draw a chart on ``axes``."""
    if chart.stacked:
        _draw_stack(axes, series)
    else:
        half_widths = dict(_points(metrics, chart.band))
        _draw_lines(axes, series, half_widths)
    points = _points(metrics, chart.dots[1]) if chart.dots else []
    if points:
        axes.plot(
            *zip(*points, strict=True),
            "o-",
            color=SERIES[len(chart.lines)],
            markersize=5,
            linewidth=1,
            clip_on=False,
            zorder=3,
        )
    axes.set_ylim(*chart.limits)


def _draw_lines(axes: Any, series: list[Series], half_widths: dict[int, float]) -> None:
    """Draw one line per series, and a band around the first line at the iterations that have a half-width."""
    for colour, points in series:
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            solid_capstyle="round",
            linewidth=1.8,
            marker="o" if len(points) < 3 else "",
            markersize=4,
        )
    _, first_points = series[0]
    band = []
    for iteration, value in first_points:
        if iteration in half_widths:
            half_width = half_widths[iteration]
            band.append((iteration, value - half_width, value + half_width))
    if band:
        axes.fill_between(*zip(*band, strict=True), color=SERIES[0], alpha=0.15, linewidth=0)


def _draw_stack(axes: Any, series: list[Series]) -> None:
    """Draw the series stacked, so that the top line is their sum in each iteration."""
    iterations = np.unique([iteration for _, points in series for iteration, _ in points])
    edges = np.append(iterations - 0.5, iterations[-1] + 0.5)
    baseline = np.zeros(len(iterations))
    for colour, points in series:
        by_iteration = dict(points)
        heights = [by_iteration.get(iteration, 0.0) for iteration in iterations.tolist()]
        top = baseline + heights
        # Draw all iterations as one shape, because one bar per iteration takes seconds from a thousand iterations on.
        axes.stairs(top, edges, baseline=baseline, fill=True, color=colour)
        baseline = top
    if len(iterations) == 1:
        axes.set_xlim(iterations[0] - 3, iterations[0] + 3)


def _text(value: Any) -> str:
    """Return a prompt or a completion as escaped HTML; the messages of a conversation are joined."""
    if isinstance(value, list):
        value = "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return f"<pre>{page.text(value)}</pre>"


def _reward(value: float | None) -> str:
    """Return a reward as HTML, or "failed" if the reward is not finite."""
    if value is None or not math.isfinite(value):
        return '<span class="reward none">failed</span>'
    kind = "good" if value > 0 else "none"
    return f'<span class="reward {kind}">{value:g}</span>'


def _before_after(before: dict | None, after: dict | None) -> str:
    """Return a table of the first eight questions with their first answers before and after training."""
    cells_before = _first_answers(before)
    cells_after = _first_answers(after)
    rows = []
    for question in {**cells_before, **cells_after}:
        _, prompt = question
        rows.append(page.row(prompt, cells_before.get(question, ""), cells_after.get(question, "")))
    return page.table(("question", "before", "after"), rows, "samples")


def _first_answers(evaluation: dict | None) -> dict[tuple[int, str], str]:
    """Return the first answer to each of the first eight questions, by (number, prompt) of the question, as HTML."""
    if evaluation is None:
        return {}
    answers = {}
    first_samples = evaluation["samples"][:: evaluation["num_samples"]]
    for number, sample in enumerate(first_samples[:8]):
        question = (number, _text(sample["prompt"]))
        answers[question] = _reward(sample["reward"]) + _text(sample["completion"])
    return answers


def _rollouts(samples: Rows) -> str:
    """Return a table of up to four rollouts each of the first and the last iteration in samples.jsonl."""
    if not samples:
        return ""
    rows = []
    for iteration in sorted({samples[0]["iteration"], samples[-1]["iteration"]}):
        of_iteration = [sample for sample in samples if sample["iteration"] == iteration]
        rows += [_rollout_row(sample) for sample in of_iteration[:4]]
    return page.table(("prompt", "completion", ""), rows, "samples")


def _rollout_row(sample: dict[str, Any]) -> str:
    """Return one row of the table of rollouts."""
    facts = [
        f"iteration {sample['iteration']}",
        f"stop: {sample['stop_reason']}",
        f"policy {_plain(sample['policy_version'])}",
        f"age {_plain(sample['age'])}",
    ]
    parts = sample["parts"]
    if len(parts) > 1:
        facts.append(", ".join(f"{name} {_plain(value)}" for name, value in parts.items()))
    notes = "<br>".join(page.text(fact) for fact in facts)
    answer = _reward(sample["reward"]) + _text(sample["completion"])
    return page.row(_text(sample["prompt"]), answer, f"<small>{notes}</small>")


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _settings(config: Config) -> str:
    """Return a visible table of the changed settings and a folded table of the settings at their default."""
    defaults = flatten(Config()) | function_defaults(config)
    changed = []
    unchanged = []
    for name, value in flatten(config).items():
        name_cell = f"<code>{page.text(name)}</code>"
        default = defaults.get(name)
        if value != default:
            changed.append(page.row(name_cell, _json_text(value), _json_text(default)))
        else:
            unchanged.append(page.row(name_cell, _json_text(value)))
    visible_table = page.table(("changed", "value", "default"), changed, "changed")
    folded_table = page.table(("setting", "value"), unchanged)
    return visible_table + page.folded(f"{len(unchanged)} settings at their default", folded_table)


def _json_text(value: Any) -> str:
    return page.text(json.dumps(value, ensure_ascii=False))


def print_samples(workdir: pathlib.Path) -> None:
    """Print three held-out completions of the trained model, or its last three rollouts without an evaluation."""
    evaluation = read_evaluation(workdir / "eval_after.json")
    if evaluation:
        samples = evaluation["samples"][:: evaluation["num_samples"]][:3]
    else:
        samples = read_samples(workdir / "samples.jsonl", ANSWER_FIELDS)[-3:]
    for sample in samples:
        prompt = sample["prompt"]
        if not isinstance(prompt, str):
            prompt = prompt[-1]["content"]
        print(f"  {prompt.strip()!r} -> {sample['completion'].strip()!r}  reward {sample['reward']}")
