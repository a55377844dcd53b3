"""The picture of the README: pass rate over minutes, the main job against TRL, from stored records of the race.

    python -m benchmarks.race_figure --out=docs/main_job.svg

The picture has one panel for each record of benchmarks.race. A record belongs to one machine and one day. Minutes count
from the start of the program, so the first step includes compiling.

Owns: the curves and the drawing. Does not know: how the records were made (benchmarks.race).
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from typing import Any

from benchmarks.machine import ROOT, short_cpu
from benchmarks.race import TARGET, WINDOW

RECORDS = [ROOT / "benchmarks" / "baselines" / f"{name}_race.json" for name in ("2026-11-23_epyc", "2026-11-22_2cpu")]
LOOKS = {"ours": ("jaxrl_llm", "C0"), "trl": ("TRL", "C1")}


def curves(record: dict[str, Any], system: str) -> list[tuple[list[float], list[float], list[float]]]:
    """Return (minutes, pass rates, mean pass rates of the last ``WINDOW`` steps) for each seed of a record."""
    value = {figure["name"]: figure["value"] for figure in record["figures"]}
    found = []
    for seed, steps in enumerate(record["settings"]["curves"][system]):
        seconds = [step[0] for step in steps]
        rates = [step[1] for step in steps]
        seconds[0] = value[f"{system}/seed_{seed}/first_update_s"]
        minutes = [end / 60 for end in itertools.accumulate(seconds)]
        means = []
        for i in range(len(rates)):
            recent = rates[max(0, i + 1 - WINDOW) : i + 1]
            means.append(sum(recent) / len(recent))
        found.append((minutes, rates, means))
    return found


def draw(records: list[dict[str, Any]], out: pathlib.Path) -> None:
    """Draw one panel per record, with one line per seed and system, and write the SVG file ``out``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "race", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(4.2 * len(records), 3.0), layout="constrained")
        panels = figure.subplots(1, len(records), sharex=True, sharey=True, squeeze=False)[0]
        for axes, record in zip(panels, records, strict=True):
            day = record["date"][:10]
            cpu = short_cpu(record["hardware"]["cpu"])
            cores = record["hardware"]["cores"]
            for system, (label, color) in LOOKS.items():
                for seed, (minutes, rates, recent) in enumerate(curves(record, system)):
                    axes.plot(minutes, rates, ".", color=color, alpha=0.3, markersize=4)
                    (line,) = axes.plot(minutes, recent, color=color, label=None if seed else label)
                    line.set_gid(f"{system} seed {seed} {day}")
            axes.axhline(TARGET, color="black", linestyle=":", linewidth=0.8)
            axes.set_title(f"{cores} cores, {cpu}, {day}", fontsize=9)
            axes.set_ylim(0, 1)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False, loc="lower right")
        figure.supxlabel("minutes since the program was started")
        figure.supylabel("pass rate in training")
        figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race_figure", description=__doc__.splitlines()[0])
    parser.add_argument(
        "records",
        nargs="*",
        type=pathlib.Path,
        default=RECORDS,
        help="files of benchmarks.race",
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the SVG file to write")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw([json.loads(path.read_text()) for path in given.records], given.out)


if __name__ == "__main__":
    main()
