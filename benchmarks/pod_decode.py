"""Count the bytes that a chip of a pod reads and sends in a decode step of an 8B model, from the compiled program.

    python -m benchmarks.pod_decode --topology=v5p:2x2x4 --fsdp=4 --tensor=4 [--sampler_tensor=8] [--layers=32]

The job is that of ``benchmarks.pod``. The command prints the temporary memory of publish and decode. For one decode
step, as the mean from empty caches to full ones, it prints the bytes read from HBM over the bytes that must be read,
and the bytes that a chip sends. A step must read every weight except the embedding's table once, prompts once, and the
filled part of each cache once. The kernel reads caches in whole blocks, which is printed separately. Arrays in VMEM are
not read again. Written bytes do not count.

Owns: the bytes that must be read. Does not know: how a program's text is parsed (planning).
"""

from __future__ import annotations

import argparse
import dataclasses

from benchmarks import pod
from jaxrl_llm.planning import compiled
from jaxrl_llm.run import Run
from jaxrl_llm.runtime import sharding


def must_read(run: Run) -> float:
    """Return the bytes that each chip must read in a decode step: the mean from empty caches to full ones."""
    config = run.config
    arch = run.model.arch
    mesh = run.sampler.mesh
    weights = arch.num_params
    if not arch.tied:  # A step reads only a few rows of an embedding that is not also the head.
        weights -= arch.vocab_size * arch.width
    prompts = config.num_slots // config.rollout.group_size * config.prompts.max_tokens
    cached_tokens = config.num_slots * config.sampling.max_completion_tokens / 2 + prompts
    per_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_size
    cached = cached_tokens / sharding.num_data_shards(mesh) * per_token
    return 2 * (weights + cached) / mesh.shape["tensor"]


@dataclasses.dataclass(frozen=True)
class Step:
    """Bytes of one chip in a decode step. ``of_blocks`` counts bytes of caches that are read but not filled."""

    read: float
    must: float
    of_blocks: float
    sent: dict[str, float]

    @property
    def above(self) -> float:
        """Return the excess of the read bytes, without ``of_blocks``, as a share of the bytes that must be read."""
        return (self.read - self.of_blocks) / self.must - 1


def step_of(run: Run, decode: compiled.Row) -> Step:
    """Return the bytes of a decode step, from the compiled program of a chunk."""
    steps = run.config.rollout.chunk_steps
    state = run.sampler.abstract_state()
    of_blocks = (compiled.live_share(run) - 0.5) * sharding.device_bytes((state.cache_k, state.cache_v))
    sent = {kind: size / steps for kind, size in decode.counts.by_collective().items()}
    return Step(decode.counts.total("read_bytes") / steps, must_read(run), of_blocks, sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5p:2x2x4")
    for name, default in (("fsdp", 16), ("tensor", 1), ("sampler_tensor", 0), ("layers", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    mesh = {name: getattr(given, name) for name in ("fsdp", "tensor", "sampler_tensor")}
    run = pod.run_of(given.topology, mesh, layers=given.layers)
    for row in compiled.compile_rows(run, ("publish", "decode")):
        if row.memory is None:
            raise SystemExit(f"error: {row.name}: {row.refused}")
        temporary = row.memory.temporary / 2**20
        outputs = row.memory.outputs / 2**20
        print(f"{row.name:8} temporary {temporary:.0f} MiB a chip, outputs {outputs:.0f}", flush=True)
    step = step_of(run, row)
    print(
        f"decode step reads {step.read / 2**20:.0f} MiB, must read {step.must / 2**20:.0f}: {step.read / step.must:.3f}"
    )
    print(f"without whole blocks of caches, {step.of_blocks / 2**20:.0f} MiB: {1 + step.above:.3f}")
    sent = ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(step.sent.items()))
    print(f"sends, bytes a step: {sent or 'nothing'}")


if __name__ == "__main__":
    main()
