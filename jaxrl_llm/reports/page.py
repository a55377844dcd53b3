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
INK = "#010101"
FAINT = "#020202"
SERIES = ("#030303", "#040404", "#050505", "#060606", "#070707", "#080808", "#090909", "#0a0a0a")
COLOURS = {
    INK: "var(--muted)",
    FAINT: "var(--line)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)},
}
DASHES = ("-", "--", ":", "-.")  # with more series than colours, the colours repeat with the next line style


def text(value: Any) -> str:
    """Return any value as escaped HTML text, safe between tags and in an attribute."""
    return html.escape(visible(str(value)))


def stroke(number: int) -> tuple[str, str]:
    """Return the colour and the line style of the ``number``-th series of a picture."""
    round_of_colours, colour = divmod(number, len(SERIES))
    return SERIES[colour], DASHES[round_of_colours % len(DASHES)]


def write_page(path: pathlib.Path, title: str, sections: Sequence[str]) -> pathlib.Path:
    """Write the whole page to ``path`` and return the path. ``title`` is plain text; ``sections`` are HTML."""
    frame = PAGE.read_text(encoding="utf-8")
    before, after = frame.split("{{body}}")
    head = before.replace("{{title}}", text(title))
    body = "\n".join(sections)
    bucket.write_whole(path, head + body + after)
    return path


def section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def header(title: str, note: str) -> str:
    return f"<header><h1>{text(title)}</h1><p>{text(note)}</p></header>"


def row(*cells: str) -> str:
    joined = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr>{joined}</tr>"


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def table(head: Sequence[str], rows: Sequence[str], classes: str = "") -> str:
    """Return an HTML table of rows made by ``row``, or "" if there are no rows."""
    if not rows:
        return ""
    names = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(rows)
    return f'<div class="scroll"><table class="{classes}"><thead><tr>{names}</tr></thead>{body}</table></div>'


def legend(keys: Sequence[tuple[int, str, str]]) -> str:
    """Return the legend of a picture, or "" if it has fewer than two series.

    Args:
        keys: (number of the series, label, "line" or "dot") of each series.
    """
    if len(keys) < 2:
        return ""
    entries = []
    for number, label, mark in keys:
        _, line_style = stroke(number)
        classes = mark
        if mark == "line" and line_style != "-":
            classes += " broken"
        colour = f"var(--series-{number % len(SERIES)})"
        entries.append(f'<span><i class="{classes}" style="--key:{colour}"></i>{label}</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


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

    style = {
        "svg.fonttype": "none",  # write text as text, not as outlines, so that it has the page's font
        "svg.hashsalt": salt,
        "font.size": 9,
    }
    out = io.StringIO()
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=(4.6, 2.5), layout="constrained")
        axes = drawn.add_subplot()
        draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole_x))
        if second_x is not None:

            def two_labels(x: float, _: int) -> str:
                return f"{x:g}\n{second_x(x)}"

            axes.xaxis.set_major_formatter(FuncFormatter(two_labels))
        _style_axes(axes)
        axes.set_xlabel(x_label, color=INK, loc="right", fontsize=8)
        drawn.savefig(
            out,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    return _inline(out.getvalue(), label)


def _style_axes(axes: Any) -> None:
    """Give axes the page's style: horizontal grid lines, no frame, placeholder colours."""
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set_color(INK)


def _inline(svg: str, label: str) -> str:
    """Return an SVG file as an ``<svg>`` element in the colours of the style sheet, with the text alternative."""
    element = svg[svg.index("<svg") :]
    # SVG groups would have the same ids in several pictures of a page. Nothing refers to these ids, so remove them.
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    for placeholder, variable in COLOURS.items():
        element = element.replace(placeholder, variable)
    attributes = f'role="img" aria-label="{text(label)}"'
    return element.replace("<svg ", f"<svg {attributes} ", 1)
