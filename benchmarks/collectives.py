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
import collections
import re

from benchmarks import pod
from jaxrl_llm.planning import compiled
from jaxrl_llm.run import Run


def needed(run: Run) -> dict[str, float]:
    """Return the bytes that a chip must send in an update with weights split over fsdp and tensor, by kind of array.

    In each micro-batch every matrix of a layer is gathered for the forward and for the backward pass, in bfloat16, and
    the head once; their gradients are scattered, a layer's in bfloat16 and the head's in float32. Tokens' rows of the
    embedding are exchanged, and their gradients. What a chip sends between those it splits layers with: in each layer
    two sums of the activations forward, and two backward.
    """
    config, arch, mesh = run.config, run.model.arch, run.mesh.shape
    fsdp, tensor, shards = mesh["fsdp"], mesh["tensor"], mesh["fsdp"] * mesh["data"]
    micro_batches = compiled.micro_batches(run)
    of_layer = arch.width * arch.head_size * 2 * (arch.num_heads + arch.num_kv_heads) + 3 * arch.width * arch.ffn
    layers, head = (
        arch.num_layers * of_layer / tensor,
        arch.vocab_size * arch.width / tensor,
    )
    others = (fsdp - 1) / fsdp
    tokens = config.update.micro_batch_size / shards * config.row_tokens
    activations = 2 * (tensor - 1) / tensor * tokens * arch.width * 2
    return {
        "layers gathered twice": micro_batches * others * 2 * 2 * layers,
        "layers' gradients scattered": micro_batches * others * 2 * layers,
        "head gathered, its gradient scattered": micro_batches * others * (2 + 4) * head,
        "embedding's rows exchanged": micro_batches * others * 2 * 2 * tokens * arch.width,
        "activations summed": micro_batches * arch.num_layers * 4 * activations,
    }


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
    places = collections.defaultdict(lambda: [0.0, 0.0])
    for times, one in row.counts.sent:
        where = re.sub(r"closed_call/|while/body/|body/|jit\(_update\)/", "", one.op_name)
        place = places[one.kind, one.shape, one.chips, where]
        place[0] += times
        place[1] += times * one.num_bytes / 2**20
    size = row.memory
    print(f"arguments {size.arguments / 2**20:.0f} MiB a chip, temporary {size.temporary / 2**20:.0f} MiB")
    print(f"sent {sum(mib for _, mib in places.values()):.1f} MiB a chip")
    if given.program == "update":
        algebra = {name: size / 2**20 for name, size in needed(run).items() if size}
        print(f"needs {sum(algebra.values()):.1f} MiB: " + ", ".join(f"{name} {n:.1f}" for name, n in algebra.items()))
    for (kind, shape, chips, where), (times, mib) in sorted(places.items(), key=lambda x: -x[1][1])[:40]:
        print(f"{mib:12.1f} MiB {times:7.0f} x {kind:<18} {shape:<26} {chips:4} chips  {where[-90:]}")


if __name__ == "__main__":
    main()
