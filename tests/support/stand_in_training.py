"""A stand-in for training in a sweep's processes: it writes metrics and a report, or follows its settings."""

import json
import os
import signal
import time

from jaxrl_llm.commands import sweep_worker
from jaxrl_llm.config import ConfigError, to_json

SERVE = "from support.stand_in_training import serve; serve(CONNECTION)"
# optimizer.learning_rate -> what happens
REFUSE, RAISE, DIE, WAIT, EARLY, NO_END = 1.0, 2.0, 3.0, 4.0, 5.0, 6.0


def train(config, workdir):
    """Write pass rates of 0.1 x iteration + seed.

    Continue from the last written iteration; each call appends a line to turns.txt.
    """
    print(f"training in {workdir.name}")
    (workdir / "config.json").write_text(to_json(config))
    with open(workdir / "turns.txt", "a") as turns:
        turns.write(f"{os.getpid()}\n")
    kind = config.optimizer.learning_rate
    if kind == REFUSE:
        raise ConfigError("no such thing")
    if kind == RAISE:
        raise ZeroDivisionError("ours")
    if kind == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == WAIT:
        stopped = []
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
        write(workdir, config, 1)
        while not stopped:
            time.sleep(0.01)
        return 0
    write(workdir, config, 1 if kind == EARLY else config.num_iterations)
    if kind not in (EARLY, NO_END):
        (workdir / "report.html").touch()
    return 0


def write(workdir, config, until):
    path = workdir / "metrics.jsonl"
    first = 1 + (len(path.read_text().splitlines()) if path.exists() else 0)
    with open(path, "a") as file:
        for i in range(first, until + 1):
            file.write(
                json.dumps({"iteration": i, "eval/pass_rate": 0.1 * i + config.seed, "tokens/trained": 10}) + "\n"
            )


def serve(fileno):
    sweep_worker.main(fileno, train)
