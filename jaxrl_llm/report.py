"""``python -m jaxrl_llm.report --workdir=DIR`` writes DIR/report.html: the run on one self-contained page.

Reads what the run left: metrics.jsonl, and where present config.json, eval_before.json, eval_after.json and
samples.jsonl. The page needs no other file: charts are inline SVG drawn by matplotlib in placeholder colours that
the page's style sheet replaces, so that they follow light and dark.

Owns: the page. Does not know: how the run was made.
"""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.config import Config, ConfigError, flatten, freeze
from jaxrl_llm.metrics import METRICS, read_lines, read_metrics

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
    Chart("Entropy", "nats per token", (("policy", "update/entropy_nats"),), limits=(0, None)),
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
    Chart("Uses of a rollout", "draws", (("mean", "replay/uses_mean"),), limits=(0, None)),
    Chart("First uses", "fraction of draws", (("first use", "replay/first_use_frac"),), limits=(0, 1)),
    Chart("Since last use", "optimizer steps", (("mean", "replay/since_last_use_mean_steps"),), limits=(0, None)),
    Chart("Different prompts", "per update batch", (("mean", "replay/unique_prompts_mean"),), limits=(0, None)),
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
    Chart("Gradient norm", "before clipping", (("mean", "update/grad_norm"),), limits=(0, None)),
    Chart(
        "Sampler-learner gap", "nats, largest", (("largest", "update/sampler_learner_gap_max_nats"),), limits=(0, None)
    ),
)

# What is also drawn over compute: steps that reuse rollouts are cheaper than steps that do not.
COMPUTE_CHARTS = tuple(chart for chart in CHARTS if chart.title in ("Reward", "Pass rate", "Entropy"))
COMPUTE = "compute in trained rollouts, sum of B + mu R"

# Drawn colour -> style-sheet variable. Matplotlib writes colours in lower case.
INK, FAINT = "#010101", "#020202"
SERIES = ("#030303", "#040404", "#050505")
COLOURS = {INK: "var(--muted)", FAINT: "var(--line)"} | {c: f"var(--series-{i})" for i, c in enumerate(SERIES)}


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
    config = freeze(settings) if settings is not None else None
    sections = [
        _header(workdir, metrics, config),
        _cards(metrics, config, before, after),
        _section("Curves", _charts(metrics)),
        _section("Curves over compute", _charts(_over_compute(metrics), COMPUTE, COMPUTE_CHARTS)),
        _section("Before and after", _before_after(before, after)),
        _section("Rollouts during training", _rollouts(samples)),
        _section("Settings", _settings(config) if config is not None else ""),
        _section("What the metrics mean", _glossary()),
    ]
    path = workdir / "report.html"
    page = PAGE.replace("{{title}}", html.escape(workdir.resolve().name)).replace("{{body}}", "\n".join(sections))
    path.write_text(page, encoding="utf-8")
    return path


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _values(metrics: Rows, name: str) -> list[tuple[int, float]]:
    """(iteration, value) wherever the metric has a number."""
    return [(row["iteration"], row[name]) for row in metrics if name in row and row[name] is not None]


def _header(workdir: pathlib.Path, metrics: Rows, config: Config | None) -> str:
    made_of = ""
    if config is not None:
        task = config.prompts.name or config.prompts.source
        made_of = f"{config.model.path} on {task}, seed {config.seed}"
    return f"<header><h1>{html.escape(workdir.resolve().name)}</h1><p>{html.escape(made_of)}</p></header>"


def _cards(metrics: Rows, config: Config | None, before: dict | None, after: dict | None) -> str:
    """The few numbers one asks for first."""

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
    cards.append(card("Iterations", f"{len(metrics)}", planned))
    if seconds := sum_of("time/iteration_s"):
        generated = sum_of("tokens/generated")
        cards.append(card("Wall time", _duration(seconds), f"{generated:,.0f} tokens generated" if generated else ""))
    return f'<div class="cards">{"".join(cards)}</div>'


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m} min" if hours else f"{m} min {s} s" if m else f"{s} s"


def _over_compute(metrics: Rows) -> Rows:
    """Rows whose place is the compute spent until then; none where the run has not measured it."""
    costs = [row.get("time/compute_rollouts") for row in metrics]
    if not metrics or any(cost is None for cost in costs):
        return []
    return [row | {"iteration": total} for row, total in zip(metrics, itertools.accumulate(costs), strict=True)]


def _charts(metrics: Rows, axis: str = "iteration", charts: tuple[Chart, ...] = CHARTS) -> str:
    figures = []
    for chart in charts:
        if any(_values(metrics, name) for _, name in chart.lines):
            svg = _draw(chart, metrics, axis)
            title = f"{chart.title} <small>{chart.unit}</small>"
            figures.append(f"<figure><figcaption>{title}{_legend(chart, metrics)}</figcaption>{svg}</figure>")
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _legend(chart: Chart, metrics: Rows) -> str:
    shown = [(i, label, "line") for i, (label, name) in enumerate(chart.lines) if _values(metrics, name)]
    if chart.dots and _values(metrics, chart.dots[1]):
        shown.append((len(chart.lines), chart.dots[0], "dot"))
    if len(shown) < 2:
        return ""
    keys = (
        f'<span><i class="{mark}" style="background:var(--series-{i})"></i>{label}</span>' for i, label, mark in shown
    )
    return f'<div class="legend">{"".join(keys)}</div>'


def _draw(chart: Chart, metrics: Rows, axis: str) -> str:
    """The chart as an inline ``<svg>`` whose colours are the style sheet's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Text stays text, in the page's font; the salt keeps the ids of two charts on the page apart.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title + axis, "font.size": 9}):
        figure = Figure(figsize=(4.6, 2.5), layout="constrained")
        axes = figure.add_subplot()
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
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=axis == "iteration"))
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(colors=INK, length=0)
        axes.yaxis.get_offset_text().set_color(INK)
        axes.set_xlabel(axis, color=INK, loc="right", fontsize=8)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    # Names of groups would repeat from chart to chart, and nothing refers to them.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])
    for drawn, shown in COLOURS.items():
        svg = svg.replace(drawn, shown)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(chart.title)}" ', 1)


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
    """Bars: each iteration is a whole that is divided."""
    iterations = sorted({x for _, values in series for x, _ in values})
    floor = dict.fromkeys(iterations, 0.0)
    step = min((b - a for a, b in itertools.pairwise(iterations)), default=1)
    for i, values in series:
        x, y = zip(*values, strict=True)
        axes.bar(x, y, bottom=[floor[k] for k in x], width=0.9 * step, color=SERIES[i], linewidth=0)
        for k, value in values:
            floor[k] += value
    if len(iterations) == 1:
        axes.set_xlim(iterations[0] - 3, iterations[0] + 3)


def _table(head: Sequence[str], rows: Sequence[str], classes: str = "") -> str:
    cells = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table class="{classes}"><thead><tr>{cells}</tr></thead>{"".join(rows)}</table></div>'


def _text(value: Any) -> str:
    """A prompt or completion, escaped; messages are joined."""
    if isinstance(value, list):
        value = "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return f"<pre>{html.escape(str(value))}</pre>"


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
    return _table(("question", "before", "after"), rows, "samples")


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
            notes = "<br>".join(html.escape(fact) for fact in facts)
            rows.append(
                f"<tr><td>{_text(row['prompt'])}</td><td>{_reward(row['reward'])}{_text(row['completion'])}</td>"
                f"<td><small>{notes}</small></td></tr>"
            )
    return _table(("prompt", "completion", ""), rows, "samples")


def _plain(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _settings(config: Config) -> str:
    """Changed settings in sight, the rest folded."""
    values, default = flatten(config), flatten(Config())

    def rows(names: list[str], columns: Callable[[str], tuple]) -> list[str]:
        return [
            f"<tr><td><code>{name}</code></td>"
            + "".join(f"<td>{html.escape(json.dumps(value, ensure_ascii=False))}</td>" for value in columns(name))
            + "</tr>"
            for name in names
        ]

    changed = [name for name in values if values[name] != default[name]]
    same = [name for name in values if values[name] == default[name]]
    first = _table(("changed", "value", "default"), rows(changed, lambda n: (values[n], default[n])), "changed")
    rest = _table(("setting", "value"), rows(same, lambda n: (values[n],)))
    return (
        f"{first if changed else ''}<details><summary>{len(same)} settings at their default</summary>{rest}</details>"
    )


def _glossary() -> str:
    rows = [
        f"<tr><td><code>{name}</code></td><td>{html.escape(metric.unit)}</td><td>{html.escape(metric.meaning)}</td></tr>"
        for name, metric in METRICS.items()
    ]
    return f"<details><summary>{len(METRICS)} metrics</summary>{_table(('name', 'unit', 'meaning'), rows)}</details>"


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root { color-scheme: light dark; --back: #f7f7f5; --card: #ffffff; --ink: #1d1f24; --muted: #6a6f7a; --line: #e3e4e0;
  --series-0: #2f6fde; --series-1: #e07b29; --series-2: #2a9d78; --good: #1b7f55; --good-back: #e0f3ea;
  --none-back: #efefec; --mark: #fdf6e3; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --card: #1e2126; --ink: #e6e7ea; --muted: #9aa0ab;
  --line: #33373e; --series-0: #6ea0ff; --series-1: #f2a05c; --series-2: #4fc69d; --good: #6fd6a8;
  --good-back: #1d3a2f; --none-back: #2b2f36; --mark: #2c2820; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 0.8rem; font-size: 1.1rem; }
header p { margin: 0.2rem 0 1.4rem; color: var(--muted); overflow-wrap: anywhere; }
small { color: var(--muted); font-weight: normal; }
.cards { display: grid; gap: 0.8rem; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); }
.card, figure, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 0.8rem 1rem; display: flex; flex-direction: column; }
.card span { color: var(--muted); font-size: 0.85rem; }
.card b { font-size: 1.35rem; font-weight: 650; white-space: nowrap; font-variant-numeric: tabular-nums; }
.card i { color: var(--muted); font-style: normal; font-weight: 400; }
.charts { display: grid; gap: 0.8rem; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); }
figure { margin: 0; padding: 0.8rem 0.9rem 0.4rem; display: flex; flex-direction: column; }
figcaption { font-weight: 600; margin-bottom: 0.3rem; flex: 1; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: inherit !important; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; font-weight: normal; font-size: 0.8rem; color: var(--muted); }
.legend i { display: inline-block; width: 0.9rem; height: 3px; margin-right: 0.35rem; border-radius: 2px;
  vertical-align: middle; }
.legend i.dot { width: 8px; height: 8px; border-radius: 50%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 0.45rem 0.9rem; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
table.changed td:nth-child(2) { background: var(--mark); font-weight: 600; }
table.samples { min-width: 38rem; }
table.samples td { width: 34%; }
td, code { overflow-wrap: anywhere; }
code, pre { font: 0.85rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16rem; overflow-y: auto; }
.reward { display: inline-block; padding: 0 0.5rem; margin-bottom: 0.25rem; border-radius: 99px; font-size: 0.78rem; }
.reward.good { color: var(--good); background: var(--good-back); }
.reward.none { color: var(--muted); background: var(--none-back); }
summary { cursor: pointer; color: var(--muted); margin: 0.8rem 0; }
</style>
</head>
<body>
{{body}}
</body>
</html>
"""


def main() -> None:
    print(write_report(WORKDIR.value))


if __name__ == "__main__":
    from absl import flags

    from jaxrl_llm import cli

    WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a run; the report is written into it.", required=True)
    cli.run(main)
