"""A run: the programs of an actor and of a learner for a config and an architecture on a mesh.

``train`` compiles the programs for the present devices. ``plan`` compiles the same programs for a pod that is absent.

Owns: which programs a run has, and the shapes that pass between them. Does not know: weights, data, time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.actor import evaluation, quotas, resampling
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError, flatten
from jaxrl_llm.learner import adapter_modules, low_memory, optim, publish
from jaxrl_llm.learner.learner import LearnerPrograms, num_bytes
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models import moe, quantised
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files import peft
from jaxrl_llm.models.kernels import context
from jaxrl_llm.models.kernels import learner as kernels
from jaxrl_llm.models.row_logp import chunk_tokens
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.runtime.programs import Program, host_share, memory_limit


@dataclasses.dataclass(frozen=True)
class Run:
    """Static parts of a run. Abstract values are ``jax.ShapeDtypeStruct`` with shardings."""

    config: Config
    mesh: Mesh
    sampler: Sampler
    eval_sampler: Sampler | None
    learner: LearnerPrograms

    @property
    def model(self) -> Model:
        return self.learner.model

    @functools.cached_property
    def sampler_params(self) -> Any:
        return publish.abstract_params(self.model, self.sampler.mesh)

    @property
    def beside(self) -> dict[str, Any]:
        """Device memory that the programs' sizes do not show: keyword arguments of ``programs.in_use_bytes``."""
        frozen = sharding.device_bytes(self.learner.frozen)
        return {"keeps_slots": self.config.rollout.lookahead_prompts > 0, "frozen": frozen}

    @property
    def abstract_checkpoint(self) -> dict[str, Any]:
        """Return the abstract arrays that a checkpoint may have, by part.

        A checkpoint has the parts of ``PASSING`` if the run was stopped during a generation. It always has the sampler
        if decode slots keep open rollouts between iterations.
        """
        state = {"train": self.learner.abstract_state, "ring": self.learner.abstract_ring}
        state |= self.learner.abstract_memory
        several = self.config.rollout.max_resample_rounds
        rounds = {"rounds": self.learner.sampled} if several else {}
        return state | {"sampler": self.sampler.abstract_state()} | rounds

    def programs(self) -> dict[str, Program]:
        """Return every program of the run by name."""
        programs = self.sampler.programs(self.sampler_params) | self.learner.programs()
        whole = sharding.replicated(self.mesh, 0)
        for part, state in (self.abstract_checkpoint | self.learner.frozen).items():
            programs[f"checksums_{part}"] = Program(checksums, (state,), whole)
        if self.config.rollout.max_resample_rounds:
            P = self.config.rollout.prompts_per_iteration
            place = sharding.undivided(self.mesh, jnp.int32, (P,))
            sampled = self.learner.sampled
            choose = functools.partial(resampling.choose, group_size=self.config.rollout.group_size)
            programs["choose"] = Program(choose, (sampled, sampled, place), sharding.of(sampled))
        if self.eval_sampler is not None:
            evals = self.eval_sampler.programs(self.sampler_params)
            programs |= {f"eval_{name}": program for name, program in evals.items()}
        return programs


def assemble(
    config: Config, arch: Architecture, eos_ids: tuple[int, ...], mesh: Mesh, reference: Architecture | None = None
) -> Run:
    """Build the run of a config.

    Args:
        reference: architecture of the frozen reference; None = the model's architecture.

    Raises:
        ConfigError: one of these:

            - The mesh does not divide a batch number.
            - A model does not fit the mesh, the row width or its other settings (``model_of``).
            - The adapters cannot be split into modules (``adapter_modules``).
            - The folder ``executables`` does not exist.
            - The devices cannot use host memory, but a setting needs host memory.
    """
    if config.executables and not os.path.isdir(config.executables):
        raise ConfigError(f"executables={config.executables!r} must be a folder that plan --save has written, or ''")
    sharding.check_divisible(config, mesh)
    config = config.scaled()
    model = model_of(config, arch, mesh)
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=model.base.lora))
    reference_model = model_of(plain, reference, mesh, "reference") if reference else model.base
    optimizer = adapter_modules.one_at_a_time(optim.make(config.optimizer, config.num_updates), config.model.lora)
    if config.replay.memory == "host":
        sharding.check_host_memory(mesh, "replay.memory", "host", otherwise="device")
    if config.optimizer.offload:
        sharding.check_host_memory(mesh, "optimizer.offload", True, otherwise=False)
        optimizer = low_memory.offloaded(optimizer)
    of_critic = dataclasses.replace(config.optimizer, learning_rate=config.algorithm.critic.learning_rate)
    critic_optimizer = optim.make(of_critic, config.num_updates) if config.has_critic else None
    shards = sharding.num_data_shards(mesh)
    setting, packed = config.update.logp_chunk_tokens, config.line_tokens > 0
    padded_tokens = config.update.micro_batch_size * config.sampling.max_completion_tokens
    most = (config.update.micro_batch_tokens if packed else padded_tokens) // shards
    chunk = chunk_tokens(setting, mesh.devices.flat[0], most=most, vocab=model.arch.vocab_size, packed=packed)
    sampler_mesh = sharding.sampler_mesh(config.mesh, mesh)
    rollout = config.rollout
    sampler = Sampler(
        model=model_of(config, arch, sampler_mesh),
        mesh=sampler_mesh,
        learner_mesh=mesh,
        sampling=config.sampling,
        eos_ids=eos_ids,
        num_prompts=config.rollout.prompts_per_iteration,
        group_size=config.rollout.group_size,
        max_prompt_tokens=config.prompts.max_tokens,
        num_slots=config.num_slots,
        chunk_steps=config.rollout.chunk_steps,
        lookahead=rollout.lookahead_prompts,
        slack=quotas.slack_of(
            rollout.prompts_per_iteration,
            rollout.lookahead_prompts,
            sharding.num_data_shards(sampler_mesh),
            rollout.max_lag_iterations,
        ),
        stale_cache=rollout.stale_cache if rollout.lookahead_prompts else "",
        keeps_entropy=config.keeps_entropy,
        keeps_old_logp=config.keeps_old_logp and config.rollout.lookahead_prompts > 0,
        keeps_experts=config.model.routing_replay,
        answer_tokens=config.environments.max_answer_tokens if config.environments.factory else 0,
        turn_tokens=config.environments.max_turn_tokens,
        branches=tuple(config.algorithm.advantage.settings.get(name, 0) for name in ("branch_rows", "branch_turns")),
    )
    update = Update(
        config=dataclasses.replace(config.update, logp_chunk_tokens=chunk),
        sampling=config.sampling,
        model=model,
        optimizer=optimizer,
        num_devices=shards,
        group_size=config.rows_per_prompt(sharding.num_ring_shards(config, mesh)),
        line_tokens=config.line_tokens,
        algorithm=config.algorithm,
        critic_optimizer=critic_optimizer,
        pass_threshold=config.rewards.pass_threshold,
        compares_mixed=rollout.stale_cache == "recompute",
    )
    slots = sampler.abstract_state() if sampler.keeps_old_logp else None
    learner = LearnerPrograms(config, mesh, reference_model, update, sampler.abstract_rollout(), slots)
    eval_sampler = evaluation.sampler_of(config, sampler) if config.eval.num_prompts else None
    return Run(config, mesh, sampler, eval_sampler, learner)


def describe(run: Run, num_train: int, num_held_out: int, read_s: float, skipped: list[str], written: str) -> str:
    """Return the text printed at the start: devices, model, questions, batch sizes, checkpoint, first skipped rows."""
    config, arch = run.config, run.model.arch
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    others = config.rows_per_iteration - config.rollouts_per_iteration
    per_iteration = config.update.updates_per_iteration * config.update.batch_size
    ring_bytes = num_bytes(run.learner.abstract_ring)
    learned, lora = sum(x.size for x in jax.tree.leaves(run.learner.params)), config.model.lora
    lines = [
        f"devices     {run.mesh.size} x {run.mesh.devices.flat[0].device_kind}; mesh {axes}"
        + (f"; {hosts.count()} hosts" if hosts.count() > 1 else ""),
        f"model       {config.model.path}: {arch.num_params / 1e6:.1f} M parameters, {arch.num_layers} layers, "
        f"width {arch.width}, vocabulary {arch.vocab_size}, {config.model.compute_dtype}"
        + (f"; {learned / 1e6:.2f} M in adapters of rank {lora.rank} learn" if lora.rank else ""),
        f"questions   {num_train} to train on, {num_held_out} held out ({config.prompts.source} {config.prompts.name})"
        + (f", read in {read_s:.0f} s" if read_s > 3 else ""),
        "batches, in sequences over all devices",
        f"  prompts per iteration  {config.rollout.prompts_per_iteration:>6}",
        f"  group size             {config.rollout.group_size:>6}   {config.rollouts_per_iteration} rollouts generated"
        + (f", {others} of others" if others else ""),
        f"  update batch           {config.update.batch_size:>6}   x {config.update.updates_per_iteration} updates = "
        f"{per_iteration} trained, each rollout {per_iteration / config.rows_per_iteration:.1f} times",
        f"  micro-batch            {config.update.micro_batch_tokens or config.update.micro_batch_size:>6}"
        + (f"   tokens, packed in lines of {config.line_tokens}" if config.line_tokens else ""),
        f"  ring                   {config.ring_capacity:>6}   {config.ring_capacity // config.rows_per_iteration} "
        f"iterations of rollouts, {ring_bytes / config.ring_capacity / 2**10:.1f} KiB each, in {config.replay.memory} "
        "memory",
        f"checkpoint  {num_bytes(run.abstract_checkpoint) / 1e9:.2f} GB{written}",
        *evaluation.first_skipped(skipped),
    ]
    return "\n".join(lines)


def check_room(run: Run, *made: tuple[Any, ...]) -> None:
    """Check that arrays fit in the memory of a device.

    Args:
        made: (arrays, names of the settings that make them large); none = the arrays of ``run``.

    Raises:
        ConfigError: one of the entries does not fit.
    """
    c = flatten(run.config)
    for tree, *names in made or (
        ((run.learner.abstract_state, run.learner.frozen), "model.path", "model.reference_path"),
        (run.learner.abstract_ring, "replay.capacity", "replay.capacity_tokens"),
        (run.sampler.abstract_state(), "rollout.group_size", "rollout.lookahead_prompts", "sampling.support_tokens"),
        (run.eval_sampler and run.eval_sampler.abstract_state(), "eval.num_samples", "eval.slots"),
    ):
        check_fits(tree, run.mesh, {name: c[name] for name in names})


def check_fits(tree: Any, mesh: Mesh, given: dict[str, Any]) -> None:
    """Check that arrays fit in the memory of a device.

    Args:
        given: settings that make the arrays large, by name, for the error message.

    Raises:
        ConfigError: the arrays do not fit.
    """
    limit = memory_limit(mesh) or host_share(mesh)
    if (need := sharding.device_bytes(tree)) > limit:
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(f"{said} need {need / 2**30:.2f} GiB per device, which has {limit / 2**30:.2f} GiB")


def model_of(config: Config, arch: Architecture, mesh: Mesh, who: str = "model") -> Model:
    """Build the model of a config.

    Args:
        who: "model" or "reference", for error messages and quantisation.

    Raises:
        ConfigError: the model does not fit the mesh, the row width or its settings of experts, adapters and rounding.
    """
    tensor = mesh.shape["tensor"]
    if arch.num_heads % tensor or arch.num_kv_heads % tensor:
        name = "tensor" if tensor == config.mesh.tensor else "sampler_tensor"
        raise ConfigError(
            f"mesh.{name}={tensor} must divide the {who}'s {arch.num_heads} heads and {arch.num_kv_heads} key heads"
        )
    context.check(arch, mesh)
    moe.check(config, arch, mesh, who)
    if config.row_tokens > arch.max_positions:
        raise ConfigError(
            f"prompts.max_tokens={config.prompts.max_tokens} + sampling.max_completion_tokens="
            f"{config.sampling.max_completion_tokens} must be at most the {who}'s {arch.max_positions} positions"
        )
    attention = kernels.choose(config.model.attention, mesh.devices.flat[0], config.model.compute_dtype, arch)
    remat, dtype = "full" if config.model.remat == "auto" else config.model.remat, config.model.param_dtype
    rules, weights = sharding.rules_of(config.mesh), quantised.kinds(config, arch, who, mesh)
    model = Model(arch, config.model.compute_dtype, remat, attention, rules, dtype, *weights, config.model.lora)
    peft.check(model, mesh, config.model.path)
    return model
