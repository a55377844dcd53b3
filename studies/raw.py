"""Raw metrics of published runs, from which the study's tables and figures are made: one compressed file per sweep.

    python -m studies.raw --config=configs/sweeps/e4_delay.py --runs=runs/e4 --out=studies/data/e4.json.xz \\
        [--only ARM ...]

A file has for every finished run: its settings, its label in the sweep, the score of each held-out question before the
run and at every evaluation, the results of the sweep's ``after``, and the metrics ``METRICS``. The metrics are of every
iteration, or of evaluations only if the run only chose a learning rate. The file also has the versions, the commit and
the machine of the runs. studies.all reads nothing else.

With ``--only``, the runs of these arms are put into the file, and the other arms keep their runs. So a long sweep can
be run one arm, or a few seeds of an arm, at a time. No value is measured by the clock, so the machines may differ. An
arm is shown once all its seeds are in the file.

Owns: the raw file. Does not know: the tables and figures.
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
from jaxrl_llm.sweeps.points import SEED, Point, Sweep, with_point
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
        SystemExit: the sweep has no such arm; no run is finished; the runs have several commits or versions; or two
            runs of one seed and task have different held-out questions. Intervals need the same questions.
    """
    base = runpy.run_path(config)["get_config"]().to_dict()
    sweep = read_sweep(config)
    if only:
        sweep = _only_arms(sweep, only, config)
    points = points_of(config, base, sweep, folder)
    runs = [run for run in runs_of(folder, points, sweep, {}) if run.status == "finished"]
    made_with = []
    for run in runs:
        record = json.loads((folder / run.name / "config.json").read_text())
        made_with.append(record["made_with"])
    if not runs or any(other != made_with[0] for other in made_with):
        raise SystemExit(f"--runs={folder} must have finished runs of {config}, all of one commit and its versions")
    configs_of_runs = {run.name: points[run.name][1] for run in runs}
    refuse_other_questions([(folder / run.name, configs_of_runs[run.name]) for run in runs])
    records = [_record(run, folder / run.name, configs_of_runs[run.name], sweep.name_of(run.point)) for run in runs]
    return {
        "config": config,
        "made_with": made_with[0] | {"machine": hardware()},
        "runs": records,
    }


def _only_arms(sweep: Sweep, only: Sequence[str], config: str) -> Sweep:
    """Return the sweep with the points of the arms ``only``."""
    points_by_arm: dict[str, list[Point]] = {}
    for point in sweep.points:
        points_by_arm.setdefault(without_rate(sweep.name_of(point)), []).append(point)
    missing = sorted({*only} - {*points_by_arm})
    if missing:
        raise SystemExit(f"--only={missing[0]!r}: no such arm in {config}; it has {sorted(points_by_arm)}")
    points = [point for point in sweep.points if without_rate(sweep.name_of(point)) in only]
    return dataclasses.replace(sweep, points=points)


def added(content: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Return the content of the file at ``path`` with the runs of ``content`` added.

    A new run replaces a run of the same name. A run of another machine records its machine.

    Raises:
        SystemExit: the runs have another config, commit or versions than the file, or an arm would be reported at two
            learning rates.
    """
    if not path.is_file():
        return content
    before = content_of(path)
    machine = content["made_with"]["machine"]
    machine_before = before["made_with"]["machine"]
    _refuse_other(path, "config", before["config"], content["config"])
    _refuse_other(
        path,
        "made_with",
        before["made_with"],
        content["made_with"] | {"machine": machine_before},
    )
    runs = {record["name"]: record for record in before["runs"]}
    for record in content["runs"]:
        runs[record["name"]] = record if machine == machine_before else record | {"machine": machine}
    rates: dict[str, float] = {}
    for record in runs.values():
        if not is_reported(record["point"][SEED]):
            continue
        arm = without_rate(record["label"])
        rate = record["point"][RATE]
        first_rate = rates.setdefault(arm, rate)
        if first_rate != rate:
            raise SystemExit(f"{path} would have {arm!r} at two learning rates, {first_rate} and {rate}")
    return before | {"runs": list(runs.values())}


def _refuse_other(path: pathlib.Path, field: str, before: Any, new: Any) -> None:
    """Raise SystemExit if new runs have another value of ``field`` than the file at ``path``."""
    if before != new:
        raise SystemExit(f"{path} has runs of {field} {before}, not of {new}")


def refuse_other_questions(runs: Sequence[tuple[pathlib.Path, Config]]) -> None:
    """Raise SystemExit if two runs of one seed and task were asked different held-out questions.

    ``runs`` has the folder and the config of each run.
    """
    questions_of_task: dict[str, tuple[pathlib.Path, list[str]]] = {}
    for workdir, config in runs:
        samples = json.loads((workdir / "eval_before.json").read_text())["samples"]
        questions = [sample["prompt"] for sample in samples[:: config.eval.num_samples]]
        task = f"{config.seed} {config.prompts}"
        first, first_questions = questions_of_task.setdefault(task, (workdir, questions))
        if questions != first_questions:
            raise SystemExit(f"{workdir} was asked other held-out questions than {first}, of the same seed and task")


def _record(run: Run, workdir: pathlib.Path, config: Config, label: str) -> dict[str, Any]:
    """Return the record of a run for the raw file."""
    evaluated = [row["iteration"] for row in run.rows if row.get("eval/pass_rate") is not None]
    threshold = config.rewards.pass_threshold
    passed = []
    for iteration in evaluated:
        name = "eval_after.json" if iteration == config.num_iterations else f"eval_{iteration}.json"
        passed.append(_passed(workdir / name, threshold))
    rows = run.rows if is_reported(run.point[SEED]) else _between(run.rows, evaluated)
    return {
        "name": run.name,
        "label": label,
        "point": run.point,
        "samples": config.eval.num_samples,
        "after": dict(run.after),
        "before": _passed(workdir / "eval_before.json", threshold),
        "passed": passed,
        "metrics": {name: [_rounded(row.get(name)) for row in rows] for name in ("iteration", *METRICS)},
    }


def _passed(path: pathlib.Path, threshold: float) -> list[int]:
    """Return the number of answers that passed, for each question of an evaluation.

    Raises:
        SystemExit: the reward of an answer failed. The answer would count as wrong.
    """
    evaluation = json.loads(path.read_text())
    rewards = [sample["reward"] for sample in evaluation["samples"]]
    num_failed = rewards.count(None)
    if num_failed:
        raise SystemExit(f"{path} has {num_failed} answers whose reward failed: run that point again")
    by_question = np.reshape(np.array(rewards) >= threshold, (-1, evaluation["num_samples"]))
    return by_question.sum(axis=1).tolist()


def _between(rows: Sequence[Any], evaluated: Sequence[int]) -> list[dict[str, float | None]]:
    """Return one row per evaluation over the iterations since the last one: sums for ``COUNTS``, otherwise means."""
    lines = []
    begin = 0
    for end in evaluated:
        interval = [row for row in rows if begin < row["iteration"] <= end]
        line: dict[str, float | None] = {}
        for name in METRICS:
            values = [row[name] for row in interval if row.get(name) is not None]
            reduce = np.sum if name in COUNTS else np.mean
            line[name] = float(reduce(values)) if values else None
        line["iteration"] = end
        line["eval/pass_rate"] = interval[-1]["eval/pass_rate"]
        lines.append(line)
        begin = end
    return lines


def _rounded(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}")


def write(content: dict[str, Any], path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(content).encode(), preset=9))


def content_of(path: pathlib.Path) -> dict[str, Any]:
    """Return the content that ``write`` wrote to a file."""
    return json.loads(lzma.decompress(path.read_bytes()))


def read(path: pathlib.Path) -> Study:
    """Return the content of the raw file at ``path`` as a study."""
    content = content_of(path)
    records = content["runs"]
    machine = content["made_with"]["machine"]
    return Study(
        config=content["config"],
        made_with=content["made_with"],
        runs=[_run(record) for record in records],
        labels={record["name"]: record["label"] for record in records},
        samples_of={record["name"]: record["samples"] for record in records},
        passed={record["name"]: np.array(record["passed"]) for record in records},
        before={record["name"]: np.array(record["before"]) for record in records if "before" in record},
        machines={record["name"]: record.get("machine", machine) for record in records},
    )


def _run(record: dict[str, Any]) -> Run:
    """Return the run of a record."""
    columns = record["metrics"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    point: Point = {name: _as_setting(value) for name, value in record["point"].items()}
    return Run(record["name"], point, "finished", rows, after=record.get("after", {}))


def _as_setting(value: Any) -> Any:
    """Return a value of JSON as a setting: a list becomes a tuple, unless it holds functions (mappings)."""
    is_tuple = isinstance(value, list) and not any(isinstance(item, dict) for item in value)
    return tuple(value) if is_tuple else value


def configs(study: Study, runs: Sequence[Run]) -> list[Config]:
    """Return the whole config of each of the runs."""
    base = runpy.run_path(study.config)["get_config"]().to_dict()
    return [recorded(with_point(base, _with_current_settings(run.point))) for run in runs]


def _with_current_settings(point: Point) -> Point:
    """Return the point with ``replay.draw`` in place of the settings that earlier versions had for fresh batches."""
    if not point.get("replay.fresh_batches"):
        return point
    current = dict(point)
    del current["replay.fresh_batches"]
    current["replay.draw"] = {
        "name": "fresh_or_older",
        "fresh_share": current.pop("replay.fresh_fraction"),
        "fresh_from_iteration": current.pop("replay.fresh_from_iteration", 0),
    }
    return current


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--runs", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM", help="arms, without their rates")
    arguments = parser.parse_args()
    content = collect(arguments.config, arguments.runs, arguments.only)
    if arguments.only:
        content = added(content, arguments.out)
    write(content, arguments.out)
    size_mb = arguments.out.stat().st_size / 2**20
    print(f"{len(content['runs'])} runs, {size_mb:.2f} MiB in {arguments.out}")


if __name__ == "__main__":
    main()
