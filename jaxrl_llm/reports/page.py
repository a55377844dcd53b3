"""A page that needs no other file: its style, its pictures, its tables.

Pictures are inline SVG drawn by matplotlib in placeholder colours that the page's style sheet replaces, so that they
follow light and dark.

Owns: how a page looks. Does not know: what is on it.
"""

from __future__ import annotations

import html
import io
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.runtime.nested import visible

# Drawn colour -> style-sheet variable. Matplotlib writes colours in lower case.
INK, FAINT = "#010101", "#020202"
SERIES = tuple(f"#{3 + i:02x}{3 + i:02x}{3 + i:02x}" for i in range(8))
COLOURS = {INK: "var(--muted)", FAINT: "var(--line)"} | {c: f"var(--series-{i})" for i, c in enumerate(SERIES)}
DASHES = ("-", "--", ":", "-.")  # series beyond the colours begin the colours again, broken


def text(value: Any) -> str:
    """Any value as text between tags or in an attribute, whatever it has in it."""
    return html.escape(visible(str(value)))


def stroke(number: int) -> tuple[str, str]:
    """Colour and line style of a picture's ``number``-th series."""
    return SERIES[number % len(SERIES)], DASHES[number // len(SERIES) % len(DASHES)]


def write_page(path: pathlib.Path, title: str, sections: Sequence[str]) -> pathlib.Path:
    """Write the page at ``path`` in one go and return the path; ``title`` is text, sections are HTML."""
    before, after = PAGE.split("{{body}}")
    page = before.replace("{{title}}", text(title)) + "\n".join(sections) + after
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def header(title: str, note: str) -> str:
    return f"<header><h1>{text(title)}</h1><p>{text(note)}</p></header>"


def row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def table(head: Sequence[str], rows: Sequence[str], classes: str = "") -> str:
    """A table of ``row``s; nothing without any."""
    if not rows:
        return ""
    cells = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table class="{classes}"><thead><tr>{cells}</tr></thead>{"".join(rows)}</table></div>'


def legend(keys: Sequence[tuple[int, str, str]]) -> str:
    """(colour's number, label, "line" or "dot") of each series; nothing for a single one."""
    if len(keys) < 2:
        return ""

    def key(i: int, label: str, mark: str) -> str:
        broken = " broken" if mark == "line" and stroke(i)[1] != "-" else ""
        return f'<span><i class="{mark}{broken}" style="--key:var(--series-{i % len(SERIES)})"></i>{label}</span>'

    return f'<div class="legend">{"".join(key(*each) for each in keys)}</div>'


def figure(title: str, unit: str, keys: str, svg: str) -> str:
    return f"<figure><figcaption>{title} <small>{unit}</small>{keys}</figcaption>{svg}</figure>"


def figures(all_of_them: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(all_of_them)}</div>' if all_of_them else ""


def picture(
    draw: Callable[[Any], None],
    *,
    label: str,
    x_label: str,
    salt: str,
    whole_x: bool = True,
    second_x: Callable[[float], str] | None = None,
) -> str:
    """What ``draw(axes)`` draws, as an inline ``<svg>`` whose colours are the style sheet's.

    Args:
        label: read out instead of the picture.
        salt: keeps the ids of two pictures of a page apart.
        whole_x: ticks at whole numbers alone.
        second_x: what stands below the number of a tick, from that number: another measure of the same axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    # Text stays text, in the page's font.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9}):
        drawn = Figure(figsize=(4.6, 2.5), layout="constrained")
        axes = drawn.add_subplot()
        draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole_x))
        if second_x:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}\n{second_x(x)}"))
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(colors=INK, length=0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_offset_text().set_color(INK)
        axes.set_xlabel(x_label, color=INK, loc="right", fontsize=8)
        out = io.StringIO()
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    # Names of groups would repeat from picture to picture, and nothing refers to them.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])
    for placeholder, shown in COLOURS.items():
        svg = svg.replace(placeholder, shown)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{text(label)}" ', 1)


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root { color-scheme: light dark; --back: #f7f7f5; --card: #ffffff; --ink: #1d1f24; --muted: #6a6f7a; --line: #e3e4e0;
  --series-0: #2f6fde; --series-1: #e07b29; --series-2: #2a9d78; --series-3: #b0418f; --series-4: #8a6d3b;
  --series-5: #d23f49; --series-6: #1a9bb8; --series-7: #6a7a2b; --good: #1b7f55; --good-back: #e0f3ea;
  --none-back: #efefec; --mark: #fdf6e3; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --card: #1e2126; --ink: #e6e7ea; --muted: #9aa0ab;
  --line: #33373e; --series-0: #6ea0ff; --series-1: #f2a05c; --series-2: #4fc69d; --series-3: #e08ac8;
  --series-4: #c9a970; --series-5: #f47c84; --series-6: #5cc8e0; --series-7: #b3c46a; --good: #6fd6a8;
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
  vertical-align: middle; background: var(--key); }
.legend i.broken { background: repeating-linear-gradient(90deg, var(--key) 0 3px, transparent 3px 5px); }
.legend i.dot { width: 8px; height: 8px; border-radius: 50%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 0.45rem 0.9rem; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
table.changed td:nth-child(2) { background: var(--mark); font-weight: 600; }
table.samples { min-width: 38rem; }
table.samples td { width: 34%; }
table.groups td:first-child { white-space: nowrap; }
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
