"""Seconds of an iteration of each arm of some sweeps, on a machine that does nothing else.

    python -m studies.timing studies/data/e2.json.xz studies/data/e3.json.xz [--iterations=40] [--rounds=2] \\
        [--only ARM ...]

Sweeps run several points at once, so their clock times are not reliable. This module runs each reported arm's config
alone for a few iterations, in several rounds. Each round has a random order, so that a machine that slows down favours
no arm. The result is the median over all iterations, without the first of each run, which warms up. Arms that differ
only in learning rate and seed are one arm. The results are in studies/data/e2_times.json and similar files.
With ``--only``, only the given arms are measured. The other arms keep their recorded times.

Owns: the timed runs, the files of times. Does not know: what an arm learns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import random
import statistics
import tempfile
from typing import Any

from benchmarks.machine import hardware
from jaxrl_llm.commands.train import train
from jaxrl_llm.config import Config, to_json
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.sweeps.table import groups
from studies import raw
from studies.costs import GENERATED, TRAINED
from studies.design import without_rate

RAW = ".json.xz"


def timed(config: Config, iterations: int) -> Config:
    """Return a config with the same work per iteration, for a few training iterations without evaluation."""
    iterations += config.replay.delay_iterations
    evaluation = dataclasses.replace(config.eval, every_iterations=0, num_prompts=0, name="")
    optimizer = dataclasses.replace(config.optimizer, learning_rate=Config().optimizer.learning_rate)
    return dataclasses.replace(config, num_iterations=iterations, eval=evaluation, optimizer=optimizer, seed=0)


def measure(config: Config) -> list[dict[str, float]]:
    """Run the config in a temporary folder and return the metrics of its training iterations, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            train(config, workdir)
        return [row for row in read_metrics(workdir)[1:] if row.get(TRAINED)]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the rows as the fields of ``costs.Times``."""
    return {
        "generate_s": statistics.median(row["time/generate_s"] + row["time/reward_s"] for row in rows),
        "update_s": statistics.median(row["time/update_s"] for row in rows),
        "iteration_s": statistics.median(row["time/iteration_s"] for row in rows),
        "generated": statistics.median(row[GENERATED] for row in rows),
        "trained": statistics.median(row[TRAINED] for row in rows),
    }


@dataclasses.dataclass
class Work:
    """Arms to time.

    Attributes:
        configs: timed config by its JSON. Arms of several files may share one.
        arms: JSON of the timed config by raw file and name of the arm.
    """

    configs: dict[str, Config] = dataclasses.field(default_factory=dict)
    arms: dict[pathlib.Path, dict[str, str]] = dataclasses.field(default_factory=dict)

    def add(self, path: pathlib.Path, iterations: int, only: list[str]) -> None:
        """Add the reported arms of a raw file. Arms outside ``only`` are not measured, unless it is empty."""
        study = raw.read(path)
        first_runs = [runs[0] for runs in groups(study.reported()).values()]
        for run, config in zip(first_runs, raw.configs(study, first_runs), strict=True):
            name = study.labels[run.name]
            timed_config = timed(config, iterations)
            key = to_json(timed_config)
            if not only or without_rate(name) in only:
                self.configs[key] = timed_config
            self.arms.setdefault(path, {})[name] = key

    def names(self) -> set[str]:
        """Return the names of all arms without their rates."""
        return {without_rate(name) for arms in self.arms.values() for name in arms}


def write_times(
    path: pathlib.Path,
    arms: dict[str, str],
    rows: dict[str, list[dict[str, float]]],
    made_with: dict[str, Any],
    only: list[str],
) -> None:
    """Write the times of the arms of a raw file beside it. With ``only``, the other arms keep their recorded times."""
    out = path.with_name(f"{path.name.removesuffix(RAW)}_times.json")
    before = json.loads(out.read_text()) if only else {"made_with": made_with, "times": {}}
    recorded = {without_rate(name): times for name, times in before["times"].items()}
    times = {}
    for name, key in arms.items():
        times[name] = summary(rows[key]) if key in rows else recorded[without_rate(name)]
    content_made_with = before["made_with"]
    if only:
        content_made_with = content_made_with | {"again": made_with | {"arms": only}}
    out.write_text(json.dumps({"made_with": content_made_with, "times": times}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("raw", type=pathlib.Path, nargs="+")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM", help="arms, without their rates")
    arguments = parser.parse_args()
    are_raw = all(path.name.endswith(RAW) for path in arguments.raw)
    if arguments.iterations < 2 or arguments.rounds < 1 or not are_raw:
        parser.error(f"files must be *{RAW}, --iterations at least 2 (the first warms up) and --rounds at least 1")
    work = Work()
    for path in arguments.raw:
        work.add(path, arguments.iterations, arguments.only)
    missing = {*arguments.only} - work.names()
    if missing:
        parser.error(f"--only={min(missing)!r}: no such arm")
    rows: dict[str, list[dict[str, float]]] = {key: [] for key in work.configs}
    for i in range(arguments.rounds):
        for key in random.Random(i).sample(list(work.configs), len(work.configs)):
            rows[key] += measure(work.configs[key])
        made_with = {
            "machine": hardware(),
            "iterations": arguments.iterations,
            "rounds": i + 1,
            "with": [path.name.removesuffix(RAW) for path in arguments.raw],
        }
        for path, arms in work.arms.items():
            write_times(path, arms, rows, made_with, arguments.only)


if __name__ == "__main__":
    main()
