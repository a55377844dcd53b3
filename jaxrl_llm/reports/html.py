"""The report of a run: DIR/report.html, one self-contained page.

Reads what the run left: metrics.jsonl, and where present config.json, eval_before.json, eval_after.json and
samples.jsonl.

Owns: what is on the page. Does not know: how it looks (page), how the run was made.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import Config, ConfigError, flatten, freeze
from jaxrl_llm.reports import page
from jaxrl_llm.reports.metrics import AGE_LABELS, METRICS, read_lines, read_metrics
from jaxrl_llm.reports.page import SERIES
from jaxrl_llm.runtime.nested import function_defaults

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Chart:
    """One picture: ``lines`` are (label, metric); ``band`` is the metric of a +- band around the first line."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    band: str = ""
    dots: tuple[str, str] | None = None  # drawn where there is a value alone: evaluations
    stacked: bool = False
    limits: tuple[float | None, float | None] = (None, None)


CHARTS = (
    Chart(
        "Reward",
        "mean, and one standard deviation around it",
        (("mean", "rollout/reward_mean"),),
        band="rollout/reward_std",
    ),
    Chart(
        "Pass rate",
        "fraction",
        (("training rollouts", "rollout/pass_rate"),),
        dots=("held-out", "eval/pass_rate"),
        limits=(0, 1),
    ),
    Chart(
        "Entropy",
        "nats per token",
        (
            ("of trained tokens", "update/entropy_nats"),
            ("of tokens as drawn", "rollout/sampled_entropy_nats"),
            ("of what they were drawn from", "rollout/model_entropy_nats"),
        ),
        limits=(0, None),
    ),
    Chart("Completion length", "tokens", (("mean", "rollout/completion_length_tokens"),), limits=(0, None)),
    Chart(
        "Truncated and degenerate",
        "fraction",
        (("truncated rollouts", "rollout/truncated_frac"), ("tied groups", "rollout/degenerate_group_frac")),
        limits=(0, 1),
    ),
    Chart(
        "Staleness of drawn rollouts",
        "iterations",
        (("mean age", "replay/age_mean_steps"), ("oldest", "replay/age_max_steps")),
        limits=(0, None),
    ),
    Chart(
        "Uses of a rollout",
        "draws",
        (("of those drawn, so far", "replay/uses_mean"), ("of those that left, in all", "replay/replay_ratio")),
        limits=(0, None),
    ),
    Chart("First uses", "fraction of draws", (("first use", "replay/first_use_frac"),), limits=(0, 1)),
    Chart("Since last use", "optimizer steps", (("mean", "replay/since_last_use_mean_steps"),), limits=(0, None)),
    Chart("Different prompts", "per update batch", (("mean", "replay/unique_prompts_mean"),), limits=(0, None)),
    Chart("Places of the ring without a token", "fraction", (("wasted", "replay/wasted_share"),), limits=(0, 1)),
    Chart("Cost of generating", "over that of training, per rollout", (("mu", "time/cost_ratio"),), limits=(0, None)),
    Chart(
        "Time of an iteration",
        "seconds",
        (("generate", "time/generate_s"), ("reward", "time/reward_s"), ("update", "time/update_s")),
        stacked=True,
    ),
    Chart(
        "Throughput",
        "tokens per second",
        (("generate", "throughput/generate_tokens_per_s"), ("update", "throughput/update_tokens_per_s")),
        limits=(0, None),
    ),
    Chart(
        "KL divergence",
        "nats per token",
        (("to the sampler", "update/kl_behaviour_nats"), ("to the anchor", "update/kl_reference_nats")),
    ),
    Chart("Clipped tokens", "fraction", (("clipped", "update/clip_frac"),), limits=(0, None)),
    Chart(
        "Effective sample size",
        "fraction",
        (("of trained tokens", "update/ess_frac"), ("of completions", "update/sequence_ess_frac")),
        limits=(0, 1),
    ),
    Chart(
        "Clipped tokens by age",
        "fraction",
        tuple((f"{label} iterations", f"update/clip_frac_age_{label}") for label in AGE_LABELS),
        limits=(0, None),
    ),
    Chart(
        "Effective sample size by age",
        "fraction of tokens",
        tuple((f"{label} iterations", f"update/ess_frac_age_{label}") for label in AGE_LABELS),
        limits=(0, 1),
    ),
    Chart("Gradient norm", "before clipping", (("mean", "update/grad_norm"),), limits=(0, None)),
    Chart(
        "Sampler-learner gap", "nats, largest", (("largest", "update/sampler_learner_gap_max_nats"),), limits=(0, None)
    ),
)

X_AXIS = "iteration"
# Stands below the iterations: those that reuse rollouts are cheaper than those that do not.
COMPUTE_AXIS = "iteration / compute until then: sum of B + mu R, in rollouts trained"


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
    """Write ``workdir/report.html`` from the files of the run and return its path.

    Raises:
        ConfigError: no metrics.jsonl, nothing in it, or a file of the run that cannot be read.
    """
    workdir = pathlib.Path(workdir)
    metrics = read_metrics(workdir)
    if not metrics:
        raise ConfigError(f"{workdir / 'metrics.jsonl'} is empty: no iteration was finished")
    settings = _read_json(workdir / "config.json")
    before, after = _read_json(workdir / "eval_before.json"), _read_json(workdir / "eval_after.json")
    samples = read_lines(workdir / "samples.jsonl") if (workdir / "samples.jsonl").is_file() else []
    newest = max((int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdigit()), default=0)
    made_with = (settings or {}).pop("made_with", {})
    try:
        config = freeze(settings) if settings is not None else None
    except ConfigError as error:
        raise ConfigError(f"{workdir / 'config.json'}: {error}") from None
    sections = [
        _header(workdir, metrics, config),
        _cards(metrics, config, before, after, newest),
        page.section("Curves", _charts(metrics)),
        page.section("Before and after", _before_after(before, after)),
        page.section("Rollouts during training", _rollouts(samples)),
        page.section("Settings", _settings(config) if config is not None else ""),
        page.section("Made with", _made_with(made_with)),
        page.section("What the metrics mean", _glossary()),
    ]
    return page.write_page(workdir / "report.html", workdir.resolve().name, sections)


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def _values(metrics: Rows, name: str) -> list[tuple[int, float]]:
    """(iteration, value) wherever the metric has a number."""
    return [(row["iteration"], row[name]) for row in metrics if name in row and row[name] is not None]


def _header(workdir: pathlib.Path, metrics: Rows, config: Config | None) -> str:
    made_of = ""
    if config is not None:
        task = config.prompts.name or config.prompts.source
        made_of = f"{config.model.path} on {task}, seed {config.seed}"
    return page.header(workdir.resolve().name, made_of)


def _cards(metrics: Rows, config: Config | None, before: dict | None, after: dict | None, newest: int) -> str:
    """The few numbers one asks for first; ``newest`` is the iteration of the newest checkpoint."""

    def card(title: str, value: str, note: str = "") -> str:
        return f'<div class="card"><span>{title}</span><b>{value}</b><small>{note}</small></div>'

    def change(values: Sequence[float], form: str) -> str:
        shown = [format(value, form) for value in (values[0], values[-1])]
        return shown[0] if len(values) == 1 else f"{shown[0]} <i>&rarr;</i> {shown[1]}"

    def sum_of(name: str) -> float:
        return sum(value for _, value in _values(metrics, name))

    cards = []
    pairs = [
        ("held-out, before and after", [e["pass_rate"] for e in (before, after) if e and e["pass_rate"] is not None])
    ]
    pairs += [
        (note, [value for _, value in _values(metrics, name)])
        for note, name in (
            ("held-out, first and last", "eval/pass_rate"),
            ("training rollouts, first and last", "rollout/pass_rate"),
        )
    ]
    note, rates = max(pairs, key=lambda pair: min(len(pair[1]), 2))  # the first that has both ends
    if rates:
        cards.append(card("Pass rate", change(rates, ".0%"), note))
    for title, name, form in (
        ("Reward", "rollout/reward_mean", ".2f"),
        ("Entropy, nats", "update/entropy_nats", ".2f"),
        ("Completion, tokens", "rollout/completion_length_tokens", ".1f"),
    ):
        if values := [value for _, value in _values(metrics, name)]:
            cards.append(card(title, change(values, form), "first and last iteration"))
    planned = f"of {config.num_iterations} planned" if config is not None else ""
    if missing := max(metrics[-1]["iteration"], newest) - len(metrics):
        planned += f"; {missing} more are not in metrics.jsonl"
    cards.append(card("Iterations", f"{len(metrics)}", planned))
    if seconds := sum_of("time/iteration_s"):
        generated = sum_of("tokens/generated")
        cards.append(card("Wall time", _duration(seconds), f"{generated:,.0f} tokens generated" if generated else ""))
    return f'<div class="cards">{"".join(cards)}</div>'


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m} min" if hours else f"{m} min {s} s" if m else f"{s} s"


def _compute_at(metrics: Rows) -> Callable[[float], str] | None:
    """The compute spent until an iteration, as text; "" between iterations. None where the run has not measured it."""
    spent = dict(_values(metrics, "time/compute_rollouts"))
    if not spent:
        return None

    def shown(x: float) -> str:
        if x not in spent:
            return ""
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if spent[x] >= size:
                return f"{spent[x] / size:.3g}{unit}"
        return f"{spent[x]:.3g}"

    return shown


def _charts(metrics: Rows) -> str:
    figures = []
    compute_at = _compute_at(metrics)
    axis = COMPUTE_AXIS if compute_at else X_AXIS
    for chart in CHARTS:
        if any(_values(metrics, name) for _, name in chart.lines):
            draw = functools.partial(_draw, chart=chart, metrics=metrics)
            svg = page.picture(draw, label=chart.title, x_label=axis, salt=chart.title, second_x=compute_at)
            figures.append(page.figure(chart.title, chart.unit, _legend(chart, metrics), svg))
    return page.figures(figures)


def _legend(chart: Chart, metrics: Rows) -> str:
    shown = [(i, label, "line") for i, (label, name) in enumerate(chart.lines) if _values(metrics, name)]
    if chart.dots and _values(metrics, chart.dots[1]):
        shown.append((len(chart.lines), chart.dots[0], "dot"))
    return page.legend(shown)


def _draw(axes: Any, *, chart: Chart, metrics: Rows) -> None:
    series = [(i, _values(metrics, name)) for i, (_, name) in enumerate(chart.lines)]
    series = [(i, values) for i, values in series if values]
    if chart.stacked:
        _draw_stack(axes, series)
    else:
        _draw_lines(axes, chart, series, _values(metrics, chart.band))
    if chart.dots and (points := _values(metrics, chart.dots[1])):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "o-", color=SERIES[len(chart.lines)], markersize=5, linewidth=1, clip_on=False, zorder=3)
    axes.set_ylim(*chart.limits)


def _draw_lines(axes: Any, chart: Chart, series: list, band: list) -> None:
    for i, values in series:
        x, y = zip(*values, strict=True)
        marker = "o" if len(x) < 3 else ""
        axes.plot(x, y, color=SERIES[i], linewidth=1.8, marker=marker, markersize=4, solid_capstyle="round")
    width = dict(band)
    if points := [(x, y - width[x], y + width[x]) for x, y in series[0][1] if x in width]:
        x, low, high = zip(*points, strict=True)
        axes.fill_between(x, low, high, color=SERIES[0], alpha=0.15, linewidth=0)


def _draw_stack(axes: Any, series: list) -> None:
    """Steps one upon the other: each iteration is a whole that is divided."""
    seen = [x for _, values in series for x, _ in values]
    iterations = np.arange(min(seen), max(seen) + 1)
    floor = np.zeros(len(iterations))
    for i, values in series:
        known = dict(values)
        top = floor + [known.get(x, 0.0) for x in iterations.tolist()]
        # One shape of all iterations: a bar each takes seconds from a thousand on.
        axes.stairs(top, np.append(iterations - 0.5, iterations[-1] + 0.5), baseline=floor, fill=True, color=SERIES[i])
        floor = top
    if len(iterations) == 1:
        axes.set_xlim(iterations[0] - 3, iterations[0] + 3)


def _text(value: Any) -> str:
    """A prompt or completion, escaped; messages are joined."""
    if isinstance(value, list):
        value = "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return f"<pre>{page.text(value)}</pre>"


def _reward(value: float | None) -> str:
    shown = "failed" if value is None or not math.isfinite(value) else f"{value:g}"
    kind = "good" if shown != "failed" and value > 0 else "none"
    return f'<span class="reward {kind}">{shown}</span>'


def _before_after(before: dict | None, after: dict | None) -> str:
    """The same question answered before and after, one row each."""
    answers: dict[str, dict[str, str]] = {}
    for moment, evaluation in (("before", before), ("after", after)):
        for sample in evaluation["samples"][:8] if evaluation else ():
            cell = _reward(sample["reward"]) + _text(sample["completion"])
            answers.setdefault(_text(sample["prompt"]), {})[moment] = cell
    if not answers:
        return ""
    rows = [
        f"<tr><td>{prompt}</td><td>{cells.get('before', '')}</td><td>{cells.get('after', '')}</td></tr>"
        for prompt, cells in answers.items()
    ]
    return page.table(("question", "before", "after"), rows, "samples")


def _rollouts(samples: Rows, each: int = 4) -> str:
    """A few rollouts of the first and of the last iteration that wrote some."""
    if not samples:
        return ""
    ends = sorted({samples[0]["iteration"], samples[-1]["iteration"]})
    rows = []
    for iteration in ends:
        for row in [row for row in samples if row["iteration"] == iteration][:each]:
            parts = ", ".join(f"{name} {_plain(value)}" for name, value in row["parts"].items())
            facts = [f"iteration {iteration}", f"stop: {row['stop_reason']}", f"policy {_plain(row['policy_version'])}"]
            facts += [f"age {_plain(row['age'])}"] + ([parts] if len(row["parts"]) > 1 else [])
            notes = "<br>".join(page.text(fact) for fact in facts)
            rows.append(
                f"<tr><td>{_text(row['prompt'])}</td><td>{_reward(row['reward'])}{_text(row['completion'])}</td>"
                f"<td><small>{notes}</small></td></tr>"
            )
    return page.table(("prompt", "completion", ""), rows, "samples")


def _plain(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _settings(config: Config) -> str:
    """Changed settings in sight, the rest folded."""
    values, default = flatten(config), flatten(Config()) | function_defaults(config)

    def rows(names: list[str], columns: Callable[[str], tuple]) -> list[str]:
        return [
            f"<tr><td><code>{page.text(name)}</code></td>"
            + "".join(f"<td>{page.text(json.dumps(value, ensure_ascii=False))}</td>" for value in columns(name))
            + "</tr>"
            for name in names
        ]

    changed = [name for name in values if values[name] != default.get(name)]
    same = [name for name in values if values[name] == default.get(name)]
    first = page.table(("changed", "value", "default"), rows(changed, lambda n: (values[n], default.get(n))), "changed")
    rest = page.table(("setting", "value"), rows(same, lambda n: (values[n],)))
    return (
        f"{first if changed else ''}<details><summary>{len(same)} settings at their default</summary>{rest}</details>"
    )


def _made_with(made_with: dict[str, Any]) -> str:
    """Versions and commit, as config.json has them."""
    named = {**made_with.get("versions", {}), "commit": made_with.get("commit", "")}
    rows = [f"<tr><td>{page.text(k)}</td><td>{page.text(v)}</td></tr>" for k, v in named.items() if v]
    return page.table(("package", "version"), rows) if rows else ""


def _glossary() -> str:
    rows = [
        f"<tr><td><code>{name}</code></td><td>{page.text(metric.unit)}</td><td>{page.text(metric.meaning)}</td></tr>"
        for name, metric in METRICS.items()
    ]
    return (
        f"<details><summary>{len(METRICS)} metrics</summary>{page.table(('name', 'unit', 'meaning'), rows)}</details>"
    )


def print_samples(workdir: pathlib.Path) -> None:
    """Three held-out completions of the trained model, or of its last rollouts where nothing is held out."""
    evaluation = _read_json(workdir / "eval_after.json")
    for row in evaluation["samples"][:3] if evaluation else read_lines(workdir / "samples.jsonl")[-3:]:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        print(f"  {prompt.strip()!r} -> {row['completion'].strip()!r}  reward {row['reward']}")
