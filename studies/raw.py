"""Raw metrics of published runs: what a sweep's tables and figures are made from, in one compressed file.

    python -m studies.raw --config=configs/sweeps/e3_positive_bias.py --runs=runs/e3 --out=docs/raw/e3.json.xz

The file has every finished run's settings, the metrics below at every iteration and its last evaluation, and the
versions and the commit that made them. Tables read it in place of the runs' folder.

Owns: that file. Does not know: what is shown of it (arms, replay_figure).
"""

from __future__ import annotations

import argparse
import json
import lzma
import pathlib
import runpy
from typing import Any

from jaxrl_llm.sweep.__main__ import read_sweep, runs_of
from jaxrl_llm.sweep.points import Point, freeze_points
from jaxrl_llm.sweep.table import Run

METRICS = (
    *("time/compute_rollouts", "time/cost_ratio", "time/iteration_s", "tokens/generated", "tokens/trained"),
    *("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "update/ess_frac"),
    *("replay/age_mean_steps", "replay/uses_mean", "replay/replay_ratio"),
)
DIGITS = 5  # of a metric


def collect(config: str, folder: pathlib.Path) -> dict[str, Any]:
    """The file's content from the finished runs of a sweep.

    Raises:
        SystemExit: no run is finished, or they are of several commits or versions.
    """
    points = freeze_points(runpy.run_path(config)["get_config"]().to_dict(), read_sweep(config).points)
    runs = [run for run in runs_of(folder, points, {}) if run.status == "finished"]
    made_with = [json.loads((folder / run.name / "config.json").read_text())["made_with"] for run in runs]
    if not runs or any(other != made_with[0] for other in made_with):
        raise SystemExit(f"--runs={folder} must have finished runs of {config}, all of one commit and its versions")
    return {"config": config, "made_with": made_with[0], "runs": [_record(run, folder) for run in runs]}


def _record(run: Run, folder: pathlib.Path) -> dict[str, Any]:
    columns = {name: [_rounded(row.get(name)) for row in run.rows] for name in METRICS}
    evaluation = json.loads((folder / run.name / "eval_after.json").read_text())
    return {"name": run.name, "point": run.point, "metrics": columns, "pass_at_k": evaluation["pass_at_k"]}


def _rounded(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.{DIGITS}g}")


def write(content: dict[str, Any], path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(content).encode()))


def read(path: pathlib.Path) -> tuple[list[Run], dict[str, dict[str, float]]]:
    """The runs of a file, and by run the pass@k of its last evaluation."""
    content = json.loads(lzma.decompress(path.read_bytes()))
    runs, pass_at_k = [], {}
    for record in content["runs"]:
        columns = record["metrics"]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        rows = [{"iteration": i, **row} for i, row in enumerate(rows, 1)]
        is_tuple = lambda v: isinstance(v, list) and not any(isinstance(x, dict) for x in v)  # and no list of functions
        point: Point = {name: tuple(v) if is_tuple(v) else v for name, v in record["point"].items()}
        runs.append(Run(record["name"], point, "finished", rows))
        pass_at_k[record["name"]] = record["pass_at_k"]
    return runs, pass_at_k


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--runs", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    given = parser.parse_args()
    content = collect(given.config, given.runs)
    write(content, given.out)
    print(f"{len(content['runs'])} runs, {given.out.stat().st_size / 2**20:.2f} MiB in {given.out}")


if __name__ == "__main__":
    main()
