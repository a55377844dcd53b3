"""Train: the whole algorithm, top to bottom.

    python -m jaxrl_llm.train --config=configs/debug.py --workdir=runs/debug [--config.seed=1 ...]

One iteration has these steps:

    act       publish the weights to the sampler, and sample G completions for each of P prompts; other processes score
              finished completions while the sampler decodes the rest
    learn     turn rewards into advantages, insert the rollouts into the device ring, and take U optimizer steps on
              batches drawn from the ring
    log       compute the metrics
    evaluate  score completions of held-out questions, if an evaluation is due
    save      write a checkpoint, if a checkpoint is due

The same command with the same workdir resumes the run. One checkpoint has the whole state of a run.

Owns: the order of these steps. Does not know: how a step is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import sys
import time
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from jaxrl_llm.actor.actor import Actor, too_many_failures
from jaxrl_llm.actor.evaluation import Evaluation, questions
from jaxrl_llm.actor.external import External
from jaxrl_llm.config import Config, freeze
from jaxrl_llm.conversations import environment as environments
from jaxrl_llm.conversations.environment import Environment
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.models.files import peft, pretrained, run_models, templates
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import EncodedExample, PromptStream
from jaxrl_llm.reports import html as report
from jaxrl_llm.reports.iteration_log import IterationLog
from jaxrl_llm.reports.metrics import MetricsWriter, Progress
from jaxrl_llm.run import Run, assemble, check_room, describe
from jaxrl_llm.runtime import cli, hosts, machine, programs, sharding, weights
from jaxrl_llm.runtime.checkpoint import Checkpointer, Restored, claim
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
        DiskError: a disk is full or read-only. The last checkpoint is safe.
    """
    run_models.check(config, workdir)
    with cli.writing(workdir), claim(workdir, config.checkpoint.bucket):
        return _train(config, workdir, allow_config_changes)


def _train(config: Config, workdir: pathlib.Path, allow_config_changes: bool) -> int:
    use_cache(config.compilation_cache)
    setup = _prepare(config, workdir, allow_config_changes)
    config = setup.config
    progress = Progress(config.num_iterations, setup.checkpoints.latest_iteration() or 0)
    with (
        StopRequest() as stop,
        RewardPool(
            config.rewards,
            task_scorer=setup.task_scorer,
            examples=setup.examples,
            check=stop.check,
        ) as pool,
        environments.opened(config, setup.examples, setup.tokenizer) as environment,
        contextlib.closing(MetricsWriter(workdir, config.metrics)) as writer,
        contextlib.closing(setup.external),
        contextlib.closing(setup.checkpoints),
    ):
        compiled = _compile(setup, progress)
        log = IterationLog(config, writer, progress, has_evaluation=bool(setup.held_out))
        training = _restore_or_start(setup, compiled, pool, environment, log, writer, progress)
        failure = _iterate(training, stop)
        if stop.requested and (log.iteration or training.actor.is_inside):
            training.save(is_inside=not log.is_complete or training.actor.is_inside)
        progress.close()
    if failure is not None:
        return _report_failure(setup, log, failure)
    if not log.is_done:
        return _report_stop(setup, log, stop)
    return _report_end(setup, training.learner)


# ---- data and model: their errors come before anything is compiled -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setup:
    """Data, model and static parts of a run.

    Attributes:
        allow_config_changes: resume although settings differ from the checkpoint.
        source, teacher: sources of the weights of the policy and of the reference.
        held_out: questions of the evaluations.
        skipped: one message per row of the data that is not used.
        read_s: seconds to read the data.
        task_scorer: reward function of the task (``tasks.scorer``).
    """

    config: Config
    workdir: pathlib.Path
    allow_config_changes: bool
    mesh: Mesh
    source: pretrained.Source
    teacher: pretrained.Source
    tokenizer: Tokenizer
    train_set: list[EncodedExample]
    held_out: list[EncodedExample]
    skipped: list[str]
    read_s: float
    stream: PromptStream
    task_scorer: Any
    run: Run
    external: External
    checkpoints: Checkpointer

    @property
    def examples(self) -> list[Any]:
        return [row.example for row in self.train_set + self.held_out]


def _prepare(config: Config, workdir: pathlib.Path, allow_config_changes: bool) -> Setup:
    """Read the data and the model's files, describe the run, and check that it can resume from its checkpoint."""
    mesh = sharding.make_mesh(config.mesh)
    source = pretrained.resolve(config.model.path)
    tokenizer = source.tokenizer().ending_at(config.sampling.stop_tokens)
    config = templates.dated(config, tokenizer, workdir)
    started = time.monotonic()
    train_set, held_out, skipped = questions(config, tokenizer)
    read_s = time.monotonic() - started
    stream = PromptStream(train_set, config.prompts, Ledger(), seed=config.seed, held_out=held_out)
    teacher = pretrained.resolve_reference(config.model, source)
    run = assemble(config, source.architecture(), tokenizer.eos_ids, mesh, teacher.architecture())
    source.check_weights(run.model.base, mesh)
    teacher.check_weights(run.learner.reference_model, mesh)
    setup = Setup(
        config=config,
        workdir=workdir,
        allow_config_changes=allow_config_changes,
        mesh=mesh,
        source=source,
        teacher=teacher,
        tokenizer=tokenizer,
        train_set=train_set,
        held_out=held_out,
        skipped=skipped,
        read_s=read_s,
        stream=stream,
        task_scorer=tasks.scorer(config.prompts),
        run=run,
        external=External(
            run.config,
            tokenizer,
            train_set,
            held_out,
            vocab_size=run.model.arch.vocab_size,
            layout=sharding.of(run.learner.abstract_external),
            num_parts=run.learner.annotation.num_parts,
        ),
        checkpoints=Checkpointer(workdir, config.checkpoint),
    )
    columns = [(example.prompt, example.columns) for example in setup.examples]
    hosts.agree(config=record(config, mesh), questions=columns)

    def check_questions(host_state: dict[str, Any]) -> None:
        stream.check(host_state["stream"], allow_changes=allow_config_changes)

    setup.checkpoints.check_config(
        config,
        run.abstract_checkpoint,
        check_questions,
        allow_changes=allow_config_changes,
    )
    if hosts.is_first():
        weights.begin(workdir, record(config, mesh, processor=machine.processor()))
    return setup


# ---- programs ------------------------------------------------------------------------------------------------------


def _compile(setup: Setup, progress: Progress) -> dict[str, jax.stages.Compiled]:
    """Describe the run to the user, then compile its programs and check that they fit in memory."""
    run = setup.run
    mesh = setup.mesh
    check_room(run)
    last_write = setup.checkpoints.last_write()
    progress.note(
        describe(
            run,
            len(setup.train_set),
            len(setup.held_out),
            setup.read_s,
            setup.skipped,
            last_write,
        )
    )
    started = time.monotonic()
    limit = memory_limit(mesh)
    compiled = load_all(run.programs(), mesh, setup.config.executables) or compile_all(run.programs(), mesh)
    compiled = keep_what_fits(run, compiled, limit)
    check_memory(compiled, limit or host_share(mesh), **run.beside)
    progress.note(memory_table(compiled) + f"\ncompiled in {time.monotonic() - started:.0f} s")
    return compiled


# ---- state: of the start, or of the checkpoint ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Training:
    """The parts of a run that have a state.

    Attributes:
        evaluation: measures the pass rate of held-out questions, None without held-out questions.
        is_new: whether the run has no checkpoint.
    """

    setup: Setup
    compiled: dict[str, jax.stages.Compiled]
    actor: Actor
    learner: Learner
    evaluation: Evaluation | None
    log: IterationLog
    writer: MetricsWriter
    progress: Progress
    is_new: bool

    def evaluate(self, name: str) -> dict[str, float | None]:
        """Evaluate the weights, write the result to a file of this name, and return the metrics."""
        assert self.evaluation is not None
        path = self.setup.workdir / name
        result = self.evaluation.measure(path, self.learner.publish(), self.learner.version)
        self.progress.note(result.line)
        return result.values

    def host_state(self) -> dict[str, Any]:
        """Return the state on the host that the run needs to resume, as plain JSON."""
        return self.actor.state() | self.learner.host_state()

    def save(self, *, is_inside: bool) -> None:
        """Start to write a checkpoint.

        Args:
            is_inside: the iteration of the checkpoint is not complete, or an earlier checkpoint saved it when it was
                not complete.
        """
        self.setup.checkpoints.save(
            self.log.iteration,
            self.learner.arrays() | self.actor.arrays(),
            self.log.state() | self.host_state(),
            self.setup.config,
            pass_rate=self.log.pass_rate,
            is_inside=is_inside,
            checksums=_checksums(self.compiled),
        )


def _checksums(compiled: dict[str, jax.stages.Compiled]) -> Any:
    """Return the function that computes the checksums of a part of a checkpoint on the devices."""

    def checksums(part: str, state: Any) -> jax.Array:
        return compiled[f"checksums_{part}"](state)

    return checksums


def _restore_or_start(
    setup: Setup,
    compiled: dict[str, jax.stages.Compiled],
    pool: RewardPool,
    environment: Environment | None,
    log: IterationLog,
    writer: MetricsWriter,
    progress: Progress,
) -> Training:
    """Load the weights, and restore the state of the checkpoint if the run has a checkpoint."""
    run = setup.run
    restored = setup.checkpoints.restore(
        run.abstract_checkpoint,
        setup.config,
        allow_config_changes=setup.allow_config_changes,
        checksums=_checksums(compiled),
    )
    reference_model = run.learner.reference_model if run.learner.loads_reference else None
    base, reference, initial_params = pretrained.weights(
        run.model,
        reference_model,
        setup.mesh,
        setup.source,
        setup.teacher,
        seed=setup.config.seed,
    )
    actor = Actor(run, compiled, setup.tokenizer, setup.stream, pool, setup.external, environment)
    learner = Learner(run.learner, compiled, setup.stream.ledger, reference=reference, base=base)
    evaluation = None
    if setup.held_out:
        evaluation = Evaluation(run, compiled, setup.tokenizer, setup.held_out, pool, environment)
    if restored is None:
        learner.start(initial_params())
        log.start()
    else:
        messages = _restore(restored, setup, actor, learner, log)
        progress.note("\n".join(messages))
    return Training(
        setup,
        compiled,
        actor,
        learner,
        evaluation,
        log,
        writer,
        progress,
        is_new=restored is None,
    )


def _restore(restored: Restored, setup: Setup, actor: Actor, learner: Learner, log: IterationLog) -> list[str]:
    """Restore the state of a checkpoint. Return messages for the user."""
    host_state = restored.host_state
    arrays = restored.device_state
    messages = log.restore(host_state, restored.iteration)
    messages += actor.restore(host_state, arrays, restored.shapes)
    learner.restore(host_state, arrays, setup.teacher.is_merged)
    return [
        *messages,
        f"resumed at iteration {restored.iteration} from {setup.checkpoints.directory}",
    ]


# ---- the loop ------------------------------------------------------------------------------------------------------


def _iterate(training: Training, stop: StopRequest) -> str | None:
    """Run the iterations that are left, until a signal requests a stop.

    Returns:
        An error message if the run must end early, otherwise None.
    """
    log = training.log
    recompiles = programs.CompileCounter()
    failure = None
    with contextlib.suppress(Stopped):  # raised at points where the state can be saved
        if training.is_new and training.evaluation:
            training.evaluate("eval_before")
        log.start_clock(training.actor.spent_s)
        while failure is None and not log.is_done:
            was_incomplete = not log.is_complete  # the run was stopped in the evaluation of this iteration
            if log.is_complete:
                stop.check()
                failure = _act_and_learn(training)
            evaluation_name = log.evaluation_due()
            if evaluation_name:
                log.evaluate(training.evaluate(evaluation_name))
            log.stop_clock(recompiles=recompiles.after_warmup())
            _compare_hosts(training)
            log.complete(training.setup.checkpoints.check())
            if log.is_final or failure or training.setup.checkpoints.is_due(log.iteration, log.pass_rate):
                training.save(is_inside=was_incomplete)
    return failure


def _act_and_learn(training: Training) -> str | None:
    """Generate rollouts, learn from them and record the metrics. Return an error message if the run must end."""
    config = training.setup.config
    actor = training.actor
    learner = training.learner
    log = training.log
    acted = actor.act(learner.publish(), learner.version, log.iteration)
    sums, open_rollouts = learner.learn(acted.scored, log.iteration)
    actor.receive_open_rollouts(open_rollouts)
    actor_values = actor.values(acted, num_tied=int(sums["degenerate_groups"]))
    log.record(actor_values, sums, peak_bytes=programs.peak_memory_bytes(training.setup.mesh))
    training.writer.append(actor.lines(acted, log.iteration))
    failure = too_many_failures(config, acted.sampled.answers)
    return failure or learner.faults.failure(training.setup.workdir)


def _compare_hosts(training: Training) -> None:
    """Check that all hosts hold the same state, if the setting asks for the check."""
    if training.setup.config.metrics.compare_hosts:
        hosts.agree_on_copies(training.learner.arrays(), **training.host_state())


# ---- what is left behind -------------------------------------------------------------------------------------------


def _report_failure(setup: Setup, log: IterationLog, failure: str) -> int:
    """Print the error that ended the run early. Return the exit status."""
    directory = setup.checkpoints.directory
    print(
        f"error: {failure}; checkpoint of iteration {log.iteration} in {directory}",
        file=sys.stderr,
    )
    return 1


def _report_stop(setup: Setup, log: IterationLog, stop: StopRequest) -> int:
    """Print where the run was stopped. Return the exit status."""
    requested = stop.requested
    assert requested is not None, "an incomplete run without a failure was stopped by a signal"
    saved = "nothing to save yet"
    if setup.checkpoints.latest_iteration() is not None:
        saved = f"checkpoint in {setup.checkpoints.directory}"
    print(f"stopped by {requested} after iteration {log.iteration}; {saved}")
    print("run the same command again to continue")
    return 128 + signal.Signals[requested]


def _report_end(setup: Setup, learner: Learner) -> int:
    """Write the report and the exported model, and print their places. Return the exit status."""
    config = setup.config
    workdir = setup.workdir
    if hosts.is_first():  # because the first host writes the files that the report reads
        report.print_samples(workdir)
    print(f"checkpoint  {setup.checkpoints.directory}{setup.checkpoints.best()}")
    if config.checkpoint.export:
        folder = workdir / "hf"
        peft.export(
            learner.policy,
            setup.run.model,
            setup.tokenizer,
            folder,
            config.model.path,
            like=setup.source.folder,
        )
        print(f"model       {folder}  (Hugging Face folder)")
    if hosts.is_first():
        print(f"report      {report.write_report(workdir)}")
    return 0


FLAGS = flags.FLAGS


def main() -> None:
    """Run the command with the values of its flags."""
    sys.exit(
        train(
            freeze(FLAGS.config),
            pathlib.Path(FLAGS.workdir),
            allow_config_changes=FLAGS.allow_config_changes,
        )
    )


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
