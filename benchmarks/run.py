"""Measure one training step of this package and of its peers, by turns, and compare it with the machine's floor.

    bash launch/bench.sh [ours] [trl] [trl-bf16] [tunix] [--steps N] [--json FILE]

Each peer is measured in a pair with ours: both keep their processes and take turns step by step, so that the machine's
slow and fast minutes affect both. The first step of each is warm-up. A step is rejected and repeated if other processes
took more than ``--max-others`` of the machine's CPU time. The machine's ceilings are measured between steps. The floor
of a step uses the better of the ceilings before and after it. All systems compute in float32 on the CPU, except
trl-bf16: TRL in its default mixed precision, which is compared with the float32 floor too.

Owns: the order of steps, the medians, the table. Does not know: how a system makes its step (workers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine, results
from benchmarks.floors import Ceilings, Floor, best
from benchmarks.results import Figure
from benchmarks.worker import Worker, WorkerError
from jaxrl_llm.config import ConfigError

OURS = "ours"
PARTS = ("step_s", "generate_s", "update_s")  # seconds of a step that are reported


@dataclasses.dataclass(frozen=True)
class System:
    """Worker of a system, its virtual environment ("" = this one), and whether it uses mixed precision."""

    worker: str
    venv: str = ""
    bf16: bool = False


SYSTEMS = {
    OURS: System("benchmarks.workers.ours"),
    "trl": System("benchmarks.workers.trl", ".venv-trl"),
    "trl-bf16": System("benchmarks.workers.trl", ".venv-trl", bf16=True),
    "tunix": System("benchmarks.workers.tunix", ".venv-tunix"),
}
FOLDER = machine.ROOT / "runs" / "bench"
WEIGHTS = FOLDER / "smollm2-135m-instruct"  # the folder that workload.exported writes


@dataclasses.dataclass(frozen=True)
class Step:
    """One measured step. ``pair`` is the peer that ran beside it.

    Attributes:
        others: share of the CPU time that other processes took.
        unshared, shared: the floors at the ceilings around this step.
    """

    system: str
    pair: str
    figures: dict[str, float]
    others: float
    unshared: Floor
    shared: Floor


def command(name: str) -> list[str]:
    """Return the command of a system's worker. Its first word is the environment's Python, which may be missing."""
    system = SYSTEMS[name]
    python = machine.ROOT / system.venv / "bin" / "python" if system.venv else Path(sys.executable)
    return [str(python), "-m", system.worker]


def pairs_of(systems: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the pairs of systems that run side by side. All systems together do not fit in a small memory."""
    peers = [name for name in systems if name != OURS]
    if OURS not in systems:
        return [(peer,) for peer in peers]
    return [(OURS, peer) for peer in peers] or [(OURS,)]


def alternate(
    workers: Sequence[Any],
    pair: str,
    *,
    steps: int,
    max_others: float,
    measure: Callable[[], Ceilings],
    floors: Callable[[Ceilings], tuple[Floor, Floor]],
    say: Callable[[str], None],
) -> tuple[list[Step], list[Step], list[Ceilings]]:
    """Take steps in turn, A B A B, until each worker has ``steps`` good steps, or for three times as many turns.

    Args:
        measure: the machine's ceilings now.
        floors: ceilings -> unshared and shared floor.

    Returns:
        Accepted steps, rejected steps, and every measurement of the ceilings.
    """
    accepted: list[Step] = []
    rejected: list[Step] = []
    ceilings = [measure()]
    for _ in range(3 * steps):
        for worker in workers:
            figures, others = worker.step()
            ceilings.append(measure())
            unshared, shared = floors(best(ceilings[-2:]))
            step = Step(worker.name, pair, figures, others, unshared, shared)
            is_accepted = others <= max_others
            if is_accepted:
                accepted.append(step)
            else:
                rejected.append(step)
            say(
                f"{worker.name:<9} step {figures['step_s']:7.2f} s   generate {figures['generate_s']:6.2f}   "
                f"update {figures['update_s']:6.2f}   floor {step.unshared.step_s:6.2f}   "
                f"others {others:4.0%}{'' if is_accepted else '   rejected'}"
            )
        counts = [sum(step.system == worker.name for step in accepted) for worker in workers]
        if min(counts) >= steps:
            break
    return accepted, rejected, ceilings


def summarise(accepted: Sequence[Step]) -> list[Figure]:
    """Return the medians of each system, and how many times faster ours is than the peer of the same pair."""
    figures = []
    for system in dict.fromkeys(step.system for step in accepted):
        figures += figures_of(system, [step for step in accepted if step.system == system])
    for pair in dict.fromkeys(step.pair for step in accepted if step.system != OURS):
        seconds = {}
        for system in (OURS, pair):
            seconds[system] = [s.figures["step_s"] for s in accepted if (s.pair, s.system) == (pair, system)]
        if seconds[OURS]:
            ratio = statistics.median(seconds[pair]) / statistics.median(seconds[OURS])
            figures.append(Figure(f"{OURS}/times_faster_than_{pair}", ratio, "x", "more"))
    return figures


def figures_of(system: str, steps: Sequence[Step]) -> list[Figure]:
    """Return the medians over the steps of one system."""
    figures = []
    for part in PARTS:
        seconds = statistics.median(step.figures[part] for step in steps)
        figures.append(Figure(f"{system}/{part}", seconds, "s", "less"))
    tokens_per_s = statistics.median(step.figures["tokens"] / step.figures["generate_s"] for step in steps)
    samples_per_s = statistics.median(step.figures["samples"] / step.figures["step_s"] for step in steps)
    figures.append(Figure(f"{system}/tokens_per_s", tokens_per_s, "tokens/s", "more"))
    figures.append(Figure(f"{system}/samples_per_s", samples_per_s, "samples/s", "more"))
    for kind in ("unshared", "shared"):
        for part in PARTS:
            share = statistics.median(getattr(getattr(step, kind), part) / step.figures[part] for step in steps)
            name = f"{system}/share_of_{kind}_floor/{part.removesuffix('_s')}"
            figures.append(Figure(name, share, "", "more"))
    peak = max(step.figures["peak_bytes"] for step in steps)
    figures.append(Figure(f"{system}/peak_bytes", peak, "bytes", "less"))
    figures.append(Figure(f"{system}/steps", len(steps), "", ""))
    return figures


def table(figures: Sequence[Figure], systems: Sequence[str]) -> Table:
    """Return a table with one row per system. Floor shares are for step / generation / update, in percent."""
    value = {figure.name: figure.value for figure in figures}
    result = Table(title="medians; floor shares in % of step / generate / update")
    columns = ("system", "steps", "step s", "generate s", "update s", "tokens/s", "samples/s")
    for column in (
        *columns,
        "% of floor",
        "% of shared",
        "peak GB",
        "1st update s",
        "ours faster",
    ):
        result.add_column(column, justify="left" if column == "system" else "right", no_wrap=True)
    for s in systems:
        shares = [
            " / ".join(
                f"{100 * value[f'{s}/share_of_{kind}_floor/{part}']:.0f}" for part in ("step", "generate", "update")
            )
            for kind in ("unshared", "shared")
        ]
        ratio = value.get(f"{OURS}/times_faster_than_{s}")
        result.add_row(
            s,
            f"{value[f'{s}/steps']:.0f}",
            *(f"{value[f'{s}/{part}']:.2f}" for part in ("step_s", "generate_s", "update_s")),
            f"{value[f'{s}/tokens_per_s']:.0f}",
            f"{value[f'{s}/samples_per_s']:.2f}",
            *shares,
            f"{value[f'{s}/peak_bytes'] / 1e9:.1f}",
            f"{value[f'{s}/first_update_s']:.0f}",
            f"{ratio:.2f} x" if ratio else "",
        )
    return result


@dataclasses.dataclass
class Measured:
    """Steps, ceilings and versions of all pairs.

    Attributes:
        first_update: seconds from the start of each system's process to the end of its first step.
    """

    accepted: list[Step] = dataclasses.field(default_factory=list)
    rejected: list[Step] = dataclasses.field(default_factory=list)
    ceilings: list[Ceilings] = dataclasses.field(default_factory=list)
    first_update: dict[str, float] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def median_ceilings(self) -> Ceilings:
        """Return the median of each rate."""
        columns = zip(*map(dataclasses.astuple, self.ceilings), strict=True)
        return Ceilings(*(statistics.median(column) for column in columns))


def measure(
    systems: Sequence[str],
    commands: Mapping[str, list[str]],
    options: Any,
    environment: dict[str, str],
) -> int:
    """Run every pair, print each step and then the table. Return the exit status."""
    # Imported here, because JAX counts the cores at its first use, and main has chosen them.
    from benchmarks import floors, workload
    from benchmarks.ceilings import Probe

    say = Console(width=160).print
    job, arch = workload.make_job(
        WEIGHTS,
        num_questions=options.questions,
        threads=options.threads,
        remat=options.remat,
    )
    probe = Probe(arch, decode_rows=job.samples)

    def floors_at(ceilings: Ceilings) -> tuple[Floor, Floor]:
        shape = (arch, job.prompt_tokens, job.samples_per_question, job.completion_tokens, ceilings)
        return floors.floor(*shape, shared=False), floors.floor(*shape, shared=True)

    def start(name: str) -> Worker:
        log = FOLDER / f"{name}.log"
        say(f"starting {name} (log {log.relative_to(machine.ROOT)})")
        return Worker(
            name,
            commands[name],
            dataclasses.asdict(dataclasses.replace(job, bf16=SYSTEMS[name].bf16)),
            environment=environment,
            log=log,
            timeout_s=options.timeout,
        )

    measured = Measured()
    for names in pairs_of(systems):
        with contextlib.ExitStack() as stack:
            workers = started(names, start, stack, measured, say)
            accepted, rejected, ceilings = alternate(
                workers,
                names[-1],
                steps=options.steps,
                max_others=options.max_others,
                measure=probe.measure,
                floors=floors_at,
                say=say,
            )
        measured.accepted += accepted
        measured.rejected += rejected
        measured.ceilings += ceilings
    missing = [name for name in systems if all(step.system != name for step in measured.accepted)]
    if missing:
        raise WorkerError(f"every step of {', '.join(missing)} was disturbed by other processes")
    say_results(measured, systems, job, floors_at, options, say)
    return 0


def started(
    names: Sequence[str],
    start: Callable[[str], Worker],
    stack: contextlib.ExitStack,
    measured: Measured,
    say: Callable[[str], None],
) -> list[Worker]:
    """Start the workers of a pair, run their warm-up steps, and return them. ``stack`` closes them."""
    workers = []
    for name in names:
        worker = start(name)
        stack.callback(worker.close)
        worker.step()
        measured.first_update.setdefault(name, worker.age_s)
        measured.versions |= worker.versions
        say(f"{name:<9} first update {worker.age_s:.0f} s after its start")
        workers.append(worker)
    return workers


def say_results(
    measured: Measured,
    systems: Sequence[str],
    job: Any,
    floors_at: Callable[[Ceilings], tuple[Floor, Floor]],
    options: Any,
    say: Callable[[Any], None],
) -> None:
    """Print the table, the ceilings, the floors and the rejected steps. Write the file ``options.json``, if any."""
    figures = summarise(measured.accepted)
    for name, seconds in measured.first_update.items():
        figures.append(Figure(f"{name}/first_update_s", seconds, "s", "less"))
    median = measured.median_ceilings()
    for name, rate in dataclasses.asdict(median).items():
        figures.append(Figure(f"ceiling/{name}", rate, "1/s"))
    say(table(figures, systems))
    say(
        f"ceilings  matmul {median.decode_flops / 1e9:.0f} GFLOP/s at {job.samples} rows, "
        f"{median.batch_flops / 1e9:.0f} at 1024; read {median.read_bytes / 1e9:.1f} GB/s "
        f"(medians of {len(measured.ceilings)})"
    )
    for floor, kind in zip(floors_at(median), ("unshared", "shared"), strict=True):
        say(f"floor     {floor.step_s:.1f} s = {floor.generate_s:.1f} + {floor.update_s:.1f}, prompts {kind}")
    num_steps = len(measured.accepted) + len(measured.rejected)
    reason = f"other processes took over {options.max_others:.0%} of the CPU"
    say(f"rejected  {len(measured.rejected)} of {num_steps} steps: {reason}")
    if options.json:
        hidden = ("model", "questions", "bf16")
        settings = {name: value for name, value in dataclasses.asdict(job).items() if name not in hidden}
        settings |= {"max_others": options.max_others, "rejected": len(measured.rejected)}
        settings["steps"] = [dataclasses.asdict(step) for step in (*measured.accepted, *measured.rejected)]
        results.write(options.json, "run", figures, versions=measured.versions, settings=settings)
        say(f"result    {options.json}")


def environment(threads: int) -> dict[str, str]:
    """Set the environment of this process and of its workers, and return it."""
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "JAX_PLATFORMS": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return dict(os.environ)


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="bash launch/bench.sh", description=__doc__.splitlines()[0])
    parser.add_argument(
        "systems",
        nargs="*",
        metavar="system",
        help=f"systems to measure, of {', '.join(SYSTEMS)}; default: all",
    )
    parser.add_argument(
        "--steps",
        type=results.at_least(1),
        default=3,
        help="accepted steps of each system in each pair",
    )
    parser.add_argument(
        "--questions",
        type=results.at_least(1),
        default=16,
        help="an even number; fewer for a quick look",
    )
    parser.add_argument("--threads", type=results.at_least(1), default=2, help="cores to use")
    parser.add_argument(
        "--remat",
        choices=("none", "dots", "full"),
        default="dots",
        help="model.remat of ours",
    )
    parser.add_argument(
        "--max-others",
        type=results.share,
        default=0.1,
        help="largest share of CPU time that other processes may take in a step",
    )
    parser.add_argument(
        "--timeout",
        type=results.at_least(1),
        default=1800,
        help="seconds to wait for a worker's reply",
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    if options.questions % 2:
        parser.error(f"--questions={options.questions} must be even: a micro-batch holds the samples of two")
    systems = list(dict.fromkeys(options.systems)) or list(SYSTEMS)
    commands = {}
    for name in systems:
        if name not in SYSTEMS:
            parser.error(f"no system {name!r}; known: {', '.join(SYSTEMS)}")
        commands[name] = command(name)
        if not Path(commands[name][0]).exists():
            parser.error(f"{name} needs {SYSTEMS[name].venv}: run bash launch/bench.sh {name}")

    machine.use_cores(options.threads)
    try:
        return measure(systems, commands, options, environment(options.threads))
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
