"""A stand-in for train on several hosts, for tests of launchers: exit statuses, one checkpoint, one workdir.

It counts iterations in a shared workdir and continues from the last one. After SIGTERM to any process, all save and end
with status 143. If a process dies, the others end with status 1 and name its host. A seed of -1 is bad input.
"""

import os
import pathlib
import signal
import sys
import time

FLAGS = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
INDEX, COUNT = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
ITERATIONS = int(FLAGS.get("config.num_iterations", 3))


def main():
    if FLAGS.get("config.seed") == "-1":
        print("error: seed=-1 must be at least 0", file=sys.stderr)
        return 2
    assert COUNT == 1 or os.environ["JAXRL_DISTRIBUTED"] == "1"
    workdir = FLAGS["workdir"]
    assert not workdir.startswith("gs://")
    if workdir.startswith("/shared/"):
        workdir = os.environ["HOME"] + workdir  # this worker's, where its share is mounted
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    job = workdir / f"job-{os.environ['FAKE_JOB']}"  # of this start: who is there, and what one tells all
    job.mkdir(exist_ok=True)
    stops = []
    (job / f"process-{INDEX}").write_text(str(os.getpid()))
    wait(lambda: all((job / f"process-{i}").exists() and pid(job, i) for i in range(COUNT)))
    signal.signal(signal.SIGTERM, lambda *_: stops.append(1))  # before it has joined the others it is ended
    checkpoint = workdir / "checkpoint"
    first = iteration = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if INDEX == 0:
        print(f"host 0 of {COUNT} starts at iteration {first}", flush=True)
    while iteration < ITERATIONS:
        if stops:
            (job / "stop").touch()
        if (job / "stop").exists():
            if INDEX == 0:
                checkpoint.write_text(str(iteration))
                print(f"stopped by SIGTERM after iteration {iteration}", flush=True)
            return 143
        for i in range(COUNT):
            if not os.path.exists(f"/proc/{pid(job, i)}") and not (job / f"done-{i}").exists():
                print(f"error: decode: host {i} is gone", file=sys.stderr, flush=True)
                return 1
        time.sleep(0.05)
        iteration += 1
        (workdir / f"iteration-{INDEX}").write_text(str(iteration))
    (job / f"done-{INDEX}").touch()
    if INDEX == 0:
        checkpoint.write_text(str(iteration))
        (workdir / "hf").mkdir(exist_ok=True)
        (workdir / "hf" / "config.json").write_text("{}")
        print(f"iteration {iteration}/{ITERATIONS}\nmodel {FLAGS['workdir']}/hf", flush=True)
    return 0


def pid(job, index):
    return (job / f"process-{index}").read_text()


def wait(what):
    until = time.monotonic() + 30
    while not what():
        if time.monotonic() > until:
            print("error: start: a host does not come", file=sys.stderr)
            sys.exit(1)
        time.sleep(0.01)


sys.exit(main())
