"""A page that needs no other file: its style, its pictures, its tables.

Pictures are inline SVG drawn by matplotlib in placeholder colours that the page's style sheet replaces, so that they
follow light and dark.

Owns: how a page looks. Does not know: what is on it.
"""

from __future__ import annotations

import html
import io
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.runtime import bucket
from jaxrl_llm.runtime.nested import visible

PAGE = pathlib.Path(__file__).with_name("page.html")  # the frame and its style sheet

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
    before, after = PAGE.read_text(encoding="utf-8").split("{{body}}")
    page = before.replace("{{title}}", text(title)) + "\n".join(sections) + after
    bucket.write_whole(path, page)
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
