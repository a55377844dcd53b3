"""Ahead-of-time compilation: compile every program of a run for absent chips and read the compiler's reports.

The compiler writes a program's optimised text and the buffers of its temporary memory into a temporary folder. These
files are used because jaxlib's own reader of the text does not understand everything that a newer libtpu writes.

Owns: compiling, reading the compiler's files, the "out of memory" message. Does not know: seconds, chips' rates.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import pathlib
import re
import statistics
import tempfile
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental.serialize_executable import serialize
from jax.sharding import Mesh

from jaxrl_llm.models.kernels import tpu_decode
from jaxrl_llm.models.kernels.learner import cache_length
from jaxrl_llm.ops.logp import LIVE_CHUNK
from jaxrl_llm.planning import counting, operations
from jaxrl_llm.planning.cost import reads_prompts
from jaxrl_llm.run import Run
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.executables import saved_as, saved_in
from jaxrl_llm.runtime.programs import Memory, memory

# Line of a buffer in "memory-usage-report": cumulative size; size; offset; number of values; shapes.
_BUFFER = re.compile(r"^\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+)(\w+);\s*(\d+);\s*\d+;\s*(.*)$", re.MULTILINE)
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Temporary memory of one shape: ``number`` buffers with ``size`` bytes in total."""

    shape: str
    number: int
    size: float

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(int(n) for n in re.findall(r"\d+", self.shape.partition("[")[2]))


@dataclasses.dataclass(frozen=True)
class Row:
    """Compilation result of one program.

    Attributes:
        refused: the compiler's message if the program does not fit, else "". If the program does not fit, ``memory`` is
            None.
        buffers: the contents of the temporary memory, the largest first.
    """

    name: str
    memory: Memory | None
    refused: str
    counts: counting.Counts | None = None
    buffers: tuple[Buffer, ...] = ()
    executable: jax.stages.Compiled | None = None
    lowered: jax.stages.Lowered | None = None


def compile_rows(run: Run, names: Iterable[str] | None = None, *, keep: bool = False) -> Iterator[Row]:
    """Compile programs of the run and yield each result in order.

    Args:
        names: names of the programs; None = all programs of the run.
        keep: rows also contain the executables.
    """
    programs = run.programs()
    if names is None:
        names = programs
    lowered = {name: programs[name].lower(run.mesh) for name in names}

    def compile_named(name: str) -> Row:
        return compile_one(run, name, lowered[name], keep=keep)

    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(compile_named, lowered)


def compile_one(run: Run, name: str, lowered: jax.stages.Lowered, *, keep: bool = False) -> Row:
    """Compile one program of the run. A program that does not fit still gets its counts and its temporary memory."""
    refused = ""
    compiled = None
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm_plan_") as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
        }
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            refused = _out_of_memory(error)
            if not refused:
                raise  # an error of this package: the compiler does not accept the program
        text = _newest(folder, "*after_optimizations.txt")
        report = _newest(folder, "*after_optimizations-memory-usage-report.txt")
    if compiled is not None and not text:
        text = compiled.as_text() or ""
    return Row(
        name,
        memory=None if compiled is None else memory(compiled),
        refused=refused,
        counts=_counts(run, name, text) if text else None,
        buffers=temporaries(report),
        executable=compiled if keep else None,
        lowered=lowered if keep else None,
    )


def _out_of_memory(error: jax.errors.JaxRuntimeError) -> str:
    """Return the compiler's message that a program does not fit, or "" for another error."""
    found = re.search(r"Ran out of memory.*?exceeds available HBM \([^)]*\)", str(error), re.DOTALL)
    return found.group() if found else ""


def _counts(run: Run, name: str, text: str) -> counting.Counts:
    """Return the counts of one program of the run, from its optimised text."""
    cache_share = live_share(run)
    computed_share = head_share(run, name)
    turns = micro_batches(run) if name == "update" else 1

    def turns_of(loop: str) -> float:
        return turns

    def read_share(call: str) -> float:
        return cache_share if "decode_attention" in call else 1.0

    def taken(branch: str) -> float:
        return computed_share if LIVE_CHUNK in branch else 1.0

    return counting.count(
        text,
        turns_of=turns_of,
        read_share=read_share,
        attended=functools.partial(attended_share, run, name),
        taken=taken,
    )


def _newest(folder: str, pattern: str) -> str:
    """Return the text of the last file that matches, or ""."""
    paths = sorted(pathlib.Path(folder).glob(pattern))
    return paths[-1].read_text() if paths else ""


def save_all(rows: Iterable[Row], mesh: Mesh, folder: str) -> None:
    """Write the executables of rows that have them. ``train`` loads them (runtime.executables.load_all)."""
    mesh_folder = saved_in(folder, mesh)
    mesh_folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.executable is not None and row.lowered is not None:
            (mesh_folder / saved_as(row.lowered, mesh)).write_bytes(serialize(row.executable)[0])


def micro_batches(run: Run) -> int:
    """Return the micro-batches of an update whose rows all have full length.

    The text of a packed program does not contain this number.
    """
    config = run.config
    lines_per_micro_batch = run.learner.update.num_lines
    if not lines_per_micro_batch:
        return config.update.batch_size // config.update.micro_batch_size
    draws_per_line = max(1, config.line_tokens // config.draw_tokens)
    num_lines = -(-_draws(run) // draws_per_line)
    return -(-num_lines // lines_per_micro_batch)


def _draws(run: Run) -> int:
    """Return the draws of an update."""
    return run.config.update.batch_size // run.config.rows_per_draw


def _draws_per_line(run: Run) -> float:
    """Return the average number of draws in a packed line."""
    num_lines = micro_batches(run) * run.learner.update.num_lines
    return _draws(run) / num_lines


def attended_share(run: Run, program: str, queries: int, keys: int, block: int) -> float:
    """Return the least share of [queries, keys] that a Splash kernel computes, averaged over the model's layers.

    The text of packed lines does not contain their mask. For packed lines, the result is the share that tokens of
    full-length draws see in their own rows.
    """
    config = run.config
    is_packed = program == "update" and run.learner.update.num_lines > 0
    prompt_tokens = config.prompts.max_tokens
    row_tokens = prompt_tokens + config.sampling.max_completion_tokens

    def num_pairs(tokens: int, window: int) -> float:
        """Return the number of query-key pairs of a row."""
        full = min(tokens, window)
        return full * (full + 1) / 2 + (tokens - full) * window

    def layer_share(window: int) -> float:
        if not is_packed:
            return operations.causal_share(queries, keys, block, window)
        prompt_pairs = num_pairs(prompt_tokens, window or keys)
        row_pairs = num_pairs(row_tokens, window or keys)
        draw_pairs = prompt_pairs + config.rows_per_draw * (row_pairs - prompt_pairs)
        return _draws_per_line(run) * draw_pairs / (queries * keys)

    shares = []
    for model in (run.model, run.learner.reference_model):
        windows = [layer.window for layer in model.arch.by_layer if not layer.is_recurrent]
        shares.append(statistics.fmean(layer_share(window) for window in windows))
    return min(shares)


def head_share(run: Run, program: str) -> float:
    """Return the share of a packed line's positions that have a target.

    At least this share of the head's chunks is computed.
    """
    config = run.config
    if program != "update" or not run.learner.update.num_lines:
        return 1.0
    targets = config.rows_per_draw * config.sampling.max_completion_tokens
    if reads_prompts(config):  # leave prompts out, because they have chunks of their own
        targets = min(targets, config.prompts.max_tokens - 1)
    return min(1.0, _draws_per_line(run) * targets / config.line_tokens)


def live_share(run: Run) -> float:
    """Return the share of a cache that decode steps on TPU read in whole blocks, averaged from empty to full."""
    tokens = run.config.sampling.max_completion_tokens
    arch = run.model.arch
    mesh = run.sampler.mesh
    rows = run.config.num_slots // sharding.num_data_shards(mesh)
    heads = arch.num_kv_heads // mesh.shape["tensor"]
    token_bytes = heads * arch.head_size * jnp.dtype(run.config.model.compute_dtype).itemsize
    _, block_tokens = tpu_decode.step_of(rows, cache_length(tokens), token_bytes)
    return min(1.0, 0.5 * (1 + block_tokens / tokens))


def temporaries(report: str) -> tuple[Buffer, ...]:
    """Return the contents of the device's temporary memory, by the first shape that each buffer holds.

    The report has one table per allocation. Arguments and results have one line each, so that the longest table is the
    temporary memory. Its buffers can share addresses at different times. Sizes are scaled so that their sum is its
    total.
    """
    device = report.partition("Memory Space: default")[2].partition("Memory Space: ")[0]
    tables = [_BUFFER.findall(table) for table in device.split("cumulative_size")]
    lines = max(tables, key=len)
    if len(lines) < 2:
        return ()
    number: collections.defaultdict[str, int] = collections.defaultdict(int)
    total: collections.defaultdict[str, float] = collections.defaultdict(float)
    ends = []
    for size, unit, offset, shapes in lines:
        match = re.search(r"\w+\[[\d,]*\]", shapes)
        shape = match[0] if match else "?"
        num_bytes = float(size) * _UNITS[unit]
        ends.append(int(offset) + num_bytes)
        number[shape] += 1
        total[shape] += num_bytes
    scale = min(1.0, max(ends) / sum(total.values()))
    largest_first = sorted(total.items(), key=lambda item: item[1], reverse=True)
    return tuple(Buffer(shape, number[shape], size * scale) for shape, size in largest_first)
