"""Digests of whole runs, to show that a refactoring changes no number.

    python tests/golden/states.py record runs/golden.json     before the change
    python tests/golden/states.py compare runs/golden.json    after it

Runs every recipe and debug for ten iterations and the main job for two, and keeps a digest of every array of their last
checkpoints, of its host state, of the metrics that are not times, and the table of memory. The digests of arrays are
compared as a set, because names and order of leaves may change. Arrays that only one side has are printed. Compare only
on one machine and with one version of jax: floats differ between processors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
MAIN_JOB = "configs/grpo_smollm2_135m_chain_sum.py"


def jobs() -> dict[str, list[str]]:
    """Return the arguments of ``train`` for each job, by name."""
    quick = ["--config.num_iterations=10", "--config.metrics.tensorboard=False", "--config.checkpoint.export=False"]
    recipes = sorted((ROOT / "jaxrl_llm" / "recipes").glob("[!_]*.py"))
    found = {path.stem: [f"--config={path.relative_to(ROOT)}", *quick] for path in recipes}
    found["debug"] = ["--config=configs/debug.py", *quick]
    found["main"] = [f"--config={MAIN_JOB}", *quick[1:], "--config.num_iterations=2", "--config.eval.num_prompts=8"]
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def arrays_of(checkpoint: pathlib.Path) -> dict[str, str]:
    """Return the digest of every array of a checkpoint, by name."""
    import numpy as np
    import orbax.checkpoint as ocp

    tree = ocp.PyTreeCheckpointer().restore(checkpoint / "state")
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): digest(str((x.shape, x.dtype)).encode() + np.ascontiguousarray(x).tobytes())
        for path, x in ((path, np.asarray(leaf)) for path, leaf in leaves)
    }


def run(name: str, arguments: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        if name == "sapo":  # alone: what it takes of others is tested elsewhere
            (pathlib.Path(folder) / "other").mkdir()
            arguments = [*arguments, f"--config.external.paths=('{folder}/other',)"]
        workdir = pathlib.Path(folder) / "run"
        command = [sys.executable, "-m", "jaxrl_llm.train", *arguments, f"--workdir={workdir}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        last = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        timed = ("time/", "throughput/", "memory/")
        kept = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]
        table = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
        return {
            "arrays": arrays_of(last),
            "metrics": {key: digest(json.dumps([row.get(key) for row in kept]).encode()) for key in kept[-1]},
            "samples": digest((workdir / "samples.jsonl").read_bytes()),
            "memory": {program: numbers for program, *numbers in table},
        }


def differences(old: dict, new: dict) -> list[str]:
    """Return the differences between two records of a run."""
    found = []
    left, right = list(old["arrays"].values()), list(new["arrays"].values())
    for name, value in old["arrays"].items():
        if value in right:
            right.remove(value)
        else:
            found.append(f"array {name} is gone or differs")
    for name, value in new["arrays"].items():
        if value in left:
            left.remove(value)
        else:
            found.append(f"array {name} is new or differs")
    for key in ("metrics", "memory"):
        for name in sorted(set(old[key]) | set(new[key])):
            if old[key].get(name) != new[key].get(name):
                found.append(f"{key} {name}: {old[key].get(name)} -> {new[key].get(name)}")
    if old["samples"] != new["samples"]:
        found.append("samples.jsonl differs")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    chosen = {name: how for name, how in jobs().items() if not given.only or name in given.only}
    if given.what == "record":
        given.file.write_text(json.dumps({name: run(name, how) for name, how in chosen.items()}, indent=1))
        return
    expected, failed = json.loads(given.file.read_text()), 0
    for name, how in chosen.items():
        found = differences(expected[name], run(name, how))
        failed += bool(found)
        print(name, "as recorded" if not found else "\n  " + "\n  ".join(found), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
