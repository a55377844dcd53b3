"""Compare one accelerator with its data sheet in bfloat16: decode tokens per second, and the update's FLOP utilisation.

    python -m benchmarks.gpu [--shape NAME ...] [--json FILE]
    bash launch/bench.sh gpu [--shape NAME ...] [--json FILE]      also transformers and TRL; run setup.sh gpu before

Each shape has random weights. The benchmark decodes completions of 128 tokens after prompts of 64 at batch 64 and 256,
in groups of 8. It takes optimizer steps on 64 rows of 256 + 256 tokens in micro-batches of 16. With ``--preset tiny``,
all sizes are small, for tests.

- Decode is compared with the larger time of its FLOPs and its bytes: the weights, and the cached keys with each prompt
  once per group.
- The update's utilisation counts 6 operations per parameter and token, and attention. A prompt counts once per row, and
  recomputation does not count.
- Peaks are those of the data sheet; on a CPU they are measured.
- The peers have the same shapes, sizes and accelerator: transformers' generate in bfloat16, and TRL's optimizer step in
  its mixed precision.

Owns: sizes and peaks. Does not know: how programs are built (iteration), how a peer makes its step (workers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import floors, machine, results, run, workload
from benchmarks.ceilings import Probe
from benchmarks.floors import Ceilings
from benchmarks.iteration import Iteration, random_params, random_prompts
from benchmarks.results import Figure
from benchmarks.shapes import SHAPES
from benchmarks.stopwatch import Stopwatch
from benchmarks.worker import Worker, WorkerError
from jaxrl_llm.config import Config, freeze
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files import families

# Part of the device's name -> dense bfloat16 operations and bytes of its memory per second.
# Source: NVIDIA's data sheets of the SXM modules.
PEAKS = {
    "H200": Ceilings(989e12, 989e12, 4.8e12),
    "H100": Ceilings(989e12, 989e12, 3.35e12),
    "A100-SXM4-80GB": Ceilings(312e12, 312e12, 2.039e12),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement: decode batches, tokens, and the update's rows."""

    batches: tuple[int, ...] = (64, 256)
    group: int = 8
    prompt: int = 64
    completion: int = 128
    chunk: int = 64
    update_rows: int = 64
    update_prompt: int = 256
    update_completion: int = 256
    micro_batch: int = 16


SIZES = {
    "full": Sizes(),
    "tiny": Sizes(
        (4,),
        2,
        4,
        4,
        4,
        update_rows=4,
        update_prompt=64,
        update_completion=4,
        micro_batch=2,
    ),
}
PEER_TIMEOUT_S = 1800  # of one step


def peaks(device: jax.Device, arch: Architecture) -> Ceilings:
    """Return the rates of the data sheet, or on a CPU the measured rates.

    Raises:
        ValueError: the peaks of the device are unknown.
    """
    if device.platform == "cpu":
        return Probe(arch, dtype="bfloat16").measure()
    for name, ceilings in PEAKS.items():
        if name in device.device_kind.replace(" ", "-"):
            return ceilings
    raise ValueError(f"no peak figures for {device.device_kind!r}; known: {', '.join(PEAKS)} (benchmarks/gpu.py)")


def config_of(rows: int, group: int, prompt: int, completion: int, *, chunk: int, micro_batch: int) -> Config:
    return freeze(
        {
            "model": {"compute_dtype": "bfloat16", "remat": "auto"},
            "prompts": {"max_tokens": prompt},
            "sampling": {"max_completion_tokens": completion},
            "rollout": {
                "prompts_per_iteration": rows // group,
                "group_size": group,
                "chunk_steps": chunk,
            },
            "update": {"batch_size": rows, "micro_batch_size": micro_batch},
        }
    )


def decode_config(rows: int, sizes: Sizes) -> Config:
    return config_of(
        rows,
        sizes.group,
        sizes.prompt,
        sizes.completion,
        chunk=sizes.chunk,
        micro_batch=sizes.group,
    )


def update_config(sizes: Sizes) -> Config:
    return config_of(
        sizes.update_rows,
        sizes.group,
        sizes.update_prompt,
        sizes.update_completion,
        chunk=sizes.update_completion,
        micro_batch=sizes.micro_batch,
    )


def least_decode_s(arch: Architecture, rows: int, sizes: Sizes, ceilings: Ceilings) -> float:
    """Return the floor of all decode steps of a batch."""
    least = 0.0
    for step in range(1, sizes.completion + 1):
        read = rows // sizes.group * sizes.prompt + rows * step
        work = floors.decode_step(arch, rows=rows, context=sizes.prompt + step, read=read, itemsize=2)
        least += work.seconds(ceilings.decode_flops, ceilings.read_bytes)
    return least


def update_flops(arch: Architecture, sizes: Sizes) -> float:
    """Return the operations that the utilisation counts."""
    prompts = [sizes.update_prompt] * (sizes.update_rows // sizes.group)
    return floors.update_flops(arch, prompts, sizes.group, sizes.update_completion, shared=False)


def decode(name: str, arch: Architecture, ceilings: Ceilings, sizes: Sizes, repeats: int) -> Iterator[Figure]:
    """Measure tokens per second of decoding without prefill, its share of the floor, and all of generation."""
    for rows in sizes.batches:
        config = decode_config(rows, sizes)
        watch = Stopwatch()
        prompts = random_prompts(config, arch)
        iteration = Iteration(config, arch, random_params, prompts, wrap=watch.wrap, learner=False)
        iteration.generate()
        seconds = []
        whole = []
        for _ in range(repeats):
            watch.seconds.clear()
            start = time.perf_counter()
            iteration.generate()
            whole.append(time.perf_counter() - start)
            seconds.append(watch.total("decode"))
        taken = statistics.median(seconds)
        tokens = rows * sizes.completion
        least = least_decode_s(arch, rows, sizes, ceilings)
        per_s = tokens / statistics.median(whole)
        yield Figure(f"{name}/generate_tokens_per_s/batch={rows}", per_s, "tokens/s", "more")
        yield Figure(f"{name}/decode_tokens_per_s/batch={rows}", tokens / taken, "tokens/s", "more")
        yield Figure(f"{name}/decode_share_of_floor/batch={rows}", least / taken, "", "more")


def update(name: str, arch: Architecture, ceilings: Ceilings, sizes: Sizes, repeats: int) -> Iterator[Figure]:
    """Measure the model FLOP utilisation of the update program, including its draw and optimizer step."""
    rows = sizes.update_rows
    watch = Stopwatch()
    iteration = Iteration(update_config(sizes), arch, random_params, [], wrap=watch.wrap, sampler=False)
    rollout = iteration.random_rollout()
    for _ in range(repeats + 1):
        iteration.update(rollout, np.arange(rows) % 2)
    taken = statistics.median(watch.seconds["update"][1:])
    tokens = rows * (sizes.update_prompt + sizes.update_completion)
    yield Figure(f"{name}/update_tokens_per_s", tokens / taken, "tokens/s", "more")
    utilisation = update_flops(arch, sizes) / taken / ceilings.batch_flops
    yield Figure(f"{name}/update_mfu", utilisation, "", "more")


def peers(name: str, arch: Architecture, sizes: Sizes, repeats: int) -> Iterator[Figure]:
    """Measure tokens per second of transformers' generate, and of TRL's step without its generation.

    Raises:
        WorkerError: a worker did not become ready, or ended.
    """
    config = families.config_of(arch)
    for rows in sizes.batches:
        job = {
            "rows": rows,
            "prompt_tokens": sizes.prompt,
            "completion_tokens": sizes.completion,
        }
        taken = _median("hf", {"config": config, **job}, "generate_s", repeats)
        per_s = rows * sizes.completion / taken
        yield Figure(f"{name}/hf/generate_tokens_per_s/batch={rows}", per_s, "tokens/s", "more")
    job = {
        "config": config,
        "model": str(workload.exported(run.WEIGHTS).resolve()),  # for its tokenizer
        "num_questions": sizes.update_rows // sizes.group,
        "prompt_tokens": sizes.update_prompt,
        "samples_per_question": sizes.group,
        "completion_tokens": sizes.update_completion,
        "micro_batch": sizes.micro_batch,
        "learning_rate": 1e-5,
        "threads": os.cpu_count(),
        "bf16": True,
    }
    tokens = sizes.update_rows * (sizes.update_prompt + sizes.update_completion)
    taken = _median("trl", job, "update_s", repeats)
    yield Figure(f"{name}/trl/update_tokens_per_s", tokens / taken, "tokens/s", "more")


def _median(worker: str, job: dict[str, Any], part: str, repeats: int) -> float:
    """Return the median seconds of a part of a peer's step. The first call does not count."""
    python = run.command("trl")[0]
    log = run.FOLDER / f"gpu_{worker}.log"
    command = [python, "-m", f"benchmarks.workers.{worker}"]
    peer = Worker(worker, command, job, environment=dict(os.environ), log=log, timeout_s=PEER_TIMEOUT_S)
    seconds = []
    with contextlib.closing(peer):
        for _ in range(repeats + 1):
            figures, _ = peer.step()
            seconds.append(figures[part])
    return statistics.median(seconds[1:])


def compared(figures: list[Figure]) -> Iterator[Figure]:
    """Yield our rates divided by the peers' rates."""
    value = {figure.name: figure.value for figure in figures}
    for name in value:
        shape, _, rest = name.partition("/")
        peer, _, ours = rest.partition("/")
        our_rate = value.get(f"{shape}/{ours}")
        if our_rate:
            yield Figure(f"{shape}/times_faster_than_{peer}/{ours}", our_rate / value[name], "x", "more")


def figures_of(name: str, arch: Architecture, ceilings: Ceilings, sizes: Sizes, options: Any) -> Iterator[Figure]:
    """Measure all parts of one shape, and the peers if ``options.peers``.

    Raises:
        WorkerError: a peer's worker did not become ready, or ended.
    """
    for key, rate in dataclasses.asdict(ceilings).items():
        yield Figure(f"{name}/peak/{key}", rate, "1/s")
    for measure in (decode, update):
        started = time.monotonic()
        yield from measure(name, arch, ceilings, sizes, options.repeats)
        print(f"{name} {measure.__name__}: {time.monotonic() - started:.0f} s", flush=True)
    if options.peers:
        yield from peers(name, arch, sizes, options.repeats)


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=SHAPES,
        default=["smollm2-135m", "qwen2-1.5b"],
        help="shapes of the models",
    )
    parser.add_argument("--preset", choices=SIZES, default="full", help="sizes of the measurement")
    parser.add_argument("--repeats", type=results.at_least(1), default=3)
    parser.add_argument(
        "--peers",
        action="store_true",
        help="measure transformers and TRL too, in .venv-trl",
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    if options.peers and not Path(run.command("trl")[0]).exists():
        parser.error("--peers needs .venv-trl: run bash launch/bench.sh gpu")
    if options.peers:  # JAX and the peers share the memory of the device.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    sizes = SIZES[options.preset]
    device = jax.devices()[0]
    figures: list[Figure] = []
    for name in options.shape:
        arch = SHAPES[name]
        try:
            ceilings = peaks(device, arch)
        except ValueError as error:
            parser.error(str(error))
        try:
            figures += figures_of(name, arch, ceilings, sizes, options)
        except WorkerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    figures += compared(figures)
    table = Table("figure", "value", "unit", title=f"{device.device_kind}, bfloat16, random weights")
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit)
    Console(width=120).print(table)
    if options.json:
        settings = {"sizes": dataclasses.asdict(sizes), "repeats": options.repeats}
        results.write(
            options.json,
            "gpu",
            figures,
            versions=machine.versions("jaxrl_llm", "jax", "jaxlib"),
            settings=settings,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
