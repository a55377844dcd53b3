"""Checkpoints in a bucket: as on a disk, and complete wherever a host dies. The bucket is emulated on this machine."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import numpy as np
import pytest
from runtime.test_checkpoint import CONFIG, abstract, host_copy, make_state, mesh, place
from support import bucket as emulation
from support.comparing import assert_same
from support.refusal import ANY, raises_with, refused
from system.test_hosts import SETTINGS, TIMES, Job

from jaxrl_llm.config import CheckpointConfig, ConfigError
from jaxrl_llm.runtime import bucket, checkpoint
from jaxrl_llm.runtime.checkpoint import Checkpointer, claim
from jaxrl_llm.runtime.hosts import MachineError
from jaxrl_llm.runtime.weights import restore_params

FOLDER = "gs://my-bucket/runs/one"


@pytest.fixture(scope="module")
def server():
    """Start one server for all tests, because tensorstore reads its address once."""
    pytest.importorskip("gcsfs")
    with emulation.serving() as (address, objects), pytest.MonkeyPatch.context() as patch:
        for name, value in emulation.environment(address).items():
            patch.setenv(name, value)
        yield objects


@pytest.fixture
def objects(server):
    """Return the objects of an empty bucket."""
    server.clear()
    yield server
    server.states = None


def steps(objects):
    return {found[1] for _, name in objects if (found := re.match(r"runs/one/(\d+|aside-\d+)/", name))}


@pytest.mark.tier("extras")
def test_it_is_as_on_a_disk(objects, tmp_path):
    state, newer = place(make_state(1), mesh(4, 2)), place(make_state(3), mesh(4, 2))
    settings = CheckpointConfig(bucket=FOLDER, keep_last=2)
    checkpointer = Checkpointer(tmp_path, settings)
    for iteration in (1, 2, 3):
        checkpointer.save(iteration, state, {"n": iteration}, CONFIG, pass_rate=None)
    checkpointer.save(3, newer, {"n": 4}, CONFIG, pass_rate=None, is_inside=True)  # in place of the one that is there
    checkpointer.close()
    assert steps(objects) == {"2", "3"} and not (tmp_path / "checkpoints").exists()
    again = Checkpointer(tmp_path, settings)
    restored = again.restore(abstract(place(make_state(2), mesh(8, 1))), CONFIG, allow_config_changes=False)
    again.close()
    assert (restored.iteration, restored.is_inside, restored.host_state) == (3, True, {"n": 4})
    assert_same(host_copy(restored.device_state), host_copy(newer))
    for name, kept in ((FOLDER, newer), (f"{FOLDER}/2", state)):
        params, _ = restore_params(name)
        assert_same(params["norm"], np.asarray(kept["train"].params["policy"]["norm"]))


def write(folder, text):
    """Write a checkpoint as orbax does, the marker object last."""
    for name in ("state/a", "metadata", bucket.MARKER):
        (folder / name).write_text(text)


def whole(objects):
    """Return the text of the only checkpoint, which must be complete."""
    names = {f"runs/one/12/{name}" for name in ("state/a", "metadata", bucket.MARKER)}
    assert {name for _, name in objects} == names
    (text,) = {data for data, _ in objects.values()}
    return text


@pytest.mark.tier("extras")
def test_a_host_that_dies_at_any_write_leaves_the_old_or_the_new_checkpoint_whole(objects):
    folder = bucket.place(FOLDER)
    step, aside = folder / "12", folder / f"{checkpoint.ASIDE}12"
    write(step, "old")
    objects.states = [dict(objects)]
    bucket.move(step, aside)
    write(step, "new")
    checkpoint._tidy(folder)
    states = objects.states
    assert len(states) == 1 + 3 + 3 + 3 + 3  # copied, removed, written, removed

    def resumed(state):
        """Return the state in which a new start finds the checkpoints after its predecessor died.

        The start may die too.
        """
        objects.states = None
        objects.clear()
        objects.update(state)
        objects.states = []
        checkpoint._tidy(folder)
        return whole(objects), objects.states

    found = [resumed(state) for state in states]
    assert [text for text, _ in found] == [b"old"] * 9 + [b"new"] * 4
    for text, inner in found:
        assert all(resumed(state)[0] == text for state in inner)


@pytest.mark.parametrize("name", ["gs://", "gs://my-bucket", "gs://My-Bucket/run", "gs://my-bucket/a[b]/c", "gs://a/b"])
def test_what_is_no_folder_of_a_bucket_is_refused_by_name(name, tmp_path):
    with refused("checkpoint.bucket", name, "gs://BUCKET/FOLDER"):
        Checkpointer(tmp_path, CheckpointConfig(bucket=name))


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "_is_installed", lambda name: False)
    with raises_with(ConfigError, FOLDER, "gcsfs", "pip install 'jaxrl_llm[gcs]'"):
        Checkpointer(tmp_path, CheckpointConfig(bucket=FOLDER))


@pytest.mark.tier("extras")
def test_a_bucket_that_cannot_be_written_is_said(objects, tmp_path, monkeypatch):
    def fail(*_):
        raise emulation.Refused(403)

    monkeypatch.setattr(emulation.Store, "write", fail)
    with refused("checkpoint.bucket", FOLDER), claim(tmp_path, FOLDER):
        pass


def errors():
    from google.api_core import exceptions
    from google.auth.exceptions import DefaultCredentialsError, TransportError

    passing = (exceptions.ServiceUnavailable, exceptions.TooManyRequests, TransportError, ConnectionError)
    refused = (exceptions.Forbidden, exceptions.NotFound, DefaultCredentialsError)
    return [(error, MachineError) for error in passing] + [(error, ConfigError) for error in refused]


@pytest.mark.tier("extras")
def test_what_may_pass_is_no_bad_input(monkeypatch):
    """A bucket that does not answer must not end a run with the status after which nothing restarts it."""
    storage = pytest.importorskip("google.cloud.storage")
    monkeypatch.setattr(bucket, "_is_installed", lambda name: True)
    monkeypatch.setattr(storage, "Client", lambda: types.SimpleNamespace(bucket=str))
    for error, raised in errors():
        monkeypatch.setattr(bucket._Writer, "take", mock.Mock(side_effect=error("why")))
        reasons = (error.__name__, "why")
        with refused("checkpoint.bucket", FOLDER, *reasons, raises=raised), bucket.held(FOLDER, "this process"):
            pass


@pytest.mark.tier("extras")
def test_an_object_that_is_written_again_while_it_is_read_is_read_again():
    """Once, a run that waited for its predecessor was refused when the predecessor released the folder."""
    exceptions = pytest.importorskip("google.api_core.exceptions")
    gone = types.SimpleNamespace(generation=1, download_as_text=mock.Mock(side_effect=exceptions.NotFound("1")))
    newer = types.SimpleNamespace(generation=2, download_as_text=lambda timeout: "who")
    for found, expected in (([gone, newer], (2, "who")), ([gone, None], (0, ""))):
        there = types.SimpleNamespace(get_blob=mock.Mock(side_effect=found))
        assert bucket._Writer(there, "writer.txt", "me")._read() == expected


HOLDER = """
import pathlib, sys, time
from jaxrl_llm.runtime import bucket, checkpoint
bucket.BEAT_S = 0.2
with checkpoint.claim(pathlib.Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holder(workdir):
    """Start a process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, workdir, FOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def writer(objects):
    return objects["my-bucket", f"runs/one/{bucket.WRITER}"][0].decode()


@pytest.mark.tier("extras")
def test_a_second_run_is_kept_out_until_the_first_has_ended_or_is_dead(objects, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(bucket, "BEAT_S", 0.2)
    monkeypatch.setattr(bucket, "STALE_S", 3.0)
    with holder(tmp_path / "one") as first:
        holder_names = (f"process {first.pid}", f"--workdir={tmp_path / 'one'}")
        with refused("checkpoint.bucket", FOLDER, *holder_names), claim(tmp_path / "two", FOLDER):
            pass
        assert str(first.pid) in writer(objects)  # which the refused one has left alone
        first.kill()
        first.wait()
        with claim(tmp_path / "two", FOLDER):  # what the killed one left does not stay
            assert f"process {first.pid}" in capfd.readouterr().err
            assert f"process {os.getpid()} on" in writer(objects)
            time.sleep(1)  # written again meanwhile, and it stays its own
    assert not objects  # let go at the end: the next waits for nothing
    started = time.monotonic()
    with claim(tmp_path / "two", FOLDER):
        assert time.monotonic() - started < bucket.STALE_S


@pytest.mark.tier("extras")
def test_a_run_whose_folder_was_taken_over_ends(objects, tmp_path):
    """The run sent no heartbeat for so long that another run treated it as dead."""
    with holder(tmp_path) as first:
        objects["my-bucket", f"runs/one/{bucket.WRITER}"] = b"process 1 on another", 10**6
        assert first.wait(30) == 1
    assert writer(objects) == "process 1 on another"


@pytest.mark.tier("extras")
@pytest.mark.parametrize(("before", "now"), [("", FOLDER), (FOLDER, "")])
def test_a_run_whose_checkpoints_lie_elsewhere_is_not_begun_anew(before, now, tmp_path):
    pytest.importorskip("gcsfs")
    (tmp_path / "config.json").write_text(json.dumps({"checkpoint": {"bucket": before}}))
    with refused("checkpoint.bucket", now, str(tmp_path), before):
        Checkpointer(tmp_path, CheckpointConfig(bucket=now))


def test_a_run_that_has_ended_loses_no_metrics_with_its_checkpoints(tmp_path):
    """A user may remove checkpoints to save space and give the command again. The metrics must not be lost."""
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    Checkpointer(tmp_path, CheckpointConfig()).close()  # stopped before its first one
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "report.html").touch()
    with refused(f"--workdir={tmp_path}", ANY, "checkpoints", "report.html"):
        Checkpointer(tmp_path, CheckpointConfig())
    settings = tmp_path / "config.json"
    settings.write_text('{"num_iterations": 2, "checkpoint": {}}')  # a report of a run that went on, and was killed
    Checkpointer(tmp_path, CheckpointConfig()).close()
    settings.write_text('{"num_iterations": 1, "checkpoint": {}}')
    (tmp_path / "checkpoints").rmdir()
    with refused(f"--workdir={tmp_path}", ANY, "report.html"):
        Checkpointer(tmp_path, CheckpointConfig())
    (tmp_path / "metrics.jsonl").write_text("")
    Checkpointer(tmp_path, CheckpointConfig()).close()


@pytest.mark.tier("extras")
def test_nor_with_those_in_a_bucket_where_its_own_sign_stands(objects, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (tmp_path / "report.html").touch()
    (tmp_path / "config.json").write_text(json.dumps({"num_iterations": 1, "checkpoint": {"bucket": FOLDER}}))
    with claim(tmp_path, FOLDER):
        assert "process" in writer(objects)
        with refused(f"--workdir={tmp_path}", ANY, FOLDER, "report.html"):
            Checkpointer(tmp_path, CheckpointConfig(bucket=FOLDER))
        write(bucket.place(FOLDER) / "1", "a checkpoint")
        bucket.check(tmp_path, FOLDER)


def last_lines(workdir):
    """Return the last lines of the metrics, without times, and of the samples."""
    rows = [json.loads((workdir / f"{name}.jsonl").read_text().splitlines()[-1]) for name in ("metrics", "samples")]
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


@pytest.mark.tier("extras")
def test_hosts_that_share_nothing_but_a_bucket_go_on_where_others_were_stopped(objects, tmp_path):
    """The machines have empty disks. The result equals that of a run on one disk."""
    settings = SETTINGS | {"eval.num_prompts": 0, "metrics.share_rollouts": False, "checkpoint.export": False}
    disk = Job(2, tmp_path, settings, flags=(f"--workdir={tmp_path / 'disk'}",))
    statuses, outputs = disk.end()
    assert statuses == [0, 0], outputs
    settings["checkpoint.bucket"] = FOLDER

    def job(name):
        return Job(2, tmp_path, settings, of_host={i: [f"--workdir={tmp_path / f'{name}{i}'}"] for i in range(2)})

    first = job("first")
    first.until("iteration 1/")
    first.hosts[1].send_signal(signal.SIGTERM)
    statuses, outputs = first.end()
    assert statuses == [143, 143] and f"checkpoint in {FOLDER}" in outputs[0], outputs
    second = job("second")
    statuses, outputs = second.end()
    assert statuses == [0, 0] and f"from {FOLDER}" in outputs[0] and "has lost" in outputs[0], outputs
    assert {path.parent.name for path in tmp_path.glob("*/checkpoints")} == {"disk"}
    assert last_lines(tmp_path / "second0") == last_lines(tmp_path / "disk")
    assert_same(restore_params(FOLDER)[0], restore_params(tmp_path / "disk")[0])
