"""Train: the whole algorithm, top to bottom.

    python -m jaxrl_llm.train --config=configs/debug.py --workdir=runs/debug [--config.seed=1 ...]

One iteration: publish the weights to the sampler, sample G completions for each of P prompts (their
rewards are scored in other processes while the rest decodes), turn rewards into advantages, put the
rollouts into the device ring, and take U optimizer steps on batches drawn from it. Rerun with the same
workdir to resume: everything a run is made of is in one checkpoint.

Owns: the order of things. Does not know: how any of them is done.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from jaxrl_llm.actor.evaluation import evaluate, questions
from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.actor.guests import External, shared_groups
from jaxrl_llm.actor.resampling import sample
from jaxrl_llm.actor.rewards import RewardPool
from jaxrl_llm.algorithms.memory import Memory
from jaxrl_llm.config import Config, ConfigError, freeze, record
from jaxrl_llm.models.files import hf, pretrained
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.stream import PromptStream
from jaxrl_llm.reports import html as report
from jaxrl_llm.reports.metrics import MetricsWriter, Progress, cost_values, draw_values, rollout_values, update_values
from jaxrl_llm.run import Run, assemble, check_room, keep_what_fits
from jaxrl_llm.runtime import cli, programs, rng, sharding
from jaxrl_llm.runtime.checkpoint import Checkpointer, StopRequest, claim
from jaxrl_llm.runtime.nested import visible
from jaxrl_llm.runtime.programs import check_memory, compile_all, memory_limit, memory_table, release_freed, use_cache
from jaxrl_llm.types import OUTCOME_SCORE, Rewards


def train(config: Config, workdir: pathlib.Path, *, allow_config_changes: bool = False) -> int:
    """Run, or resume, the training of ``config`` in ``workdir``.

    Returns:
        Exit status: 0 when done or stopped by a signal, 1 when too many rewards failed.

    Raises:
        ConfigError: bad input, before anything is compiled.
        DiskError: a disk takes no more; what is in the last checkpoint is safe.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"a job of {jax.process_count()} hosts: train runs on one host (all its devices), several are not ready yet"
        )
    with cli.writing(workdir), claim(workdir):
        return _train(config, workdir, allow_config_changes)


def _train(config: Config, workdir: pathlib.Path, allow_config_changes: bool) -> int:
    # ---- what the run is made of: data and model first, for their errors cost nothing ------------------
    use_cache(config.compilation_cache)
    mesh = sharding.make_mesh(config.mesh)
    source = pretrained.resolve(config.model.path)
    tokenizer = source.tokenizer()
    started = time.monotonic()
    train_set, held_out, skipped = questions(config, tokenizer)
    read_s = time.monotonic() - started
    stream = PromptStream(train_set, config.prompts, seed=config.seed)
    teacher = pretrained.resolve_reference(config.model, source)
    run = assemble(config, source.architecture(), tokenizer.eos_ids, mesh, teacher.architecture())
    memory = Memory(config, run.model.arch.width)
    source.check_weights(run.model, mesh)
    teacher.check_weights(run.reference_model, mesh)
    external = External(run, tokenizer)
    checkpoints = Checkpointer(workdir, config.checkpoint)
    checkpoints.check_config(config, allow_changes=allow_config_changes)
    (workdir / "config.json").write_text(record(config))
    (workdir / "report.html").unlink(missing_ok=True)  # it says that the run came to its end

    progress = Progress(config.num_iterations, checkpoints.latest_iteration() or 0)
    examples = [row.example for row in train_set + held_out]
    with (
        RewardPool(config.rewards, task_scorer=tasks.scorer(config.prompts), examples=examples) as pool,
        StopRequest() as stop,
        contextlib.closing(MetricsWriter(workdir, config.metrics)) as metrics,
        contextlib.closing(checkpoints),
    ):
        check_room(run)
        progress.note(describe(run, source, len(train_set), len(held_out), read_s))
        for message in skipped[:10] + ([f"... and {len(skipped) - 10} more"] if len(skipped) > 10 else []):
            progress.note(f"skipped {message}")
        started, limit = time.monotonic(), memory_limit(mesh.devices.flatten().tolist())
        compiled = keep_what_fits(run, compile_all(run.programs(), mesh), limit)
        check_memory(compiled, limit, keeps_slots=config.rollout.lookahead_prompts > 0)
        progress.note(memory_table(compiled) + f"\ncompiled in {time.monotonic() - started:.0f} s")
        on_device = lambda x: jax.device_put(x, sharding.replicated(mesh, x))  # noqa: E731
        sample_key, draw_key, eval_key = on_device([rng.stream(config.seed, s) for s in ("sample", "draw", "eval")])

        # ---- state: fresh, or the checkpoint's --------------------------------------------------------
        generator = Generator(run.sampler, compiled, tokenizer.decode, config.rollout.max_lag_iterations)
        evals = {name.removeprefix("eval_"): p for name, p in compiled.items() if name.startswith("eval_")}
        how = {"allow_config_changes": allow_config_changes, "checksums": compiled["checksums"]}
        restored = checkpoints.restore(run.abstract_checkpoint, config, **how)
        reference = teacher.load_params(run.reference_model, mesh, seed=config.seed) if run.loads_reference else None
        if restored is None:
            start, compute, ring = 0, 0.0, compiled["init_ring"]()
            if reference is not None and teacher is source:
                params = jax.tree.map(jnp.copy, reference)  # the state takes the weights it is given over
            else:
                params = source.load_params(run.model, mesh, seed=config.seed)
            state = compiled["init_state"](params)
            metrics.restore({})
        else:
            start, state, ring = restored.iteration, restored.device_state["train"], restored.device_state["ring"]
            stream.restore(restored.host_state["stream"])
            memory.restore(restored.host_state["memory"])
            external.restore(restored.host_state["external"])
            compute = restored.host_state["compute"]
            for warning in metrics.restore(restored.host_state["metrics"]):
                progress.note(warning)
            if config.rollout.lookahead_prompts:
                generator.state = restored.device_state["sampler"]
            for *where, prompt_id in restored.host_state["open_prompts"]:
                row = stream.lookup(prompt_id)
                generator.adopt(*where, prompt_id, row.example, row.tokens.tolist())
            progress.note(f"resumed at iteration {start} from {checkpoints.directory}")

        def score(group: FinishedGroup):
            return pool.submit(group.example, [tokenizer.decode(c) for c in group.completions])

        def questions_of(groups: list[FinishedGroup]) -> list[int]:
            return [stream.question(group.prompt_id) for group in groups]

        def measure(name: str) -> dict[str, Any]:
            """Evaluate, and keep the completions for the report."""
            result = evaluate(
                Generator(run.eval_sampler, evals, tokenizer.decode),
                compiled["publish"](state.params),
                held_out,
                pool,
                tokenizer.decode,
                version=state.step,
                key=eval_key,
                threshold=config.rewards.pass_threshold,
            )
            (workdir / f"{name}.json").write_text(json.dumps(result, indent=1))
            progress.note(f"held-out pass rate {result['pass_rate']:.3f} over {len(held_out)} questions ({name})")
            return result

        def save(iteration: int, pass_rate: float | None) -> None:
            host = {
                "stream": stream.state(),
                "memory": memory.state(),
                "external": external.state(),
                "compute": compute,
                "metrics": metrics.state(),
                "open_prompts": generator.opened(),
            }
            arrays = {"train": state, "ring": ring, "sampler": generator.state}
            checkpoints.save(iteration, arrays, host, config, pass_rate=pass_rate, checksums=compiled["checksums"])

        if evals and start == 0:
            measure("eval_before")

        # ---- the loop ----------------------------------------------------------------------------------
        recompiles = programs.CompileCounter()
        progress.restart_clock()
        failure, iteration = None, start
        while iteration < config.num_iterations and not stop.requested and failure is None:
            t0 = time.monotonic()
            guests = external.next_groups(iteration, score)
            sampled = sample(
                generator,
                stream.next_batch,
                pool.collect,
                compiled.get("choose"),
                compiled["publish"](state.params),  # lives as long as the call: the update has its memory
                config=config,
                version=state.step,
                key=sample_key,
                on_finished=score,
            )
            release_freed(num_bytes(state.params))  # the published copy
            t1 = time.monotonic()
            rollout, groups, rewards = sampled.rollout, sampled.groups, sampled.rewards
            # What goes into the ring: the run's own groups, and those of others beside them.
            rows, known, about = rollout, rewards, questions_of(groups)
            if guests:
                rows = compiled["join"](state.params, state.step, rollout, guests.rows)
                known, about = guests.join(rewards, about, pool.collect)
            ref_logp = compiled["reference"](reference or state.reference, rows) if run.keeps_reference else None
            layout = jax.tree.map(lambda x: x.sharding, run.abstract_scores)
            scores = jax.device_put(memory.scores(known, about), layout)
            if config.has_critic:
                scores = scores.replace(value=compiled["values"](state, rows))
            if config.keeps_hidden:
                scores = scores.replace(hidden=compiled["hidden"](state.params, rows))
            if config.keeps_old_logp:
                scores = scores.replace(old_logp=compiled["old_logp"](state.params, state.step, rows))
            if run.sampler.keeps_old_logp:
                generator.state = compiled["score_open"](state.params, state.step, generator.state)
            now = on_device(np.int32(iteration))
            ring, made = compiled["insert"](ring, rows, scores, ref_logp, now)
            state, ring, used = compiled["update"](state, ring, now, draw_key)
            made, used = jax.device_get((made, used))
            t2 = time.monotonic()

            memory.observe(known, about, used | made)
            answers = sampled.answers  # those that were left out too
            passed = answers.total >= config.rewards.pass_threshold
            stream.observe(questions_of(sampled.asked), passed, answers.outcome == OUTCOME_SCORE)
            iteration += 1
            if iteration in config.objective.reference_reset_iterations:
                state, ring = compiled["reset_reference"](state, ring)
            check_gap(config, iteration, used)
            num_tied = int(made["degenerate_groups"]) + sampled.num_tied_left_out
            values = rollout_values(config, sampled.asked, answers, num_tied) | update_values(config, used | made)
            values |= draw_values(config, generator.take_draws())
            generate_s, update_s = t1 - t0 - sampled.waited_s, t2 - t1
            values |= {
                "time/generate_s": generate_s,
                "time/reward_s": sampled.waited_s,
                "time/update_s": update_s,
                "throughput/generate_tokens_per_s": values["tokens/generated"] / generate_s,
                "throughput/update_tokens_per_s": values["tokens/trained"] / update_s,
                "memory/peak_bytes": programs.peak_memory_bytes(mesh),
            }
            if guests:
                values |= guests.values()
            if config.prompts.retire_pass_rate:
                values["prompts/retired"] = len(stream.retired())
            values |= cost_values(config, values, compute)
            compute = values["time/compute_rollouts"]
            metrics.write_samples(sampled.shown(iteration, config.metrics.samples_per_iteration, tokenizer.decode))
            if config.metrics.share_rollouts:
                metrics.write_shared(shared_groups(groups, rewards, stream.lookup))
            failure = too_many_failures(config, answers)
            final = iteration == config.num_iterations
            pass_rate = None
            if evals and (final or due(config.eval.every_iterations, iteration)):
                result = measure("eval_after" if final else f"eval_{iteration}")
                pass_rate = result["pass_rate"]
                values["eval/pass_rate"] = pass_rate
                values["eval/completion_length_tokens"] = result["completion_length_tokens"]
                values["eval/pass_any_rate"] = result["pass_at_k"][str(config.eval.num_samples)]
            values["compile/recompiles_after_warmup"] = recompiles.after_warmup()
            values["time/iteration_s"] = time.monotonic() - t0
            metrics.write(iteration, values)
            checkpoints.check()
            progress.update(iteration, values)
            last = final or stop.requested or failure is not None
            if last or due(config.checkpoint.every_iterations, iteration):
                save(iteration, pass_rate)
        progress.close()

    # ---- what is left behind -------------------------------------------------------------------------------
    if failure is not None:
        print(f"error: {failure}; checkpoint of iteration {iteration} in {checkpoints.directory}", file=sys.stderr)
        return 1
    if iteration < config.num_iterations:
        print(f"stopped by {stop.requested} after iteration {iteration}; checkpoint in {checkpoints.directory}")
        print("run the same command again to continue")
        return 0
    report.print_samples(workdir)
    print(f"checkpoint  {checkpoints.directory}")
    if config.checkpoint.export:
        hf.export(state.params, run.model, tokenizer, workdir / "hf")
        print(f"model       {workdir / 'hf'}  (Hugging Face folder)")
    print(f"report      {report.write_report(workdir)}")
    return 0


def describe(run: Run, source: pretrained.Source, num_train: int, num_held_out: int, read_s: float) -> str:
    """What the run is about to do, in words and in the four batch numbers."""
    config, arch = run.config, run.model.arch
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    others = config.rows_per_iteration - config.rollouts_per_iteration
    per_iteration = config.update.updates_per_iteration * config.update.batch_size
    ring_bytes = num_bytes(run.abstract_ring)
    lines = [
        f"devices     {run.mesh.size} x {run.mesh.devices.flat[0].device_kind}; mesh {axes}",
        f"model       {config.model.path}: {arch.num_params / 1e6:.1f} M parameters, {arch.num_layers} layers, "
        f"width {arch.width}, vocabulary {arch.vocab_size}, {config.model.compute_dtype}",
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
    ]
    return "\n".join(lines)


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def due(every: int, iteration: int) -> bool:
    return every > 0 and iteration % every == 0


def too_many_failures(config: Config, rewards: Rewards) -> str | None:
    failed = float(np.mean(rewards.outcome != OUTCOME_SCORE))
    if failed <= config.rewards.max_failure_frac:
        return None
    return (
        f"{failed:.0%} of the rewards failed, more than rewards.max_failure_frac="
        f"{config.rewards.max_failure_frac}: " + "; ".join(map(visible, rewards.errors))
    )


class SamplerLearnerGapError(RuntimeError):
    """Sampler and learner disagree about the probability of what was sampled."""


def check_gap(config: Config, iteration: int, used: dict[str, Any]) -> None:
    """Stop a run whose first batch shows that sampler and learner are not the same model."""
    limit = config.update.max_sampler_learner_gap_nats
    if iteration == 1 and used["own_token_count"] > 0 and not used["gap_max"] <= limit:
        raise SamplerLearnerGapError(
            f"the learner's log-probs differ from the sampler's by up to {used['gap_max']:.4f} nats, more than "
            f"update.max_sampler_learner_gap_nats={limit}"
        )


def main() -> None:
    workdir = pathlib.Path(WORKDIR.value)
    sys.exit(train(freeze(CONFIG.value), workdir, allow_config_changes=ALLOW_CONFIG_CHANGES.value))


if __name__ == "__main__":
    CONFIG = config_flags.DEFINE_config_file("config", None, "Python file with get_config().")
    WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; an existing one is resumed.")
    ALLOW_CONFIG_CHANGES = flags.DEFINE_bool("allow_config_changes", False, "Resume although settings differ.")
    flags.mark_flags_as_required(["config", "workdir"])
    cli.run(main)
