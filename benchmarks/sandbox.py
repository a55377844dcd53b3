"""Measure how many programs the sandbox runs per second, compared with a new interpreter per program and with a fork.

    python -m benchmarks.sandbox [--seconds=3] [--rounds=3] [--workers 1 2]

    fork         a fork of a process of this size that exits at once: no method that forks can be faster
    sandbox      each isolation that this machine allows
    subprocess   a new interpreter without isolation: `python -I -S -c`, and `python -c` as in a simple reward

The kinds take turns in each round, so that other work on the machine affects all of them. The command prints the best
and the median rate of the rounds, and the CPU time of one execution in all processes that take part. The CPU time
depends less on other work. The programs are `pass`, and a function with three assertions in the form of MBPP.
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
        run: runs one program, and raises if the program fails.
        spent: returns the CPU seconds of all programs so far.
    """

    run: Callable[[str], object]
    spent: Callable[[], float]


def measure(kind: Kind, code: str, num_threads: int, seconds: float) -> tuple[float, float]:
    """Run a program in ``num_threads`` threads for ``seconds``, and until the last run has ended.

    Returns:
        Runs per second, and milliseconds of CPU time per run.
    """
    counts = [0] * num_threads
    until = time.perf_counter() + seconds

    def work(i: int) -> None:
        while time.perf_counter() < until:
            kind.run(code)
            counts[i] += 1

    began = time.perf_counter()
    spent_before = kind.spent() + time.process_time()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    spent = kind.spent() + time.process_time() - spent_before
    return sum(counts) / elapsed, 1e3 * spent / sum(counts)


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
    """Return the forks per second of ``num`` small interpreters at once, and the CPU milliseconds of a fork."""
    command = [sys.executable, "-I", "-S", "-c", FORKS, str(seconds)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num)]
    rates = []
    costs = []
    for process in processes:
        rate, cost = process.communicate()[0].split()
        rates.append(float(rate))
        costs.append(float(cost))
    return sum(rates), sum(costs) / num


def started(*flags: str) -> Kind:
    """Return the kind that starts an interpreter for each program."""

    def run(code: str) -> None:
        command = [sys.executable, *flags, "-c", code]
        subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
            check=True,
        )

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    return Kind(run, spent)


def in_sandbox(pool: Sandbox) -> Kind:
    """Return the kind that runs programs in ``pool``."""

    def run(code: str) -> None:
        result = pool.run(code)
        if not result.finished:
            raise RuntimeError(f"the program failed: {result}")

    def spent() -> float:
        return sum(sum(process.cpu_times()[:4]) for process in pool.processes())

    return Kind(run, spent)


def kinds_of(stack: contextlib.ExitStack, num_workers: int) -> dict[str, Kind]:
    """Return the kinds that this machine allows. ``stack`` closes the sandboxes."""
    kinds = {"subprocess -I -S": started("-I", "-S"), "subprocess": started()}
    for isolation in ISOLATIONS:
        with contextlib.suppress(SandboxError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = stack.enter_context(Sandbox(Limits(), num_workers=num_workers, isolation=isolation))
            kinds[f"sandbox, {isolation}"] = in_sandbox(pool)
    return kinds


def measure_rounds(num_workers: int, rounds: int, seconds: float) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return the (runs per second, CPU milliseconds) of each round by kind and program."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        kinds = kinds_of(stack, num_workers)
        for _ in range(rounds):
            found.setdefault(("fork", ""), []).append(forks(num_workers, seconds))
            for program, code in PROGRAMS.items():
                for name, kind in kinds.items():
                    measured = measure(kind, code, num_workers, seconds)
                    found.setdefault((name, program), []).append(measured)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each kind in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of programs at once")
    options = parser.parse_args()
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, ", end="")
    print(f"Linux {platform.release()}, Python {platform.python_version()}")
    for num in options.workers:
        found = measure_rounds(num, options.rounds, options.seconds)
        for (name, program), measured in found.items():
            rates = [rate for rate, _ in measured]
            costs = [cost for _, cost in measured]
            print(f"{num} at once  {name:22s} {program:5s} best {max(rates):6.0f}/s", end="  ")
            print(f"median {statistics.median(rates):6.0f}/s  CPU {statistics.median(costs):6.2f} ms", flush=True)


if __name__ == "__main__":
    main()
