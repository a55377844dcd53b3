"""Train: the whole algorithm, top to bottom.

    python -m jaxrl_llm.train --config=configs/debug.py --workdir=runs/debug [--config.seed=1 ...]

One iteration: publish the weights to the sampler, sample G completions for each of P prompts (their rewards are scored
in other processes while the rest decodes), turn rewards into advantages, put the rollouts into the device ring, and
take U optimizer steps on batches drawn from it. Rerun with the same workdir to resume: one checkpoint has all of a run.

Owns: the order of things. Does not know: how any of them is done.
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys
import time

from absl import flags
from ml_collections import config_flags

from jaxrl_llm.actor.actor import Actor, too_many_failures
from jaxrl_llm.actor.evaluation import Evaluation, questions
from jaxrl_llm.actor.external import External
from jaxrl_llm.config import Config, freeze
from jaxrl_llm.conversations import environment as environments
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.models.files import peft, pretrained, run_models, templates
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import PromptStream
from jaxrl_llm.reports import html as report
from jaxrl_llm.reports.metrics import MetricsWriter, Progress, cost_values, plain_numbers, update_values
from jaxrl_llm.run import assemble, check_room, describe
from jaxrl_llm.runtime import cli, hosts, machine, programs, sharding, weights
from jaxrl_llm.runtime.checkpoint import Checkpointer, claim
from jaxrl_llm.runtime.executables import keep_what_fits, load_all
from jaxrl_llm.runtime.programs import check_memory, compile_all, host_share, memory_limit, memory_table, use_cache
from jaxrl_llm.runtime.run_record import record
from jaxrl_llm.runtime.stop import Stopped, StopRequest
from jaxrl_llm.scoring.rewards import RewardPool


def train(config: Config, workdir: pathlib.Path, *, allow_config_changes: bool = False) -> int:
    """Run, or resume, the training of ``config`` in ``workdir``.

    Returns:
        Exit status: 0 when done, 1 when too many rewards failed, 128 + its number when stopped by a signal.

    Raises:
        ConfigError: bad input, before anything is compiled.
        DiskError: a disk takes no more; what is in the last checkpoint is safe.
    """
    run_models.check(config, workdir)
    with cli.writing(workdir), claim(workdir, config.checkpoint.bucket):
        return _train(config, workdir, allow_config_changes)


def _train(config: Config, workdir: pathlib.Path, allow_config_changes: bool) -> int:
    # ---- what the run is made of: data and model first, for their errors cost nothing ------------------
    use_cache(config.compilation_cache)
    mesh = sharding.make_mesh(config.mesh)
    source = pretrained.resolve(config.model.path)
    tokenizer = source.tokenizer().ending_at(config.sampling.stop_tokens)
    config = templates.dated(config, tokenizer, workdir)
    started = time.monotonic()
    train_set, held_out, skipped = questions(config, tokenizer)
    read_s = time.monotonic() - started
    stream = PromptStream(train_set, config.prompts, ledger := Ledger(), seed=config.seed, held_out=held_out)
    teacher = pretrained.resolve_reference(config.model, source)
    run = assemble(config, source.architecture(), tokenizer.eos_ids, mesh, teacher.architecture())
    source.check_weights(run.model.base, mesh)
    teacher.check_weights(run.learner.reference_model, mesh)
    external = External(run, tokenizer, train_set, held_out)
    checkpoints = Checkpointer(workdir, config.checkpoint)
    examples, scorer = [row.example for row in train_set + held_out], tasks.scorer(config.prompts)
    hosts.agree(config=record(config, mesh), questions=[(one.prompt, one.columns) for one in examples])
    check = lambda host: stream.check(host["stream"], allow_changes=allow_config_changes)
    checkpoints.check_config(config, run.abstract_checkpoint, check, allow_changes=allow_config_changes)
    if hosts.is_first():
        weights.begin(workdir, record(config, mesh, processor=machine.processor()))

    progress = Progress(config.num_iterations, checkpoints.latest_iteration() or 0)
    with (
        StopRequest() as stop,
        RewardPool(config.rewards, task_scorer=scorer, examples=examples, check=stop.check) as pool,
        environments.opened(config, examples, tokenizer) as environment,
        contextlib.closing(MetricsWriter(workdir, config.metrics)) as metrics,
        contextlib.closing(external),
        contextlib.closing(checkpoints),
    ):
        check_room(run)
        progress.note(describe(run, len(train_set), len(held_out), read_s, skipped, checkpoints.last_write()))
        started, limit = time.monotonic(), memory_limit(mesh)
        compiled = load_all(run.programs(), mesh, config.executables) or compile_all(run.programs(), mesh)
        compiled = keep_what_fits(run, compiled, limit)
        check_memory(compiled, limit or host_share(mesh), **run.beside)
        progress.note(memory_table(compiled) + f"\ncompiled in {time.monotonic() - started:.0f} s")

        # ---- state: fresh, or the checkpoint's --------------------------------------------------------
        sums_of = lambda part, state: compiled[f"checksums_{part}"](state)
        how = {"allow_config_changes": allow_config_changes, "checksums": sums_of}
        restored = checkpoints.restore(run.abstract_checkpoint, config, **how)
        models = run.model, run.learner.reference_model if run.learner.loads_reference else None
        base, reference, begin = pretrained.weights(*models, mesh, source, teacher, seed=config.seed)
        actor = Actor(run, compiled, tokenizer, stream, pool, external, environment)
        learner = Learner(run.learner, compiled, ledger, reference=reference, base=base)
        evaluation = Evaluation(run, compiled, tokenizer, held_out, pool, environment) if held_out else None
        measure = lambda name: evaluation.measure(workdir / name, learner.publish(), learner.version)
        iteration, compute, failure, values, final, row = 0, 0.0, None, {}, False, {}
        if restored is None:
            learner.start(begin())
            metrics.restore({})
        else:
            host, arrays, iteration = restored.host_state, restored.device_state, restored.iteration
            compute, values, row = host["compute"], host["values"], host.get("row", {})
            final = host.get("final", True) or not evaluation
            said = metrics.restore(host["metrics"], iteration, values) + actor.restore(host, arrays, restored.shapes)
            is_told = final and hosts.exchange(metrics.state())[0]["metrics.jsonl"]  # none on a new machine
            if not (values or is_told) and iteration == config.num_iterations:  # or it lacks an evaluation there
                metrics.restore(metrics.state(), iteration, values := row)
            learner.restore(host, arrays, teacher.is_merged)
            progress.note("\n".join([*said, f"resumed at iteration {iteration} from {checkpoints.directory}"]))

        def save(is_inside: bool = False) -> None:
            host = {"compute": compute, "metrics": metrics.state(), "values": values, "final": final, "row": row}
            host |= actor.state() | learner.host_state()
            arrays = learner.arrays() | actor.arrays()
            how = {"pass_rate": pass_rate, "is_inside": is_inside, "checksums": sums_of}
            checkpoints.save(iteration, arrays, host, config, **how)

        # ---- the loop ----------------------------------------------------------------------------------
        recompiles, pass_rate = programs.CompileCounter(), None
        progress.restart_clock()
        with contextlib.suppress(Stopped):  # by a signal, wherever it can be saved: inside a generation too
            if restored is None and evaluation:
                progress.note(measure("eval_before").line)
            before = time.monotonic() - values.get("time/iteration_s", actor.spent_s)
            while (values or iteration < config.num_iterations) and failure is None:
                if is_new := not values:  # else they are of one that was stopped in its evaluation, or before it
                    stop.check()
                    acted = actor.act(learner.publish(), learner.version, iteration)
                    sums, open_rollouts = learner.learn(acted.scored, iteration)
                    actor.receive_open_rollouts(open_rollouts)
                    iteration += 1
                    values = actor.values(acted, num_tied=int(sums["degenerate_groups"])) | update_values(config, sums)
                    values["memory/peak_bytes"] = programs.peak_memory_bytes(mesh)
                    values["time/iteration_s"] = time.monotonic() - before  # so far
                    values = plain_numbers(values | cost_values(config, values, compute))
                    compute = values["time/compute_rollouts"]
                    metrics.append(actor.lines(acted, iteration))
                    failure = too_many_failures(config, acted.sampled.answers) or learner.faults.failure(workdir)
                final, pass_rate, every = iteration == config.num_iterations, None, config.eval.every_iterations
                if evaluation and (final or (every > 0 and iteration % every == 0)):
                    measured = measure("eval_after" if final else f"eval_{iteration}")
                    progress.note(measured.line)
                    values, pass_rate = values | measured.values, measured.values["eval/pass_rate"]
                values["compile/recompiles_after_warmup"] = recompiles.after_warmup()
                values["time/iteration_s"], before = (now := time.monotonic()) - before, now
                if config.metrics.compare_hosts:
                    hosts.agree_on_copies(learner.arrays(), **actor.state(), **learner.host_state())
                values |= checkpoints.check()
                metrics.write(iteration, values)
                progress.update(iteration, values)
                row, values = values, {}
                if final or failure or checkpoints.is_due(iteration, pass_rate):
                    save(is_inside=not is_new)
        if stop.requested and (iteration or actor.is_inside):
            save(is_inside=bool(values) or actor.is_inside)
        progress.close()

    # ---- what is left behind -------------------------------------------------------------------------------
    if failure is not None:
        print(f"error: {failure}; checkpoint of iteration {iteration} in {checkpoints.directory}", file=sys.stderr)
        return 1
    if values or iteration < config.num_iterations or (stop.requested and not final):
        saved = checkpoints.latest_iteration() is not None and f"checkpoint in {checkpoints.directory}"
        print(f"stopped by {stop.requested} after iteration {iteration}; {saved or 'nothing to save yet'}")
        print("run the same command again to continue")
        return 128 + signal.Signals[stop.requested]
    if hosts.is_first():  # the files that they read are its own
        report.print_samples(workdir)
    print(f"checkpoint  {checkpoints.directory}{checkpoints.best()}")
    if config.checkpoint.export:
        peft.export(learner.policy, run.model, tokenizer, workdir / "hf", config.model.path, like=source.folder)
        print(f"model       {workdir / 'hf'}  (Hugging Face folder)")
    if hosts.is_first():
        print(f"report      {report.write_report(workdir)}")
    return 0


FLAGS = flags.FLAGS


def main() -> None:
    """Run the command with the values of its flags."""
    sys.exit(train(freeze(FLAGS.config), pathlib.Path(FLAGS.workdir), allow_config_changes=FLAGS.allow_config_changes))


def define_flags() -> None:
    """Define the flags of the command."""
    config_flags.DEFINE_config_file("config", None, "Python file with get_config(), or a run to run again.")
    flags.DEFINE_string("workdir", None, "Where the run lives; an existing one is resumed.")
    flags.DEFINE_bool("allow_config_changes", False, "Resume although settings differ.")
    flags.mark_flags_as_required(["config", "workdir"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__, stops=True)
