"""Bytes that each chip sends in a compiled program, beside the bytes that the layout needs. Loops count by their turns.

    python -m benchmarks.collectives --topology=v5p:2x2x4 --fsdp=16 [--tensor=4 --layers=2 --chunk=128]
    python -m benchmarks.collectives --topology=v5p:2x2x4 --fsdp=4 --tensor=4 --program=decode

The command compiles a program of the job of ``benchmarks.pod`` for absent chips (extra ``[plan]``). It prints one line
for each place in the program that sends, and for an update the bytes that its algebra needs. Bytes are those of the
ring algorithms: each of n chips sends (n-1)/n of an array that is gathered or scattered whole, and twice as much of an
array that is reduced and kept whole by all chips.

Owns: the update's algebra. Does not know: how a program's text is read (planning), seconds, links.
"""

from __future__ import annotations

import argparse
import dataclasses
import re

from benchmarks import pod
from jaxrl_llm.planning import compiled
from jaxrl_llm.run import Run

MOST_PLACES = 40  # places that are printed


def needed(run: Run) -> dict[str, float]:
    """Return the bytes that a chip must send in an update with weights split over fsdp and tensor, by kind of array.

    In each micro-batch:

    - every matrix of a layer is gathered in bfloat16, once for the forward and once for the backward pass;
    - the head is gathered once, in bfloat16;
    - gradients are scattered, those of layers in bfloat16 and that of the head in float32;
    - the rows of the embedding for the tokens, and their gradients, are exchanged;
    - with ``tensor``, each layer has two sums of activations in the forward pass and two in the backward pass.
    """
    config = run.config
    arch = run.model.arch
    fsdp = run.mesh.shape["fsdp"]
    tensor = run.mesh.shape["tensor"]
    shards = fsdp * run.mesh.shape["data"]
    micro_batches = compiled.micro_batches(run)
    attention = arch.width * arch.head_size * 2 * (arch.num_heads + arch.num_kv_heads)
    mlp = 3 * arch.width * arch.ffn
    layers = arch.num_layers * (attention + mlp) / tensor
    head = arch.vocab_size * arch.width / tensor
    others = (fsdp - 1) / fsdp  # share of an array that other chips hold
    tokens = config.update.micro_batch_size / shards * config.row_tokens
    activations = 2 * (tensor - 1) / tensor * tokens * arch.width * 2
    return {
        "layers gathered twice": micro_batches * others * 2 * 2 * layers,
        "layers' gradients scattered": micro_batches * others * 2 * layers,
        "head gathered, its gradient scattered": micro_batches * others * (2 + 4) * head,
        "embedding's rows exchanged": micro_batches * others * 2 * 2 * tokens * arch.width,
        "activations summed": micro_batches * arch.num_layers * 4 * activations,
    }


@dataclasses.dataclass
class Place:
    """A place of a program that sends: the collective, its operation name, how often it runs and how much it sends."""

    kind: str
    shape: str
    chips: int
    where: str
    times: float = 0.0
    mib: float = 0.0


def sent_by_place(row: compiled.Row) -> list[Place]:
    """Return the places of a program that send, the largest first."""
    places: dict[tuple[str, str, int, str], Place] = {}
    for times, one in row.counts.sent:
        where = re.sub(r"closed_call/|while/body/|body/|jit\(_update\)/", "", one.op_name)
        key = (one.kind, one.shape, one.chips, where)
        place = places.setdefault(key, Place(*key))
        place.times += times
        place.mib += times * one.num_bytes / 2**20
    return sorted(places.values(), key=lambda place: -place.mib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5p:2x2x4")
    for name, default in (("fsdp", 16), ("tensor", 1), ("sampler_tensor", 0), ("layers", 32), ("chunk", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--completion", type=int, default=4096)
    parser.add_argument("--micro_batch", type=int, default=64)
    parser.add_argument("--program", default="update")
    given = parser.parse_args()
    mesh = {name: getattr(given, name) for name in ("fsdp", "tensor", "sampler_tensor")}
    changed = {
        "sampling": {"max_completion_tokens": given.completion},
        "update": {
            "micro_batch_size": given.micro_batch,
            "logp_chunk_tokens": given.chunk,
        },
    }
    run = pod.run_of(given.topology, mesh, layers=given.layers, changed=changed)
    (row,) = compiled.compile_rows(run, [given.program])
    if row.memory is None:
        raise SystemExit(f"error: {row.name}: {row.refused}")
    places = sent_by_place(row)
    memory = row.memory
    print(f"arguments {memory.arguments / 2**20:.0f} MiB a chip, temporary {memory.temporary / 2**20:.0f} MiB")
    print(f"sent {sum(place.mib for place in places):.1f} MiB a chip")
    if given.program == "update":
        algebra = {name: size / 2**20 for name, size in needed(run).items() if size}
        parts = ", ".join(f"{name} {mib:.1f}" for name, mib in algebra.items())
        print(f"needs {sum(algebra.values()):.1f} MiB: {parts}")
    for place in places[:MOST_PLACES]:
        print(
            f"{place.mib:12.1f} MiB {place.times:7.0f} x {place.kind:<18} {place.shape:<26} {place.chips:4} chips  "
            f"{place.where[-90:]}"
        )


if __name__ == "__main__":
    main()
