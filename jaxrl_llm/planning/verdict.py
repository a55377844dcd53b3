"""Memory verdict: the contents of a chip's memory while a program runs, and the settings that would reduce it most.

It also finds the largest ring that fits.

Owns: kinds of memory, the settings that lower each, with values that divide. Does not know: compilers, seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import jax

from jaxrl_llm.models import lora
from jaxrl_llm.planning.compiled import Row
from jaxrl_llm.run import Run
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import SAMPLING, START_UP, Memory

STATE = "weights and moments"
RING = "ring"
PUBLISHED = "published weights"
SLOTS = "sampler's slots"
FROZEN = "frozen weights"  # names of the frozen weights: a reference's weights, and the base weights of adapters
LOGITS = "logits"
KEPT = "layers' inputs kept for the backward pass"
LAYER = "values of a layer"
MATRICES = "weights gathered, laid out anew, or their gradients"
OTHER = "other temporary memory"


def host_bytes(memories: Mapping[str, Memory]) -> int:
    """Return the bytes that a device keeps in its host's memory throughout an iteration."""
    return sum(memories[name].on_host for name in START_UP if name in memories)


def kept(run: Run, *, sampling: bool) -> dict[str, int]:
    """Return a device's bytes by kind while a program of the sampler (``sampling``) or of the learner runs."""
    learner = run.learner
    kinds = {
        STATE: sharding.device_bytes(learner.abstract_state),
        RING: sharding.device_bytes(learner.abstract_ring),
    }
    frozen = sharding.device_bytes(learner.frozen)
    if frozen:
        kinds[FROZEN] = frozen
    trained, *base = lora.split(run.sampler_params)
    published = sharding.device_bytes((trained if sampling else (), *base))
    if published:
        kinds[PUBLISHED] = published
    if sampling or run.config.rollout.lookahead_prompts > 0:
        kinds[SLOTS] = sharding.device_bytes(run.sampler.abstract_state())
    return kinds


def _sorted(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(n for n in dims if n > 1))


def _matrices(run: Run) -> set[tuple[int, ...]]:
    """Return the shapes of the model's weights: whole and sharded, all layers and one, plain and with merged axes."""
    found = set()
    for x in jax.tree.leaves((run.learner.params, run.learner.frozen)):
        for shape in (x.shape, x.sharding.shard_shape(x.shape)):
            for dims in (
                shape,
                shape[1:] if shape[0] == run.model.arch.num_layers else shape,
            ):
                joined = [(*dims[:i], dims[i] * dims[i + 1], *dims[i + 2 :]) for i in range(len(dims) - 1)]
                found |= {_sorted(each) for each in (dims, *joined) if len(_sorted(each)) > 1}
    return found


def kind_of(run: Run, dims: tuple[int, ...]) -> str:
    """Return the kind of memory that a temporary buffer of this shape belongs to."""
    arch, config = run.model.arch, run.config
    tokens = {config.prompts.max_tokens, config.row_tokens, config.line_tokens, config.draw_tokens}
    tokens |= {config.sampling.max_completion_tokens}
    one = [n for n in dims if n > 1]
    if _sorted(dims) in _matrices(run):
        return MATRICES
    if {arch.vocab_size, arch.vocab_size // run.mesh.shape["tensor"]} & set(one):
        return LOGITS
    if tokens & set(one):
        return KEPT if one[0] == arch.num_layers else LAYER
    return OTHER


def made_of(run: Run, row: Row) -> dict[str, float]:
    """Return a device's bytes by kind while a program runs, the largest first."""
    sizes: dict[str, float] = {}
    if row.name not in START_UP:
        sizes |= kept(run, sampling=row.name in (*SAMPLING, "publish"))
    for buffer in row.buffers:
        kind = kind_of(run, buffer.dims)
        sizes[kind] = sizes.get(kind, 0.0) + buffer.size
    largest_first = sorted(sizes.items(), key=lambda item: item[1], reverse=True)
    return {kind: size for kind, size in largest_first if size > 0}


def suggestions(run: Run, row: Row, most: int = 3) -> list[str]:
    """Return the settings that reduce this program's memory most, for its largest kinds of memory first."""
    found: list[str] = []
    for kind in made_of(run, row):
        for text in _settings(run, kind, row.name):
            if text not in found:
                found.append(text)
                break
    return found[:most] or ["more chips"]


def _settings(run: Run, kind: str, program: str) -> Iterator[str]:
    """Yield the settings that reduce a kind of memory, the best first, with values that divide."""
    config, arch, mesh = run.config, run.model.arch, run.mesh.shape
    data, fsdp, tensor = (mesh[axis] for axis in ("data", "fsdp", "tensor"))
    half_data = f" with mesh.data={data // 2}" if config.mesh.data else ""  # 0: derived from the other axes
    rows, shards = (
        config.update.micro_batch_size,
        sharding.num_ring_shards(config, run.mesh),
    )
    unit = shards * (config.rows_per_draw if config.algorithm.surrogate.facts.siblings else 1)
    learns = program in ("update", "annotate", "score_open")

    def more_fsdp():
        if data % 2 == 0:
            yield f"mesh.fsdp={2 * fsdp}{half_data} (now {fsdp})"

    def more_tensor():
        fits = arch.num_kv_heads % (2 * tensor) == config.mesh.sampler_tensor % (2 * tensor) == 0
        if fits and (data % 2 == 0 or fsdp % 2 == 0):
            less = half_data if data % 2 == 0 else f" with mesh.fsdp={fsdp // 2}"
            yield f"mesh.tensor={2 * tensor}{less} (now {tensor})"

    def smaller_micro_batch():
        if config.update.micro_batch_tokens:
            yield f"a lower update.micro_batch_tokens (now {config.update.micro_batch_tokens})"
        elif rows % (2 * unit) == 0:
            yield f"update.micro_batch_size={rows // 2} (now {rows})"
        elif (smaller := rows // unit // 2 * unit) and config.update.batch_size % smaller == 0:
            yield f"update.micro_batch_size={smaller} (now {rows})"

    def fewer_slots():
        half, meshes = config.num_slots // 2, (run.mesh, run.sampler.mesh)
        if half and half % math.lcm(*map(sharding.num_data_shards, meshes)) == 0:
            yield f"rollout.slots={half} (now {config.num_slots})"

    if kind in (STATE, FROZEN, MATRICES):
        yield from more_fsdp()
        if kind == STATE and not config.optimizer.offload:
            yield "optimizer.offload=True"
            if config.optimizer.name != "adafactor" and config.optimizer.moment_dtype == "float32":
                yield "optimizer.moment_dtype='bfloat16'"
        yield from more_tensor()
    elif kind == RING:
        if config.replay.memory != "host":
            yield "replay.memory='host'"
        if config.ring_capacity > config.rows_per_iteration:
            yield f"a lower replay.capacity (now {config.ring_capacity})"
    elif kind == SLOTS:
        yield from fewer_slots()
        yield from more_tensor()
    elif kind == PUBLISHED:
        yield from more_tensor()
    elif kind == LOGITS and learns:
        chunk = run.learner.update.config.logp_chunk_tokens
        if chunk > 128:
            yield f"update.logp_chunk_tokens={chunk // 2} (now {chunk})"
        yield from more_tensor()
    elif learns:
        if kind == KEPT and run.model.remat != "full":
            yield f"model.remat='full' (now {run.model.remat!r})"
        yield from smaller_micro_batch()
        yield from more_tensor()
    else:
        yield from fewer_slots()
        yield from more_tensor()


def ring_that_fits(run: Run, spare_bytes: float) -> int | None:
    """Return the rollouts that the ring could hold, if each device has ``spare_bytes`` free at its fullest time.

    Return None if the ring is in host memory or its capacity is in tokens.
    """
    config = run.config
    if config.replay.memory == "host" or config.replay.capacity_tokens:
        return None
    each = sharding.device_bytes(run.learner.abstract_ring) / config.ring_capacity
    unit = math.lcm(
        sharding.num_ring_shards(config, run.mesh) * config.rows_per_draw,
        config.rows_per_iteration,
    )
    return max(0, int((config.ring_capacity + spare_bytes / each) // unit) * unit)
