"""The programs of benchmarks.gpu compiled for an absent GPU: the bytes and multiplications of each operation.

    python -m benchmarks.roofline [--topology h200:1] [--shape NAME ...] [--remat dots] [--logp-chunk-tokens N]

The extra [plan-gpu] is needed. Every operation is counted alone at the data sheet's rates: its operands and results
once through memory, or its multiplications, whichever takes longer. Kernels of libraries count by their arguments,
matmuls at their best rate, and the start of an operation as nothing. The sum is a bound that the chip will not reach. A
loop that ends early (decode) counts as one turn, which is a step of every row.

Owns: the bytes that an operation moves. Does not know: how compiled text is parsed (planning.hlo), time.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import gpu, results
from benchmarks.floors import Ceilings
from benchmarks.shapes import SHAPES
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.planning import chips
from jaxrl_llm.planning.hlo import Computation, Instruction, parse
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding

MOVE_NOTHING = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota"}
READ_A_PART = {"dynamic-slice", "slice", "gather"}


def _bytes(x: Instruction) -> float:
    """Return the bytes of an operation's result, without the workspace of a library."""
    is_call = x.op == "custom-call" and len(x.shapes) > 1
    return sum(s.dense_bytes for s in x.shapes if not (is_call and s.dtype == "s8"))


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes and multiplications of one operation in a whole program."""

    operation: Instruction
    times: int
    bytes: float
    flops: float

    def seconds(self, peaks: Ceilings) -> float:
        return max(self.bytes / peaks.read_bytes, self.flops / peaks.batch_flops)


def costs(computations: Mapping[str, Computation], inside: Computation, times: int = 1) -> Iterator[Cost]:
    """Return the costs of every operation of a computation. A loop counts by its turns if the text has their number."""
    for x in inside.instructions.values():
        if x.op in MOVE_NOTHING:
            continue
        if x.op == "while":
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', x.attributes)
            (body,) = x.called("body")
            yield from costs(computations, computations[body], times * int(turns[1] if turns else 1))
        elif x.op in ("conditional", "call"):
            branches = x.called("branch_computations") or x.called("to_apply")
            yield from costs(computations, computations[branches[-1]], times)
        else:
            if x.op == "fusion":
                (name,) = x.called("calls")
                fused = computations[name]
                moved = _moved_by_fusion(fused)
                flops = sum(_flops(one, fused) for one in fused.instructions.values())
            else:
                moved = _moved(x, inside)
                flops = _flops(x, inside)
            yield Cost(x, times, times * moved, times * flops)


def _flops(x: Instruction, inside: Computation) -> int:
    """Return the multiplications and additions of a matmul of XLA or of a library, and 0 for any other operation."""
    over = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?(\d+)', x.attributes)
    if not over or x.operands[0] not in inside.instructions:
        return 0
    return 2 * x.shapes[0].size * inside.instructions[x.operands[0]].shapes[0].dims[int(over[1])]


def _moved(x: Instruction, inside: Computation) -> float:
    """Return the bytes that an operation reads and writes."""
    if x.op in READ_A_PART:
        return 2 * _bytes(x)
    if x.op == "dynamic-update-slice":
        return 2 * _bytes(inside.instructions[x.operands[1]])
    return _bytes(x) + sum(_bytes(inside.instructions[name]) for name in x.operands if name in inside.instructions)


def _moved_by_fusion(fused: Computation) -> float:
    """Return the bytes of parameters that are read and of the result that is written."""

    def read(x: Instruction) -> float:
        total = 0.0
        for user in fused.users.get(x.name, ()):
            is_first = user.operands[0] == x.name
            if user.op in READ_A_PART and is_first:
                total += _bytes(user)
            elif user.op == "bitcast":
                total += read(user)
            elif user.op != "dynamic-update-slice" or not is_first:
                return _bytes(x)
        return min(total, _bytes(x))

    def written(x: Instruction) -> float:
        if x.op in ("tuple", "bitcast"):
            return sum(written(fused.instructions[name]) for name in x.operands)
        return _bytes(fused.instructions[x.operands[1]] if x.op == "dynamic-update-slice" else x)

    return sum(read(x) for x in fused.parameters.values()) + written(fused.instructions[fused.root])


def report(text: str, peaks: Ceilings, least_s: float, top: int) -> tuple[str, Table]:
    """Return the sum of all operations beside the floor, and the operations that take longest."""
    computations = parse(text)
    entry = next(each for each in computations.values() if each.is_entry)
    found = sorted(costs(computations, entry), key=lambda cost: -cost.seconds(peaks))
    total = sum(cost.seconds(peaks) for cost in found)
    table = Table("ms", "times", "MB", "GFLOP", "operation", "result", "of")
    for cost in found[:top]:
        table.add_row(
            f"{cost.seconds(peaks) * 1e3:.3f}",
            str(cost.times),
            f"{cost.bytes / cost.times / 1e6:.1f}",
            f"{cost.flops / cost.times / 1e9:.1f}",
            cost.operation.name,
            ", ".join(map(str, cost.operation.shapes))[:32],
            cost.operation.op_name[-40:],
        )
    return (
        f"{total * 1e3:.3g} ms in all: {sum(c.bytes for c in found) / 1e9:.1f} GB, "
        f"{sum(c.flops for c in found) / 1e12:.2f} TFLOP, {sum(c.times for c in found)} operations; "
        f"at best {least_s / total:.0%} of the floor, {least_s * 1e3:.3g} ms"
    ), table


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="h200:1", help="the --topology of jaxrl_llm.plan")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["smollm2-135m", "qwen2-1.5b"])
    parser.add_argument(
        "--remat",
        choices=("none", "dots", "full"),
        default="dots",
        help="model.remat of the update",
    )
    parser.add_argument(
        "--logp-chunk-tokens",
        type=results.at_least(0),
        default=0,
        help="update.logp_chunk_tokens",
    )
    parser.add_argument("--top", type=results.at_least(0), default=12, help="operations to list")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # The command only compiles.
    generation = options.topology.partition(":")[0].upper()
    known = [ceilings for module, ceilings in gpu.PEAKS.items() if generation in module]
    if not generation or not known:
        parser.error(f"--topology={options.topology!r} must be of GPUs whose peaks are known: h200:1, h100:1, a100:1")
    try:
        devices, _ = chips.devices_of(options.topology)
    except ConfigError as error:
        parser.error(str(error))
    peaks = known[0]
    sizes = gpu.SIZES["full"]
    console = Console(width=150)
    for name in options.shape:
        arch = SHAPES[name]

        def show(program: str, config: Config, least_s: float, of: str, arch=arch, name=name) -> None:
            run = assemble(config, arch, (), sharding.make_mesh(config.mesh, devices[:1]), arch)
            text = run.programs()[program].lower(run.mesh).compile().as_text()
            summary, table = report(text, peaks, least_s, options.top)
            print(f"{name}, {of}: {summary}")
            if options.top:
                console.print(table)

        config = gpu.update_config(sizes)
        model = dataclasses.replace(config.model, remat=options.remat)
        update = dataclasses.replace(config.update, logp_chunk_tokens=options.logp_chunk_tokens)
        config = dataclasses.replace(config, model=model, update=update)
        show("update", config, gpu.update_flops(arch, sizes) / peaks.batch_flops, "an update")
        for rows in sizes.batches:
            step_s = gpu.least_decode_s(arch, rows, sizes, peaks) / sizes.completion
            show("decode", gpu.decode_config(rows, sizes), step_s, f"a step of {rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
