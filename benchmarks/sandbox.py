"""Executions a second of the sandbox, beside an interpreter started for each (the peer) and a fork (the limit).

    python -m benchmarks.sandbox [--seconds=3] [--rounds=3] [--workers 1 2]

    fork         a bare fork of this size of process that exits: nothing can be quicker that forks
    sandbox      each isolation that this machine allows
    subprocess   `python -I -S -c`, and `python -c` as a reward function would write it, without any wall

The kinds take turns in each round, so that what else the machine does falls on all of them; of each the best and the
median of the rounds, and the processor's time for each, of all processes that have part in it, which depends less on
what else it does. Programs: `pass`, and a function with three assertions as MBPP has them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable

from jaxrl_llm.sandbox.sandbox import ISOLATIONS, Limits, Sandbox, SandboxError

PROGRAMS = {
    "pass": "pass",
    "mbpp": """
import math

def is_woodall(x):
    if x % 2 == 0:
        return False
    if x == 1:
        return True
    x, p = x + 1, 0
    while x % 2 == 0:
        x, p = x / 2, p + 1
        if p == x:
            return True
    return False

assert is_woodall(383) == True
assert is_woodall(254) == False
assert is_woodall(200) == False
""",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to run a program.

    Attributes:
        run: runs one, and raises where it fails.
        spent: seconds of the processor that all it has run so far took.
    """

    run: Callable[[str], object]
    spent: Callable[[], float]


def measure(kind: Kind, code: str, num_threads: int, seconds: float) -> tuple[float, float]:
    """Runs a second in so many threads, to the end of the last, and milliseconds of the processor for each."""
    counts, until = [0] * num_threads, time.perf_counter() + seconds

    def work(i: int) -> None:
        while time.perf_counter() < until:
            kind.run(code)
            counts[i] += 1

    began, spent = time.perf_counter(), kind.spent() + time.process_time()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return sum(counts) / seconds, 1e3 * (kind.spent() + time.process_time() - spent) / sum(counts)


FORKS = """
import os, sys, time
began, count = time.perf_counter(), 0
while time.perf_counter() - began < float(sys.argv[1]):
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    count += 1
times = os.times()
print(count / (time.perf_counter() - began), 1e3 * sum(times[:4]) / count)
"""


def forks(num: int, seconds: float) -> tuple[float, float]:
    """Forks a second of so many small interpreters at once, and milliseconds of processor each."""
    command = [sys.executable, "-I", "-S", "-c", FORKS, str(seconds)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num)]
    rates, costs = zip(
        *(map(float, process.communicate()[0].split()) for process in processes),
        strict=True,
    )
    return sum(rates), sum(costs) / num


def started(*flags: str) -> Kind:
    """An interpreter for each program."""

    def run(code: str) -> None:
        command = [sys.executable, *flags, "-c", code]
        subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
            check=True,
        )

    return Kind(run, lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]))


def in_sandbox(pool: Sandbox) -> Kind:
    def run(code: str) -> None:
        if not (result := pool.run(code)).finished:
            raise RuntimeError(f"the program failed: {result}")

    return Kind(run, lambda: sum(sum(process.cpu_times()[:4]) for process in pool.processes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each kind in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="programs at once")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, ",
        end="",
    )
    print(f"Linux {platform.release()}, Python {platform.python_version()}")
    for num in options.workers:
        with contextlib.ExitStack() as stack:
            kinds = {"subprocess -I -S": started("-I", "-S"), "subprocess": started()}
            for isolation in ISOLATIONS:
                with contextlib.suppress(SandboxError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    pool = stack.enter_context(Sandbox(Limits(), num_workers=num, isolation=isolation))
                    kinds[f"sandbox, {isolation}"] = in_sandbox(pool)
            rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for _ in range(options.rounds):
                rates.setdefault(("fork", ""), []).append(forks(num, options.seconds))
                for program, code in PROGRAMS.items():
                    for name, kind in kinds.items():
                        measured = measure(kind, code, num, options.seconds)
                        rates.setdefault((name, program), []).append(measured)
        for (name, program), found in rates.items():
            each, costs = zip(*found, strict=True)
            print(
                f"{num} at once  {name:22s} {program:5s} best {max(each):6.0f}/s",
                end="  ",
            )
            print(
                f"median {statistics.median(each):6.0f}/s  processor {statistics.median(costs):6.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
