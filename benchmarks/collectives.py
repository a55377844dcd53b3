"""Bytes that each chip sends to others in a compiled program, read off its optimised HLO; loops counted by their trips.

    python -m benchmarks.collectives --topology=v5e:4x4 --fsdp=16 --layers=2 [--tensor=1 --chunk=0 --tied]

compiles one update of Llama-3.1-8B's shapes with so many layers for chips that are not at hand (extra ``[plan]``), and
prints one line for each place in the program that sends. Bytes are of the ring algorithms: of n chips each sends
(n-1)/n of what is gathered or scattered whole, twice that where it is reduced and kept whole by all.

Owns: the reading of HLO text. Does not know: seconds, links.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
from typing import NamedTuple

BITS = {"pred": 8, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# "%name = SHAPE kind(operands)", SHAPE an array or a tuple of them.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


class Sent(NamedTuple):
    """A collective where it stands in the program."""

    kind: str
    shape: str  # of the largest array that it makes, or takes to scatter, such as "bf16[128,64]"
    chips: int  # that take part with each other
    times: int  # that the program runs it; a loop whose trips the compiler does not know counts once
    sent_bytes: float  # by a chip, each time
    op_name: str  # of the line of Python that it comes from, as JAX names it


def _bytes(dtype: str, dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n) * BITS[dtype] // 8


def collectives(text: str) -> list[Sent]:
    """Every collective of more than one chip in a program's optimised HLO text."""
    bodies, entry, current = {}, None, None
    for line in text.splitlines():
        if line.endswith("{") and " -> " in line and not line.startswith(" "):
            current = line.removeprefix("ENTRY ").split(" ")[0].removeprefix("%")
            entry = current if line.startswith("ENTRY") else entry
            bodies[current] = []
        elif current and (match := INSTRUCTION.match(line)):
            bodies[current].append((*match.groups(), line))
    found, channels = [], set()

    def visit(name: str, times: int, fused: str = "") -> None:
        shapes = {instruction: shape for instruction, shape, *_ in bodies[name]}
        for _, shape, kind, rest, line in bodies[name]:
            base = kind.removesuffix("-start")
            if base in KINDS:
                # Computation beside which a collective goes on repeats it, under the channel it was started with.
                channel = re.search(r"channel_id=(\d+)", line)
                if fused and channel and channel[1] in channels:
                    continue
                channels.add(fused and channel and channel[1])
                scattered = "all-reduce-scatter" in fused
                found.append(_sent(base, shape, rest, line, shapes, times, scattered))
                continue
            inside = times * _trips(bodies, line) if kind == "while" else times
            called = re.findall(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line)
            for several in re.findall(r"branch_computations=\{([^}]*)\}", line):
                called += [one.strip().removeprefix("%") for one in several.split(",")]
            for one in called:
                if one in bodies:
                    visit(one, inside, one if kind == "fusion" else fused)

    visit(entry, 1)
    return [one for one in found if one.chips > 1]


def _trips(bodies: dict[str, list], line: str) -> int:
    """Of a loop from 0 while its counter is less than a constant; of any other 1."""
    condition = bodies[re.search(r"condition=%?([\w.\-]+)", line)[1]]
    constants = [
        int(m[1]) for *_, kind, rest, _ in condition if kind == "constant" and (m := re.match(r"(\d+)\)", rest))
    ]
    is_less = any("direction=LT" in rest for *_, rest, _ in condition)
    return constants[0] if is_less and len(constants) == 1 else 1


def _sent(kind, shape, rest, line, shapes, times, scattered) -> Sent:
    if kind == "reduce-scatter":  # what it takes is whole, what it gives a shard
        shape = " ".join(shapes.get(name, "") for name in re.findall(r"%([\w.\-]+)", rest.split(")")[0]))
    arrays = [x for x in ARRAY.findall(shape) if x[0] in BITS] or [("u8", "0")]
    dtype, dims = max(arrays, key=lambda x: _bytes(*x))
    # Of several arrays reduced at once all count; where another kind is started its result has its operand too.
    size = sum(_bytes(*x) for x in arrays) if kind == "all-reduce" else _bytes(dtype, dims)
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        chips = int(groups[2])
    elif groups := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", groups[1]))
        of_axis = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups[2])  # whole, or a part of it
        chips = math.prod(int(part or axes[name]) for name, part in of_axis)
    elif groups := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        chips = len(groups[1].split(","))
    else:
        pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
        chips = pairs[1].count("{") if pairs else 1
    share = {"collective-permute": 1, "all-reduce": (1 if scattered else 2) * (chips - 1) / chips}
    op = re.search(r'op_name="([^"]*)"', line)
    sent = share.get(kind, (chips - 1) / max(chips, 1)) * size
    return Sent("reduce-scatter" if scattered else kind, f"{dtype}[{dims}]", chips, times, sent, op[1] if op else "")


def main() -> None:
    import jax

    from jaxrl_llm.config import freeze
    from jaxrl_llm.models.architecture import Architecture
    from jaxrl_llm.planning import chips
    from jaxrl_llm.run import assemble
    from jaxrl_llm.runtime import sharding
    from jaxrl_llm.runtime.programs import memory

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:4x4")
    for name, default in (("fsdp", 16), ("tensor", 1), ("layers", 2), ("chunk", 0), ("prompt", 512), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--completion", type=int, default=1536)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--program", default="update")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    devices, _ = chips.devices_of(args.topology)
    shards = len(devices) // args.tensor
    config = freeze(
        {
            "model": {"path": "random:debug", "compute_dtype": "bfloat16"},
            "prompts": {"max_tokens": args.prompt},
            "sampling": {"max_completion_tokens": args.completion},
            "rollout": {"prompts_per_iteration": shards, "group_size": 8},
            "replay": {"capacity": 16 * shards},
            "update": {
                "batch_size": 8 * shards,
                "micro_batch_size": args.rows * shards,
                "logp_chunk_tokens": args.chunk,
            },
            "mesh": {"fsdp": args.fsdp, "tensor": args.tensor},
        }
    )
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    shape = {"vocab_size": 128256, "width": 4096, "num_layers": args.layers, "ffn": 14336, "max_positions": 131072}
    arch = Architecture(**heads, **shape, tied=args.tied)
    run = assemble(config, arch, (5,), sharding.make_mesh(config.mesh, devices))
    compiled = run.programs()[args.program].lower(run.mesh).compile()
    size, places = memory(compiled), collections.defaultdict(lambda: [0, 0.0])
    for one in collectives(compiled.as_text()):
        where = re.sub(r"closed_call/|while/body/|body/|jit\(_update\)/", "", one.op_name)
        place = places[one.kind, one.shape, one.chips, where]
        place[0] += one.times
        place[1] += one.times * one.sent_bytes / 2**20
    print(f"arguments {size.arguments / 2**20:.0f} MiB a chip, temporary {size.temporary / 2**20:.0f} MiB")
    print(f"sent {sum(mib for _, mib in places.values()):.1f} MiB a chip")
    for (kind, shape, num_chips, where), (times, mib) in sorted(places.items(), key=lambda x: -x[1][1])[:40]:
        print(f"{mib:9.1f} MiB {times:5} x {kind:<18} {shape:<26} {num_chips:4} chips  {where[-90:]}")


if __name__ == "__main__":
    main()
