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
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import config_flags

from jaxrl_llm.actor.actor import Actor
from jaxrl_llm.actor.evaluation import Evaluation, questions
from jaxrl_llm.actor.guests import External
from jaxrl_llm.actor.rewards import RewardPool
from jaxrl_llm.config import Config, ConfigError, freeze, record
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.models.files import hf, pretrained
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import PromptStream
from jaxrl_llm.reports import html as report
from jaxrl_llm.reports.metrics import MetricsWriter, Progress, cost_values, update_values
from jaxrl_llm.run import assemble, check_room, describe, keep_what_fits
from jaxrl_llm.runtime import cli, programs, sharding
from jaxrl_llm.runtime.checkpoint import Checkpointer, StopRequest, claim
from jaxrl_llm.runtime.programs import check_memory, compile_all, load_all, memory_limit, memory_table, use_cache


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
    ledger = Ledger()
    stream = PromptStream(train_set, config.prompts, ledger, seed=config.seed)
    teacher = pretrained.resolve_reference(config.model, source)
    run = assemble(config, source.architecture(), tokenizer.eos_ids, mesh, teacher.architecture())
    source.check_weights(run.model, mesh)
    teacher.check_weights(run.learner.reference_model, mesh)
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
        progress.note(describe(run, len(train_set), len(held_out), read_s))
        for message in skipped[:10] + ([f"... and {len(skipped) - 10} more"] if len(skipped) > 10 else []):
            progress.note(f"skipped {message}")
        started, limit = time.monotonic(), memory_limit(mesh.devices.flatten().tolist())
        compiled = load_all(run.programs(), mesh, config.executables) or compile_all(run.programs(), mesh)
        compiled = keep_what_fits(run, compiled, limit)
        check_memory(compiled, limit, keeps_slots=config.rollout.lookahead_prompts > 0)
        progress.note(memory_table(compiled) + f"\ncompiled in {time.monotonic() - started:.0f} s")

        # ---- state: fresh, or the checkpoint's --------------------------------------------------------
        how = {"allow_config_changes": allow_config_changes, "checksums": compiled["checksums"]}
        restored = checkpoints.restore(run.abstract_checkpoint, config, **how)
        teaches = run.learner.loads_reference
        reference = teacher.load_params(run.learner.reference_model, mesh, seed=config.seed) if teaches else None
        actor = Actor(run, compiled, tokenizer.decode, stream, pool, external)
        learner = Learner(run.learner, compiled, ledger, reference=reference)
        evaluation = Evaluation(run, compiled, tokenizer, held_out, pool, workdir) if held_out else None
        if restored is None:
            iteration, compute = 0, 0.0
            if reference is not None and teacher is source:
                params = jax.tree.map(jnp.copy, reference)  # the learner takes the weights it is given over
            else:
                params = source.load_params(run.model, mesh, seed=config.seed)
            learner.start(params)
            metrics.restore({})
            if evaluation:
                progress.note(evaluation.measure("eval_before", learner.publish(), learner.version).line)
        else:
            iteration, compute, arrays = restored.iteration, restored.host_state["compute"], restored.device_state
            actor.restore(restored.host_state, arrays["sampler"])
            learner.restore(restored.host_state, arrays["train"], arrays["ring"])
            for warning in metrics.restore(restored.host_state["metrics"]):
                progress.note(warning)
            progress.note(f"resumed at iteration {iteration} from {checkpoints.directory}")

        # ---- the loop ----------------------------------------------------------------------------------
        recompiles = programs.CompileCounter()
        progress.restart_clock()
        failure = None
        while iteration < config.num_iterations and not stop.requested and failure is None:
            t0 = time.monotonic()
            acted = actor.act(learner.publish(), learner.version, iteration)
            t1 = time.monotonic()
            sums = learner.learn(acted.scored, iteration)
            update_s = time.monotonic() - t1
            iteration += 1

            values = actor.values(acted, num_tied=int(sums["degenerate_groups"])) | update_values(config, sums)
            values["time/update_s"] = update_s
            values["throughput/update_tokens_per_s"] = values["tokens/trained"] / update_s
            values["memory/peak_bytes"] = programs.peak_memory_bytes(mesh)
            values |= cost_values(config, values, compute)
            compute = values["time/compute_rollouts"]
            metrics.write_samples(actor.samples(acted, iteration))
            if config.metrics.share_rollouts:
                metrics.write_shared(actor.shared(acted))
            failure, final, pass_rate = actor.failure(acted), iteration == config.num_iterations, None
            if evaluation and (final or due(config.eval.every_iterations, iteration)):
                name = "eval_after" if final else f"eval_{iteration}"
                measured = evaluation.measure(name, learner.publish(), learner.version)
                progress.note(measured.line)
                values |= measured.values
                pass_rate = measured.values["eval/pass_rate"]
            values["compile/recompiles_after_warmup"] = recompiles.after_warmup()
            values["time/iteration_s"] = time.monotonic() - t0
            metrics.write(iteration, values)
            checkpoints.check()
            progress.update(iteration, values)
            if final or stop.requested or failure or due(config.checkpoint.every_iterations, iteration):
                host = actor.state() | learner.host_state() | {"compute": compute, "metrics": metrics.state()}
                arrays = {"train": learner.state, "ring": learner.ring, "sampler": actor.generator.state}
                checks = compiled["checksums"]
                checkpoints.save(iteration, arrays, host, config, pass_rate=pass_rate, checksums=checks)
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
        hf.export(learner.policy, run.model, tokenizer, workdir / "hf")
        print(f"model       {workdir / 'hf'}  (Hugging Face folder)")
    print(f"report      {report.write_report(workdir)}")
    return 0


def due(every: int, iteration: int) -> bool:
    return every > 0 and iteration % every == 0


def main() -> None:
    workdir = pathlib.Path(WORKDIR.value)
    sys.exit(train(freeze(CONFIG.value), workdir, allow_config_changes=ALLOW_CONFIG_CHANGES.value))


if __name__ == "__main__":
    CONFIG = config_flags.DEFINE_config_file("config", None, "Python file with get_config().")
    WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; an existing one is resumed.")
    ALLOW_CONFIG_CHANGES = flags.DEFINE_bool("allow_config_changes", False, "Resume although settings differ.")
    flags.mark_flags_as_required(["config", "workdir"])
    cli.run(main)
