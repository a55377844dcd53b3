"""The programs of benchmarks.gpu compiled for a GPU that is not here: what each operation must move and multiply.

    python -m benchmarks.roofline [--topology h200:1] [--shape NAME ...] [--remat dots] [--logp-chunk-tokens N]

Wants the extra [plan-gpu]. Every operation is counted alone, at the data sheet's rates: its operands and results once
through memory, or its multiplications, whichever takes longer. Kernels of libraries count by what they are given,
matmuls at their best, starting an operation as nothing: a bound that the chip will not reach, and a list of where it
goes. A loop that ends early (decode) is counted as one turn, which is a step of every row.

Owns: what a line of compiled text moves. Does not know: time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
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
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding

BITS = {"pred": 8, "bf16": 16}  # others have theirs in their name
MOVE_NOTHING = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota"}
READ_A_PART = {"dynamic-slice", "slice", "gather"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of compiled text: ``name = type kind(operands), rest``."""

    name: str
    type: str
    kind: str
    operands: list[str]
    rest: str
    is_root: bool

    @property
    def arrays(self) -> list[tuple[str, list[int]]]:
        """Kind of number and shape of each array of the result."""
        found = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", self.type)
        return [(kind, [int(n) for n in dims.split(",") if n]) for kind, dims in found]

    @property
    def bytes(self) -> int:
        """Of its result, and of no library's workspace beside it."""
        arrays = self.arrays
        if self.kind == "custom-call" and len(arrays) > 1:
            arrays = [array for array in arrays if array[0] != "s8"]
        return sum(math.prod(shape) * _bits(kind) // 8 for kind, shape in arrays)

    @property
    def shape(self) -> list[int]:
        """Of its result, the first array of several."""
        return self.arrays[0][1]

    def names(self, attribute: str) -> list[str]:
        """Computations that an attribute gives."""
        found = re.search(attribute + r"=\{?((?:%[\w.\-]+(?:, )?)+)", self.rest)
        return re.findall(r"%([\w.\-]+)", found[1]) if found else []


Computation = dict[str, Operation]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one operation does in a whole program."""

    operation: Operation
    times: int
    bytes: float
    flops: float

    def seconds(self, peaks: Ceilings) -> float:
        return max(self.bytes / peaks.read_bytes, self.flops / peaks.batch_flops)


def _bits(kind: str) -> int:
    return BITS.get(kind) or int(re.search(r"\d+", kind)[0])


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations of compiled text by name, and the name of the one it begins with."""
    computations: dict[str, Computation] = {}
    entry = ""
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.\-]+) .*->.*\{$", line):
            current = computations[start[2]] = {}
            entry = start[2] if start[1] else entry
        elif found := re.match(r"\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line):
            root, name, kind_of_result, kind, rest = found.groups()
            operands, _, attributes = rest.partition(")")
            operands = re.findall(r"%([\w.\-]+)", operands)
            current[name] = Operation(name, kind_of_result, kind, operands, attributes, bool(root))
    return computations, entry


def costs(computations: Mapping[str, Computation], name: str, times: int = 1) -> Iterator[Cost]:
    """Of every operation that a computation runs, loops by their turns where the text says how many."""
    computation = computations[name]
    for operation in computation.values():
        if operation.kind in MOVE_NOTHING:
            continue
        if operation.kind == "while":
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.rest)
            yield from costs(computations, operation.names("body")[0], times * int(turns[1] if turns else 1))
        elif operation.kind in ("conditional", "call"):
            branches = operation.names("branch_computations") or operation.names("to_apply")
            yield from costs(computations, branches[-1], times)
        else:
            if operation.kind == "fusion":
                fused = computations[operation.names("calls")[0]]
                moved, flops = _moved_by_fusion(fused), sum(_flops(one, fused) for one in fused.values())
            else:
                moved, flops = _moved(operation, computation), _flops(operation, computation)
            yield Cost(operation, times, times * moved, times * flops)


def _flops(operation: Operation, computation: Computation) -> int:
    """Multiplications and additions of a matmul, XLA's or a library's; 0 of anything else."""
    over = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?(\d+)', operation.rest)
    if not over or operation.operands[0] not in computation:
        return 0
    return 2 * math.prod(operation.shape) * computation[operation.operands[0]].shape[int(over[1])]


def _moved(operation: Operation, computation: Computation) -> int:
    if operation.kind in READ_A_PART:
        return 2 * operation.bytes
    if operation.kind == "dynamic-update-slice":
        return 2 * computation[operation.operands[1]].bytes
    return operation.bytes + sum(computation[x].bytes for x in operation.operands if x in computation)


def _moved_by_fusion(fused: Computation) -> int:
    """Parameters as far as they are read, and the result as far as it is written."""
    users = collections.defaultdict(list)
    for operation in fused.values():
        for operand in operation.operands:
            users[operand].append(operation)

    def read(name: str) -> int:
        total = 0
        for user in users[name]:
            is_first = user.operands[0] == name
            if user.kind in READ_A_PART and is_first:
                total += user.bytes
            elif user.kind == "bitcast":
                total += read(user.name)
            elif user.kind != "dynamic-update-slice" or not is_first:
                return fused[name].bytes
        return min(total, fused[name].bytes)

    def written(operation: Operation) -> int:
        if operation.kind in ("tuple", "bitcast"):
            return sum(written(fused[x]) for x in operation.operands)
        return fused[operation.operands[1]].bytes if operation.kind == "dynamic-update-slice" else operation.bytes

    root = next(operation for operation in fused.values() if operation.is_root)
    return sum(read(name) for name, one in fused.items() if one.kind == "parameter") + written(root)


def report(text: str, peaks: Ceilings, least_s: float, top: int) -> tuple[str, Table]:
    """The sum of all operations beside the floor, and those that take longest."""
    found = sorted(costs(*parse(text)), key=lambda cost: -cost.seconds(peaks))
    total = sum(cost.seconds(peaks) for cost in found)
    table = Table("ms", "times", "MB", "GFLOP", "operation", "result", "of")
    for cost in found[:top]:
        place = re.search(r'op_name="([^"]*)"', cost.operation.rest)
        table.add_row(
            f"{cost.seconds(peaks) * 1e3:.3f}",
            str(cost.times),
            f"{cost.bytes / cost.times / 1e6:.1f}",
            f"{cost.flops / cost.times / 1e9:.1f}",
            cost.operation.name,
            cost.operation.type[:32],
            place[1][-40:] if place else "",
        )
    return (
        f"{total * 1e3:.3g} ms in all: {sum(c.bytes for c in found) / 1e9:.1f} GB, "
        f"{sum(c.flops for c in found) / 1e12:.2f} TFLOP, {sum(c.times for c in found)} operations; "
        f"at best {least_s / total:.0%} of the floor, {least_s * 1e3:.3g} ms"
    ), table


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="h200:1", help="as jaxrl_llm.plan takes it")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["smollm2-135m", "qwen2-1.5b"])
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="dots", help="model.remat of the update")
    parser.add_argument("--logp-chunk-tokens", type=results.at_least(0), default=0, help="update.logp_chunk_tokens")
    parser.add_argument("--top", type=results.at_least(0), default=12, help="operations to list")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # it only compiles
    generation = options.topology.partition(":")[0].upper()
    known = [ceilings for module, ceilings in gpu.PEAKS.items() if generation in module]
    if not generation or not known:
        parser.error(f"--topology={options.topology!r} must be of GPUs whose peaks are known: h200:1, h100:1, a100:1")
    try:
        devices, _ = chips.devices_of(options.topology)
    except ConfigError as error:
        parser.error(str(error))
    peaks, sizes, console = known[0], gpu.SIZES["full"], Console(width=150)
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
