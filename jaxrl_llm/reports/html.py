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
from collections.abc import Callable
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
    before = read_evaluation(workdir / "eval_before.json")
    after = read_evaluation(workdir / "eval_after.json")
    samples = read_samples(workdir / "samples.jsonl")
    steps = (step_of(path.name) for path in workdir.glob("checkpoints/*"))
    newest = max((step for step in steps if step is not None), default=0)
    made_with = (record.made_with or {}) if record is not None else {}
    try:
        config = recorded(record.settings) if record is not None else None
    except ConfigError as error:
        raise ConfigError(f"{record_path}: {error}") from None
    title, made_of = workdir.resolve().name, ""
    if config is not None:
        if max(metrics[-1]["iteration"], newest) < config.num_iterations:
            after = None  # the run is not finished: the file comes from an earlier, shorter run
        made_of = f"{config.model.path} on {config.prompts.name or config.prompts.source}, seed {config.seed}"
    # Versions, commit, devices and processor as recorded in config.json.
    names = ("commit", "devices", "processor")
    named = {
        **made_with.get("versions", {}),
        **{name: made_with.get(name, "") for name in names},
    }
    packages = [item for item in named.items() if item[1]]
    rows = [page.row(f"<code>{name}</code>", page.text(x.unit), page.text(x.meaning)) for name, x in METRICS.items()]
    glossary = page.table(("name", "unit", "meaning"), rows)
    sections = [
        page.header(title, made_of),
        _cards(metrics, config, before, after, newest),
        page.section("Curves", _charts(metrics)),
        page.section("Before and after", _before_after(before, after)),
        page.section("Rollouts during training", _rollouts(samples)),
        page.section("Settings", _settings(config) if config is not None else ""),
        page.section(
            "Made with",
            page.table(("package", "version"), [page.row(*map(page.text, x)) for x in packages]),
        ),
        page.section("What the metrics mean", page.folded(f"{len(METRICS)} metrics", glossary)),
    ]
    return page.write_page(workdir / "report.html", title, sections)


def _values(metrics: Rows, name: str) -> list[tuple[int, float]]:
    """Return (iteration, value) for each row in which the metric is a number."""
    return [(row["iteration"], row[name]) for row in metrics if name in row and row[name] is not None]


def _cards(
    metrics: Rows,
    config: Config | None,
    before: dict | None,
    after: dict | None,
    newest: int,
) -> str:
    """Return the cards with the most important numbers. ``newest`` is the iteration of the newest checkpoint."""

    def card(title: str, value: str, note: str = "") -> str:
        return f'<div class="card"><span>{title}</span><b>{value}</b><small>{note}</small></div>'

    def of(name: str) -> list[float]:
        return [value for _, value in _values(metrics, name)]

    rates = {
        "held-out, before and after": [e["pass_rate"] for e in (before, after) if e and e.get("pass_rate") is not None],
        "held-out, first and last": of("eval/pass_rate"),
        "training rollouts, first and last": of("rollout/pass_rate"),
    }
    best = max(rates, key=lambda name: min(len(rates[name]), 2))  # entries below the first one need at least two values
    cards = []
    for title, values, form, note in (
        ("Pass rate", rates[best], ".0%", best),
        ("Reward", of("rollout/reward_mean"), ".2f", "first and last iteration"),
        ("Entropy, nats", of("update/entropy_nats"), ".2f", "first and last iteration"),
        (
            "Completion, tokens",
            of("rollout/completion_length_tokens"),
            ".1f",
            "first and last iteration",
        ),
    ):
        if values:
            ends = [format(value, form) for value in (*values[:1], *values[1:][-1:])]
            cards.append(card(title, " <i>&rarr;</i> ".join(ends), note))
    planned = f"of {config.num_iterations} planned" if config is not None else ""
    if missing := max(metrics[-1]["iteration"], newest) - len(metrics):
        planned += f"; {missing} more are not in metrics.jsonl"
    cards.append(card("Iterations", f"{len(metrics)}", planned))
    if seconds := sum(of("time/iteration_s")):
        generated = sum(of("tokens/generated"))
        cards.append(
            card(
                "Wall time",
                _duration(seconds),
                f"{generated:,.0f} tokens generated" if generated else "",
            )
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours} h {m} min"
    if m:
        return f"{m} min {s} s"
    return f"{s} s"


def _compute_at(metrics: Rows) -> Callable[[float], str] | None:
    """Return a function from an iteration to the compute spent until then, as text.

    The text is "" for a number that is not an iteration. Return None if the run did not measure its compute.
    """
    spent = dict(_values(metrics, "time/compute_rollouts"))

    def shown(x: float) -> str:
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (0, "")):
            if x in spent and spent[x] >= size:
                return f"{spent[x] / (size or 1):.3g}{unit}"
        return ""

    return shown if spent else None


def _charts(metrics: Rows) -> str:
    figures = []
    compute_at = _compute_at(metrics)
    axis = COMPUTE_AXIS if compute_at else "iteration"
    for chart in CHARTS:
        series = [(i, label, _values(metrics, name)) for i, (label, name) in enumerate(chart.lines.items())]
        series = [one for one in series if one[2]]
        if not series:
            continue
        keys = [(i, label, "line") for i, label, _ in series]
        if chart.dots and _values(metrics, chart.dots[1]):
            keys.append((len(chart.lines), chart.dots[0], "dot"))
        draw = functools.partial(
            _draw,
            chart=chart,
            metrics=metrics,
            series=[(SERIES[i], v) for i, _, v in series],
        )
        svg = page.picture(draw, label=chart.title, x_label=axis, salt=chart.title, second_x=compute_at)
        figures.append(page.figure(chart.title, chart.unit, page.legend(keys), svg))
    return page.figures(figures)


def _draw(axes: Any, *, chart: Chart, metrics: Rows, series: list) -> None:
    """Draw a chart on ``axes``. ``series`` has the colour and the points of each line."""
    if chart.stacked:
        _draw_stack(axes, series)
    else:
        _draw_lines(axes, series, dict(_values(metrics, chart.band)))
    if chart.dots and (points := _values(metrics, chart.dots[1])):
        colour = SERIES[len(chart.lines)]
        axes.plot(
            *zip(*points, strict=True),
            "o-",
            color=colour,
            markersize=5,
            linewidth=1,
            clip_on=False,
            zorder=3,
        )
    axes.set_ylim(*chart.limits)


def _draw_lines(axes: Any, series: list, width: dict[int, float]) -> None:
    for colour, values in series:
        style = {
            "linewidth": 1.8,
            "marker": "o" if len(values) < 3 else "",
            "markersize": 4,
        }
        axes.plot(*zip(*values, strict=True), color=colour, solid_capstyle="round", **style)
    if points := [(x, y - width[x], y + width[x]) for x, y in series[0][1] if x in width]:
        axes.fill_between(*zip(*points, strict=True), color=SERIES[0], alpha=0.15, linewidth=0)


def _draw_stack(axes: Any, series: list) -> None:
    """Draw the series stacked, so that the top line is their sum in each iteration."""
    iterations = np.unique([x for _, values in series for x, _ in values])
    floor = np.zeros(len(iterations))
    for colour, values in series:
        known = dict(values)
        top = floor + [known.get(x, 0.0) for x in iterations.tolist()]
        # Draw all iterations as one shape, because one bar per iteration takes seconds from a thousand iterations on.
        axes.stairs(
            top,
            np.append(iterations - 0.5, iterations[-1] + 0.5),
            baseline=floor,
            fill=True,
            color=colour,
        )
        floor = top
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
    answers: dict[tuple[int, str], dict[str, str]] = {}
    for moment, evaluation in (("before", before), ("after", after)):
        for i, sample in enumerate(evaluation["samples"][:: evaluation["num_samples"]][:8] if evaluation else ()):
            cell = _reward(sample["reward"]) + _text(sample["completion"])
            answers.setdefault((i, _text(sample["prompt"])), {})[moment] = cell
    rows = [page.row(prompt, of.get("before", ""), of.get("after", "")) for (_, prompt), of in answers.items()]
    return page.table(("question", "before", "after"), rows, "samples")


def _rollouts(samples: Rows) -> str:
    """Return a table of up to four rollouts each of the first and the last iteration in samples.jsonl."""
    rows = []
    for iteration in sorted({row["iteration"] for row in (*samples[:1], *samples[-1:])}):
        for row in [row for row in samples if row["iteration"] == iteration][:4]:
            parts = ", ".join(f"{name} {_plain(value)}" for name, value in row["parts"].items())
            facts = [
                f"iteration {iteration}",
                f"stop: {row['stop_reason']}",
                f"policy {_plain(row['policy_version'])}",
                f"age {_plain(row['age'])}",
            ]
            if len(row["parts"]) > 1:
                facts.append(parts)
            notes = "<br>".join(map(page.text, facts))
            answer = _reward(row["reward"]) + _text(row["completion"])
            rows.append(page.row(_text(row["prompt"]), answer, f"<small>{notes}</small>"))
    return page.table(("prompt", "completion", ""), rows, "samples")


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _settings(config: Config) -> str:
    """Return a visible table of the changed settings and a folded table of the settings at their default."""
    values = flatten(config)
    default = flatten(Config()) | function_defaults(config)

    def rows(names: list[str], *columns: dict[str, Any]) -> list[str]:
        lines = []
        for name in names:
            cells = [page.text(json.dumps(column.get(name), ensure_ascii=False)) for column in columns]
            lines.append(page.row(f"<code>{page.text(name)}</code>", *cells))
        return lines

    changed = [name for name in values if values[name] != default.get(name)]
    same = [name for name in values if values[name] == default.get(name)]
    rest = page.table(("setting", "value"), rows(same, values))
    first = page.table(("changed", "value", "default"), rows(changed, values, default), "changed")
    return first + page.folded(f"{len(same)} settings at their default", rest)


def print_samples(workdir: pathlib.Path) -> None:
    """Print three held-out completions of the trained model, or its last three rollouts without an evaluation."""
    evaluation = read_evaluation(workdir / "eval_after.json")
    rows = evaluation["samples"][:: evaluation["num_samples"]][:3] if evaluation else None
    if rows is None:
        rows = read_samples(workdir / "samples.jsonl", ANSWER_FIELDS)[-3:]
    for row in rows:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        print(f"  {prompt.strip()!r} -> {row['completion'].strip()!r}  reward {row['reward']}")
