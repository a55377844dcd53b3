"""Seconds of an iteration of each arm of a sweep, on a machine that does nothing else.

    python -m studies.timing --raw=docs/raw/e2.json.xz --out=docs/raw/e2_times.json [--iterations=40] [--rounds=2]

Sweeps run points side by side, which no clock is true in. So each reported arm's config is run again for a few
iterations, one arm at a time, round after round, and what is kept is the median over the iterations of all rounds but
the first of each, which warms up.

Owns: those runs, that file. Does not know: what an arm learns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import statistics
import tempfile

from benchmarks.machine import hardware
from jaxrl_llm.config import Config
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.sweep.__main__ import read_sweep
from jaxrl_llm.sweep.table import groups, label
from jaxrl_llm.train import train
from studies import raw
from studies.costs import GENERATED, TRAINED


def measure(config: Config, iterations: int) -> list[dict[str, float]]:
    """Iterations of the config that train, but the first of all, in a folder that is gone afterwards."""
    evaluation = dataclasses.replace(config.eval, every_iterations=0, num_prompts=0)
    config = dataclasses.replace(config, num_iterations=iterations, eval=evaluation)
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            train(config, workdir)
        return [row for row in read_metrics(workdir)[1:] if row.get(TRAINED)]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians, as ``costs.Times``."""
    of = lambda value: statistics.median(map(value, rows))
    return {
        "generate_s": of(lambda row: row["time/generate_s"] + row["time/reward_s"]),
        "update_s": of(lambda row: row["time/update_s"]),
        "iteration_s": of(lambda row: row["time/iteration_s"]),
        "generated": of(lambda row: row[GENERATED]),
        "trained": of(lambda row: row[TRAINED]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--raw", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    study = raw.read(given.raw)
    sweep, first = read_sweep(study.config), [runs[0] for runs in groups(study.reported()).values()]
    arms = dict(zip((label(run, sweep) for run in first), raw.configs(study, first), strict=True))
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for _ in range(given.rounds):
        for name, config in arms.items():
            rows[name] += measure(config, given.iterations)
    times = {name: summary(measured) for name, measured in rows.items()}
    made_with = {"machine": hardware(), "iterations": given.iterations, "rounds": given.rounds}
    given.out.write_text(json.dumps({"made_with": made_with, "times": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
