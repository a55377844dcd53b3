"""Plan page: memory of each program and the time of an iteration as pictures, then all numbers as tables.

Owns: the content of the page. Does not know: the style of the page (reports.page), the source of the numbers.
"""

from __future__ import annotations

import pathlib
from typing import Any

from jaxrl_llm.planning.cost import RESOURCES
from jaxrl_llm.reports import page

GIB = 2**30
TABLE = ("calls", "TFLOP", "GB memory", "GB sent", "ms", "bound by")


def write(path: pathlib.Path, found: dict[str, Any]) -> pathlib.Path:
    """Write the page of a plan's numbers (``plan``'s JSON)."""
    title = f"{found['model']} on {found['topology']}"
    mesh = " x ".join(f"{name} {size}" for name, size in found["mesh"].items())
    verdict = "fits" if not found["does_not_fit"] else "does not fit: " + ", ".join(found["does_not_fit"])
    note = f"{found['chips']} chips, {found['hosts']} hosts, mesh {mesh}; {verdict}"
    if found.get("advice"):
        note += f". What helps most: {'; '.join(found['advice'])}"
    pictures = [_memory(found), *_times(found)]
    sections = [
        page.header(title, note),
        page.figures(pictures),
        page.section("Programs, per call and chip", page.table(("program", *TABLE), _rows(found))),
        page.section(
            "Memory per chip, GiB",
            page.table(("program", "kind", "GiB"), _kinds(found)),
        ),
    ]
    return page.write_page(path, title, sections)


def _bars(
    title: str,
    unit: str,
    bars: dict[str, dict[str, float]],
    series: list[str],
    limit: float | None,
) -> str:
    """Return horizontal stacked bars, one per name, with one colour per series."""
    names = list(bars)

    def draw(axes: Any) -> None:
        left = [0.0] * len(names)
        for i, one in enumerate(series):
            sizes = [bars[name].get(one, 0.0) for name in names]
            axes.barh(
                names,
                sizes,
                left=left,
                color=page.SERIES[i % len(page.SERIES)],
                height=0.7,
            )
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.invert_yaxis()
        if limit is not None:
            axes.axvline(limit, color=page.INK, linewidth=1, linestyle="--")

    said = "; ".join(f"{name} {sum(parts.values()):.3g}" for name, parts in bars.items())
    svg = page.picture(draw, label=f"{title}, {unit}: {said}", x_label=unit, salt=title, whole_x=False)
    return page.figure(
        title,
        unit,
        page.legend([(i, one, "line") for i, one in enumerate(series)]),
        svg,
    )


def _memory(found: dict[str, Any]) -> str:
    fullest = sorted(
        found["programs"],
        key=lambda name: -(found["programs"][name]["in_use_bytes"] or 1e30),
    )[:8]
    bars = {}
    for name in fullest:
        program = found["programs"][name]
        sizes = program["memory"]
        if sizes is None:
            bars[name] = {"does not fit, by kind": sum(program["made_of"].values()) / GIB}
            continue
        beside = (program["in_use_bytes"] - sizes["peak"]) / GIB
        own = {kind: sizes[kind] / GIB for kind in ("arguments", "temporary")}
        own["outputs"] = (sizes["outputs"] - sizes["aliased"]) / GIB
        bars[name] = own | {"beside it": max(0.0, beside)}
    series = ["arguments", "temporary", "outputs", "beside it", "does not fit, by kind"]
    series = [one for one in series if any(one in bar for bar in bars.values())]
    return _bars(
        "Memory while a program runs",
        "GiB per chip",
        bars,
        series,
        found["memory_limit_bytes"] / GIB,
    )


def _times(found: dict[str, Any]) -> list[str]:
    parts = {part: {"at least": s} for part, s in found["iteration"]["parts"].items() if s}
    if not parts:
        return []
    costs = {name: of for name, of in found["costs"].items() if of["calls"] and of["seconds"]}
    most = sorted(costs, key=lambda name: -costs[name]["calls"] * costs[name]["seconds"])[:6]
    alone = {
        name: {r: costs[name]["seconds_by_resource"][r] / costs[name]["seconds"] for r in RESOURCES} for name in most
    }
    return [
        _bars("Split of an iteration", "seconds at least", parts, ["at least"], None),
        _bars(
            "What each resource alone would take",
            "of the program's time",
            alone,
            list(RESOURCES),
            1.0,
        ),
    ]


def _rows(found: dict[str, Any]) -> list[str]:
    rows = []
    for name, of in found["costs"].items():
        sent = sum(of["link_bytes"].values())
        numbers = (
            of["flops"] / 1e12,
            of["hbm_bytes"] / 1e9,
            sent / 1e9,
            of["seconds"] * 1e3,
        )
        cells = (name, of["calls"], *(f"{x:.4g}" for x in numbers), of["bound"])
        rows.append(page.row(*map(page.text, cells)))
    return rows


def _kinds(found: dict[str, Any]) -> list[str]:
    return [
        page.row(page.text(name), page.text(kind), f"{size / GIB:.3f}")
        for name, program in found["programs"].items()
        for kind, size in program["made_of"].items()
        if size > 2**20
    ]
