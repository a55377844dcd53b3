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
    published_weights = (trained, *base) if sampling else (*base,)
    published = sharding.device_bytes(published_weights)
    if published:
        kinds[PUBLISHED] = published
    if sampling or run.config.rollout.lookahead_prompts > 0:
        kinds[SLOTS] = sharding.device_bytes(run.sampler.abstract_state())
    return kinds


def _without_ones(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sorted dimensions above 1. Arrays with other orders of the same dimensions count as equal."""
    return tuple(sorted(size for size in dims if size > 1))


def _matrices(run: Run) -> set[tuple[int, ...]]:
    """Return the shapes of the model's weights: whole and sharded, all layers and one, plain and with merged axes."""
    variants: list[tuple[int, ...]] = []
    for weight in jax.tree.leaves((run.learner.params, run.learner.frozen)):
        for shape in (weight.shape, weight.sharding.shard_shape(weight.shape)):
            variants.append(shape)
            if shape[0] == run.model.arch.num_layers:
                variants += [shape[1:], *_with_merged_axes(shape[1:])]
            variants += _with_merged_axes(shape)
    shapes = {_without_ones(dims) for dims in variants}
    return {dims for dims in shapes if len(dims) > 1}


def _with_merged_axes(dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes in which two neighbouring axes are merged into one."""
    merged = []
    for i in range(len(dims) - 1):
        product = dims[i] * dims[i + 1]
        merged.append((*dims[:i], product, *dims[i + 2 :]))
    return merged


def kind_of(run: Run, dims: tuple[int, ...]) -> str:
    """Return the kind of memory that a temporary buffer of this shape belongs to."""
    arch = run.model.arch
    config = run.config
    sizes = [size for size in dims if size > 1]
    if _without_ones(dims) in _matrices(run):
        return MATRICES
    vocabularies = {
        arch.vocab_size,
        arch.vocab_size // run.mesh.shape["tensor"],
    }
    if not vocabularies.isdisjoint(sizes):
        return LOGITS
    token_counts = {
        config.prompts.max_tokens,
        config.row_tokens,
        config.line_tokens,
        config.draw_tokens,
        config.sampling.max_completion_tokens,
    }
    if not token_counts.isdisjoint(sizes):
        return KEPT if sizes[0] == arch.num_layers else LAYER
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
    suggested: list[str] = []
    advice = _Advice(run, row.name)
    for kind in made_of(run, row):
        for text in advice.for_kind(kind):
            if text not in suggested:
                suggested.append(text)
                break
    return suggested[:most] or ["more chips"]


class _Advice:
    """Settings that reduce the memory of one program of a run, with values that divide."""

    def __init__(self, run: Run, program: str):
        self._run = run
        self._config = run.config
        self._is_learner = program in ("update", "annotate", "score_open")
        mesh = run.mesh.shape
        self._data = mesh["data"]
        self._fsdp = mesh["fsdp"]
        self._tensor = mesh["tensor"]
        self._half_data = f" with mesh.data={self._data // 2}" if self._config.mesh.data else ""  # 0: derived

    def for_kind(self, kind: str) -> Iterator[str]:
        """Yield the settings that reduce a kind of memory, the best first."""
        if kind in (STATE, FROZEN, MATRICES):
            yield from self._more_fsdp()
            if kind == STATE:
                yield from self._smaller_moments()
            yield from self._more_tensor()
        elif kind == RING:
            yield from self._smaller_ring()
        elif kind == PUBLISHED:
            yield from self._more_tensor()
        elif kind == LOGITS and self._is_learner:
            yield from self._smaller_logits()
            yield from self._more_tensor()
        elif kind != SLOTS and self._is_learner:
            if kind == KEPT and self._run.model.remat != "full":
                yield f"model.remat='full' (now {self._run.model.remat!r})"
            yield from self._smaller_micro_batch()
            yield from self._more_tensor()
        else:
            yield from self._fewer_slots()
            yield from self._more_tensor()

    def _more_fsdp(self) -> Iterator[str]:
        if self._data % 2 == 0:
            yield f"mesh.fsdp={2 * self._fsdp}{self._half_data} (now {self._fsdp})"

    def _more_tensor(self) -> Iterator[str]:
        doubled = 2 * self._tensor
        divides_heads = self._run.model.arch.num_kv_heads % doubled == 0
        divides_sampler = self._config.mesh.sampler_tensor % doubled == 0
        if not (divides_heads and divides_sampler):
            return
        if self._data % 2 == 0:
            yield f"mesh.tensor={doubled}{self._half_data} (now {self._tensor})"
        elif self._fsdp % 2 == 0:
            yield f"mesh.tensor={doubled} with mesh.fsdp={self._fsdp // 2} (now {self._tensor})"

    def _smaller_moments(self) -> Iterator[str]:
        optimizer = self._config.optimizer
        if optimizer.offload:
            return
        yield "optimizer.offload=True"
        if optimizer.name != "adafactor" and optimizer.moment_dtype == "float32":
            yield "optimizer.moment_dtype='bfloat16'"

    def _smaller_ring(self) -> Iterator[str]:
        config = self._config
        if config.replay.memory != "host":
            yield "replay.memory='host'"
        if config.ring_capacity > config.rows_per_iteration:
            yield f"a lower replay.capacity (now {config.ring_capacity})"

    def _smaller_logits(self) -> Iterator[str]:
        chunk = self._run.learner.update.config.logp_chunk_tokens
        if chunk > 128:
            yield f"update.logp_chunk_tokens={chunk // 2} (now {chunk})"

    def _smaller_micro_batch(self) -> Iterator[str]:
        update = self._config.update
        if update.micro_batch_tokens:
            yield f"a lower update.micro_batch_tokens (now {update.micro_batch_tokens})"
            return
        rows = update.micro_batch_size
        unit = sharding.num_ring_shards(self._config, self._run.mesh)
        if self._config.algorithm.surrogate.facts.siblings:
            unit *= self._config.rows_per_draw
        if rows % (2 * unit) == 0:
            yield f"update.micro_batch_size={rows // 2} (now {rows})"
            return
        smaller = rows // unit // 2 * unit
        if smaller and update.batch_size % smaller == 0:
            yield f"update.micro_batch_size={smaller} (now {rows})"

    def _fewer_slots(self) -> Iterator[str]:
        half = self._config.num_slots // 2
        learner_shards = sharding.num_data_shards(self._run.mesh)
        sampler_shards = sharding.num_data_shards(self._run.sampler.mesh)
        if half and half % math.lcm(learner_shards, sampler_shards) == 0:
            yield f"rollout.slots={half} (now {self._config.num_slots})"


def ring_that_fits(run: Run, spare_bytes: float) -> int | None:
    """Return the rollouts that the ring could hold, if each device has ``spare_bytes`` free at its fullest time.

    Return None if the ring is in host memory or its capacity is in tokens.
    """
    config = run.config
    if config.replay.memory == "host" or config.replay.capacity_tokens:
        return None
    rollout_bytes = sharding.device_bytes(run.learner.abstract_ring) / config.ring_capacity
    rows_of_all_shards = sharding.num_ring_shards(config, run.mesh) * config.rows_per_draw
    unit = math.lcm(rows_of_all_shards, config.rows_per_iteration)
    capacity = config.ring_capacity + spare_bytes / rollout_bytes
    num_units = int(capacity // unit)
    return max(0, num_units * unit)
