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
    parser.add_argument("raw", type=pathlib.Path, nargs="+")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM", help="arms, without their rates")
    given = parser.parse_args()
    if given.iterations < 2 or given.rounds < 1 or not all(path.name.endswith(RAW) for path in given.raw):
        parser.error(f"files must be *{RAW}, --iterations at least 2 (the first warms up) and --rounds at least 1")
    work: dict[str, Config] = {}
    arms: dict[pathlib.Path, dict[str, str]] = {}  # by file and name of the arm: its timed config as JSON
    for path in given.raw:
        study = raw.read(path)
        first = [runs[0] for runs in groups(study.reported()).values()]
        for run, config in zip(first, raw.configs(study, first), strict=True):
            config, name = timed(config, given.iterations), study.labels[run.name]
            what = to_json(config)
            if not given.only or without_rate(name) in given.only:
                work[what] = config
            arms.setdefault(path, {})[name] = what
    if missing := {*given.only} - {without_rate(name) for its_arms in arms.values() for name in its_arms}:
        parser.error(f"--only={sorted(missing)[0]!r}: no such arm")
    rows: dict[str, list[dict[str, float]]] = {what: [] for what in work}
    for i in range(given.rounds):
        for what in random.Random(i).sample(list(work), len(work)):
            rows[what] += measure(work[what])
        made_with = {"machine": hardware(), "iterations": given.iterations, "rounds": i + 1}
        made_with["with"] = [path.name.removesuffix(RAW) for path in given.raw]
        for path, its_arms in arms.items():
            out = path.with_name(f"{path.name.removesuffix(RAW)}_times.json")
            before = json.loads(out.read_text()) if given.only else {"made_with": made_with, "times": {}}
            kept = {without_rate(name): times for name, times in before["times"].items()}
            times = {name: summary(rows[x]) if x in work else kept[without_rate(name)] for name, x in its_arms.items()}
            again = {"again": made_with | {"arms": given.only}} if given.only else {}
            content = {"made_with": before["made_with"] | again, "times": times}
            out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
