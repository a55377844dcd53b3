"""Assembly: a config and a model's shape on a mesh become the programs of one run.

``train`` compiles them for the devices it has; ``plan`` compiles the same ones for a pod it has not.

Owns: which programs a run has, and the shapes that pass between them. Does not know: weights, data, time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.algorithms import corrections, credit
from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.algorithms.baselines import num_features
from jaxrl_llm.algorithms.shaping import NUM_DIFFICULTIES
from jaxrl_llm.config import Config, ConfigError, flatten
from jaxrl_llm.learner import optim, publish
from jaxrl_llm.learner.annotation import Annotation
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.kernels import learner as kernels
from jaxrl_llm.models.row_logp import chunk_tokens
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.runtime import rng, sharding
from jaxrl_llm.runtime.programs import Program, in_use_bytes, memory, memory_limit
from jaxrl_llm.types import Critic, Experience, RingState, Rollout, Scores, TrainState


@dataclasses.dataclass(frozen=True)
class Run:
    """The static parts of a run. Abstract values are ``jax.ShapeDtypeStruct`` with shardings."""

    config: Config
    mesh: Mesh
    model: Model
    reference_model: Model  # whose log-probs the objective's reference has; another than ``model`` for a teacher
    optimizer: optax.GradientTransformation
    sampler: Sampler
    eval_sampler: Sampler | None
    update: Update

    @functools.cached_property
    def annotation(self) -> Annotation:
        return Annotation(self.update, self.reference_model, self.config.rollout.group_size)

    @functools.cached_property
    def learner_params(self) -> Any:
        return self.model.abstract_params(self.mesh)

    @functools.cached_property
    def sampler_params(self) -> Any:
        return publish.abstract_params(self.model, self.mesh)

    @property
    def keeps_reference(self) -> bool:
        return self.config.keeps_reference

    @property
    def loads_reference(self) -> bool:
        """Whether the reference is beside the learner's state, the same all through; else it is a part of it."""
        return self.keeps_reference and not self.config.objective.reference_reset_iterations

    @functools.cached_property
    def abstract_rollout(self) -> Rollout:
        """What an iteration puts into the ring."""
        return self._abstract_rows(self.config.rows_per_iteration)

    @functools.cached_property
    def abstract_external(self) -> Rollout:
        """Rows of others, as the host has them: without what the current weights say of them."""
        rows = self._abstract_rows(self.config.rows_per_iteration - self.config.rollouts_per_iteration)
        return rows.replace(behaviour_logp=None, policy_version=None, entropy=None, old_logp=None)

    def _abstract_rows(self, B: int) -> Rollout:
        S = self.config.row_tokens
        rows = Rollout(
            tokens=jax.ShapeDtypeStruct((B, S), jnp.int32),
            prompt_length=jax.ShapeDtypeStruct((B,), jnp.int32),
            length=jax.ShapeDtypeStruct((B,), jnp.int32),
            behaviour_logp=jax.ShapeDtypeStruct((B, S), jnp.float32),
            group_id=jax.ShapeDtypeStruct((B,), jnp.int32),
            prompt_id=jax.ShapeDtypeStruct((B,), jnp.int32),
            policy_version=jax.ShapeDtypeStruct((B, S), jnp.int32),
            stop_reason=jax.ShapeDtypeStruct((B,), jnp.int8),
        )
        if size := self.sampler.support_tokens:
            rows = rows.replace(support=jax.ShapeDtypeStruct((B, S, size), jnp.int32))
        if self.sampler.keeps_entropy:
            rows = rows.replace(entropy=jax.ShapeDtypeStruct((B, S), jnp.float32))
        if self.sampler.keeps_old_logp:
            rows = rows.replace(old_logp=jax.ShapeDtypeStruct((B, S), jnp.float32))
        return place(rows, sharding.leading(self.mesh, rows))

    @functools.cached_property
    def abstract_scores(self) -> Scores:
        """What the host knows of them: all but what the learner says."""
        B, settings = self.config.rows_per_iteration, self.config.credit
        kind, features = settings.advantage, num_features(self.model.arch.width)
        return Scores(
            reward=self.rows((B,), jnp.float32),
            trainable=self.rows((B,), bool),
            parts=self.rows((B, len(self.config.rewards.functions)), jnp.float32) if kind == "gdpo" else None,
            baseline=self.rows((B,), jnp.float32) if kind == "mssr" else None,
            regression=self.whole(jnp.float32, (features, features + 1)) if kind == "poise" else None,
            moments=self.whole(jnp.float32, (3,)) if settings.advantage_norm_decay else None,
            short_answer=self.whole(jnp.int32, (NUM_DIFFICULTIES,)) if settings.short_answer_iterations else None,
        )

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        params = self.learner_params
        optimizer = optim.abstract_state(self.optimizer, params, self.mesh, offload=self.config.optimizer.offload)
        average = params if self.config.keeps_average else None
        coefficient = self.whole(jnp.float32) if self.config.objective.entropy_target else None
        reference = params if self.config.objective.reference_reset_iterations else None
        previous = params if self.config.keeps_previous else None
        return TrainState(
            params, optimizer, self.whole(jnp.int32), average, self.abstract_critic, coefficient, reference, previous
        )

    @functools.cached_property
    def abstract_critic(self) -> Critic | None:
        critic = jax.eval_shape(self._init_critic)
        return place(critic, sharding.replicated(self.mesh, critic))

    @functools.cached_property
    def abstract_ring(self) -> RingState:
        ring = jax.eval_shape(self._init_ring)
        layout = sharding.leading(self.mesh, ring)
        if self.config.replay.memory == "host":
            layout = layout.replace(slots=sharding.on_host(layout.slots))
        return place(ring, layout)

    @property
    def abstract_checkpoint(self) -> dict[str, Any]:
        """What a checkpoint has; of the sampler nothing where every iteration starts with empty slots."""
        slots = self.sampler.abstract_state() if self.config.rollout.lookahead_prompts else None
        return {"train": self.abstract_state, "ring": self.abstract_ring, "sampler": slots}

    def whole(self, dtype: Any, shape: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.replicated(self.mesh, 0))

    def rows(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        x = jax.ShapeDtypeStruct(shape, dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.leading(self.mesh, x))

    # ---- the functions that are compiled -------------------------------------------------------------

    def _init_state(self, params: Any) -> TrainState:
        copy = lambda: jax.tree.map(jnp.copy, params)  # noqa: E731
        optimizer, objective = self.optimizer.init(params), self.config.objective
        average = copy() if self.config.keeps_average else None
        coefficient = jnp.float32(objective.entropy_coefficient) if objective.entropy_target else None
        reference = copy() if objective.reference_reset_iterations else None
        previous = copy() if self.config.keeps_previous else None
        step = jnp.zeros((), jnp.int32)
        return TrainState(params, optimizer, step, average, self._init_critic(), coefficient, reference, previous)

    def _init_critic(self) -> Critic | None:
        if not self.config.has_critic:
            return None
        head = values.new_head(self.model.arch.width, self.update.bins)
        return Critic(head, self.update.critic_optimizer.init(head))

    def _init_ring(self) -> RingState:
        B, S = self.config.rows_per_iteration, self.config.row_tokens
        tokens = jax.ShapeDtypeStruct((B, S), jnp.float32)
        shape = Experience(
            rollout=self.abstract_rollout.replace(entropy=None, old_logp=None),
            reward=jax.ShapeDtypeStruct((B,), jnp.float32),
            advantage=tokens,
            trainable=jax.ShapeDtypeStruct((B,), bool),
            group_mean=jax.ShapeDtypeStruct((B,), jnp.float32),
            ref_logp=tokens if self.keeps_reference else None,
            returns=tokens if self.config.has_critic else None,
            value=tokens if self.config.has_critic and self.config.objective.value_clip else None,
            old_logp=tokens if self.config.keeps_old_logp else None,
        )
        return replay.init(
            shape,
            capacity=self.config.ring_capacity,
            num_shards=sharding.num_ring_shards(self.config, self.mesh),
            on_host=self.config.replay.memory == "host",
            capacity_tokens=self.config.replay.capacity_tokens,
            page_tokens=self.config.page_tokens,
        )

    def _choose(self, first: Rollout, second: Rollout, place: jax.Array) -> Rollout:
        """The groups [P] i32 at these places among the 2P of two rounds, as one round's."""
        size = self.config.rollout.group_size

        def take(x, y):
            groups = jnp.concatenate([x, y]).reshape(-1, size, *x.shape[1:])
            return groups[place].reshape(x.shape)

        return jax.tree.map(take, first, second)

    def _insert(self, ring, rollout, scores, ref_logp, iteration):
        """Credit, then the ring. Returns the ring and credit's sums."""
        experience, sums = credit.assign(rollout, scores, ref_logp, self.config)
        threshold = self.config.rewards.pass_threshold
        imitates = self.config.objective.imitation_coefficient > 0
        how = {"pass_threshold": threshold, "imitates": imitates, "group_size": self.config.rows_per_draw}
        before = replay.usage(ring)
        ring = replay.insert(ring, experience, iteration, self.config.replay, **how)
        return ring, sums | replay.ended(before, ring, num_new=experience.reward.size)

    def _update(self, state, ring, iteration, key):
        def draw(ring, key):
            ring, batch, info = replay.draw(
                ring,
                key,
                iteration,
                self.config.replay,
                batch_size=self.config.update.batch_size,
                group_size=self.config.rows_per_draw,
                row_tokens=self.config.row_tokens,
            )
            return ring, batch, replay.sums(info)

        key = jax.random.fold_in(key, iteration)
        state, ring, sums = self.update.step(state, ring, key, draw)
        if self.config.replay.min_ess:
            by_age = (sums[f"{name}_by_age"] for name in ("ratio_sum", "ratio_square_sum", "token_count"))
            ring = replay.retire_stale(ring, iteration, corrections.effective_share(*by_age), self.config.replay)
        rate = optim.schedule(self.config.optimizer, self.config.num_updates)(jnp.maximum(state.step - 1, 0))
        sums |= {"filled_slots": replay.num_filled(ring), "wasted_share": replay.wasted_share(ring)}
        return state, ring, sums | {"learning_rate": rate}

    def _reset_reference(self, state: TrainState, ring: RingState) -> tuple[TrainState, RingState]:
        """The policy as its own reference, and an empty ring: what is in the old one knows the old reference."""
        del ring
        return state.replace(reference=jax.tree.map(jnp.copy, state.params)), self._init_ring()

    def programs(self) -> dict[str, Program]:
        """Every program of the run by name."""
        layout = lambda tree: jax.tree.map(lambda x: x.sharding, tree)  # noqa: E731
        whole = sharding.replicated(self.mesh, 0)
        B, S = self.config.rows_per_iteration, self.config.row_tokens
        key = self.whole(jax.eval_shape(lambda: rng.stream(0, "draw")).dtype)
        iteration = self.whole(jnp.int32)
        tokens = self.rows((B, S), jnp.float32)
        ref_logp = tokens if self.keeps_reference else None
        hidden = self.rows((B, self.model.arch.width), jnp.float32)
        scores = self.abstract_scores.replace(
            value=tokens if self.config.has_critic else None,
            old_logp=tokens if self.config.keeps_old_logp else None,
            hidden=hidden if self.config.keeps_hidden else None,
        )
        state, ring, rollout = self.abstract_state, self.abstract_ring, self.abstract_rollout
        programs = {"publish": publish.program(self.model, self.mesh)} | self.sampler.programs(self.sampler_params)
        programs |= {
            "init_state": Program(self._init_state, (self.learner_params,), layout(state), donate=(0,)),
            "init_ring": Program(self._init_ring, (), layout(ring)),
            "insert": Program(
                self._insert,
                (ring, rollout, scores, ref_logp, iteration),
                (layout(ring), whole),
                donate=(0,),
            ),
            "update": Program(
                self._update, (state, ring, iteration, key), (layout(state), layout(ring), whole), donate=(0, 1)
            ),
            "checksums": Program(checksums, (self.abstract_checkpoint,), whole),
        }
        if self.keeps_reference:
            params = self.reference_model.abstract_params(self.mesh)
            programs["reference"] = Program(self.annotation.reference, (params, rollout), ref_logp.sharding)
        if self.config.objective.reference_reset_iterations:
            programs["reset_reference"] = Program(
                self._reset_reference, (state, ring), (layout(state), layout(ring)), donate=(0, 1)
            )
        sampled = self._abstract_rows(self.config.rollouts_per_iteration)
        if self.config.rollout.max_resample_rounds:
            place = self.whole(jnp.int32, (self.config.rollout.prompts_per_iteration,))
            programs["choose"] = Program(self._choose, (sampled, sampled, place), layout(sampled))
        if self.config.keeps_old_logp:
            given = (self.learner_params, iteration, rollout)
            programs["old_logp"] = Program(self.annotation.old_logp, given, tokens.sharding)
        if self.sampler.keeps_old_logp:
            slots = self.sampler.abstract_state()
            given = (self.learner_params, iteration, slots)
            programs["score_open"] = Program(self.annotation.score_open, given, layout(slots), donate=(2,))
        if self.config.external.groups_per_iteration:
            programs["join"] = Program(
                self.annotation.join, (self.learner_params, iteration, sampled, self.abstract_external), layout(rollout)
            )
        if self.config.keeps_hidden:
            programs["hidden"] = Program(self.annotation.hidden, (self.learner_params, rollout), hidden.sharding)
        if self.config.has_critic:
            programs["values"] = Program(self.annotation.values, (state, rollout), tokens.sharding)
        if self.eval_sampler is not None:
            needed = ("init_sampler", "prefill", "decode", "read_group", "stop_rows", "collect")
            evals = self.eval_sampler.programs(self.sampler_params)
            programs |= {f"eval_{name}": evals[name] for name in needed if name in evals}
        return programs


def place(shapes: Any, layouts: Any) -> Any:
    """Attach shardings to abstract arrays."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layouts)


def assemble(
    config: Config, arch: Architecture, eos_ids: tuple[int, ...], mesh: Mesh, reference: Architecture | None = None
) -> Run:
    """The run of a config.

    Args:
        reference: shape of the frozen reference; None = as the model's.

    Raises:
        ConfigError: a batch number does not divide over the mesh, or a model does not fit it or the row width.
    """
    sharding.check_divisible(config, mesh)
    config = config.scaled()
    model = model_of(config, arch, mesh)
    reference_model = model_of(config, reference, mesh, "reference") if reference else model
    optimizer = optim.make(config.optimizer, config.num_updates)
    if config.replay.memory == "host":
        sharding.check_host_memory(mesh, "replay.memory", "host", otherwise="device")
    if config.optimizer.offload:
        sharding.check_host_memory(mesh, "optimizer.offload", True, otherwise=False)
        optimizer = optim.offloaded(optimizer)
    critic_optimizer = None
    if config.has_critic:
        rate = config.optimizer.value_learning_rate
        critic_optimizer = optim.make(dataclasses.replace(config.optimizer, learning_rate=rate), config.num_updates)
    shards = sharding.num_data_shards(mesh)
    setting, packed = config.update.logp_chunk_tokens, config.line_tokens > 0
    padded_tokens = config.update.micro_batch_size * config.sampling.max_completion_tokens
    most = (config.update.micro_batch_tokens if packed else padded_tokens) // shards
    chunk = chunk_tokens(setting, mesh.devices.flat[0], most=most, vocab=model.arch.vocab_size, packed=packed)
    sampler = Sampler(
        model=model,
        mesh=mesh,
        sampling=config.sampling,
        eos_ids=eos_ids,
        num_prompts=config.rollout.prompts_per_iteration,
        group_size=config.rollout.group_size,
        max_prompt_tokens=config.prompts.max_tokens,
        num_slots=config.num_slots,
        chunk_steps=config.rollout.chunk_steps,
        lookahead=config.rollout.lookahead_prompts,
        keeps_entropy=config.keeps_entropy,
        keeps_old_logp=config.keeps_old_logp and config.rollout.lookahead_prompts > 0,
    )
    return Run(
        config=config,
        mesh=mesh,
        model=model,
        reference_model=reference_model,
        optimizer=optimizer,
        sampler=sampler,
        eval_sampler=eval_sampler(config, sampler) if config.eval.num_prompts else None,
        update=Update(
            config=dataclasses.replace(config.update, logp_chunk_tokens=chunk),
            sampling=config.sampling,
            model=model,
            optimizer=optimizer,
            num_devices=shards,
            group_size=config.rows_per_draw,
            line_tokens=config.line_tokens,
            objective=config.objective,
            critic_optimizer=critic_optimizer,
            pass_threshold=config.rewards.pass_threshold,
        ),
    )


def check_room(run: Run) -> None:
    """Refuse, before anything is compiled, what by itself has no room on a device; ConfigError names its settings."""
    # Devices of a CPU do not say how much they have: they share their host's.
    on_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(run.mesh.local_devices)
    limit, c = memory_limit(run.mesh.devices.flatten().tolist()) or on_host, flatten(run.config)
    for tree, *names in (
        (run.abstract_state, "model.path"),
        (run.abstract_ring, "replay.capacity", "replay.capacity_tokens"),
        (run.sampler.abstract_state(), "rollout.group_size", "rollout.lookahead_prompts", "sampling.support_tokens"),
        (run.eval_sampler and run.eval_sampler.abstract_state(), "eval.num_samples"),
    ):
        there = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != sharding.HOST_MEMORY]
        need = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in there)
        if need > limit:
            given = ", ".join(f"{name}={c[name]!r}" for name in names)
            raise ConfigError(f"{given} need {need / 2**30:.2f} GiB per device, which has {limit / 2**30:.2f} GiB")


def model_of(config: Config, arch: Architecture, mesh: Mesh, who: str = "model") -> Model:
    """The model of a config; ConfigError where it does not fit the mesh or the row width."""
    tensor = mesh.shape["tensor"]
    if arch.num_heads % tensor or arch.num_kv_heads % tensor:
        raise ConfigError(
            f"mesh.tensor={tensor} must divide the {who}'s {arch.num_heads} heads and {arch.num_kv_heads} key heads"
        )
    if config.row_tokens > arch.max_positions:
        raise ConfigError(
            f"prompts.max_tokens={config.prompts.max_tokens} + sampling.max_completion_tokens="
            f"{config.sampling.max_completion_tokens} must be at most the {who}'s {arch.max_positions} positions"
        )
    attention = kernels.choose(config.model.attention, mesh.devices.flat[0], config.model.compute_dtype, arch.head_size)
    remat = "full" if config.model.remat == "auto" else config.model.remat
    return Model(arch, config.model.compute_dtype, remat, attention)


def keep_what_fits(
    run: Run, compiled: dict[str, jax.stages.Compiled], limit: int | None
) -> dict[str, jax.stages.Compiled]:
    """For ``model.remat="auto"``: the run's compiled programs, with the update that keeps the MLPs if it fits.

    Args:
        compiled: every program of the run, its update recomputing all.
        limit: bytes of a device; None = not known, and then all is recomputed.
    """
    if run.config.model.remat != "auto" or limit is None:
        return compiled
    # What "none" keeps beside takes longer to write and read than to compute (BENCHMARKS).
    model = dataclasses.replace(run.model, remat="dots")
    other = dataclasses.replace(run, model=model, update=dataclasses.replace(run.update, model=model))
    try:
        update = other.programs()["update"].lower(run.mesh).compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        return compiled  # the TPU compiler refuses what a chip cannot hold
    memories = {name: memory(program) for name, program in compiled.items()} | {"update": memory(update)}
    in_use = in_use_bytes(memories, keeps_slots=run.config.rollout.lookahead_prompts > 0)
    return compiled | {"update": update} if in_use["update"] <= limit else compiled


def eval_sampler(config: Config, sampler: Sampler) -> Sampler:
    """A sampler for held-out questions: as many at a time as fill the training sampler's slots."""
    shards, samples = sampler.shards, config.eval.num_samples
    at_once = min(config.eval.num_prompts, -(-config.num_slots // samples))
    at_once = -(-at_once // shards) * shards
    return dataclasses.replace(
        sampler,
        sampling=dataclasses.replace(config.sampling, temperature=config.eval.temperature),
        num_prompts=at_once,
        group_size=samples,
        num_slots=min(at_once * samples, config.num_slots),
        lookahead=0,
        keeps_support=False,
        keeps_entropy=False,
        keeps_old_logp=False,
    )
