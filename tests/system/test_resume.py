"""A run that was killed and resumed is bitwise equal to a run that was never killed.

The tests use real processes of the train command and real signals. The processes share JAX's compilation cache, so
programs are compiled once. Compared is everything that a run leaves: each array of its last checkpoint (weights,
moments, ring, sampler slots), the prompt stream, each metric except times and process sizes, and each row of
samples.jsonl.
"""

import datetime
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support import building, ghosts
from support.refusal import check_words, raises_with
from support.tiers import mostly_in

from jaxrl_llm.actor import evaluation
from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import Config, ConfigError, freeze, from_json
from jaxrl_llm.models.files import gguf, templates
from jaxrl_llm.reports.metrics import MetricsWriter, read_metrics
from jaxrl_llm.runtime import stop as stopping
from jaxrl_llm.runtime.checkpoint_files import changed_settings, pass_rates

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "debug.py"
ENVIRONMENTS = pathlib.Path(__file__).parents[1] / "fixtures" / "environments.py"
NUM_ITERATIONS = 6
# Fewer slots than rollouts and prompts of later iterations in the table: rollouts are in flight at every checkpoint.
SETTINGS = {
    "num_iterations": NUM_ITERATIONS,
    "rollout.prompts_per_iteration": 8,
    "rollout.group_size": 2,
    "rollout.slots": 8,
    "rollout.chunk_steps": 3,
    "rollout.lookahead_prompts": 8,
    "replay.capacity": 32,
    "replay.capacity_tokens": 1000,
    "replay.min_ess": 0.5,
    "update.batch_size": 16,
    "update.micro_batch_size": 8,
    "eval.num_prompts": 0,
    "checkpoint.every_iterations": 1,
    "checkpoint.keep_last": 2,
    "checkpoint.export": False,
    "metrics.tensorboard": False,
    "metrics.samples_per_iteration": 16,
}
NOT_COMPARED = ("time/", "throughput/", "memory/")
DEADLINE_S = 300


class Process:
    """A process of the train command. Its standard output is read line by line."""

    def __init__(self, workdir, cache, settings, *, devices=1, largest_file=None):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        }
        overrides = [f"--config.{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "jaxrl_llm.train", f"--config={CONFIG}", f"--workdir={workdir}", *overrides]
        self.workdir = workdir
        if largest_file:  # KiB; more is refused as a full disk refuses it
            command = ["bash", "-c", f'ulimit -f {largest_file} && exec "$@"', "bash", *command]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.lines = []

    def until(self, start_of_line):
        """Read until a line starts with this text. Return whether such a line came before the process ended."""
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(start_of_line):
                return True
        return False

    def stop(self, number):
        """Send a signal. Return the exit status and the whole output."""
        self.process.send_signal(number)
        return self.finish()

    def finish(self):
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, "".join(self.lines) + out, err

    def kill_during_checkpoint_write(self):
        """Send SIGKILL while a checkpoint is half-written. Return the directory that is left."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if unfinished(self.workdir):
                self.process.send_signal(signal.SIGSTOP)  # hold it still, and look again: it may just have finished
                if left := unfinished(self.workdir):
                    self.stop(signal.SIGKILL)
                    return left[0]
                self.process.send_signal(signal.SIGCONT)
            time.sleep(0.0005)
        raise AssertionError(f"no checkpoint was seen half-written: {self.finish()}")


def unfinished(workdir):
    """Return the directories of unfinished checkpoints, except the first. So a checkpoint exists to resume from."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [folder / name for name in names if not name.isdigit()] if any(map(str.isdigit, names)) else []


def left_behind(workdir):
    """Return everything of a run that must not depend on its interruptions."""
    steps = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
    last = workdir / "checkpoints" / str(steps[-1])
    handler = ocp.PyTreeCheckpointHandler()
    names = dict(handler.metadata(last / "state").tree)
    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    arrays = handler.restore(last / "state", args=ocp.args.PyTreeRestore(restore_args=restore_args))
    handler.close()
    host = json.loads((last / "host" / "metadata").read_text())
    del host["metrics"]  # sizes of files that hold the digits of times
    del host["compute"]  # measured by the clock
    for *_, turns in host["conversations"]:
        for *_, reply in turns:
            seconds = reply.pop()  # of the environment, also measured by the clock
            assert seconds >= 0.0
    compared = lambda row: {name: value for name, value in row.items() if not name.startswith(NOT_COMPARED)}
    host["row"] = compared(host["row"])
    metrics = [compared(row) for row in read_metrics(workdir)]
    return steps, arrays, host, metrics, (workdir / "samples.jsonl").read_text()


def assert_same_run(one, other, *, same_steps=True):
    (steps, arrays, host, metrics, samples), expected = left_behind(one), left_behind(other)
    assert steps == expected[0] or (not same_steps and steps[-1] == expected[0][-1])
    assert arrays.keys() == expected[1].keys()
    for name, array in arrays.items():
        assert array.dtype == expected[1][name].dtype and array.shape == expected[1][name].shape, name
        assert array.tobytes() == expected[1][name].tobytes(), name
    assert host == expected[2]
    assert metrics == expected[3]
    assert samples == expected[4]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compilation_cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """Return the workdir of a run without interruptions."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    status, _, err = Process(workdir, cache, SETTINGS).finish()
    assert status == 0, err
    return workdir


def interrupt(workdir, cache):
    """Send Ctrl-C after the first iteration of this process. The run saves there."""
    process = Process(workdir, cache, SETTINGS)
    assert process.until("resumed at iteration ") and process.until("iteration ")
    iteration = int(process.lines[-1].split()[1].split("/")[0])
    status, out, err = process.stop(signal.SIGINT)
    assert status in (0, 128 + signal.SIGINT), err
    if iteration < NUM_ITERATIONS - 1:  # nearer to the end it may have got there before the signal arrived
        stopped = [line for line in out.splitlines() if line.startswith("stopped by SIGINT after iteration ")]
        assert len(stopped) == 1 and str(workdir / "checkpoints") in stopped[0]
    assert "Traceback" not in err


@pytest.mark.tier("kills")  # plain: test_adapters.test_a_run_that_was_resumed_is_the_run_that_was_not
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_killed_and_interrupted_is_the_run_that_never_was(tmp_path, cache, undisturbed, is_interrupted):
    # Kill -9 with a checkpoint half-written: by then the next iteration has begun.
    half_written = Process(tmp_path, cache, SETTINGS).kill_during_checkpoint_write()
    assert half_written.exists()
    if is_interrupted:
        interrupt(tmp_path, cache)

    status, out, err = Process(tmp_path, cache, SETTINGS).finish()
    assert status == 0, err
    assert "resumed at iteration " in out and not half_written.exists()
    assert_same_run(tmp_path, undisturbed)
    _, arrays, host, _, _ = left_behind(tmp_path)
    in_flight = (arrays["sampler/stop_reason"] == 0) & (arrays["sampler/length"] > arrays["sampler/prompt_length"])
    assert in_flight.any() and len(host["open_prompts"]) == SETTINGS["rollout.lookahead_prompts"]


@pytest.mark.tier("kills")
def test_so_it_is_with_an_environment_whose_episodes_are_in_flight(tmp_path, cache):
    """The run is stopped inside a generation several times."""
    settings = SETTINGS | {"sampling.max_completion_tokens": 24, "replay.capacity_tokens": 0}
    settings |= {"sampling.stop_tokens": tuple("abcdefgh")}  # which end turns: many do
    settings |= {"environments.factory": f"{ENVIRONMENTS}:brief", "environments.max_answer_tokens": 2}
    settings |= {"prompts.chat_template": False}
    status, _, err = Process(tmp_path / "one", cache, settings).finish()
    assert status == 0, err
    rng, stops = random.Random(0), 0
    for _ in range(40):
        process = Process(tmp_path / "other", cache, settings)
        process.until("iteration " if stops % 2 else "compiled")
        time.sleep(rng.uniform(0.0, 0.2))
        status, _, err = process.stop(signal.SIGTERM)
        assert status in (0, 128 + signal.SIGTERM), err
        if status == 0:
            break
        stops += 1
    assert stops >= 3
    assert_same_run(tmp_path / "other", tmp_path / "one", same_steps=False)
    turns = [line["rollout/turns_mean"] for line in left_behind(tmp_path / "one")[3]]
    assert min(turns) > 1.2


@pytest.mark.tier("kills")
def test_after_a_damaged_checkpoint_and_a_full_disk_it_is_the_run_that_never_was(tmp_path, cache, undisturbed):
    workdir = tmp_path / "copy"
    shutil.copytree(undisturbed, workdir)
    last = workdir / "checkpoints" / str(NUM_ITERATIONS)
    largest = max((last / "state").glob("**/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)
    # The last iteration again, and its checkpoint does not fit.
    status, out, err = Process(workdir, cache, SETTINGS, largest_file=200).finish()
    assert status == 1 and f"resumed at iteration {NUM_ITERATIONS - 1}" in out, err
    damaged, full = err.splitlines()
    assert damaged.startswith(f"warning: checkpoint {last} is damaged: array ")
    assert full == f"error: {workdir}: File too large"
    assert f"iteration {NUM_ITERATIONS}/" in out and not last.exists()
    status, out, err = Process(workdir, cache, SETTINGS).finish()
    assert (status, err) == (0, f"{damaged}\n")  # it is there until the new one is whole
    assert f"resumed at iteration {NUM_ITERATIONS - 1}" in out
    assert_same_run(workdir, undisturbed)


@pytest.fixture(scope="module")
def ghost_run(tmp_path_factory):
    """Return the workdir of a finished run whose programs compute nothing. Its files are those of any run."""
    workdir = tmp_path_factory.mktemp("ghosts")
    config = freeze(building.settings_of(CONFIG, SETTINGS))
    with pytest.MonkeyPatch.context() as patch:
        ghosts.haunt(patch)
        assert train_module.train(config, workdir) == 0
    return workdir


@pytest.fixture
def finished_copy(tmp_path, ghost_run, monkeypatch):
    """Return a copy of the finished run, and its config with as many devices as the run's."""
    return copy_of(ghost_run, tmp_path, monkeypatch)


def copy_of(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "copy")
    mapping = json.loads((run / "config.json").read_text())
    made_with = mapping.pop("made_with")
    assert re.fullmatch(r"\d+ x cpu", made_with["devices"])
    mesh = building.mesh_of(building.ONE)
    monkeypatch.setattr(train_module.sharding, "make_mesh", lambda _: mesh)
    assert made_with["versions"]["jax"] == jax.__version__ and len(made_with["commit"]) in (0, 40, 41)
    return tmp_path / "copy", mapping


def test_other_settings_are_refused_with_their_names(finished_copy, monkeypatch):
    workdir, mapping = finished_copy
    before = (workdir / "config.json").read_text()
    mapping["optimizer"]["learning_rate"] = 0.5
    mapping["sampling"]["top_k"] = 3
    monkeypatch.setattr(train_module, "compile_all", refuse_to_compile)
    changes = ["optimizer.learning_rate 0.01 -> 0.5", "sampling.top_k 0 -> 3"]
    with raises_with(ConfigError, *changes, "--allow_config_changes") as error:
        train_module.train(freeze(mapping), workdir)
    assert "seed" not in str(error.value)
    assert (workdir / "config.json").read_text() == before


def test_other_settings_are_accepted_by_flag(finished_copy, monkeypatch):
    workdir, mapping = finished_copy
    mapping["optimizer"]["learning_rate"] = 0.5
    monkeypatch.setattr(train_module, "compile_all", refuse_to_compile)
    with pytest.raises(CompiledError):
        train_module.train(freeze(mapping), workdir, allow_config_changes=True)


@pytest.mark.parametrize(("setting", "value"), [("seed", 1), ("prompts", {"size": 63})])
def test_other_questions_are_refused_before_a_file_is_touched(setting, value, finished_copy, monkeypatch):
    """A later check would come after the new config.json is written and the report is removed."""
    workdir, mapping = finished_copy
    mapping[setting] = mapping[setting] | value if isinstance(value, dict) else value
    files = lambda: {x.name: x.read_bytes() for x in workdir.iterdir() if x.is_file() and x.name != "lock"}
    before = files()
    assert {"config.json", "report.html", "metrics.jsonl"} <= set(before)
    monkeypatch.setattr(train_module, "compile_all", refuse_to_compile)
    with raises_with(ConfigError, "fingerprint"):
        train_module.train(freeze(mapping), workdir, allow_config_changes=True)
    assert files() == before


def test_another_answer_or_another_held_out_question_is_refused_unless_allowed(tmp_path, monkeypatch):
    """Otherwise the run would continue with other rewards, and its pass rates would be of other questions."""
    files = {name: tmp_path / f"{name}.jsonl" for name in ("prompts", "eval")}
    changes = {f"{name}.name": str(path) for name, path in files.items()}
    changes |= {
        "prompts.source": "jsonl",
        "eval.num_prompts": 2,
        "rewards.functions": ("jaxrl_llm.scoring.scores:exact",),
    }

    def run(num_iterations, *, answer="4", asked="5+5=", **how):
        for name, path in files.items():
            rows = [{"prompt": f"{asked if name == 'eval' else i}", "answer": answer} for i in range(16)]
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        mapping = building.settings_of(CONFIG, SETTINGS | changes | {"num_iterations": num_iterations})
        return train_module.train(freeze(mapping), tmp_path / "run", **how)

    ghosts.haunt(monkeypatch)
    assert run(1) == 0
    with raises_with(ConfigError, "answers", "held-out questions", "--allow_config_changes"):
        run(2, answer="5")
    with raises_with(ConfigError, "held-out questions", "--allow_config_changes") as error:
        run(2, asked="6+6=")
    assert "answers" not in str(error.value)
    assert run(2, asked="6+6=", allow_config_changes=True) == run(3, asked="6+6=") == 0


@pytest.mark.parametrize("prints", mostly_in("slow", [True, False]))
def test_a_run_whose_chat_template_prints_the_date_goes_on_on_another_day(prints, tmp_path, monkeypatch, capfd):
    """Once, its questions differed after midnight, and the run was refused."""

    class Date(datetime.date):
        @classmethod
        def today(cls):
            return cls.fromisoformat(today)

    ghosts.haunt(monkeypatch)
    monkeypatch.setattr(templates, "datetime", types.SimpleNamespace(date=Date))
    if prints:
        monkeypatch.setattr(gguf, "PLAIN_TEMPLATE", "{{ strftime_now('%d') }}" + gguf.PLAIN_TEMPLATE)
    run = lambda workdir, **changes: train_module.train(
        freeze(building.settings_of(CONFIG, SETTINGS | changes)), tmp_path / workdir
    )
    day_of = lambda workdir: json.loads((tmp_path / workdir / "config.json").read_text())["prompts"]
    today = "2026-11-26"
    assert run("one", num_iterations=1) == 0
    today = "2026-11-27"
    assert run("one", num_iterations=2) == 0 and "resumed at iteration 1" in capfd.readouterr().out
    assert run("two", num_iterations=1) == 0
    # A machine that died while it wrote; a new one, which has the checkpoints alone.
    (tmp_path / "one" / "config.json").write_bytes(b"{")
    assert templates._day(Config(), tmp_path / "one") == ("2026-11-26" if prints else None)
    (tmp_path / "one" / "config.json").unlink()
    (tmp_path / "one" / "report.html").unlink()
    assert run("one", num_iterations=3) == 0 and "resumed at iteration 2" in capfd.readouterr().out
    told = [day_of(workdir)["chat_template_kwargs"] for workdir in ("one", "two")]
    assert told == ([{"strftime_now": "2026-11-26"}, {"strftime_now": "2026-11-27"}] if prints else [{}, {}])
    # What was asked for, as a sweep compares it, is what the run was made with.
    saved = from_json((tmp_path / "one" / "config.json").read_text())
    asked = freeze(building.settings_of(CONFIG, SETTINGS))
    assert changed_settings(saved, asked) == {}


# What ``evaluation.evaluate`` gives, as far as a run asks.
EVALUATED = {"pass_rate": 0.5, "completion_length_tokens": 1.0, "pass_at_k": {"4": 0.5}, "num_prompts": 2}
EVALUATED |= {"num_samples": 4, "timeout_count": 0, "error_count": 0, "samples": []}


@pytest.mark.parametrize(
    ("evaluations", "said", "saved"),
    [(1, "after iteration 0; nothing to save yet\n", []), (2, "after iteration 2; checkpoint in ", ["2"])],
    ids=["before training", "after iteration 2"],
)
def test_a_stop_asked_for_during_an_evaluation_saves_what_there_is(
    evaluations, said, saved, finished_copy, tmp_path, monkeypatch, capfd
):
    _, mapping = finished_copy
    mapping["eval"] |= {"num_prompts": 2, "every_iterations": 2}
    mapping["rollout"]["lookahead_prompts"] = 0
    mapping["checkpoint"]["every_iterations"] = 4
    versions = []

    def evaluate(*_, **__):
        versions.append(len(versions))
        if len(versions) == evaluations:
            signal.raise_signal(signal.SIGTERM)
        return EVALUATED

    ghosts.haunt(monkeypatch)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    assert train_module.train(freeze(mapping), tmp_path / "run") == 128 + signal.SIGTERM
    assert f"stopped by SIGTERM {said}" in capfd.readouterr().out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == saved


def test_seconds_of_an_iteration_are_of_all_of_it_where_it_was_stopped_in_its_evaluation(tmp_path, monkeypatch):
    evaluations = []

    def evaluate(*_, **__):
        evaluations.append("")
        if len(evaluations) == 2:
            signal.raise_signal(signal.SIGTERM)
            raise stopping.Stopped
        return EVALUATED

    ghosts.haunt(monkeypatch)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    settings = SETTINGS | {"num_iterations": 1, "eval.num_prompts": 2}
    run = lambda: train_module.train(freeze(building.settings_of(CONFIG, settings)), tmp_path)
    assert (run(), run(), len(evaluations)) == (128 + signal.SIGTERM, 0, 3)
    row = read_metrics(tmp_path)[0]
    assert row["time/iteration_s"] > row["time/generate_s"] + row["time/update_s"] > 0


def test_a_run_that_is_to_end_where_it_was_stopped_is_evaluated_there(tmp_path, monkeypatch, capfd):
    """Otherwise it would have no evaluation, or only that of its earlier end. Afterwards the run is complete."""
    numbers, write = iter(range(1, 9)), MetricsWriter.write
    evaluate = lambda *_, **__: EVALUATED | {"number": next(numbers)}

    def write_and_ask(self, iteration, values):
        write(self, iteration, values)
        if iteration == 2:
            signal.raise_signal(signal.SIGTERM)

    ghosts.haunt(monkeypatch)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    settings = SETTINGS | {"eval.num_prompts": 2}
    config = lambda last: freeze(building.settings_of(CONFIG, settings | {"num_iterations": last}))
    run = lambda last: train_module.train(config(last), tmp_path)
    assert run(1) == 0
    monkeypatch.setattr(MetricsWriter, "write", write_and_ask)
    assert run(3) == 128 + signal.SIGTERM
    capfd.readouterr()
    assert run(2) == 0
    check_words(capfd.readouterr().out, "0.500", "2 questions", "eval_after")
    number = lambda: json.loads((tmp_path / "eval_after.json").read_text())["number"]
    assert number() == 3  # 1 and 2: before, and after run(1)
    rows = read_metrics(tmp_path)
    assert [(row["iteration"], row.get("eval/pass_rate")) for row in rows] == [(1, 0.5), (2, 0.5)]
    assert run(2) == 0 and number() == 3  # its checkpoint says that it was evaluated
    assert read_metrics(tmp_path) == rows and "lost lines" not in capfd.readouterr().err
    assert pass_rates(tmp_path / "checkpoints")[2] == 0.5  # what keep_best goes by


@pytest.mark.parametrize("num_prompts", mostly_in("slow", [0, 2]))
def test_a_run_that_has_ended_on_another_machine_ends_here_too(num_prompts, tmp_path, monkeypatch, capfd):
    """A job restarts after its last checkpoint in a bucket, on an empty disk."""
    ghosts.haunt(monkeypatch)
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: EVALUATED)
    settings = SETTINGS | {"eval.num_prompts": num_prompts, "num_iterations": 2}
    run = lambda: train_module.train(freeze(building.settings_of(CONFIG, settings)), tmp_path)
    timeless = lambda row: {name: x for name, x in row.items() if not name.startswith(NOT_COMPARED)}
    assert run() == 0
    last = read_metrics(tmp_path)[-1]
    for path in tmp_path.iterdir():
        if path.is_file():
            path.unlink()
    capfd.readouterr()
    assert run() == 0 and f"report      {tmp_path / 'report.html'}" in capfd.readouterr().out
    (row,) = rows = read_metrics(tmp_path)
    assert (row["iteration"], timeless(row)) == (2, timeless(last))
    assert (tmp_path / "eval_after.json").exists() == (num_prompts > 0) and (tmp_path / "report.html").exists()
    assert run() == 0 and read_metrics(tmp_path) == rows
    assert "lost lines" not in "".join(capfd.readouterr())


@pytest.mark.tier("kills")  # in the plain suite one is killed, above
@pytest.mark.parametrize(
    ("chance", "changes"),
    [
        (0.5, {}),
        (0.5, {"model.path": "random:debug_experts", "model.routing_replay": True, "update.load_balance": 0.01}),
        (0.5, {"model.path": "random:debug_hybrid"}),
        (
            0.1,
            {
                "rollout.lookahead_prompts": 0,
                "rollout.max_resample_rounds": 2,
                "eval.num_prompts": 8,
                "eval.every_iterations": 1,
                "checkpoint.every_iterations": 3,
            },
        ),
        (
            0.08,
            {
                "environments.factory": f"{ENVIRONMENTS}:two_letters",
                "environments.max_answer_tokens": 40,
                "rewards.functions": ("environment",),
                "prompts.max_tokens": 64,
                "sampling.max_completion_tokens": 80,
                "sampling.stop_tokens": tuple("abcdefgh"),
                "rollout.slots": 16,
                "replay.capacity_tokens": 0,
            },
        ),
    ],
    ids=["lookahead", "experts", "hybrid", "resampling, evaluations", "agents"],
)
def test_a_run_that_is_stopped_wherever_it_can_be_is_the_run_that_is_not(tmp_path, monkeypatch, chance, changes):
    """Signals come at random checks: inside generations, rounds, evaluations and agents' episodes."""
    settings = SETTINGS | {"num_iterations": 3} | changes
    mapping = building.settings_of(CONFIG, settings)
    assert train_module.train(freeze(mapping), tmp_path / "whole") == 0

    inside, played, draws = [], 0, random.Random(2)

    def check(stop):
        if draws.random() < chance:
            stop.requested = "SIGTERM"
            raise stopping.Stopped

    monkeypatch.setattr(stopping.StopRequest, "check", check)
    for _ in range(30):
        status = train_module.train(freeze(mapping), tmp_path / "pieces")
        if status == 0:
            break
        assert status == 128 + signal.SIGTERM
        saved = sorted((tmp_path / "pieces" / "checkpoints").glob("[0-9]*"))
        host = json.loads((saved[-1] / "host" / "metadata").read_text()) if saved else {}
        inside.append((bool(host.get("rounds")), bool(host.get("values")), len(host.get("open_prompts", ()))))
        played += len(host.get("conversations", ()))  # rows whose agents have had an answer, and must be asked again
    assert status == 0 and len(inside) > 3
    if "rollout.max_resample_rounds" in changes:
        assert any(rounds for rounds, _, _ in inside) and any(values for _, values, _ in inside)
    assert any(num_open > settings["rollout.lookahead_prompts"] for _, _, num_open in inside)
    assert bool(played) == ("environments.factory" in changes)
    assert not any(line["reward/error_count"] for line in left_behind(tmp_path / "whole")[3])
    assert_same_run(tmp_path / "pieces", tmp_path / "whole", same_steps=False)  # stops have left some of their own


@pytest.mark.tier("kills")  # its parts in tests/actor/test_redistribution.py
def test_a_run_stopped_inside_generations_goes_on_on_other_numbers_of_devices(tmp_path, monkeypatch, capfd):
    """The ring and the samples equal those of four devices, floats nearly.

    It does not matter which devices held the unfinished rollouts.
    """
    changes = {"rollout.lookahead_prompts": 0, "rollout.max_resample_rounds": 2, "replay.capacity_tokens": 0}
    settings = SETTINGS | changes | {"num_iterations": 3, "replay.shards": 4, "replay.min_ess": 0.0}
    config, make_mesh = freeze(building.settings_of(CONFIG, settings)), train_module.sharding.make_mesh
    count, draws = 4, random.Random(3)
    monkeypatch.setattr(train_module.sharding, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:count]))
    assert train_module.train(config, tmp_path / "whole") == 0

    def check(stop):
        if draws.random() < 0.1:
            stop.requested = "SIGTERM"
            raise stopping.Stopped

    monkeypatch.setattr(stopping.StopRequest, "check", check)
    capfd.readouterr()
    for start in range(20):
        count = (4, 1, 4, 2)[start % 4]
        if not train_module.train(config, tmp_path / "pieces"):
            break
    moves = re.findall(r"rollouts from (\d) data-parallel devices continue on (\d)(;?)", capfd.readouterr().out)
    assert any(now > before and more for before, now, more in moves) and any(now < before for before, now, _ in moves)
    (_, arrays, _, _, samples), expected = left_behind(tmp_path / "pieces"), left_behind(tmp_path / "whole")
    assert samples == expected[4] and arrays.keys() == expected[1].keys()
    for key, array in arrays.items():
        assert array.dtype == expected[1][key].dtype
        np.testing.assert_allclose(array, expected[1][key], atol=3e-5 * (array.dtype == np.float32), err_msg=key)


class CompiledError(Exception):
    """Raised when the run reaches its compilation."""


def refuse_to_compile(*_):
    raise CompiledError


@pytest.mark.tier("kills")
def test_a_finished_run_is_left_as_it_is(cache, undisturbed, tmp_path, monkeypatch):
    workdir, _ = copy_of(undisturbed, tmp_path, monkeypatch)
    status, out, err = Process(workdir, cache, SETTINGS).finish()
    assert status == 0, err
    assert f"resumed at iteration {NUM_ITERATIONS}" in out
    assert_same_run(workdir, undisturbed)


@pytest.mark.tier("kills")
@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (1, {"rollout.lookahead_prompts": 0, "eval.num_prompts": 4, "eval.every_iterations": 2}),
        (1, {"rollout.lookahead_prompts": 0, "rollout.max_resample_rounds": 2}),
        (
            4,
            {
                "mesh.fsdp": 2,
                "algorithm.divergence": "reference",
                "algorithm.divergence.coefficient": 0.1,
                "model.compute_dtype": "bfloat16",
            },
        ),
    ],
    ids=["evaluations", "resampling", "four_devices"],
)
def test_killed_at_random_moments_again_and_again(tmp_path, cache, devices, changes):
    settings = SETTINGS | {"num_iterations": 30} | changes
    whole = tmp_path / "whole"
    status, _, err = Process(whole, cache, settings, devices=devices).finish()
    assert status == 0, err

    pieces, chance, kills = tmp_path / "pieces", random.Random(0), 0
    while kills < 6:
        process = Process(pieces, cache, settings, devices=devices)
        if not process.until("compiled in "):
            break  # it came to its end before
        time.sleep(chance.uniform(0.0, 3.0))
        status, _, err = process.stop(signal.SIGKILL)
        assert status in (0, -signal.SIGKILL), err
        kills += 1
    status, _, err = Process(pieces, cache, settings, devices=devices).finish()
    assert status == 0, err
    assert_same_run(pieces, whole)
