"""Stop or kill one of the four hosts of a run, and check how the run ends and continues.

    python -m benchmarks.host_stops [--tries=20] [--only=SIGTERM] [--folder=DIR]

Four processes run configs/debug.py on this machine, one CPU device each. Completions have up to 64 tokens in chunks of
one, and an iteration has one update, so that most of an iteration is generation. In each try, one process receives the
signal in the third of four iterations. The benchmark records how all processes end, and after how many seconds. The
same command again must then leave the files of an undisturbed run: checkpoint, metrics and samples, bit by bit.

    SIGTERM        all save and end with status 143
    SIGKILL        of host 1, 2 or 3: the others end with status 1, and name it and what it was doing
    SIGKILL of 0   where the coordination service is: the same

"Inside" counts the stops within the generation: the checkpoint shows it for SIGTERM, the other processes' messages for
SIGKILL. The table covers all tries in DIR, also of earlier calls. A try that ends wrongly leaves its output there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))  # its processes, and what they must leave
from system.test_hosts import SETTINGS, Job
from system.test_resume import assert_same_run

COUNT = 4
KINDS = {
    "SIGTERM": (signal.SIGTERM, (0, 1, 2, 3)),
    "SIGKILL": (signal.SIGKILL, (1, 2, 3)),
}
KINDS["SIGKILL of 0"] = signal.SIGKILL, (0,)
MOMENT_S = 0.5, 2.0  # from the end of the second iteration: the checkpoint is begun, the generation takes 2 s and more


def start(folder: pathlib.Path, name: str) -> Job:
    lean = {"num_iterations": 4, "eval.num_prompts": 0, "checkpoint.export": False}
    lean |= {
        "sampling.max_completion_tokens": 64,
        "rollout.chunk_steps": 1,
        "update.updates_per_iteration": 1,
    }
    return Job(COUNT, folder, SETTINGS | lean, flags=(f"--workdir={folder / name}",))


def right(kind: str, victim: int, statuses: list[int], outputs: list[str]) -> bool:
    """Return whether all hosts have ended with the right status."""
    if kind == "SIGTERM":
        return statuses == [143] * COUNT
    others = [i for i in range(COUNT) if i != victim]
    said = rf"error: host {victim} (has not been heard of for \d+ s|is gone \(.*\)); it was in: \w+"
    return all(statuses[i] == 1 and re.search(said, outputs[i]) for i in others)


def stopped_inside(kind: str, workdir: pathlib.Path, outputs: list[str]) -> bool:
    """Return whether the signal interrupted the generation."""
    if kind != "SIGTERM":
        return any("; it was in: generation of iteration" in text for text in outputs)
    steps = [path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]
    last = max(steps, key=lambda path: int(path.name))
    return json.loads((last / "config" / "metadata").read_text())["is_inside"]


def one_try(folder: pathlib.Path, kind: str, chance: random.Random) -> dict[str, object]:
    number, victims = KINDS[kind]
    victim, delay = chance.choice(victims), chance.uniform(*MOMENT_S)
    shutil.rmtree(folder / "run", ignore_errors=True)
    job = start(folder, "run")
    job.until("iteration 2/")
    time.sleep(delay)
    told = time.monotonic()
    job.hosts[victim].send_signal(number)
    statuses, outputs = job.end()
    found = {
        "seconds": time.monotonic() - told,
        "statuses": statuses,
        "right": right(kind, victim, statuses, outputs),
    }
    found |= {"kind": kind, "victim": victim, "delay": delay}
    found["inside"] = stopped_inside(kind, folder / "run", outputs)
    again, texts = start(folder, "run").end()
    try:
        assert again == [0] * COUNT
        assert_same_run(folder / "run", folder / "whole", same_steps=False)
        found["bitwise"] = True
    except AssertionError:
        found["bitwise"] = False
    if not (found["right"] and found["bitwise"]):
        name = f"{kind.replace(' ', '_')}_{time.time():.0f}.txt"
        parts = [f"==== host {i}, {s}\n{text}" for i, (s, text) in enumerate(zip(statuses, outputs, strict=True))]
        (folder / name).write_text(f"{found} host {victim} after {delay:.2f} s\n" + "\n".join([*parts, *texts]))
        print(f"  {name}", flush=True)
    with open(folder / "tries.jsonl", "a") as file:
        file.write(json.dumps(found) + "\n")
    return found


def row(kind: str, tries: list[dict[str, object]]) -> str:
    seconds = [found["seconds"] for found in tries]
    ends = sorted({tuple(sorted(found["statuses"])) for found in tries})
    right, inside, bitwise = (sum(found[name] for found in tries) for name in ("right", "inside", "bitwise"))
    spread = f"{statistics.median(seconds):.0f} / {max(seconds):.0f}"
    statuses = ", ".join(" ".join(map(str, end)) for end in ends)
    return f"| {kind} | {len(tries)} | {right} | {spread} | {statuses} | {inside} | {bitwise} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="of each kind")
    parser.add_argument("--only", choices=KINDS, help="one kind")
    parser.add_argument("--seed", type=int, default=0, help="of hosts and moments")
    parser.add_argument("--folder", type=pathlib.Path, help="of the runs; else a temporary one")
    given = parser.parse_args()
    folder = given.folder or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "whole" / "report.html").exists():
        statuses, outputs = start(folder, "whole").end()
        if statuses != [0] * COUNT:
            sys.exit("the run that nobody disturbs did not end:\n" + "\n".join(outputs))
    kinds = [given.only] if given.only else list(KINDS)
    chance, tries = random.Random(given.seed), {kind: [] for kind in KINDS}
    for line in (folder / "tries.jsonl").read_text().splitlines() if (folder / "tries.jsonl").exists() else []:
        tries[(found := json.loads(line))["kind"]].append(found)
    for _ in range(given.tries):
        for kind in kinds:
            tries[kind].append(one_try(folder, kind, chance))
            print(row(kind, tries[kind]), flush=True)
    print(f"\n{datetime.date.today()}, {os.cpu_count()} CPU cores")
    print("| signal | tries | ended right | s to the end of all, median / worst | statuses | inside | bitwise after |")
    print(
        "|---|---|---|---|---|---|---|",
        *(row(kind, x) for kind, x in tries.items() if x),
        sep="\n",
    )


if __name__ == "__main__":
    main()
