"""What a chip of a pod does in a decode step of Llama-3.1-8B's shape, from the compiled program; no chip is needed.

    python -m benchmarks.pod_decode --topology=v5p:2x2x4 --fsdp=4 --tensor=4 [--sampler_tensor=8] [--layers=32]

1,024 rollouts of 512 + 1,024 tokens, 8 to a prompt, bfloat16. Prints the temporary memory of publish and decode, and of
one decode step the bytes that go between chips and the bytes read from HBM over those that it must read: every weight
but the embedding's table once, caches (taken to be full) and prompts once. Bytes of what instructions take from HBM,
tables' rows as they are looked up; what is read from VMEM, and what is written, does not count.

libtpu writes its text of the program to a temporary folder, about 1 GB: JAX cannot print some of v5p's.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import re
import tempfile

WIDTH, FFN, HEADS, KEY_HEADS, HEAD, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
ROLLOUTS, GROUP, PROMPT, COMPLETION = 1024, 8, 512, 1024
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}
NO_READ = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "iota", "optimization-barrier")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)(?= [\w\-]+\()|\S+) ([\w\-]+)\((.*)")
COLLECTIVE = re.compile(r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?$")


def in_hbm(shapes: str) -> int:
    """Bytes of the arrays in the text of a type that no layout puts elsewhere."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shapes)
    of = lambda kind, dims: SIZES.get(kind, 0) * math.prod(int(n) for n in dims.split(",") if n)
    return sum(of(kind, dims) for kind, dims, layout in arrays if "S(" not in layout)


def decode_loop(text: str) -> list[tuple[str, str, str, str]]:
    """Name, type, operation and operands of each instruction of the loop over decode steps."""
    computations: list[list[tuple[str, str, str, str]]] = [[]]
    for line in text.splitlines():
        if line.endswith("{"):
            computations.append([])
        elif found := INSTRUCTION.match(line):
            computations[-1].append(found.groups())
    return max(computations, key=lambda c: (sum("decode_attention" in name for name, *_ in c), len(c)))


def read_and_sent(loop: list[tuple[str, str, str, str]]) -> tuple[int, dict[str, int]]:
    """Bytes read from HBM, and bytes of the results of each kind of collective."""
    types = {name: kind for name, kind, _, _ in loop}
    read, sent = 0, {}
    for name, kind, operation, rest in loop:
        if operation in NO_READ or operation.endswith("-done"):
            continue
        if found := COLLECTIVE.match(operation):
            sent[found[1]] = sent.get(found[1], 0) + in_hbm(re.sub(r"S\(\d\)", "", kind))
        for operand in re.findall(r"%([\w.\-]+)", rest.split("metadata=")[0]):
            source = types.get(operand, "(")
            if source.startswith("("):
                continue
            is_lookup = "gather" in name and in_hbm(source) > 2**24
            read += in_hbm(kind) if is_lookup and not kind.startswith("(") else 0 if is_lookup else in_hbm(source)
    return read, sent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--topology", default="v5p:2x2x4")
    for name, default in (("fsdp", 16), ("tensor", 1), ("sampler_tensor", 0), ("layers", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=false"
        os.environ |= {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags}
        from jaxrl_llm.config import freeze
        from jaxrl_llm.models.architecture import Architecture
        from jaxrl_llm.planning import chips
        from jaxrl_llm.run import assemble
        from jaxrl_llm.runtime import sharding
        from jaxrl_llm.runtime.programs import memory

        sizes = {"num_heads": HEADS, "num_kv_heads": KEY_HEADS, "head_size": HEAD, "ffn": FFN, "tied": False}
        arch = Architecture(VOCABULARY, WIDTH, given.layers, **sizes, max_positions=8192)
        settings = {
            "model": {"path": "random:debug", "compute_dtype": "bfloat16"},
            "prompts": {"max_tokens": PROMPT},
            "sampling": {"max_completion_tokens": COMPLETION},
            "rollout": {"prompts_per_iteration": ROLLOUTS // GROUP, "group_size": GROUP, "chunk_steps": 64},
            "update": {"batch_size": ROLLOUTS, "micro_batch_size": 64},
            "mesh": {name: getattr(given, name) for name in ("fsdp", "tensor", "sampler_tensor")},
        }
        config = freeze(settings)
        mesh = sharding.make_mesh(config.mesh, chips.devices_of(given.topology)[0])
        run = assemble(config, arch, (0,), mesh)
        for name in ("publish", "decode"):
            m = memory(run.programs()[name].lower(mesh).compile())
            print(
                f"{name:8} temporary {m.temporary / 2**20:.0f} MiB a chip, outputs {m.outputs / 2**20:.0f}", flush=True
            )
        text = max(pathlib.Path(folder).glob("*TLP-hlo.txt"), key=lambda path: path.stat().st_size).read_text()
    read, sent = read_and_sent(decode_loop(text))
    shards, tensor = sharding.num_data_shards(run.sampler.mesh), run.sampler.mesh.shape["tensor"]
    of_layer = WIDTH * HEAD * 2 * (HEADS + KEY_HEADS) + 3 * WIDTH * FFN
    weights = 2 * (given.layers * of_layer + VOCABULARY * WIDTH) // tensor
    places = ROLLOUTS // shards * COMPLETION + ROLLOUTS // GROUP // shards * PROMPT
    needed = weights + 2 * 2 * given.layers * places * KEY_HEADS // tensor * HEAD
    print(f"decode step reads {read / 2**20:.0f} MiB, must read {needed / 2**20:.0f}: {read / needed:.3f}")
    print("between chips, bytes a step: " + (", ".join(f"{k} {v}" for k, v in sorted(sent.items())) or "none"))


if __name__ == "__main__":
    main()
