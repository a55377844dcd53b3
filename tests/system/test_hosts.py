"""Several hosts in one run: the same tokens, rewards and metrics as one, stopped, killed and taken up together.

Real processes of the commands, joined by jax.distributed on loopback, one CPU device each. What one host of as many
devices does is the reference. Collectives between processes add up in another order than those within one, where they
are more than two: a reference of four devices is the only process of a job, whose collectives are those of many.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import psutil
import pytest
import safetensors.numpy
from support import building, ghosts
from support.command_line import run_command
from support.refusal import ANY, check_refusal, raises_with, refused
from system.test_resume import assert_same_run, left_behind

from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import ConfigError, freeze
from jaxrl_llm.runtime import hosts
from jaxrl_llm.runtime.programs import Program, compile_all, use_cache
from jaxrl_llm.runtime.stop import StopRequest

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "debug.py"
CACHING = pathlib.Path(__file__).parents[1] / "support" / "caching.py"
DEADLINE_S = 900
ENVIRONMENTS = pathlib.Path(__file__).parents[1] / "fixtures" / "environments.py"
SETTINGS = {
    "num_iterations": 3,
    "rollout.lookahead_prompts": 8,
    "rollout.max_resample_rounds": 1,
    "sampling.stop_strings": "('q',)",
    "eval.num_prompts": 8,
    "checkpoint.every_iterations": 1,
    "metrics.compare_hosts": True,
    "metrics.share_rollouts": True,
}
# Of the plain suite: without what has programs of its own.
PLAIN = SETTINGS | {"num_iterations": 2, "rollout.max_resample_rounds": 0, "eval.num_prompts": 0}
TIMES = ("time/", "throughput/", "memory/", "compile/")


class Job:
    """The hosts that run one command or script. Each has its own output, read line by line."""

    def __init__(self, count, folder, settings, *, devices=1, of_host=None, joined=False, **how):
        command, flags, config = (how.pop(*x) for x in (("command", "train"), ("flags", ()), ("config", CONFIG)))
        run = [how.pop("script")] if "script" in how else [CACHING, f"jaxrl_llm.{command}"]
        assert not how
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        overrides = [f"--config.{name}={value}" for name, value in settings.items()]
        of_config = [f"--config={config}"] if config else []
        self.outputs, self.hosts, self.readers = [[] for _ in range(count)], [], []
        self.heard = threading.Condition()
        for i in range(count):
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
                "PYTHONUNBUFFERED": "1",
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
            }
            if count > 1 or joined:
                job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(i)}
                environment |= job
            own = (of_host or {}).get(i, [])
            host = subprocess.Popen(
                [sys.executable, *run, *of_config, *flags, *overrides, *own],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.hosts.append(host)
            self.readers.append(threading.Thread(target=self._read, args=(i,)))
            self.readers[-1].start()

    def _read(self, i):
        for line in self.hosts[i].stdout:
            with self.heard:
                self.outputs[i].append(line)
                self.heard.notify_all()
        with self.heard:
            self.heard.notify_all()

    def until(self, text, host=0):
        """Wait until a host has printed this."""
        found = lambda: any(text in line for line in self.outputs[host]) or self.hosts[host].poll() is not None
        with self.heard:
            assert self.heard.wait_for(found, DEADLINE_S), self.outputs

    def end(self):
        """Return the statuses and outputs of all hosts."""
        try:
            for host in self.hosts:
                host.wait(DEADLINE_S)
        finally:
            for host in self.hosts:
                if host.poll() is None:
                    host.kill()
            for host, reader in zip(self.hosts, self.readers, strict=True):
                reader.join()
                host.stdout.close()
        return [host.returncode for host in self.hosts], ["".join(lines) for lines in self.outputs]


def run_to_end(count, folder, name, settings, *, flags=(), **how):
    job = Job(count, folder, settings, flags=(f"--workdir={folder / name}", *flags), **how)
    statuses, outputs = job.end()
    assert statuses == [0] * count, outputs
    return folder / name


def run_through_a_stop(folder, name, settings):
    """Run two hosts and stop one by a signal. If the run was not at its end, the same command continues it."""
    job = Job(2, folder, settings, flags=(f"--workdir={folder / name}",))
    job.until("iteration 1/")
    job.hosts[1].send_signal(signal.SIGTERM)
    statuses, outputs = job.end()
    assert statuses in ([143, 143], [0, 0]), outputs
    if statuses[0]:
        assert "stopped by SIGTERM after iteration" in outputs[0]
        run_to_end(2, folder, name, settings)


def assert_nearly_same_run(one, other):
    """Assert equal tokens, rewards and counts, and nearly equal floats.

    Floats depend on the order of sums over devices (9e-6 was measured).
    """
    (_, arrays, host, metrics, samples), expected = left_behind(one), left_behind(other)
    assert samples == expected[4] and host == expected[2]
    if (other / "shared_rollouts.jsonl").exists():
        assert (one / "shared_rollouts.jsonl").read_text() == (other / "shared_rollouts.jsonl").read_text()
    if (other / "eval_after.json").exists():
        assert (one / "eval_after.json").read_text() == (other / "eval_after.json").read_text()
    for row, wanted in zip(metrics, expected[3], strict=True):
        assert row.keys() == wanted.keys()
        for key, value in row.items():
            if not key.startswith(TIMES) and key != "update/sampler_learner_gap_max_nats":  # rounding itself
                assert value == wanted[key] or abs(value - wanted[key]) < 1e-5 * max(1, abs(wanted[key])), key
    for key, array in arrays.items():
        if array.dtype == np.float32:
            np.testing.assert_allclose(array, expected[1][key], atol=3e-5, err_msg=key)
        else:
            np.testing.assert_array_equal(array, expected[1][key], err_msg=key)


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    """Return the folder of a run of one host with two devices."""
    folder = tmp_path_factory.mktemp("hosts")
    run_to_end(1, folder, "one", SETTINGS, devices=2)
    return folder


def assert_of_two(two, one):
    assert_nearly_same_run(two, one)  # other files too
    assert_same_run(two, one, same_steps=False)
    models = [safetensors.numpy.load_file(folder / "hf" / "model.safetensors") for folder in (two, one)]
    assert models[0].keys() == models[1].keys()
    for name, array in models[0].items():
        np.testing.assert_allclose(array, models[1][name], atol=3e-5, err_msg=name)


@pytest.mark.tier("hosts")  # plain: the file that one host alone reads, below; test_launch joins two processes
def test_two_hosts_are_one(tmp_path):
    """With lookahead, stop strings, shared rollouts, and groups that move between hosts."""
    rows = {"rollout.group_size": 2, "replay.capacity": 32, "update.batch_size": 16, "update.micro_batch_size": 8}
    uneven = {"rollout.chunk_steps": 1, "rollout.slots": 32, "sampling.stop_tokens": tuple(string.ascii_letters)}
    settings = PLAIN | rows | uneven | {"metrics.samples_per_iteration": 16}
    one = run_to_end(1, tmp_path, "one", settings, devices=2)
    assert_of_two(run_to_end(2, tmp_path, "two", settings), one)
    first = [json.loads(line)["group_id"] for line in (one / "samples.jsonl").read_text().splitlines()][:16]
    # The first half of the rows are those of the first device, which has opened the first half of the questions.
    assert {group_id < 8 for group_id in first[:8]} == {True, False} or {x < 8 for x in first[8:]} == {True, False}


@pytest.mark.tier("hosts")
def test_two_hosts_of_which_one_was_stopped_are_one(one_host):
    """Also with resampling and evaluation."""
    run_through_a_stop(one_host, "two", SETTINGS)
    assert_of_two(one_host / "two", one_host / "one")
    assert (one_host / "two" / "eval_after.json").exists()


@pytest.mark.tier("hosts")
def test_ctrl_c_on_one_of_two_hosts_stops_both(one_host):
    job = Job(2, one_host, SETTINGS, flags=(f"--workdir={one_host / 'interrupted'}",))
    job.until("iteration 1/")
    job.hosts[0].send_signal(signal.SIGINT)
    statuses, outputs = job.end()
    assert statuses == [130, 143] and "stopped by SIGINT after iteration" in outputs[0], outputs
    run_to_end(2, one_host, "interrupted", SETTINGS)
    assert_same_run(one_host / "interrupted", one_host / "one", same_steps=False)


@pytest.mark.tier("hosts")
@pytest.mark.parametrize(
    ("count", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        (2, {"algorithm.advantage": "poise", "rollout.max_resample_rounds": 0}),
    ],
    ids=["1", "2", "4", "2 that remember an array"],
)
def test_any_number_of_hosts_of_four_devices_is_the_same_run_bit_by_bit(tmp_path, count, changes):
    settings = SETTINGS | {"mesh.fsdp": 2, "eval.every_iterations": 1}  # the first piece's last is evaluated too
    settings |= changes
    run_to_end(1, tmp_path, "one", settings, devices=4, joined=True)
    # Stopped on one number of hosts, gone on with on another: the mesh is the same.
    half = {**settings, "num_iterations": 2}
    run_to_end(count, tmp_path, "several", half, devices=4 // count, joined=True)
    other = 4 if count == 1 else 1
    run_to_end(other, tmp_path, "several", settings, devices=4 // other, joined=True)
    assert_same_run(tmp_path / "several", tmp_path / "one")


@pytest.mark.tier("hosts")
def test_gone_on_with_on_another_mesh_and_number_of_hosts_is_nearly_the_same_run(tmp_path):
    """From data 2 x fsdp 2 on two hosts to fsdp 2 on one, and to data 2 x tensor 2 on four.

    The ring has four shards.
    """
    settings = SETTINGS | {"replay.shards": 4, "eval.every_iterations": 1, "rollout.lookahead_prompts": 0}
    run_to_end(1, tmp_path, "one", settings, devices=1)
    moves = {"flags": ("--allow_config_changes",)}
    for done, count, devices, mesh in ((1, 2, 2, {"fsdp": 2}), (2, 1, 2, {"fsdp": 2}), (3, 4, 1, {"tensor": 2})):
        of_piece = settings | {f"mesh.{axis}": n for axis, n in mesh.items()} | {"num_iterations": done}
        run_to_end(count, tmp_path, "moved", of_piece, devices=devices, **moves)
    assert_nearly_same_run(tmp_path / "moved", tmp_path / "one")


@pytest.mark.tier("hosts")
def test_stopped_on_one_of_four_hosts_again_and_again_is_bitwise_the_run_that_was_not(tmp_path):
    settings = SETTINGS | {"num_iterations": 8}
    whole = run_to_end(4, tmp_path, "whole", settings)
    chance, stops = np.random.default_rng(0), 0
    while True:
        job = Job(4, tmp_path, settings, flags=(f"--workdir={tmp_path / 'pieces'}",))
        job.until("compiled in ")
        job.until("resumed at" if stops else "iteration 1/")
        time.sleep(chance.uniform(0, 1))
        job.hosts[int(chance.integers(4))].send_signal(signal.SIGTERM)
        statuses, outputs = job.end()
        if statuses == [0] * 4:
            break
        assert statuses == [143] * 4, outputs
        stops += 1
    assert stops > 1
    assert_same_run(tmp_path / "pieces", whole, same_steps=False)


@pytest.mark.tier("hosts")
def test_sigterm_to_one_of_two_hosts_ends_a_command_that_saves_nothing(tmp_path):
    settings = {"prompts.source": "arithmetic", "num_iterations": 100_000, "eval.every_iterations": 20}
    job = Job(2, tmp_path, settings, command="sft", flags=(f"--out={tmp_path / 'model'}",))
    job.until("| ")
    job.hosts[1].send_signal(signal.SIGTERM)
    told = time.monotonic()
    statuses, outputs = job.end()
    assert time.monotonic() - told < 30 and 0 not in statuses, (statuses, outputs)
    assert "host 1 failed in: " in outputs[0] and "KeyboardInterrupt" in outputs[0], outputs


WORDS = [{"prompt": "ab" * n, "kept": n} for n in (1, 2, 3, 9, 12)]  # of two widths; no multiple of two hosts
TOKENS = [{"prompt_ids": [1, 2, 3] * n, "completion_ids": [5] * (n - 1)} for n in (1, 2, 3, 9, 12)]
SAMPLING = ("--max_tokens=12", "--stop=q", "--batch_size=2")
COMMANDS = {
    "sft": ({"prompts.source": "arithmetic", "num_iterations": 3, "eval.every_iterations": 1}, ("--out={to}",)),
    "evaluate": ({}, ("--checkpoint={run}", "--num_samples=2", "--output={to}")),
    "generate": (None, ("--model=random:debug", "--prompts={words}", "--output={to}", *SAMPLING)),
    "score": (None, ("--model=random:debug", "--input={tokens}", "--output={to}", "--batch_size=2")),
    "export": (None, ("--checkpoint={run}", "--output={to}")),
}


@pytest.mark.tier("hosts")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_two_hosts_gives_what_it_gives_on_one(one_host, command):
    settings, flags = COMMANDS[command]
    rows = {"words": WORDS, "tokens": TOKENS}
    for name, table in rows.items():
        (one_host / name).write_text("".join(json.dumps(row) + "\n" for row in table))
    said = []
    for count in (1, 2):
        places = {name: one_host / name for name in rows} | {"run": one_host / "one"}
        places["to"] = one_host / f"{command}_{count}"
        how = {"command": command, "flags": [flag.format_map(places) for flag in flags], "devices": 2 // count}
        statuses, outputs = Job(count, one_host, settings or {}, config=settings is not None and CONFIG, **how).end()
        assert statuses == [0] * count, outputs
        own = re.compile(r"^(?![IWE]\d{4}|\[Gloo\]).*\n", re.MULTILINE)  # not of jax
        texts = ["".join(own.findall(text)) for text in outputs]
        said.append(re.sub(rf"\| \d+ s|{command}_{count}", "", texts[0]))
        assert not any(texts[1:]), texts
    assert said[0] == said[1] != ""
    one, two = (one_host / f"{command}_{count}" for count in (1, 2))
    if one.is_file():
        assert_nearly_equal(jsons_of(two), jsons_of(one))
        return
    assert sorted(x.name for x in two.iterdir()) == sorted(x.name for x in one.iterdir())
    arrays, wanted = (safetensors.numpy.load_file(folder / "model.safetensors") for folder in (two, one))
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(array, wanted[name], atol=0 if command == "export" else 1e-5, err_msg=name)


def jsons_of(path):
    """Return the JSON that a command has written: one object, or one per line."""
    text = path.read_text()
    return [json.loads(line) for line in (text.splitlines() if text.startswith('{"') else [text])]


def assert_nearly_equal(one, other):
    """Assert that two values are equal, floats to 1e-5."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
    if isinstance(one, (dict, list)):
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_nearly_equal(one[key], other[key])
    else:
        assert one == (pytest.approx(other, abs=1e-5, nan_ok=True) if isinstance(one, float) else other)


@pytest.mark.tier("hosts")
@pytest.mark.parametrize(("dead", "of_it"), [(2, r"has not been heard of for \d+ s"), (0, r"is gone \(.*\)")])
def test_the_death_of_a_host_ends_the_others_with_its_name_and_what_it_was_doing(tmp_path, dead, of_it):
    """Also host 0, through which all messages of the hosts go."""
    settings = SETTINGS | {"num_iterations": 300, "metrics.compare_hosts": False}
    job = Job(4, tmp_path, settings, flags=(f"--workdir={tmp_path / 'run'}",))
    job.until("iteration 2/")
    job.hosts[dead].kill()
    killed = time.monotonic()
    statuses, outputs = job.end()
    assert time.monotonic() - killed < 60
    others = [i for i in range(4) if i != dead]
    assert statuses[dead] == -signal.SIGKILL and [statuses[i] for i in others] == [1] * 3, outputs
    for i in others:
        (line,) = re.findall(f"error: host {dead} .*", outputs[i])
        assert re.search(f"{of_it}; it was in: (generation|rewards|update)", line), line
        assert "Traceback" not in outputs[i].split("error:")[-1]
    # The next start goes on from the last checkpoint.
    done = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["iteration"]
    again = Job(
        1, tmp_path, settings | {"num_iterations": done + 1}, devices=4, flags=(f"--workdir={tmp_path / 'run'}",)
    )
    statuses, outputs = again.end()
    assert statuses == [0] and "resumed at iteration" in outputs[0], outputs


@pytest.mark.tier("hosts")  # in the plain suite by one process, below
def test_hosts_with_folders_of_their_own_are_all_refused(tmp_path):
    job = Job(2, tmp_path, {}, of_host={0: [f"--workdir={tmp_path / 'a'}"], 1: [f"--workdir={tmp_path / 'b'}"]})
    statuses, outputs = job.end()
    assert statuses == [1, 1] and all("--workdir=" in text for text in outputs), outputs


@pytest.mark.tier("hosts")  # likewise
def test_hosts_that_differ_are_all_refused_with_what_differs(tmp_path):
    job = Job(2, tmp_path, {}, flags=(f"--workdir={tmp_path / 'run'}",), of_host={1: ["--config.seed=5"]})
    statuses, outputs = job.end()
    assert statuses == [2, 2] and all("config of host 1" in text for text in outputs), outputs


DAMAGED = """
import pathlib, sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_llm.config import CheckpointConfig, Config
from jaxrl_llm.runtime import cli, hosts
from jaxrl_llm.runtime.checkpoint import Checkpointer
from jaxrl_llm.runtime.weights import restore_params

workdir = pathlib.Path(sys.argv.pop())

def main():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))  # a half on each host, in files of its own
    filled = jax.jit(lambda value: {"w": jnp.full((64, 64), value, jnp.float32)}, out_shardings=split)
    abstract = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)}
    checkpoints = Checkpointer(workdir, CheckpointConfig(keep_last=3))
    for step in (1, 2, 3):
        state = {"train": {"params": {"policy": filled(float(step))}}}
        checkpoints.save(step, state, {}, Config(), pass_rate=None)
    checkpoints.wait()
    if not hosts.is_first():
        own = [path for path in (workdir / "checkpoints/3/state/ocdbt.process_1/d").iterdir()]
        assert own
        for path in own:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    hosts.exchange("damaged")
    whole = {"train": {"params": {"policy": abstract}}}
    restored = checkpoints.restore(whole, Config(), allow_config_changes=False)
    weights, _ = restore_params(workdir, abstract)
    both = restored.device_state["train"]["params"]["policy"], weights
    values = [float(x["w"].addressable_data(0)[0, 0]) for x in both]
    checkpoints.close()
    print(restored.iteration, *hosts.exchange(values))

cli.run(main)
"""


@pytest.mark.tier("hosts")  # plain: test_checkpoint.test_a_damaged_file_makes_the_checkpoint_before_it_be_taken_...
def test_a_file_that_one_host_alone_reads_and_is_cut_short_makes_all_take_the_checkpoint_before(tmp_path):
    """Once, the hosts used different checkpoints and combined them: the result was no checkpoint."""
    (tmp_path / "damaged.py").write_text(DAMAGED)
    job = Job(2, tmp_path, {}, script=tmp_path / "damaged.py", config=None, flags=(tmp_path / "run",))
    statuses, outputs = job.end()
    assert statuses == [0, 0] and "2 [2.0, 2.0] [2.0, 2.0]\n" in outputs[0], outputs
    said = "3 is damaged: array train/params/policy/w: "
    assert outputs[0].count(said) == 2 and said not in outputs[1] and "1 is damaged" not in outputs[0], outputs


# ---- units, by one process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"JAXRL_DISTRIBUTED": "yes"}, ("JAXRL_DISTRIBUTED", "yes")),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, ("JAX_PROCESS_ID", "")),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            ("JAX_PROCESS_ID", 2, "JAX_NUM_PROCESSES=2"),
        ),
    ],
)
def test_half_a_job_is_refused_by_name(monkeypatch, environment, named):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with refused(*named):
        hosts.initialize()


@pytest.mark.parametrize(
    ("environment", "is_refused"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAXRL_DISTRIBUTED": "0"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a"}, False),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, False),
    ],
)
def test_what_runs_on_one_host_joins_no_job_of_several(monkeypatch, environment, is_refused):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    joined = []
    with refused("JAXRL_DISTRIBUTED", 0) if is_refused else contextlib.nullcontext():
        initialize(monkeypatch, lambda **_: joined.append(1), alone=True)
    assert len(joined) == ("JAX_COORDINATOR_ADDRESS" in environment and not is_refused)


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("serve", ["--model=random:debug"]),
        ("sweep", [f"--config={CONFIG.parent}/sweeps/debug.py", "--workdir=/nowhere"]),
    ],
)
def test_a_server_and_a_sweep_run_on_one_host(command, given, monkeypatch, capfd):
    """On several hosts a server would not answer, and each host of a sweep would train the same points."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    done = run_command(command, *given, monkeypatch=monkeypatch, capfd=capfd)
    assert done.status == 2
    check_refusal(done.err, "JAXRL_DISTRIBUTED", 0)


def initialize(monkeypatch, join, **how):
    """Return a function that calls ``hosts.initialize()`` with jax's own detection of a job, and undoes it."""
    monkeypatch.setattr(hosts, "_joined", threading.Event())
    monkeypatch.setattr(hosts.ctypes, "CDLL", mock.Mock())
    monkeypatch.setattr(ghosts.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(ghosts.jax.distributed, "initialize", join)
    hosts.initialize(**how)


@pytest.mark.parametrize("address", [None, "a:1"])
def test_what_another_job_left_makes_no_slices_of_this_one(monkeypatch, address):
    """If the launcher names the slices' coordinator, the variables belong to this job."""
    for name, value in {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "JAXRL_DISTRIBUTED": "1"}.items():
        monkeypatch.setenv(name, value)
    if address:
        monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", address)
    joined = []
    initialize(monkeypatch, lambda **_: joined.append(dict(os.environ)))
    left = {name for name in joined[0] if name.startswith("MEGASCALE_")}
    expected = {"MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"}
    assert left == (expected if address else set())


def test_a_host_without_a_sign_of_life_is_given_up_after_40_seconds(monkeypatch):
    """With jax's own 100 and 300 seconds, the other hosts would wait much longer."""
    for name, value in {"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": "3", "PROCESS_ID": "2"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    joined = []
    initialize(monkeypatch, lambda **given: joined.append(given))
    job = {"coordinator_address": "a:1", "num_processes": 3, "process_id": 2}
    assert joined[0].pop("initialization_timeout") == 1200  # for all to come: some are still being made
    assert joined == [{**job, "heartbeat_timeout_seconds": 40, "shutdown_timeout_seconds": 40}]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RuntimeError("DEADLINE_EXCEEDED: 1 of 2"), hosts.MachineError, "DEADLINE_EXCEEDED: 1 of 2"),
        (ValueError("coordinator_address should be defined."), ConfigError, "coordinator_address"),
    ],
    ids=["the others do not come", "nothing names a job"],
)
def test_a_job_that_cannot_be_joined_is_said(monkeypatch, error, raised, message):
    def fail(**_):
        raise error

    monkeypatch.setenv("JAXRL_DISTRIBUTED", "1")
    with raises_with(raised, message):
        initialize(monkeypatch, fail)


@pytest.mark.tier("hosts")  # plain: test_a_process_that_hangs_says_where
def test_a_host_whose_job_does_not_come_ends_with_the_status_of_a_fault():
    """Launchers restart a run after this status, but not after bad input, 2."""
    script = "from jaxrl_llm.runtime import cli, hosts\nhosts.JOIN_S = 2\ncli.run(lambda: None)"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        names = {"COORDINATOR_ADDRESS": f"127.0.0.1:{nobody.getsockname()[1]}", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
        environment = {**os.environ, **{f"JAX_{name}": value for name, value in names.items()}}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "error: this process cannot join its job: some did not come in 2 s"


@pytest.mark.parametrize(
    ("environment", "is_found"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ],
    ids=str,
)
def test_a_process_is_of_a_job_where_its_launcher_says_so(monkeypatch, environment, is_found):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    joined = []
    initialize(monkeypatch, lambda **given: joined.append(given))
    assert len(joined) == is_found


def test_processes_that_jax_finds_and_that_have_not_joined_are_told_how(monkeypatch):
    """On a TPU pod each process would wait for the others, which cannot reach it."""
    monkeypatch.setattr(hosts, "count", lambda: 4)
    with refused("JAXRL_DISTRIBUTED", 1, "4 processes"):
        hosts.exchange("anything")


def test_a_process_that_has_joined_no_job_opens_no_devices(monkeypatch):
    """A TPU belongs to one process. Once, a sweep opened it before its workers, and a report next to its run."""
    monkeypatch.setattr(hosts, "count", lambda: pytest.fail("jax was asked"))
    hosts.end_at_sigterm()
    with hosts.together(lambda _: 1), StopRequest() as stop:
        stop.check()


def test_what_a_run_is_of_is_compared_before_it_begins(monkeypatch, tmp_path):
    class ComparedError(Exception):
        pass

    def agree(**facts):
        raise ComparedError(facts)

    monkeypatch.setattr(hosts, "agree", agree)
    mapping = building.settings_of(CONFIG, {"seed": 5, "prompts.size": 3, "eval.num_prompts": 0})
    with pytest.raises(ComparedError) as compared:
        train_module.train(freeze(mapping), tmp_path / "run")
    (facts,) = compared.value.args
    assert json.loads(facts["config"])["seed"] == 5
    assert [prompt for prompt, _ in facts["questions"]] == [f"Write letters like {x}:" for x in "abc"]


def test_questions_that_differ_are_named_with_where(monkeypatch):
    def exchange(value):
        return [value, {**value, "questions": "-"} if isinstance(value, dict) else value.replace("2 + 3", "2 + 4")]

    monkeypatch.setattr(hosts, "count", lambda: 2)
    monkeypatch.setattr(hosts, "exchange", exchange)
    with raises_with(ConfigError, "questions", "host 1", "host 0", "2 + 4", "2 + 3"):
        hosts.agree(config="same", questions=[("1 + 1", {}), ("2 + 3", {})])


def test_another_program_stops_all_hosts_before_any_is_compiled(monkeypatch):
    """``decode`` multiplies by 2 here and by 3 on host 1; ``publish`` is the same on both."""
    said = []

    def exchange(value):
        said.append(value)
        return [value, {**value, "program decode": "-"} if isinstance(value, dict) else value.replace("2.0", "3.0")]

    monkeypatch.setattr(hosts, "count", lambda: 2)
    monkeypatch.setattr(hosts, "exchange", exchange)
    monkeypatch.setattr(ghosts.jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled"))
    one = (ghosts.jax.ShapeDtypeStruct((2,), np.float32),)
    programs = {"publish": Program(lambda x: x, one), "decode": Program(lambda x: 2 * x, one)}
    with raises_with(ConfigError, "program decode", "host 1", "host 0", "3.0", "2.0"):
        compile_all(programs, building.mesh_of(building.ONE))
    assert set(said[0]) == {"code", "program publish", "program decode"} and len(set(said[0].values())) == 3


class Meeting:
    """The result of ``exchange`` if the hosts pass these values."""

    def __init__(self, monkeypatch, *others):
        monkeypatch.setattr(hosts, "count", lambda: 1 + len(others))
        monkeypatch.setattr(hosts, "exchange", lambda value: [value, *others])


def test_a_list_is_completed_by_those_who_have_its_parts(monkeypatch):
    Meeting(monkeypatch, [None, 2, None, 0], [None, None, None, None])
    assert hosts.complete([1, None, None, None]) == [1, 2, None, 0]


def test_a_folder_that_another_host_does_not_find_is_refused(tmp_path, monkeypatch):
    Meeting(monkeypatch, False)
    (tmp_path / "lock").write_text("of host 0")
    with refused(f"--workdir={tmp_path}", ANY, "host 1", raises=hosts.MachineError):
        hosts.find(tmp_path, "of host 0")


def test_a_disk_that_shows_late_what_another_host_wrote_is_waited_for(tmp_path, monkeypatch):
    assert hosts.FIND_S >= 60  # so long a mount of NFS keeps what it knows
    monkeypatch.setattr(hosts, "FIND_S", 30.0)
    Meeting(monkeypatch, True)
    (tmp_path / "lock").write_text("of the run before")
    late = threading.Timer(0.5, (tmp_path / "lock").write_text, ["of host 0"])
    late.start()
    hosts.find(tmp_path, "of host 0")
    late.join()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(hosts.MachineError):
        patch.setattr(hosts, "FIND_S", 0.3)
        hosts.find(tmp_path, "never written")


class Others:
    """One more host with the same environment. It sees this host's files, or does not."""

    def __init__(self, monkeypatch, *, sees):
        self.seen = []

        def exchange(value):
            if isinstance(value, tuple):
                return [value, (value[0], "its own")]
            self.seen.append(value)
            return [value, sees if isinstance(value, bool) else value]

        monkeypatch.setattr(hosts, "count", lambda: 2)
        monkeypatch.setattr(hosts, "exchange", exchange)


@pytest.fixture
def cache(monkeypatch):
    """Return a function ``cache(folder, platform)``: the folder of jax's cache after ``use_cache`` on such devices."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    config = ghosts.jax.config
    before = config.jax_compilation_cache_dir, config.jax_persistent_cache_min_compile_time_secs

    def used(folder, platform):
        monkeypatch.setattr(ghosts.jax, "default_backend", lambda: platform)
        use_cache(str(folder))
        return config.jax_compilation_cache_dir

    yield used
    config.update("jax_compilation_cache_dir", before[0])
    config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_a_cache_of_programs_that_not_all_hosts_share_is_left_off_on_gpus(tmp_path, monkeypatch, cache, capfd):
    """Hosts tune a GPU's programs together. A host that reads its own cache would leave the others waiting."""
    others = Others(monkeypatch, sees=False)
    assert cache(tmp_path / "own", "gpu") is None
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {tmp_path / 'own'} ")
    assert others.seen[-1] is True and not list((tmp_path / "own").iterdir())
    for platform in ("cpu", "tpu"):
        assert cache(tmp_path / "own", platform) == str(tmp_path / "own")
    Others(monkeypatch, sees=True)
    assert cache(tmp_path / "shared", "gpu") == str(tmp_path / "shared")
    assert capfd.readouterr().err == "" and not list((tmp_path / "shared").iterdir())


def test_a_cache_that_the_environment_names_is_looked_at_too(tmp_path, monkeypatch, cache, capfd):
    Others(monkeypatch, sees=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # jax has read it when it was imported
    ghosts.jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert cache("", "gpu") is None and f"warning: {tmp_path} " in capfd.readouterr().err
    ghosts.jax.config.update("jax_compilation_cache_dir", "gs://bucket/of/all")
    assert cache("", "gpu") == "gs://bucket/of/all"


def test_a_copy_that_is_another_is_named(monkeypatch):
    tree = {"weights": np.float32([1, 2])}
    tree = {name: ghosts.jnp.asarray(x) for name, x in tree.items()}
    Meeting(monkeypatch, {**hosts.checksums(tree), "seen": "3"})
    hosts.agree_on_copies(tree, seen=3)
    with raises_with(RuntimeError, "seen of host 1"):
        hosts.agree_on_copies(tree, seen=4)
    Meeting(monkeypatch, {name: "0" for name in hosts.checksums(tree)})
    with raises_with(RuntimeError, "weights", "host 1"):
        hosts.agree_on_copies(tree)


def test_a_process_that_hangs_says_where():
    script = "import time; from jaxrl_llm.runtime import hosts; hosts.HANGING_S = 0.3; hosts.doing('waiting')"
    command = [sys.executable, "-c", f"{script}\ndef lost(): time.sleep(1.2)\nlost()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("Timeout (0:00:00.3") >= 2 and "in lost" in done.stderr


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "max\n"}, 4096),
        ("4:memory:/pod\n2:cpu:/pod\n", {"memory/memory.limit_in_bytes": "8192\n"}, 8192),
        ("0::/\n", {}, None),
        ("", {}, None),
    ],
    ids=["of a job's step", "of a container that shows its place outside", "none", "no groups"],
)
def test_memory_is_what_the_container_or_job_has(group, limits, expected, tmp_path):
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hosts.memory_bytes(tmp_path) == (expected or psutil.virtual_memory().total)


def test_a_run_of_one_host_asks_nobody(tmp_path, monkeypatch):
    ghosts.haunt(monkeypatch)
    monkeypatch.setattr(hosts, "_service", None)
    mapping = building.settings_of(CONFIG, {"num_iterations": 2, "metrics.compare_hosts": True})
    assert train_module.train(freeze(mapping), tmp_path / "run") == 0


@pytest.mark.tier("hosts")
@pytest.mark.parametrize("mesh", [{}, {"mesh.tensor": 2}], ids=["rows of each", "rows of both"])
def test_two_hosts_are_one_with_an_environment_and_go_on_with_episodes_in_flight(tmp_path, mesh):
    """Only one host asks the environment for a row. A checkpoint has the turns of both hosts."""
    turns = {"environments.factory": f"{ENVIRONMENTS}:brief", "environments.max_answer_tokens": 2}
    turns |= {"prompts.chat_template": False, "sampling.max_completion_tokens": 24, "sampling.stop_strings": "()"}
    turns |= {"sampling.stop_tokens": tuple("abcdefgh"), "rollout.chunk_steps": 3, "rollout.slots": 16}
    settings = SETTINGS | turns | mesh | {"metrics.share_rollouts": False}
    run_to_end(1, tmp_path, "one", settings, devices=2)
    run_through_a_stop(tmp_path, "two", settings)
    assert_same_run(tmp_path / "two", tmp_path / "one", same_steps=False)
    assert min(row["rollout/turns_mean"] for row in left_behind(tmp_path / "one")[3]) > 1.2
