"""A run: the programs of an actor and of a learner for a config and an architecture on a mesh.

``train`` compiles the programs for the present devices. ``plan`` compiles the same programs for a pod that this machine
is not part of.

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
        """Arguments of ``programs.in_use_bytes`` about device memory that the programs' sizes do not include."""
        frozen = sharding.device_bytes(self.learner.frozen)
        return {
            "keeps_slots": self.config.rollout.lookahead_prompts > 0,
            "frozen": frozen,
        }

    @property
    def abstract_checkpoint(self) -> dict[str, Any]:
        """Return the abstract arrays that a checkpoint may have, by part.

        A checkpoint has the parts of ``PASSING`` if the run was stopped during a generation. It always has the sampler
        if decode slots keep open rollouts between iterations.
        """
        state: dict[str, Any] = {
            "train": self.learner.abstract_state,
            "ring": self.learner.abstract_ring,
            **self.learner.abstract_memory,
            "sampler": self.sampler.abstract_state(),
        }
        if self.config.rollout.max_resample_rounds:
            state["rounds"] = self.learner.sampled
        return state

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
    config: Config,
    arch: Architecture,
    eos_ids: tuple[int, ...],
    mesh: Mesh,
    reference: Architecture | None = None,
) -> Run:
    """Build the run of a config.

    Args:
        reference: architecture of the frozen reference; None = the model's architecture.

    Raises:
        ConfigError: a run with this config is impossible, for one of five reasons:

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
    reference_model = model.base
    if reference is not None:
        without_adapters = dataclasses.replace(config.model, lora=model.base.lora)
        reference_config = dataclasses.replace(config, model=without_adapters)
        reference_model = model_of(reference_config, reference, mesh, "reference")
    if config.replay.memory == "host":
        sharding.check_host_memory(mesh, "replay.memory", "host", otherwise="device")
    update = _update_of(config, model, mesh)
    sampler = _sampler_of(config, arch, eos_ids, mesh)
    learner = LearnerPrograms(
        config=config,
        mesh=mesh,
        reference_model=reference_model,
        update=update,
        row_shapes=sampler.abstract_rollout(),
        open_rollouts=sampler.abstract_state() if sampler.keeps_old_logp else None,
    )
    eval_sampler = evaluation.sampler_of(config, sampler) if config.eval.num_prompts else None
    return Run(config, mesh, sampler, eval_sampler, learner)


def _update_of(config: Config, model: Model, mesh: Mesh) -> Update:
    """Return the static description of an optimizer step."""
    optimizer = adapter_modules.one_at_a_time(optim.make(config.optimizer, config.num_updates), config.model.lora)
    if config.optimizer.offload:
        sharding.check_host_memory(mesh, "optimizer.offload", True, otherwise=False)
        optimizer = low_memory.offloaded(optimizer)
    critic_optimizer = None
    if config.has_critic:
        rate = config.algorithm.critic.learning_rate
        critic_config = dataclasses.replace(config.optimizer, learning_rate=rate)
        critic_optimizer = optim.make(critic_config, config.num_updates)
    shards = sharding.num_data_shards(mesh)
    packed = config.line_tokens > 0
    tokens = config.update.micro_batch_size * config.sampling.max_completion_tokens
    if packed:
        tokens = config.update.micro_batch_tokens
    chunk = chunk_tokens(
        config.update.logp_chunk_tokens,
        mesh.devices.flat[0],
        most=tokens // shards,
        vocab=model.arch.vocab_size,
        packed=packed,
    )
    return Update(
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
        compares_mixed=config.rollout.stale_cache == "recompute",
    )


def _sampler_of(config: Config, arch: Architecture, eos_ids: tuple[int, ...], mesh: Mesh) -> Sampler:
    """Return the static description of the sampler for training.

    Args:
        mesh: mesh of the learner.
    """
    rollout = config.rollout
    sampler_mesh = sharding.sampler_mesh(config.mesh, mesh)
    slack = quotas.slack_of(
        rollout.prompts_per_iteration,
        rollout.lookahead_prompts,
        sharding.num_data_shards(sampler_mesh),
        rollout.max_lag_iterations,
    )
    advantage_settings = config.algorithm.advantage.settings
    return Sampler(
        model=model_of(config, arch, sampler_mesh),
        mesh=sampler_mesh,
        learner_mesh=mesh,
        sampling=config.sampling,
        eos_ids=eos_ids,
        num_prompts=rollout.prompts_per_iteration,
        group_size=rollout.group_size,
        max_prompt_tokens=config.prompts.max_tokens,
        num_slots=config.num_slots,
        chunk_steps=rollout.chunk_steps,
        lookahead=rollout.lookahead_prompts,
        slack=slack,
        stale_cache=rollout.stale_cache if rollout.lookahead_prompts else "",
        keeps_entropy=config.keeps_entropy,
        keeps_old_logp=config.keeps_old_logp and rollout.lookahead_prompts > 0,
        keeps_experts=config.model.routing_replay,
        answer_tokens=config.environments.max_answer_tokens if config.environments.factory else 0,
        turn_tokens=config.environments.max_turn_tokens,
        branches=(
            advantage_settings.get("branch_rows", 0),
            advantage_settings.get("branch_turns", 0),
        ),
    )


def describe(
    run: Run,
    num_train: int,
    num_held_out: int,
    read_s: float,
    skipped: list[str],
    written: str,
) -> str:
    """Return the text printed at the start: devices, model, questions, batch sizes, checkpoint, first skipped rows."""
    config = run.config
    arch = run.model.arch
    rollout = config.rollout
    update = config.update
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    devices = f"{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}; mesh {axes}"
    if hosts.count() > 1:
        devices += f"; {hosts.count()} hosts"
    model = (
        f"{config.model.path}: {arch.num_params / 1e6:.1f} M parameters, {arch.num_layers} layers, "
        f"width {arch.width}, vocabulary {arch.vocab_size}, {config.model.compute_dtype}"
    )
    if config.model.lora.rank:
        num_trainable = sum(x.size for x in jax.tree.leaves(run.learner.params))
        model += f"; {num_trainable / 1e6:.2f} M trainable parameters in adapters of rank {config.model.lora.rank}"
    questions = f"{num_train} to train on, {num_held_out} held out ({config.prompts.source} {config.prompts.name})"
    if read_s > 3:
        questions += f", read in {read_s:.0f} s"
    rollouts = f"{config.rollouts_per_iteration} rollouts generated"
    num_external = config.rows_per_iteration - config.rollouts_per_iteration
    if num_external:
        rollouts += f", {num_external} external rollouts"
    rows_trained = update.updates_per_iteration * update.batch_size
    draws_per_row = rows_trained / config.rows_per_iteration
    micro_batch = f"{update.micro_batch_tokens or update.micro_batch_size:>6}"
    if config.line_tokens:
        micro_batch += f"   tokens, packed in lines of {config.line_tokens}"
    row_kib = num_bytes(run.learner.abstract_ring) / config.ring_capacity / 2**10
    ring_iterations = config.ring_capacity // config.rows_per_iteration
    lines = [
        f"devices     {devices}",
        f"model       {model}",
        f"questions   {questions}",
        "batches, in sequences over all devices",
        f"  prompts per iteration  {rollout.prompts_per_iteration:>6}",
        f"  group size             {rollout.group_size:>6}   {rollouts}",
        f"  update batch           {update.batch_size:>6}   x {update.updates_per_iteration} updates = "
        f"{rows_trained} trained, each rollout {draws_per_row:.1f} times",
        f"  micro-batch            {micro_batch}",
        f"  ring                   {config.ring_capacity:>6}   {ring_iterations} iterations of rollouts, "
        f"{row_kib:.1f} KiB each, in {config.replay.memory} memory",
        f"checkpoint  {num_bytes(run.abstract_checkpoint) / 1e9:.2f} GB{written}",
        *evaluation.first_skipped(skipped),
    ]
    return "\n".join(lines)


def check_room(run: Run, *entries: tuple[Any, ...]) -> None:
    """Check that arrays fit in the memory of a device.

    Args:
        entries: (arrays, names of the settings that make them large); without entries, the arrays of ``run``.

    Raises:
        ConfigError: one of the entries does not fit.
    """
    settings = flatten(run.config)
    for tree, *names in entries or _large_arrays(run):
        check_fits(tree, run.mesh, {name: settings[name] for name in names})


def _large_arrays(run: Run) -> list[tuple[Any, ...]]:
    """Return the arrays of a run, each with the names of the settings that make them large."""
    learner = run.learner
    entries: list[tuple[Any, ...]] = [
        ((learner.abstract_state, learner.frozen), "model.path", "model.reference_path"),
        (learner.abstract_ring, "replay.capacity", "replay.capacity_tokens"),
        (
            run.sampler.abstract_state(),
            "rollout.group_size",
            "rollout.lookahead_prompts",
            "sampling.support_tokens",
        ),
    ]
    if run.eval_sampler is not None:
        entries.append((run.eval_sampler.abstract_state(), "eval.num_samples", "eval.slots"))
    return entries


def check_fits(tree: Any, mesh: Mesh, settings: dict[str, Any]) -> None:
    """Check that arrays fit in the memory of a device.

    Args:
        settings: settings that make the arrays large, by name, for the error message.

    Raises:
        ConfigError: the arrays do not fit.
    """
    limit = memory_limit(mesh) or host_share(mesh)
    needed = sharding.device_bytes(tree)
    if needed > limit:
        values = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        needed_gib = needed / 2**30
        limit_gib = limit / 2**30
        raise ConfigError(f"{values} need {needed_gib:.2f} GiB per device, which has {limit_gib:.2f} GiB")


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
    settings = config.model
    weights, published = quantised.kinds(config, arch, who, mesh)
    model = Model(
        arch=arch,
        compute_dtype=settings.compute_dtype,
        remat="full" if settings.remat == "auto" else settings.remat,
        attention=kernels.choose(settings.attention, mesh.devices.flat[0], settings.compute_dtype, arch),
        rules=sharding.rules_of(config.mesh),
        param_dtype=settings.param_dtype,
        weights=weights,
        published=published,
        lora=settings.lora,
    )
    peft.check(model, mesh, config.model.path)
    return model
