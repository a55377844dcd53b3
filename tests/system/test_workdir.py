"""Operator errors: full disks, folders in use, damaged files, odd names.

One line names the cause, and nothing is lost. The loop is real, and its programs are ghosts. test_resume tests bitwise
resuming after such events.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
from support import command_line, ghosts
from support.refusal import ANY, check_refusal, check_words, raises_with, refused

from jaxrl_llm.actor import evaluation
from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import ConfigError, freeze
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import bucket, checkpoint
from jaxrl_llm.runtime.checkpoint import claim
from jaxrl_llm.runtime.cli import DiskError
from jaxrl_llm.runtime.hosts import MachineError
from jaxrl_llm.runtime.weights import restore_params

SETTINGS = {
    "prompts": {"size": 8},
    "sampling": {"max_completion_tokens": 8},
    "rollout": {"prompts_per_iteration": 4, "group_size": 4, "chunk_steps": 4},
    "update": {"batch_size": 16, "micro_batch_size": 16},
    "rewards": {"num_workers": 1},
    "checkpoint": {"every_iterations": 1, "export": False},
    "metrics": {"tensorboard": False, "samples_per_iteration": 0},
}


@pytest.fixture
def train(monkeypatch):
    """Return a function that trains until an iteration and returns the exit status.

    It is called as ``train(workdir, 3, metrics={...})``.
    """
    ghosts.haunt(monkeypatch)

    def run(workdir, num_iterations, *, allow_config_changes=False, **changes):
        groups = {name: SETTINGS.get(name, {}) | value for name, value in changes.items()}
        config = freeze(SETTINGS | groups | {"num_iterations": num_iterations})
        return train_module.train(config, workdir, allow_config_changes=allow_config_changes)

    return run


@contextlib.contextmanager
def files_of_at_most(size):
    """Simulate a full disk for any user: every write that makes a file longer fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path):
    """Return a disk of 3 MB, and a function that enlarges it."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if os.getuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs a user who may mount")
    yield path, lambda: subprocess.run(["mount", "-o", "remount,size=50m", str(path)], check=True)
    subprocess.run(["umount", str(path)], check=True)


def steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def iterations(workdir):
    return [row["iteration"] for row in read_metrics(workdir)]


def test_the_best_evaluation_has_a_checkpoint_wherever_it_comes(train, tmp_path, monkeypatch, capfd):
    rates = iter([0.1, 0.25, 0.75, 0.5, 0.5])  # before, of iterations 1 and 2, after 3, after 4
    figures = {"num_prompts": 2, "num_samples": 1, "completion_length_tokens": 1.0, "samples": []}
    figures |= {"timeout_count": 0, "error_count": 0}
    evaluated = lambda rate: figures | {"pass_rate": rate, "pass_at_k": {"1": rate}}
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: evaluated(next(rates)))
    changes = {
        "eval": {"num_prompts": 2, "every_iterations": 1},
        "checkpoint": {"every_iterations": 0, "keep_last": 1, "keep_best": 1},
    }
    for last in (3, 4):
        assert train(tmp_path, last, **changes) == 0
        best = tmp_path / "checkpoints" / "2"
        check_words(capfd.readouterr().out, str(best.parent), f"{best}, ", "0.750\n")
    assert steps(tmp_path) == [2, 4]
    restore_params(best)  # what --checkpoint takes


def test_a_ring_in_other_parts_is_refused_before_compiling_with_what_to_set(train, tmp_path, monkeypatch):
    """Another number of devices has the same effect."""
    train(tmp_path, 1, replay={"shards": 2})
    again = dict(num_iterations=2, allow_config_changes=True)
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "compile_all", None)
        with refused("replay.shards", 2, "ring/", "int32[2, 8", "int32[1, 16", "--allow_config_changes"):
            train(tmp_path, **again)
    assert train(tmp_path, replay={"shards": 2}, **again) == 0 and iterations(tmp_path) == [1, 2]


# ---- full disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "metrics"),
    [
        ("config.json.tmp", 1000, {}),
        pytest.param("metrics.jsonl", 6000, {}, marks=pytest.mark.slow),
        pytest.param("samples.jsonl", 8000, {"samples_per_iteration": 16}, marks=pytest.mark.slow),
        ("tensorboard/*", 8000, {"tensorboard": True}),
    ],
)
def test_a_full_disk_is_one_error_that_names_the_folder(name, size, metrics, train, tmp_path):
    changes = {"metrics": metrics, "checkpoint": {"every_iterations": 0}}
    with files_of_at_most(size), pytest.raises(DiskError) as error:
        train(tmp_path, 9, **changes)
    assert str(error.value) == f"{tmp_path}: File too large"
    (full,) = tmp_path.glob(name)
    assert full.stat().st_size == size  # it was this one, and the last line is torn
    assert name == "config.json.tmp" or iterations(tmp_path) == [*range(1, len(iterations(tmp_path)) + 1)]
    assert train(tmp_path, 9, **changes) == 0
    assert iterations(tmp_path) == [*range(1, 10)]


# Writes beside the one that fails, to nobody; the commands keep quiet about them (test_resume).
ORPHANS = pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")


@ORPHANS
def test_a_checkpoint_that_does_not_fit_leaves_those_before_and_ends_the_run_at_once(train, tmp_path, capfd):
    assert train(tmp_path, 2) == 0
    with files_of_at_most(100_000), pytest.raises(DiskError, match=f"^{tmp_path}: File too large$"):
        train(tmp_path, 30)
    assert steps(tmp_path) == [1, 2] and len(iterations(tmp_path)) < 10
    out, err = capfd.readouterr()
    assert "Traceback" not in err and "resumed at iteration 2" in out
    assert train(tmp_path, 4) == 0
    assert "resumed at iteration 2" in capfd.readouterr().out and steps(tmp_path) == [3, 4]
    assert iterations(tmp_path) == [1, 2, 3, 4]


@pytest.mark.tier("slow")  # plain: test_a_full_disk_is_one_error_that_names_the_folder
@ORPHANS
def test_a_disk_that_is_full_and_gets_room(train, small_disk, capfd):
    disk, enlarge = small_disk
    for _ in range(2):
        with pytest.raises(DiskError, match=f"^{disk}/run: No space left on device$"):
            train(disk / "run", 9)
        before = steps(disk / "run")
        assert before[0] == 1
    enlarge()
    assert train(disk / "run", 9) == 0
    out, err = capfd.readouterr()
    assert f"resumed at iteration {before[-1]}" in out and "Traceback" not in err
    assert iterations(disk / "run") == [*range(1, 10)]


def test_a_report_that_does_not_fit_leaves_the_old_one(tmp_path, monkeypatch, capfd):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "update/loss": 1.0}\n')
    (tmp_path / "report.html").write_text("the old one")
    with files_of_at_most(5000):
        done = command_line.run_command("report", f"--workdir={tmp_path}", monkeypatch=monkeypatch, capfd=capfd)
    assert (done.status, done.out, done.err) == (1, "", f"error: {tmp_path}: File too large\n")
    assert (tmp_path / "report.html").read_text() == "the old one"


# ---- damaged files ---------------------------------------------------------------------------------------------------


def test_a_resumed_run_says_that_its_curves_have_a_gap_and_mends_its_config(train, tmp_path, monkeypatch, capfd):
    assert train(tmp_path, 3) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    for harm in (b"", b"\xff\x00{", (tmp_path / "metrics.jsonl").read_bytes()[:-100]):
        (tmp_path / "metrics.jsonl").write_bytes(harm)
        (tmp_path / "config.json").write_bytes(harm)
        shutil.rmtree(tmp_path / "checkpoints" / "4", ignore_errors=True)
        capfd.readouterr()
        assert train(tmp_path, 4) == 0
        (warning,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
        assert str(tmp_path / "metrics.jsonl") in warning
        assert iterations(tmp_path) == ([1, 2, 4] if len(harm) > 10 else [4])
        assert json.loads((tmp_path / "config.json").read_text()) == config | {"num_iterations": 4}
        missing = 4 - len(iterations(tmp_path))
        assert f"{missing} more " in (tmp_path / "report.html").read_text()


def test_without_a_whole_checkpoint_nothing_is_compiled(train, tmp_path, monkeypatch):
    assert train(tmp_path, 2) == 0
    for step in (1, 2):
        os.truncate(tmp_path / "checkpoints" / str(step) / "host" / "metadata", 5)
    monkeypatch.setattr(train_module, "compile_all", None)
    with raises_with(ConfigError, "checkpoints/1", "host/"):
        train(tmp_path, 3)
    assert steps(tmp_path) == [1, 2]


# ---- two runs --------------------------------------------------------------------------------------------------------

HOLDER = """
import pathlib, sys, time
from jaxrl_llm.runtime import bucket
from jaxrl_llm.runtime.checkpoint import claim
bucket.BEAT_S = 0.2
if sys.argv[2:]:
    bucket.machine = lambda: sys.argv[2]
with claim(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holding(*arguments):
    command = [sys.executable, "-c", HOLDER, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def holder(tmp_path):
    """Return a process that holds ``tmp_path``."""
    with holding(tmp_path) as process:
        yield process


@pytest.fixture
def elsewhere(tmp_path):
    """Return a process that holds ``tmp_path`` and believes that it is on another machine."""
    with holding(tmp_path, "another machine") as process:
        yield process


def test_a_second_run_is_refused_until_the_first_is_gone_however_it_went(train, holder, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "use_cache", None)  # what a run begins with
    named = (f"process {holder.pid}", os.uname().nodename)
    with refused(f"--workdir={tmp_path}", ANY, *named) as error:
        train(tmp_path, 1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "checkpoints").exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    monkeypatch.undo()
    with claim(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()
    with claim(tmp_path):
        pass


def test_the_end_of_a_run_of_another_machine_is_waited_for(elsewhere, tmp_path, capfd):
    """The other run is being stopped, or its machine is lost. An NFS server keeps its lock for a minute and a half."""
    killed = threading.Timer(1.0, elsewhere.kill)
    killed.start()
    with claim(tmp_path):
        assert killed.finished.is_set() and f"process {os.getpid()} on " in (tmp_path / "lock").read_text()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    check_refusal(said, f"--workdir={tmp_path}", ANY, f"process {elsewhere.pid}", "120 s")


def test_a_run_of_another_machine_that_goes_on_is_a_fault_that_may_pass(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "WAIT_S", 3.0)
    monkeypatch.setattr(bucket, "STALE_LOCK_S", 1.5)
    with raises_with(MachineError, str(tmp_path), f"process {elsewhere.pid}"), claim(tmp_path):
        pass
    assert elsewhere.poll() is None and str(elsewhere.pid) in (tmp_path / "lock").read_text()


def test_a_lock_that_a_server_keeps_for_a_machine_that_is_gone_is_taken_over(tmp_path, monkeypatch):
    """NFS 3 keeps the lock of a deleted machine for ever. No process renews this lock."""
    monkeypatch.setattr(bucket, "STALE_LOCK_S", 1.5)
    with open(tmp_path / "lock", "w") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        (tmp_path / "lock").write_text("process 1 on gone since 2026-11-20 10:00:00\nanother machine")
        with claim(tmp_path):
            assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()
            with raises_with(ConfigError, str(tmp_path), f"process {os.getpid()}"), claim(tmp_path):
                pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_run_whose_folder_was_taken_over_ends(elsewhere, tmp_path):
    """The run sent no heartbeat for so long that another run treated it as dead."""
    (tmp_path / "new").write_text("process 2 on yet another\nthat")
    (tmp_path / "new").rename(tmp_path / "lock")
    assert elsewhere.wait(60) == 1
    said = f"error: --workdir={tmp_path} was taken over by process 2 on yet another that\n"
    assert elsewhere.stderr.read() == said


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_at_the_start_is_a_fault_that_may_pass(code, tmp_path, monkeypatch):
    """Bad input would end with the status after which a scheduler does not start the run again."""
    monkeypatch.setattr(pathlib.Path, "mkdir", mock.Mock(side_effect=OSError(code, os.strerror(code))))
    with raises_with(MachineError, str(tmp_path / "run"), os.strerror(code)), claim(tmp_path / "run"):
        pass


def test_a_config_that_cannot_be_written_leaves_the_old_one(tmp_path):
    bucket.write_whole(tmp_path / "config.json", "the old one")
    with files_of_at_most(3), pytest.raises(OSError, match="too large"):
        bucket.write_whole(tmp_path / "config.json", "the new one")
    assert (tmp_path / "config.json").read_text() == "the old one"


def test_the_folder_is_free_again_after_an_error(train, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module.pretrained, "resolve", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as kept:  # and with it the frames of the run
            train(tmp_path, 1)
    assert kept.traceback


def test_a_folder_in_use_may_be_read(train, tmp_path, monkeypatch, capfd):
    assert train(tmp_path, 1) == 0
    with claim(tmp_path):
        params, _ = restore_params(tmp_path)
        for command, flags in (("report", [f"--workdir={tmp_path}"]),
                               ("export", [f"--checkpoint={tmp_path}", f"--output={tmp_path / 'hf'}"])):  # fmt: skip
            done = command_line.run_command(command, *flags, monkeypatch=monkeypatch, capfd=capfd)
            assert (done.status, done.err) == (0, "")
    assert params and (tmp_path / "hf" / "config.json").exists()


def test_where_files_cannot_be_locked_that_is_said_and_the_run_goes_on(train, tmp_path, monkeypatch, capfd):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(checkpoint.fcntl, "flock", flock)
    assert train(tmp_path, 1) == 0
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {tmp_path / 'lock'}: Function not implemented")


# ---- names -----------------------------------------------------------------------------------------------------------

# A dash and a tilde in front, spaces, quotes, letters of others, and what URLs and shells take for something else.
ODD = ["-é ü", "~o", 'it\'s "so" 100%41 #?*{x}$HOME;&|']


@pytest.mark.parametrize("name", [ODD[0], *(pytest.param(name, marks=pytest.mark.slow) for name in ODD[1:])])
def test_every_command_takes_odd_names(name, train, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    workdir = pathlib.Path(name) / "ru n"
    config = pathlib.Path(f"{name}.py")
    shutil.copy(command_line.DEBUG_CONFIG, config)
    assert train(workdir, 1) == 0
    assert train(workdir, 2) == 0
    assert "resumed at iteration 1" in capfd.readouterr().out and iterations(workdir) == [1, 2]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)

    def run(command, *flags, warned=""):
        done = command_line.run_command(command, *flags, monkeypatch=monkeypatch, capfd=capfd)
        assert done.status == 0 and done.err.startswith(warned) and len(done.err.splitlines()) == bool(warned)
        return done.out

    assert run("report", f"--workdir={workdir}") == f"{workdir / 'report.html'}\n"
    assert str(workdir) in run("export", f"--checkpoint={workdir}", f"--output={workdir / 'h f'}")
    assert (workdir / "h f" / "model.safetensors").exists()
    if name == ODD[-1]:  # compiles
        few = ["--config.eval.num_prompts=8", "--config.eval.num_samples=1"]
        files = [f"--checkpoint={workdir}", f"--config={config}", f"--output={workdir / 'e.json'}"]
        run("evaluate", *files, *few, warned=f"warning: {workdir} ")
        assert json.loads((workdir / "e.json").read_text())["num_prompts"] == 8
