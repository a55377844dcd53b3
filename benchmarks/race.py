"""Measure the seconds of training until sums are learned: the main job against TRL on the same questions.

    bash launch/bench.sh race [ours] [trl] [--seeds N] [--json FILE]

Both train SmolLM2-135M-Instruct in float32 until the mean pass rate of their last 5 steps reaches 0.65, one after the
other, seed by seed. Ours is configs/grpo_smollm2_135m_chain_sum.py without its evaluations. TRL has the same
questions, reward and length of completions, 8 questions x 8 samples a step, learning rate 2e-5, no KL term and its
other defaults. Steps are counted whole, with generation and reward; starting and compiling are not.

Owns: when a run has learned, the two runs, the table. Does not know: how a system makes its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, results, run
from benchmarks.results import Figure
from benchmarks.worker import Worker, WorkerError

TARGET = 0.65  # pass rate
WINDOW = 5  # steps
MAX_STEPS = 80
MAIN_JOB = "configs/grpo_smollm2_135m_chain_sum.py"
FOLDER = machine.ROOT / "runs" / "race"

Step = tuple[float, float]  # seconds, pass rate


@dataclasses.dataclass(frozen=True)
class Result:
    """Steps of a run, whether it has learned, and the seconds from its start to the end of the first step."""

    steps: tuple[Step, ...]
    learned: bool
    first_s: float

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.steps)


def until_learned(steps: Iterable[Step]) -> Result:
    """Take steps until the mean pass rate of the last ``WINDOW`` steps is ``TARGET``, at most ``MAX_STEPS``."""
    taken: list[Step] = []
    start = time.monotonic()
    for step in steps:
        if not taken:
            first_s = time.monotonic() - start
        taken.append(step)
        mean = sum(rate for _, rate in taken[-WINDOW:]) / WINDOW
        # The tolerance accepts five pass rates of 0.65, whose mean may be smaller by rounding.
        if len(taken) >= WINDOW and mean >= TARGET - 1e-9:
            return Result(tuple(taken), True, first_s)
        if len(taken) == MAX_STEPS:
            break
    return Result(tuple(taken), False, first_s)


def ours(seed: int, environment: dict[str, str]) -> Iterator[Step]:
    """Yield the iterations of the main job, read from its metrics file. Closing the iterator ends the run."""
    from jaxrl_llm.runtime.json_lines import read_log

    workdir = FOLDER / f"ours_{seed}"
    shutil.rmtree(workdir, ignore_errors=True)
    settings = {
        "seed": seed,
        "num_iterations": MAX_STEPS,
        "eval.num_prompts": 0,
        "checkpoint.export": False,
    }
    command = [
        sys.executable,
        "-m",
        "jaxrl_llm.train",
        f"--config={MAIN_JOB}",
        f"--workdir={workdir}",
    ]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    workdir.parent.mkdir(parents=True, exist_ok=True)
    log = workdir.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=machine.ROOT, env=environment, stdout=output, stderr=output)
    metrics = workdir / "metrics.jsonl"

    def rows_so_far() -> list[dict[str, Any]]:
        return read_log(metrics) if metrics.exists() else []

    try:
        for i in range(MAX_STEPS):
            rows = rows_so_far()
            while len(rows) <= i:
                if process.poll() is not None:
                    raise WorkerError(f"ours ended with status {process.returncode} (see {log})")
                time.sleep(0.2)
                rows = rows_so_far()
            yield rows[i]["time/iteration_s"], rows[i]["rollout/pass_rate"]
    finally:
        process.terminate()
        process.wait()


def trl(seed: int, environment: dict[str, str]) -> Iterator[Step]:
    """Yield the steps of TRL's trainer. Closing the iterator ends the trainer."""
    from benchmarks import workload
    from jaxrl_llm.config import freeze
    from jaxrl_llm.questions import tasks

    config = freeze(runpy.run_path(str(machine.ROOT / MAIN_JOB))["get_config"]())
    examples = tasks.load(config.prompts, seed=seed).examples
    job = {
        "model": str(workload.exported(run.WEIGHTS).resolve()),
        "questions": [example.prompt for example in examples],
        "answers": [example.columns["answer"] for example in examples],
        "seed": seed,
        "samples_per_step": 64,
        "samples_per_question": 8,
        "completion_tokens": config.sampling.max_completion_tokens,
        "micro_batch": 16,
        "learning_rate": 2e-5,
        "threads": int(environment["OMP_NUM_THREADS"]),
        "bf16": False,
    }
    log = FOLDER / f"trl_{seed}.log"
    worker = Worker(
        "trl",
        run.command("trl"),
        job,
        environment=environment,
        log=log,
        timeout_s=1800,
    )
    with contextlib.closing(worker):
        for _ in range(MAX_STEPS):
            figures, _ = worker.step()
            yield figures["step_s"], figures["pass_rate"]


RUNNERS = {"ours": ours, "trl": trl}


def noted(name: str, seed: int, steps: Iterator[Step], say: Any) -> Iterator[Step]:
    """Yield the steps, and print a line for each."""
    total = 0.0
    with contextlib.closing(steps):
        for i, (seconds, rate) in enumerate(steps, start=1):
            total += seconds
            say(f"{name:<5} seed {seed}   step {i:3d}   {total:7.1f} s   pass {rate:.3f}")
            yield seconds, rate


def summarise(reached: dict[str, list[Result]]) -> list[Figure]:
    """Return medians over seeds. If a run has not learned, it has no seconds, and its system has no median."""
    figures = []
    medians = {}
    for name, runs in reached.items():
        # Only the first run of ours compiles; the other runs find the programs in the cache.
        for seed, result in enumerate(runs):
            if result.learned:
                figures.append(Figure(f"{name}/seed_{seed}/seconds", result.seconds, "s", "less"))
            figures.append(Figure(f"{name}/seed_{seed}/first_update_s", result.first_s, "s", "less"))
        num_learned = sum(result.learned for result in runs)
        figures.append(Figure(f"{name}/learned", num_learned, "runs", "more"))
        if all(result.learned for result in runs):
            medians[name] = statistics.median(result.seconds for result in runs)
            figures.append(Figure(f"{name}/seconds", medians[name], "s", "less"))
            steps = statistics.median(len(result.steps) for result in runs)
            figures.append(Figure(f"{name}/steps", steps, "", "less"))
    if set(RUNNERS) <= set(medians):
        figures.append(Figure("ours/share_of_trl", medians["ours"] / medians["trl"], "", "less"))
    return figures


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="bash launch/bench.sh race", description=__doc__.splitlines()[0])
    parser.add_argument(
        "systems",
        nargs="*",
        metavar="system",
        help=f"systems to run, of {', '.join(RUNNERS)}; default: both",
    )
    parser.add_argument("--seeds", type=results.at_least(1), default=3, help="number of runs of each system")
    parser.add_argument("--threads", type=results.at_least(1), default=2, help="cores to use")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(options.systems)) or list(RUNNERS)
    unknown = [name for name in names if name not in RUNNERS]
    if unknown:
        parser.error(f"no system {unknown[0]!r}; known: {', '.join(RUNNERS)}")
    if "trl" in names and not Path(run.command("trl")[0]).exists():
        parser.error(f"trl needs {run.SYSTEMS['trl'].venv}: run bash launch/bench.sh race trl")
    machine.use_cores(options.threads)
    environment = run.environment(options.threads)
    say = Console(width=160).print
    reached: dict[str, list[Result]] = {name: [] for name in names}
    try:
        for seed in range(options.seeds):
            for name in names:
                with contextlib.closing(noted(name, seed, RUNNERS[name](seed, environment), say)) as steps:
                    reached[name].append(until_learned(steps))
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    figures = summarise(reached)
    for figure in figures:
        say(f"{figure.name:<24} {figure.value:8.2f} {figure.unit}")
    if options.json:
        curves = {name: [result.steps for result in runs] for name, runs in reached.items()}
        settings = {
            "target": TARGET,
            "window": WINDOW,
            "seeds": options.seeds,
            "curves": curves,
        }
        results.write(options.json, "race", figures, versions={}, settings=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
