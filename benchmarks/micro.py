"""Micro-benchmarks: each part of an iteration alone, with the project's own programs, compared with its floor.

    python -m benchmarks.micro [--only NAME ...] [--json FILE]

    prefill        keys and values of 16 prompts
    decode         one decode step by number of slots, and by context length
    learner        16 rows of 52 + 64 tokens: log-prob (reference program), forward (prefill of prompts as long as the
                   rows), update, and backward = update - log-prob - optimizer; prompts shared by groups of 8
    logp           log-probs of 512 tokens and their gradient, by turns: the learner's code, and autodiff of the
                   definition, in one piece or in chunks that are computed twice. Also the temporary memory of each
    packing        an update of 32 ragged rows in padded micro-batches of 16 and in packed ones, by turns: in whole
                   groups, then row by row (replay.unit). The floor counts real tokens only
    optimizer      the optimizer alone on a gradient of ones
    ring           insert and draw of 40 short rows by the ring's capacity, which should be flat
    publish        copy of the float32 weights, and cast to bfloat16, split by layer
    questions      100,000 questions of 87 tokens: reading JSONL, holding out 128, tokenising with SmolLM2's tokenizer
                   (as a run does, and one by one), making the order, drawing 16. Also the memory of the questions
    host_gap       share of an iteration of the main job in which the device has nothing to do. It is measured in
                   ``train`` itself: a thread records when each program ends (stopwatch.DeviceClock), so nothing is
                   serialised. The gap lasts until the next program is dispatched

The benchmarks run on the CPU, or on the platform of JAX_PLATFORMS. Weights are random, in the shape of SmolLM2-135M. A
floor is the larger of the times of operations and bytes, computed from the shapes at the better of the ceilings that
are measured before and after. Seconds are medians after warm-up.

Owns: the measurements and their sizes. Does not know: how programs are built (iteration).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import floors, machine, results
from benchmarks.ceilings import Probe
from benchmarks.floors import Ceilings, Work
from benchmarks.iteration import Iteration, one_device, random_params, random_prompts
from benchmarks.results import Figure
from benchmarks.shapes import SHAPES
from benchmarks.stopwatch import DeviceClock, Stopwatch, idle_shares, median_seconds
from jaxrl_llm.config import Config, PromptsConfig, freeze
from jaxrl_llm.models.architecture import PRESETS, Architecture
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.row_logp import PLAIN
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.filters import Filter
from jaxrl_llm.ops.logp import chunked_logp, project
from jaxrl_llm.ops.sampling import token_logp
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import PromptStream, encode_examples, split_held_out
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import rng
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.types import Rollout

PROMPT = 52  # tokens
COMPLETION = 64  # tokens
GROUP = 8
SLOTS = (1, 16, 64, 128)
CONTEXTS = (64, 256, 1024)
CAPACITIES = (1_000, 10_000, 100_000, 1_000_000)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        work: the work of the floor; None for a measurement without a floor.
        decode: whether the matmuls have the few rows of a decode step.
    """

    name: str
    value: float
    work: Work | None = None
    decode: bool = False
    unit: str = "s"

    def floor(self, ceilings: Ceilings) -> float:
        flops = ceilings.decode_flops if self.decode else ceilings.batch_flops
        return self.work.seconds(flops, ceilings.read_bytes)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The arguments of every benchmark."""

    arch: Architecture
    repeats: int


def config_of(*, prompts: int, group: int, prompt: int, completion: int, **groups: dict[str, Any]) -> Config:
    """Return a config with these numbers of prompts, samples and tokens. ``groups`` has further settings by group."""
    rows = prompts * group
    base = {
        "prompts": {"max_tokens": prompt},
        "sampling": {"max_completion_tokens": completion},
        "rollout": {
            "prompts_per_iteration": prompts,
            "group_size": group,
            "chunk_steps": completion,
        },
        "replay": {"unit": "group"},
        "update": {"batch_size": rows, "micro_batch_size": rows},
    }
    for name, settings in groups.items():
        base[name] = {**base.get(name, {}), **settings}
    return freeze(base)


def generated(s: Setting, config: Config) -> Stopwatch:
    """Time the sampler's programs over ``repeats`` calls of ``Generator.generate``, after one warm-up call."""
    watch = Stopwatch()
    iteration = Iteration(
        config,
        s.arch,
        random_params,
        random_prompts(config, s.arch),
        wrap=watch.wrap,
        learner=False,
    )
    iteration.generate()
    watch.seconds.clear()
    for _ in range(s.repeats):
        iteration.generate()
    return watch


def prefill(s: Setting) -> Iterator[Row]:
    config = config_of(prompts=16, group=2, prompt=PROMPT, completion=2)
    seconds = statistics.median(generated(s, config).seconds["prefill"])
    yield Row(f"prefill/16x{PROMPT}", seconds, floors.prefill(s.arch, [PROMPT] * 16))


def decode(s: Setting) -> Iterator[Row]:
    for slots in SLOTS:
        yield decode_row(s, f"decode_step/slots={slots}", slots, PROMPT)
    for context in CONTEXTS:
        yield decode_row(s, f"decode_step/16 slots, prompt={context}", 16, context)


def decode_row(s: Setting, name: str, slots: int, prompt: int, *, completion: int = 32) -> Row:
    """Return the mean seconds of a decode step. All steps have the same number of busy slots."""
    group = min(GROUP, slots) if slots > 1 else 2
    prompts = max(1, slots // group)
    config = config_of(
        prompts=prompts,
        group=group,
        prompt=prompt,
        completion=completion,
        rollout={"slots": slots},
    )
    steps = prompts * group * completion // slots * s.repeats
    seconds = generated(s, config).total("decode") / steps
    own = (completion + 1) / 2
    work = floors.decode_step(s.arch, rows=slots, context=prompt + own, read=prompts * prompt + slots * own)
    return Row(name, seconds, work, decode=True)


def learner(s: Setting) -> Iterator[Row]:
    prompts = 2
    method = {"divergence": {"name": "reference", "coefficient": 0.1}}
    config = config_of(
        prompts=prompts,
        group=GROUP,
        prompt=PROMPT,
        completion=COMPLETION,
        algorithm=method,
    )
    rows = prompts * GROUP
    watch = Stopwatch()
    iteration = Iteration(config, s.arch, random_params, [], wrap=watch.wrap, sampler=False)
    rewards = np.arange(rows) % 2
    rollout = iteration.random_rollout()
    for _ in range(s.repeats + 1):
        iteration.update(rollout, rewards)
    logprob = statistics.median(watch.seconds["annotate"][1:])
    update = statistics.median(watch.seconds["update"][1:])
    del iteration
    whole = config_of(prompts=rows, group=2, prompt=PROMPT + COMPLETION, completion=2)
    forward = statistics.median(generated(s, whole).seconds["prefill"])
    step = next(iter(optimizer(s))).value
    flops = floors.update_flops(s.arch, [PROMPT] * prompts, GROUP, COMPLETION, shared=True)
    name = f"{rows}x({PROMPT}+{COMPLETION})"
    lengths = [PROMPT + COMPLETION] * rows
    yield Row(f"forward/{name}, unshared", forward, floors.prefill(s.arch, lengths))
    yield Row(f"logprob/{name}", logprob, Work(flops / floors.BACKWARD))
    yield Row(f"backward/{name}", update - logprob - step, Work(flops * 2 / floors.BACKWARD))
    yield Row(f"update/{name}", update, Work(flops))


def logp(s: Setting) -> Iterator[Row]:
    tokens = 512
    chunk = 256
    D = s.arch.width
    V = s.arch.vocab_size
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (1, tokens, D))
    head = jax.random.normal(keys[1], (V, D)) / D**0.5
    target = jax.random.randint(keys[2], (1, tokens), 0, V)
    weight = jax.random.normal(keys[3], (1, tokens))

    def ours(hidden, head):
        return chunked_logp(hidden, head, target, chunk=chunk, settings=Filter.of(PLAIN))

    def in_one_piece(hidden, head):
        logits = jax.vmap(lambda h: project(h, head))(hidden)
        return token_logp(logits, target)

    def in_chunks(hidden, head):
        @jax.checkpoint
        def one(part):
            hidden, target = part
            return token_logp(project(hidden, head), target)

        parts = (hidden.reshape(-1, chunk, D), target.reshape(-1, chunk))
        return [x.reshape(1, tokens) for x in jax.lax.map(one, parts)]

    ways = {
        "ours": ours,
        "autodiff, in one piece": in_one_piece,
        "autodiff, in chunks": in_chunks,
    }
    watch = Stopwatch()
    programs = {}
    for name, way in ways.items():

        def loss(hidden, head, way=way):
            logp, entropy = way(hidden, head)
            return jnp.sum(weight * logp), entropy

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        programs[name] = gradient.lower(hidden, head).compile()
    for _ in range(s.repeats + 1):
        for name, program in programs.items():
            watch.wrap(name, program)(hidden, head)
    for name, program in programs.items():
        work = Work(floors.BACKWARD * 2.0 * tokens * D * V)
        yield Row(f"logp/{name}", statistics.median(watch.seconds[name][1:]), work)
        megabytes = program.memory_analysis().temp_size_in_bytes / 1e6
        yield Row(f"logp/{name}, memory", megabytes, unit="MB")


# unit -> settings of a packed update
PACKED = {
    "group": {"micro_batch_tokens": 2 * (PROMPT + GROUP * COMPLETION)},
    "rollout": {"micro_batch_tokens": 8 * (PROMPT + COMPLETION), "pack_width": 2 * (PROMPT + COMPLETION)},
}


def packing(s: Setting) -> Iterator[Row]:
    prompts = 4
    for unit in ("group", "rollout"):
        watches = {}
        iterations = []
        for way, settings in (("padded", {}), ("packed", PACKED[unit])):
            config = config_of(
                prompts=prompts,
                group=GROUP,
                prompt=PROMPT,
                completion=COMPLETION,
                replay={"unit": unit},
                update={"micro_batch_size": 2 * GROUP, **settings},
            )
            watch = Stopwatch()
            watches[way] = watch
            iterations.append(Iteration(config, s.arch, random_params, [], wrap=watch.wrap, sampler=False))
        for _ in range(s.repeats + 1):
            for iteration in iterations:
                rollout = iteration.random_rollout(ragged=True)
                iteration.update(rollout, np.arange(prompts * GROUP) % 2)
        flops = flops_of_ragged(s.arch, rollout, share_prompts=unit == "group")
        for way, watch in watches.items():
            seconds = statistics.median(watch.seconds["update"][1:])
            name = f"update_{way}/{prompts * GROUP} ragged rows by {unit}"
            yield Row(name, seconds, Work(floors.BACKWARD * flops))


def flops_of_ragged(arch: Architecture, rollout: Rollout, *, share_prompts: bool) -> float:
    """Return the operations of a forward pass over the real tokens of rows with different lengths."""
    prompt = np.asarray(rollout.prompt_length)
    own = np.asarray(rollout.length - rollout.prompt_length)
    computed_prompts = prompt[::GROUP] if share_prompts else prompt
    pairs = np.sum(computed_prompts * (computed_prompts + 1) / 2) + np.sum(own * prompt + own * (own + 1) / 2)
    tokens = computed_prompts.sum() + own.sum()
    return floors.forward_flops(arch, tokens=tokens, pairs=pairs, predicted=own.sum())


def optimizer(s: Setting) -> Iterator[Row]:
    config = config_of(prompts=2, group=2, prompt=2, completion=2)
    mesh = one_device()
    transform = assemble(config, s.arch, (), mesh).learner.update.optimizer
    gradient = jax.tree.map(jnp.ones_like, weights(s.arch, mesh))
    state = [weights(s.arch, mesh)]
    state.append(transform.init(state[0]))

    def apply(params, opt_state, gradient):
        updates, opt_state = transform.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(apply, donate_argnums=(0, 1))

    def call():
        state[:] = step(*state, gradient)
        return state

    # The optimizer reads weights, gradient and two moments, and writes all of them except the gradient.
    yield Row("optimizer", median_seconds(call, s.repeats), Work(0, 7 * 4 * s.arch.num_params))


def weights(arch: Architecture, mesh: jax.sharding.Mesh) -> Any:
    return random_params(Model(arch), mesh)


def ring(s: Setting) -> Iterator[Row]:
    calls = 20 * s.repeats
    for capacity in CAPACITIES:
        config = config_of(
            prompts=5,
            group=8,
            prompt=4,
            completion=4,
            replay={"capacity": capacity, "unit": "rollout"},
        )
        mesh = one_device()
        programs = assemble(config, PRESETS["debug"], (), mesh).programs()
        compiled = compile_all({name: programs[name] for name in ("init_ring", "insert")}, mesh)
        arguments = jax.tree.map(
            lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding),
            programs["insert"].args[1:],
        )
        rows = config.rollouts_per_iteration
        row_bytes = sum(x.nbytes for x in jax.tree.leaves(arguments))
        draw = jax.jit(
            lambda ring, key, now, config=config, rows=rows: replay.draw(
                ring, key, now, config.replay, batch_size=rows
            )[:2],
            donate_argnums=0,
        )
        # A full ring in which any row may be drawn, as in a run of many iterations.
        empty = compiled["init_ring"]()
        full = empty.replace(inserted_step=jnp.zeros_like(empty.inserted_step))
        held = [full]
        key = rng.stream(0, "draw")
        now = arguments[-1]

        def insert_once(held=held, insert=compiled["insert"], arguments=arguments):
            held[0], sums = insert(held[0], *arguments)
            return sums

        def draw_once(held=held, draw=draw, key=key, now=now):
            held[0], batch = draw(held[0], key, now)
            return batch

        work = Work(0, 2 * row_bytes)
        for name, call in (("insert", insert_once), ("draw", draw_once)):
            yield Row(
                f"ring_{name}/{rows} rows of {capacity}",
                median_seconds(call, calls),
                work,
            )


def publish(s: Setting) -> Iterator[Row]:
    mesh = one_device()
    params = weights(s.arch, mesh)
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        config = config_of(prompts=2, group=2, prompt=2, completion=2, model={"compute_dtype": dtype})
        program = compile_all({"publish": assemble(config, s.arch, (), mesh).programs()["publish"]}, mesh)["publish"]
        seconds = median_seconds(functools.partial(program, params), s.repeats)
        yield Row(f"publish/{dtype}", seconds, Work(0, (4 + size) * s.arch.num_params))


def questions(s: Setting) -> Iterator[Row]:
    if s.arch is SHAPES["tiny"]:
        num = 300
        tokenizer = make_byte_tokenizer()
    else:
        num = 100_000
        tokenizer = pretrained.resolve(pretrained.SMOLLM2).tokenizer()
    seconds = collections.defaultdict(list)
    memory = []
    process = psutil.Process()

    def timed(name: str, call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments, **settings)
        seconds[name].append(time.perf_counter() - start)
        return result

    def one_by_one(examples):
        for example in examples:
            tokenizer.encode_prompt(example.prompt, chat_template=True, system_prompt="")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "questions.jsonl"
        write_questions(path, num)
        config = PromptsConfig(source="jsonl", name=str(path), size=0, max_tokens=1024)
        for _ in range(s.repeats):
            before = process.memory_info().rss
            examples = timed("read", tasks.load, config, seed=0).examples
            examples, _ = timed("held out", split_held_out, examples, 128, seed=0)
            encoded, _ = timed("tokenised", encode_examples, examples, tokenizer, config)
            stream = timed("ordered", PromptStream, encoded, config, Ledger(), seed=0)
            memory.append(process.memory_info().rss - before)
            for _ in range(20):
                timed("next 16", stream.next_batch, 16)
            timed("tokenised one by one", one_by_one, examples)
            del examples, encoded, stream
    for name, found in seconds.items():
        yield Row(f"questions/{num} {name}", statistics.median(found))
    # Later rounds reuse the memory of the process, so only the first one counts.
    yield Row(f"questions/{num} memory", memory[0] / 1e6, unit="MB")


def write_questions(path: Path, num: int) -> None:
    """Write a file of ``num`` questions with random words."""
    random = np.random.default_rng(0)
    words = __doc__.split()
    with path.open("w") as file:
        for i in range(num):
            text = " ".join(random.choice(words, random.integers(10, 60)))
            file.write(json.dumps({"prompt": f"Question {i}: {text}", "answer": i}) + "\n")


def host_gap(s: Setting) -> Iterator[Row]:
    del s  # The main job has its own model.
    from configs import grpo_smollm2_135m_chain_sum as main_job
    from jaxrl_llm.commands import train

    settings = main_job.get_config()
    settings.num_iterations = 4
    settings.eval.num_prompts = 0
    clock = DeviceClock()
    compile_them = train.compile_all

    def compile_watched(programs, mesh):
        compiled = compile_them(programs, mesh)
        return {name: clock.wrap(name, program) for name, program in compiled.items()}

    train.compile_all = compile_watched
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            train.train(freeze(settings), Path(folder))
    finally:
        train.compile_all = compile_them
        clock.close()
    shares = idle_shares(clock.intervals, "update")
    yield Row(
        f"host_gap/{len(shares)} iterations of the main job",
        statistics.median(shares),
        unit="of an iteration",
    )


BENCHMARKS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "prefill": prefill,
    "decode": decode,
    "learner": learner,
    "logp": logp,
    "packing": packing,
    "optimizer": optimizer,
    "ring": ring,
    "publish": publish,
    "questions": questions,
    "host_gap": host_gap,
}


def figures_of(row: Row, ceilings: Ceilings) -> list[Figure]:
    """Return the figure of a measurement and, if it has a floor, the share of its floor."""
    figures = [Figure(row.name, row.value, row.unit, "less")]
    if row.work is not None:
        figures.append(Figure(f"{row.name}/share_of_floor", row.floor(ceilings) / row.value, "", "more"))
    return figures


def cells_of(row: Row, ceilings: Ceilings) -> list[str]:
    """Return the cells of a measurement in the table."""
    if row.work is not None:
        least = row.floor(ceilings)
        return [row.name, f"{row.value * 1e3:.3f} ms", f"{least * 1e3:.3f} ms", f"{least / row.value:.0%}"]
    if row.unit == "MB":
        return [row.name, f"{row.value:,.0f} MB"]
    if row.unit == "s":
        return [row.name, f"{row.value * 1e3:,.3f} ms"]
    return [row.name, f"{row.value:.2%} {row.unit}"]


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="python -m benchmarks.micro", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        metavar="NAME",
        help=f"benchmarks to run, of {', '.join(BENCHMARKS)}; default: all",
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="smollm2-135m",
        help="shape of the model; tiny is for tests",
    )
    parser.add_argument("--repeats", type=results.at_least(1), default=3)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    arch = SHAPES[options.shape]
    console = Console(width=120)
    probe = Probe(arch)
    table = Table("part", "ours", "floor", "share of floor")
    figures = []
    measured = [probe.measure()]
    for name in options.only or BENCHMARKS:
        started = time.monotonic()
        rows = list(BENCHMARKS[name](Setting(arch, options.repeats)))
        measured.append(probe.measure())
        ceilings = floors.best(measured[-2:])
        for row in rows:
            figures += figures_of(row, ceilings)
            table.add_row(*cells_of(row, ceilings))
        console.print(
            f"{name}: {time.monotonic() - started:.0f} s; ceilings {ceilings.decode_flops / 1e9:.0f} GFLOP/s at 128 "
            f"rows, {ceilings.batch_flops / 1e9:.0f} at 1024, read {ceilings.read_bytes / 1e9:.1f} GB/s"
        )
    console.print(table)
    if options.json:
        versions = machine.versions("jaxrl_llm", "jax", "jaxlib")
        settings = {"shape": options.shape, "repeats": options.repeats}
        results.write(options.json, "micro", figures, versions=versions, settings=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
