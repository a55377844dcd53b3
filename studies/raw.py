"""Raw metrics of published runs: what the study's tables and figures are made from, in one compressed file a sweep.

    python -m studies.raw --config=configs/sweeps/e4_delay.py --runs=runs/e4 --out=studies/data/e4.json.xz \\
        [--only ARM ...]

Of every finished run: its settings and what its sweep called it, what each held-out question got before it and at
every evaluation, what came after, and the metrics below, at every iteration, or, of runs that only chose a learning
rate, at evaluations alone. Beside them the versions, the commit and the machine that made them. studies.all reads
nothing else. With ``--only`` these arms' runs are put into the file, and the others keep what stands there: a long
sweep can be run an arm, or a few seeds of one, at a time, on machines that do not last. None of it is measured by the
clock, so that they need not be alike. An arm is shown once all its seeds are there.

Owns: that file. Does not know: what is shown of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import pathlib
import runpy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import hardware
from jaxrl_llm.commands.sweep import points_of, read_sweep, runs_of
from jaxrl_llm.config import Config, recorded
from jaxrl_llm.sweeps.points import SEED, Point, with_point
from jaxrl_llm.sweeps.table import Run
from studies.costs import GENERATED, TRAINED
from studies.design import RATE, is_reported, without_rate

COUNTS = (GENERATED, TRAINED, "tokens/generated", "tokens/trained")  # of an iteration
METRICS = (
    *COUNTS,
    *("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "update/ess_frac"),
    *("replay/age_mean_steps", "replay/replay_ratio", "replay/since_last_use_mean_steps", "replay/first_use_frac"),
)
DIGITS = 4  # of a metric


class Study(NamedTuple):
    """Content of a raw file, read."""

    config: str
    made_with: dict[str, Any]
    runs: list[Run]
    labels: dict[str, str]  # by run: name of its arm in the sweep, with the rate
    samples_of: dict[str, int]  # by run: number of answers to each held-out question
    passed: dict[str, np.ndarray]  # by run: [evaluations, questions] number of answers that passed
    before: dict[str, np.ndarray]  # by run, if recorded: [questions] number of answers that passed before training
    machines: dict[str, dict[str, Any]]  # by run: its machine

    def reported(self) -> list[Run]:
        """Return the runs of the reported seeds, which are not used to choose a learning rate."""
        return [run for run in self.runs if is_reported(run.point[SEED])]


def collect(config: str, folder: pathlib.Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a raw file from the finished runs of a sweep.

    Args:
        only: names of arms without their rates; the others are left out. () = every arm.

    Raises:
        SystemExit: no such arm, no run is finished, they are of several commits or versions, or two of one seed and
            task were not asked the same held-out questions, as intervals take for granted.
    """
    base, sweep = runpy.run_path(config)["get_config"]().to_dict(), read_sweep(config)
    if only:
        arm_of = lambda point: without_rate(sweep.called(point))
        named = {arm_of(point) for point in sweep.points}
        if missing := sorted({*only} - named):
            raise SystemExit(f"--only={missing[0]!r}: no such arm in {config}; it has {sorted(named)}")
        sweep = dataclasses.replace(sweep, points=[point for point in sweep.points if arm_of(point) in only])
    points = points_of(config, base, sweep, folder)
    runs = [run for run in runs_of(folder, points, sweep, {}) if run.status == "finished"]
    made_with = [json.loads((folder / run.name / "config.json").read_text())["made_with"] for run in runs]
    if not runs or any(other != made_with[0] for other in made_with):
        raise SystemExit(f"--runs={folder} must have finished runs of {config}, all of one commit and its versions")
    refuse_other_questions([(folder / run.name, points[run.name][1]) for run in runs])
    records = [_record(run, folder / run.name, points[run.name][1], sweep.called(run.point)) for run in runs]
    return {"config": config, "made_with": made_with[0] | {"machine": hardware()}, "runs": records}


def added(content: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Return the content of the file at ``path`` with the runs of ``content`` added.

    A new run replaces a run of the same name. A run of another machine records its machine.

    Raises:
        SystemExit: the runs have another config, commit or versions than the file, or an arm would be reported at two
            learning rates.
    """
    if not path.is_file():
        return content
    before, machine = content_of(path), content["made_with"]["machine"]
    another = {} if machine == (its := before["made_with"]["machine"]) else {"machine": machine}
    for field, found in {"config": content["config"], "made_with": content["made_with"] | {"machine": its}}.items():
        if before[field] != found:
            raise SystemExit(f"{path} has runs of {field} {before[field]}, not of {found}")
    runs = {record["name"]: record for record in before["runs"]}
    runs |= {record["name"]: record | another for record in content["runs"]}
    rates: dict[str, float] = {}
    for record in runs.values():
        arm, rate = without_rate(record["label"]), record["point"][RATE]
        if is_reported(record["point"][SEED]) and rates.setdefault(arm, rate) != rate:
            raise SystemExit(f"{path} would have {arm!r} at two learning rates, {rates[arm]} and {rate}")
    return before | {"runs": list(runs.values())}


def refuse_other_questions(runs: Sequence[tuple[pathlib.Path, Config]]) -> None:
    """Raise SystemExit if two runs of one seed and task were asked different held-out questions.

    ``runs`` has the folder and the config of each run.
    """
    asked: dict[str, tuple[pathlib.Path, list[str]]] = {}
    for workdir, config in runs:
        samples = json.loads((workdir / "eval_before.json").read_text())["samples"]
        questions = [one["prompt"] for one in samples[:: config.eval.num_samples]]
        first, wanted = asked.setdefault(f"{config.seed} {config.prompts}", (workdir, questions))
        if questions != wanted:
            raise SystemExit(f"{workdir} was asked other held-out questions than {first}, of the same seed and task")


def _record(run: Run, workdir: pathlib.Path, config: Config, called: str) -> dict[str, Any]:
    last = config.num_iterations
    at = [row["iteration"] for row in run.rows if row.get("eval/pass_rate") is not None]
    files = [workdir / ("eval_after.json" if i == last else f"eval_{i}.json") for i in at]
    rows = run.rows if is_reported(run.point[SEED]) else _between(run.rows, at)
    columns = {name: [_rounded(row.get(name)) for row in rows] for name in ("iteration", *METRICS)}
    before, *passed = [_passed(path, config.rewards.pass_threshold) for path in (workdir / "eval_before.json", *files)]
    about = {"name": run.name, "label": called, "point": run.point, "samples": config.eval.num_samples}
    return about | {"after": dict(run.after), "before": before, "passed": passed, "metrics": columns}


def _passed(path: pathlib.Path, threshold: float) -> list[int]:
    """Return the number of answers that passed, for each question of an evaluation.

    Raises:
        SystemExit: the reward of an answer failed. The answer would count as wrong.
    """
    evaluation = json.loads(path.read_text())
    rewards = [one["reward"] for one in evaluation["samples"]]
    if failed := rewards.count(None):
        raise SystemExit(f"{path} has {failed} answers whose reward failed: run that point again")
    return np.reshape(np.array(rewards) >= threshold, (-1, evaluation["num_samples"])).sum(axis=1).tolist()


def _between(rows: Sequence[Any], at: Sequence[int]) -> list[dict[str, float | None]]:
    """Return one row per evaluation over the iterations since the last one: sums for ``COUNTS``, otherwise means."""
    found, begin = [], 0
    for end in at:
        some = [row for row in rows if begin < row["iteration"] <= end]
        line: dict[str, float | None] = {}
        for name in METRICS:
            values = [row[name] for row in some if row.get(name) is not None]
            of = np.sum if name in COUNTS else np.mean
            line[name] = float(of(values)) if values else None
        found.append(line | {"iteration": end, "eval/pass_rate": some[-1]["eval/pass_rate"]})
        begin = end
    return found


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def write(content: dict[str, Any], path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(content).encode(), preset=9))


def content_of(path: pathlib.Path) -> dict[str, Any]:
    """Return the content that ``write`` wrote to a file."""
    return json.loads(lzma.decompress(path.read_bytes()))


def read(path: pathlib.Path) -> Study:
    content = content_of(path)
    runs, labels, samples, passed, before, machines = [], {}, {}, {}, {}, {}
    for record in content["runs"]:
        columns = record["metrics"]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        is_tuple = lambda v: isinstance(v, list) and not any(isinstance(x, dict) for x in v)  # not a list of functions
        point: Point = {name: tuple(v) if is_tuple(v) else v for name, v in record["point"].items()}
        runs.append(Run(record["name"], point, "finished", rows, after=record.get("after", {})))
        passed[record["name"]] = np.array(record["passed"])
        samples[record["name"]] = record["samples"]
        labels[record["name"]] = record["label"]
        machines[record["name"]] = record.get("machine", content["made_with"]["machine"])
        if "before" in record:
            before[record["name"]] = np.array(record["before"])
    return Study(content["config"], content["made_with"], runs, labels, samples, passed, before, machines)


def configs(study: Study, runs: Sequence[Run]) -> list[Config]:
    """Return the whole config of each of the runs."""
    base = runpy.run_path(study.config)["get_config"]().to_dict()
    return [recorded(with_point(base, run.point)) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--runs", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM", help="arms, without their rates")
    given = parser.parse_args()
    content = collect(given.config, given.runs, given.only)
    if given.only:
        content = added(content, given.out)
    write(content, given.out)
    print(f"{len(content['runs'])} runs, {given.out.stat().st_size / 2**20:.2f} MiB in {given.out}")


if __name__ == "__main__":
    main()
