"""Stop or kill one of the four hosts of a run, and check how the run ends and continues.

    python -m benchmarks.host_stops [--tries=20] [--only=SIGTERM] [--folder=DIR]

Four processes run configs/debug.py on this machine, one CPU device each. Completions have up to 64 tokens in chunks of
one, and an iteration has one update, so that most of an iteration is generation. In each try, one process receives the
signal in the third of four iterations. The benchmark records how all processes end, and after how many seconds. The
same command again must then leave the files of an undisturbed run: checkpoint, metrics and samples, bit by bit.

    SIGTERM        all processes save and end with status 143
    SIGKILL        of host 1, 2 or 3: the others end with status 1, and name the host and its phase
    SIGKILL of 0   the same for host 0, which runs the coordination service

"Inside" counts the stops within the generation. For SIGTERM the checkpoint shows this, for SIGKILL the messages of the
other processes. The table covers all tries in DIR, also of earlier calls. A try that ends wrongly leaves its output in
DIR.
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
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))  # for the processes and the comparison of runs
from system.test_hosts import SETTINGS, Job
from system.test_resume import assert_same_run

COUNT = 4
KINDS = {
    "SIGTERM": (signal.SIGTERM, (0, 1, 2, 3)),
    "SIGKILL": (signal.SIGKILL, (1, 2, 3)),
}
KINDS["SIGKILL of 0"] = (signal.SIGKILL, (0,))
# Range of the signal's time, in seconds from the end of the second iteration. The checkpoint has then begun. The
# generation takes 2 s or more.
MOMENT_S = (0.5, 2.0)


def start(folder: pathlib.Path, name: str) -> Job:
    """Start the four processes of a run in ``folder / name``."""
    lean = {
        "num_iterations": 4,
        "eval.num_prompts": 0,
        "checkpoint.export": False,
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
    message = rf"error: host {victim} (has not been heard of for \d+ s|is gone \(.*\)); it was in: \w+"
    return all(statuses[i] == 1 and re.search(message, outputs[i]) for i in others)


def stopped_inside(kind: str, workdir: pathlib.Path, outputs: list[str]) -> bool:
    """Return whether the signal interrupted the generation."""
    if kind != "SIGTERM":
        return any("; it was in: generation of iteration" in text for text in outputs)
    steps = [path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]
    last = max(steps, key=lambda path: int(path.name))
    return json.loads((last / "config" / "metadata").read_text())["is_inside"]


def one_try(folder: pathlib.Path, kind: str, chance: random.Random) -> dict[str, object]:
    """Run once with a signal, run the same command again, and return the outcome of both."""
    number, victims = KINDS[kind]
    victim = chance.choice(victims)
    delay = chance.uniform(*MOMENT_S)
    shutil.rmtree(folder / "run", ignore_errors=True)
    job = start(folder, "run")
    job.until("iteration 2/")
    time.sleep(delay)
    signal_time = time.monotonic()
    job.hosts[victim].send_signal(number)
    statuses, outputs = job.end()
    found = {
        "seconds": time.monotonic() - signal_time,
        "statuses": statuses,
        "right": right(kind, victim, statuses, outputs),
        "kind": kind,
        "victim": victim,
        "delay": delay,
        "inside": stopped_inside(kind, folder / "run", outputs),
    }
    again, texts = start(folder, "run").end()
    try:
        assert again == [0] * COUNT
        assert_same_run(folder / "run", folder / "whole", same_steps=False)
        found["bitwise"] = True
    except AssertionError:
        found["bitwise"] = False
    if not (found["right"] and found["bitwise"]):
        name = f"{kind.replace(' ', '_')}_{time.time():.0f}.txt"
        parts = [f"{found} host {victim} after {delay:.2f} s"]
        for i, (status, text) in enumerate(zip(statuses, outputs, strict=True)):
            parts.append(f"==== host {i}, {status}\n{text}")
        (folder / name).write_text("\n".join([*parts, *texts]))
        print(f"  {name}", flush=True)
    with open(folder / "tries.jsonl", "a") as file:
        file.write(json.dumps(found) + "\n")
    return found


def row(kind: str, tries: list[dict[str, object]]) -> str:
    """Return the table's row of one kind of signal."""
    seconds = [found["seconds"] for found in tries]
    ends = sorted({tuple(sorted(found["statuses"])) for found in tries})
    right, inside, bitwise = (sum(found[name] for found in tries) for name in ("right", "inside", "bitwise"))
    spread = f"{statistics.median(seconds):.0f} / {max(seconds):.0f}"
    statuses = ", ".join(" ".join(map(str, end)) for end in ends)
    return f"| {kind} | {len(tries)} | {right} | {spread} | {statuses} | {inside} | {bitwise} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="tries of each kind")
    parser.add_argument("--only", choices=KINDS, help="the only kind of signal to try")
    parser.add_argument("--seed", type=int, default=0, help="seed of the hosts and moments")
    parser.add_argument("--folder", type=pathlib.Path, help="folder of the runs; default: a temporary folder")
    given = parser.parse_args()
    folder = given.folder or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "whole" / "report.html").exists():
        statuses, outputs = start(folder, "whole").end()
        if statuses != [0] * COUNT:
            sys.exit("error: the undisturbed run failed:\n" + "\n".join(outputs))
    kinds = [given.only] if given.only else list(KINDS)
    chance = random.Random(given.seed)
    tries = {kind: [] for kind in KINDS}
    record = folder / "tries.jsonl"
    if record.exists():
        for line in record.read_text().splitlines():
            found = json.loads(line)
            tries[found["kind"]].append(found)
    for _ in range(given.tries):
        for kind in kinds:
            tries[kind].append(one_try(folder, kind, chance))
            print(row(kind, tries[kind]), flush=True)
    print(f"\n{datetime.date.today()}, {os.cpu_count()} CPU cores")
    print("| signal | tries | ended right | s to the end of all, median / worst | statuses | inside | bitwise after |")
    print("|---|---|---|---|---|---|---|")
    for kind, found in tries.items():
        if found:
            print(row(kind, found))


if __name__ == "__main__":
    main()
