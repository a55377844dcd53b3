"""Building blocks of a self-contained HTML page: its style, its pictures and its tables.

Pictures are inline SVG that matplotlib draws in placeholder colours. ``picture`` replaces the placeholders by variables
of the style sheet, so that the pictures follow the light and dark themes.

Owns: the appearance of a page. Does not know: the content of a page.
"""

from __future__ import annotations

import html
import io
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.runtime import bucket
from jaxrl_llm.settings.schema import visible

PAGE = pathlib.Path(__file__).with_name("page.html")  # text of the page's frame and its style sheet

# Drawn colour -> style-sheet variable. Matplotlib writes colours in lower case.
INK, FAINT = "#010101", "#020202"
SERIES = tuple(f"#{3 + i:02x}{3 + i:02x}{3 + i:02x}" for i in range(8))
COLOURS = {INK: "var(--muted)", FAINT: "var(--line)"} | {c: f"var(--series-{i})" for i, c in enumerate(SERIES)}
DASHES = ("-", "--", ":", "-.")  # with more series than colours, the colours repeat with the next line style


def text(value: Any) -> str:
    """Return any value as escaped HTML text, safe between tags and in an attribute."""
    return html.escape(visible(str(value)))


def stroke(number: int) -> tuple[str, str]:
    """Return the colour and the line style of the ``number``-th series of a picture."""
    return SERIES[number % len(SERIES)], DASHES[number // len(SERIES) % len(DASHES)]


def write_page(path: pathlib.Path, title: str, sections: Sequence[str]) -> pathlib.Path:
    """Write the whole page to ``path`` and return the path. ``title`` is plain text; ``sections`` are HTML."""
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
    """Return an HTML table of rows made by ``row``, or "" if there are no rows."""
    if not rows:
        return ""
    cells = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table class="{classes}"><thead><tr>{cells}</tr></thead>{"".join(rows)}</table></div>'


def legend(keys: Sequence[tuple[int, str, str]]) -> str:
    """Return the legend of a picture, or "" if it has fewer than two series.

    Args:
        keys: (number of the series, label, "line" or "dot") of each series.
    """
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
    """Return the drawing of ``draw(axes)`` as an inline ``<svg>`` in the colours of the style sheet.

    Args:
        label: the text alternative of the picture (``aria-label``), for screen readers.
        salt: makes the SVG ids of this picture differ from the ids of the other pictures of the page.
        whole_x: put ticks only at whole numbers.
        second_x: maps the number of a tick to a second label below it, which shows the same point in another unit.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    # Write text as text, not as outlines, so that it has the page's font.
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
        drawn.savefig(
            out,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    svg = out.getvalue()
    # SVG groups would have the same ids in several pictures of a page. Nothing refers to these ids, so remove them.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])
    for placeholder, shown in COLOURS.items():
        svg = svg.replace(placeholder, shown)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{text(label)}" ', 1)
