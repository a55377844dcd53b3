"""Checkpoints: the saved state is restored, incomplete checkpoints are never found, changed settings are refused."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.comparing import assert_same
from support.refusal import raises_with, refused
from support.tiers import mostly_in

from jaxrl_llm.config import CheckpointConfig, Config, ConfigError, freeze, to_json
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.runtime import checkpoint, checkpoint_files, hosts
from jaxrl_llm.runtime.checkpoint import Checkpointer
from jaxrl_llm.runtime.checkpoint_files import digest
from jaxrl_llm.runtime.hosts import MachineError
from jaxrl_llm.runtime.weights import restore_params
from jaxrl_llm.types import TrainState

CONFIG = freeze({"prompts": {"arguments": {"terms": (1, 2)}}})


def mesh(data: int, fsdp: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def make_state(seed: int = 0) -> Any:
    """Return weights, AdamW state, a critic, a ring and two empty entries.

    The ring is on the data axis and has small integer types. The entries are a None and an empty subtree.
    """
    key = jax.random.key(seed)
    params = {"layers": {"q": jax.random.normal(key, (16, 8))}, "norm": jnp.arange(8, dtype=jnp.bfloat16)}
    head = {"kernel": jnp.full((8, 2), seed, jnp.float32), "bias": jnp.ones(2)}
    learned = {"policy": params, "critic": head}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "train": TrainState(learned, {name: optimizer.init(x) for name, x in learned.items()}, jnp.int32(seed)),
        "ring": {"tokens": jnp.arange(64, dtype=jnp.int32).reshape(8, 8) + seed, "ref_logp": None, "extra": {}},
        "slots": (jnp.full((4,), seed, jnp.int8), jnp.array([True, False])),
    }


def place(state: Any, m: jax.sharding.Mesh) -> Any:
    def spec(x: jax.Array) -> P:
        return P(("data", "fsdp")) if x.ndim and x.shape[0] % 8 == 0 else P()

    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(m, spec(x))), state)


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def host_copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def save(checkpointer: Checkpointer, iteration: int, state: Any, pass_rate: float | None = None, **host: Any) -> None:
    checkpointer.save(iteration, state, host, CONFIG, pass_rate=pass_rate)


@pytest.fixture
def checkpointer(tmp_path):
    with_two = Checkpointer(tmp_path, CheckpointConfig(keep_last=2))
    yield with_two
    with_two.close()


def test_restored_state_is_bitwise_the_saved_one_on_the_same_and_on_another_mesh(checkpointer, tmp_path):
    state = place(make_state(), mesh(8, 1))
    save(checkpointer, 3, state, cursor={"epoch": 1}, seed=7)
    checkpointer.wait()
    for m in (mesh(8, 1), mesh(2, 4)):
        target = abstract(place(make_state(1), m))
        restored = checkpointer.restore(target, CONFIG, allow_config_changes=False)
        assert (restored.iteration, restored.host_state) == (3, {"cursor": {"epoch": 1}, "seed": 7})
        assert restore_params(tmp_path)[1] == freeze({"prompts": {"arguments": {"terms": [1, 2]}}})
        assert_same(restored.device_state, state)
        shardings = jax.tree.map(lambda x: x.sharding, restored.device_state)
        assert shardings == jax.tree.map(lambda x: x.sharding, target)


@pytest.mark.parametrize("layout", mostly_in("slow", ["sharded", "one device", "replicated"]))
def test_saved_bytes_are_those_at_the_time_of_save_though_the_buffers_are_donated_at_once(checkpointer, layout):
    m = mesh(8, 1)
    sharding = {
        "one device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        "sharded": NamedSharding(m, P("data")),
        "replicated": NamedSharding(m, P()),
    }[layout]
    count = 2 if layout == "replicated" else 4  # every device has all of it
    # 8 MB each: large enough that nothing is copied for being small, and that the write takes longer than the updates.
    fill = jax.jit(
        lambda k: {f"w{i}": jax.random.normal(k, (2048, 1024)) + i for i in range(count)},
        out_shardings={f"w{i}": sharding for i in range(count)},
    )
    state = jax.block_until_ready(fill(jax.random.key(0)))
    expected = host_copy(fill(jax.random.key(0)))
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.5 - 7.0, tree), donate_argnums=0)
    target = abstract(state)
    jax.block_until_ready(overwrite(fill(jax.random.key(1))))  # compiled before, so that it runs at once below

    save(checkpointer, 1, state)
    for _ in range(3):
        state = overwrite(state)
    jax.block_until_ready(state)
    checkpointer.wait()
    restored = checkpointer.restore(target, CONFIG, allow_config_changes=False)
    assert_same(restored.device_state, expected)


def test_saving_compiles_nothing(checkpointer, caplog):
    replicated = jax.device_put(jnp.ones((24, 40)), NamedSharding(mesh(8, 1), P()))
    state = jax.block_until_ready({"train": place(make_state(), mesh(2, 4)), "replicated": replicated})
    programs = {part: jax.jit(checksums).lower(arrays).compile() for part, arrays in state.items()}
    with jax.log_compiles():
        checkpointer.save(1, state, {}, CONFIG, pass_rate=None, checksums=lambda part, x: programs[part](x))
        checkpointer.wait()
    assert "ompil" not in caplog.text


def test_host_state_is_that_at_the_time_of_save(checkpointer):
    host = {"cursor": [1]}
    checkpointer.save(1, make_state(), host, CONFIG, pass_rate=None)
    host["cursor"].append(2)
    assert restore(checkpointer).host_state == {"cursor": [1]}


def restore(checkpointer: Checkpointer, **kwargs: Any):
    checkpointer.wait()
    return checkpointer.restore(abstract(make_state()), CONFIG, allow_config_changes=False, **kwargs)


def test_without_a_checkpoint_restore_is_none(checkpointer):
    assert restore(checkpointer) is None
    assert checkpointer.latest_iteration() is None


def test_the_last_n_and_the_best_are_kept(tmp_path):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
    for iteration, pass_rate in enumerate((0.2, 0.9, None, 0.5, None), start=1):
        save(checkpointer, iteration, make_state(iteration), pass_rate)
    checkpointer.wait()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "5"]
    assert int(restore(checkpointer, iteration=2).device_state["train"].step) == 2
    assert int(restore(checkpointer).device_state["train"].step) == 5
    checkpointer.close()


def test_the_best_is_kept_when_a_resumed_run_saves_on(tmp_path):
    for steps in ({1: 0.9, 2: 0.1}, {3: None}, {4: 0.5}):
        checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
        for iteration, pass_rate in steps.items():
            save(checkpointer, iteration, make_state(iteration), pass_rate)
        checkpointer.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "4"]


def test_a_run_that_is_stopped_twice_in_an_iteration_keeps_its_best(tmp_path):
    """The second stop comes before the run has continued: there is no pass rate and no open iteration then."""
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
    save(checkpointer, 5, make_state(5), 0.7)
    checkpointer.save(5, make_state(5), {}, CONFIG, pass_rate=None, is_inside=True)
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
    assert restore(checkpointer).is_inside
    for iteration, pass_rate in ((5, None), (6, 0.1), (7, 0.1)):
        save(checkpointer, iteration, make_state(iteration), pass_rate)
    checkpointer.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["5", "7"]


def test_saving_an_iteration_again_is_harmless_and_going_back_forgets_the_future(checkpointer):
    for iteration in (1, 2):
        save(checkpointer, iteration, make_state(iteration))
        save(checkpointer, iteration, make_state(iteration))
    restore(checkpointer, iteration=1)
    save(checkpointer, 1, make_state(1))
    assert checkpointer.latest_iteration() == 2
    save(checkpointer, 2, make_state(5))
    assert int(restore(checkpointer).device_state["train"].step) == 5
    with raises_with(ConfigError, "iteration 9", "[1, 2]"):
        restore(checkpointer, iteration=9)


def test_what_is_still_being_written_is_waited_for(checkpointer):
    save(checkpointer, 1, make_state(1))
    target = abstract(make_state())
    assert checkpointer.restore(target, CONFIG, allow_config_changes=False).iteration == 1


def test_saving_does_not_ask_jax_whether_it_is_to_stop(checkpointer, monkeypatch):
    # jax compares what it is asked for with the check that all hosts agreed on: the checks of ``stop``, one by one.
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    for iteration in (1, 2):
        save(checkpointer, iteration, make_state(iteration))
    checkpointer.wait()
    assert not asked


def test_the_seconds_of_a_write_are_told_once_it_is_whole(checkpointer, tmp_path, monkeypatch, capfd):
    assert checkpointer.last_write() == "" and checkpointer.check() == {}
    began = time.monotonic()
    save(checkpointer, 1, make_state(1))
    checkpointer.wait()
    took = time.monotonic() - began
    told = checkpointer.check()
    assert 0 < told["time/checkpoint_s"] <= took and checkpointer.check() == {}
    again = Checkpointer(tmp_path, CheckpointConfig())
    seconds = f"{told['time/checkpoint_s']:.1f}"
    assert again.last_write() == f"; the last was written in {seconds} s, within checkpoint.grace_s=30"
    assert again.check() == {} and capfd.readouterr().err == ""
    save(again, 2, make_state(2))
    again.wait()
    monkeypatch.setattr(checkpoint_files, "steps_in", mock.Mock(side_effect=MachineError("the disk hangs")))
    assert again.check() == {}  # the checkpoint is whole: a figure ends no run
    monkeypatch.undo()
    again.close()


def test_between_two_saves_nobody_looks_into_the_folder(checkpointer, monkeypatch):
    """Each iteration asks whether a checkpoint is due. Listing the bucket each time would cost a request."""
    save(checkpointer, 1, make_state(1))
    checkpointer.wait()
    assert checkpointer.check()
    monkeypatch.setattr(checkpoint, "_tidy", lambda directory: pytest.fail("listed"))
    monkeypatch.setattr(checkpoint.checkpoint_files, "steps_in", lambda directory: pytest.fail("listed"))
    assert checkpointer.check() == {}


def test_what_went_wrong_in_a_save_is_raised_by_the_next_check(checkpointer, monkeypatch):
    def failing(*_, **__):
        raise OSError("no space left")

    save(checkpointer, 1, make_state(1))
    checkpointer.wait()
    checkpointer.check()
    monkeypatch.setattr(os, "rename", failing)
    monkeypatch.setattr(os, "replace", failing)
    save(checkpointer, 2, make_state(2))
    while checkpointer._manager.is_saving_in_progress():
        time.sleep(0.01)
    with pytest.raises(OSError, match="no space left"):
        checkpointer.check()


def test_a_host_whose_write_fails_ends_all_and_does_not_wait_for_the_others(checkpointer, monkeypatch):
    """Otherwise the other hosts would wait for its write for up to 20 minutes, and could not save."""
    met, said = [], []
    service = types.SimpleNamespace(wait_at_barrier=lambda key, timeout_ms: met.append(len(said)))
    monkeypatch.setattr(hosts, "is_alone", lambda: False)
    monkeypatch.setattr(hosts, "_service", lambda: service)
    monkeypatch.setattr(hosts, "_end", lambda error, status: f"{status} {error}")
    monkeypatch.setattr(hosts, "_leave", said.append)
    save(checkpointer, 1, make_state(1))
    checkpointer.wait()
    assert met and not said
    met.clear()
    monkeypatch.setattr(ocp.JsonCheckpointHandler, "finalize", mock.Mock(side_effect=OSError("no space left")))
    save(checkpointer, 2, make_state(2))
    with pytest.raises(OSError, match="no space left"):
        checkpointer.wait()
    assert set(said) == {"1 no space left"} and met[-1] > 0  # those before are of the beginning of the save


@pytest.mark.parametrize(("grace_s", "warns"), [(2.0, True), (3.0, False)])
def test_a_write_that_takes_longer_than_the_grace_is_warned_of(grace_s, warns, tmp_path, capfd):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(grace_s=grace_s))
    save(checkpointer, 1, make_state(1))
    checkpointer.wait()
    said = tmp_path / "checkpoints" / "1" / "_CHECKPOINT_METADATA"
    times = {"init_timestamp_nsecs": 10**18, "commit_timestamp_nsecs": 10**18 + 2_500_000_000}
    said.write_text(json.dumps(json.loads(said.read_text()) | times))
    assert checkpointer.check() == {"time/checkpoint_s": 2.5}
    late = "; the last was written in 2.5 s, too long for a preemption: checkpoint.grace_s=2"
    assert capfd.readouterr().err == (f"warning: checkpoint 1{late}\n" if warns else "")
    in_time = "; the last was written in 2.5 s, within checkpoint.grace_s=3"
    assert checkpointer.last_write() == (late if warns else in_time)
    for text in ("", "{}", '{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": null}'):
        said.write_text(text)
        assert checkpointer.last_write() == ""
    checkpointer.close()


def test_a_half_written_checkpoint_is_never_found(tmp_path):
    first = Checkpointer(tmp_path, CheckpointConfig())
    save(first, 1, make_state(1))
    first.close()
    root = tmp_path / "checkpoints"
    for name in ("2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-1234"):
        shutil.copytree(root / "1", root / name)
        shutil.rmtree(root / name / "state")
    params, _ = restore_params(tmp_path)
    assert params["norm"].shape == (8,)
    second = Checkpointer(tmp_path, CheckpointConfig())
    assert second.latest_iteration() == 1
    save(second, 2, make_state(2))
    assert int(restore(second).device_state["train"].step) == 2
    second.close()


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
from jaxrl_llm.runtime.checkpoint import Checkpointer
from jaxrl_llm.config import CheckpointConfig, Config
checkpointer = Checkpointer(sys.argv[1], CheckpointConfig())
state = lambda i: jax.block_until_ready({"w": jnp.full((4096, 4096), float(i))})
checkpointer.save(1, state(1), {"i": 1}, Config(), pass_rate=None)
checkpointer.wait()
checkpointer.save(2, state(2), {"i": 2}, Config(), pass_rate=None)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.tier("kills")  # plain: test_a_damaged_file_makes_the_checkpoint_before_it_be_taken_...
def test_a_process_killed_while_writing_leaves_a_whole_checkpoint(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert killed.returncode == -signal.SIGKILL
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    target = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    restored = checkpointer.restore(target, Config(), allow_config_changes=False)
    # The write of 2 may have won the race; whichever is found is whole.
    assert restored.host_state == {"i": restored.iteration}
    assert np.all(np.asarray(restored.device_state["w"]) == restored.iteration)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if "tmp" in p.name] == []
    checkpointer.close()


def change(**sections: Any) -> Config:
    return dataclasses.replace(
        CONFIG,
        **{
            name: dataclasses.replace(getattr(CONFIG, name), **value) if isinstance(value, dict) else value
            for name, value in sections.items()
        },
    )


def test_a_checkpoint_of_another_version_is_named_and_said_to_be_one(copy):
    """The error names the checkpoint, not only the unknown setting."""
    checkpoint = copy / "checkpoints" / "2"
    text = json.loads((checkpoint / "config" / "metadata").read_text())
    host = json.loads((checkpoint / "host" / "metadata").read_text())
    del text["digest"]
    text["config"]["update"]["old_setting"] = 3
    (checkpoint / "config" / "metadata").write_text(json.dumps(text | {"digest": digest(host, text)}))
    for read in (resume, restore_params):
        with refused("update.old_setting", 3, str(checkpoint)):
            read(copy)


def test_changed_settings_are_refused_by_name_unless_allowed(checkpointer):
    save(checkpointer, 1, make_state())
    checkpointer.wait()
    target = abstract(make_state())
    changed = change(seed=3, optimizer={"learning_rate": 0.5})
    with raises_with(ConfigError, "seed 0 -> 3", "optimizer.learning_rate 1e-05 -> 0.5") as error:
        checkpointer.restore(target, changed, allow_config_changes=False)
    assert "\n" not in str(error.value)
    assert checkpointer.restore(target, changed, allow_config_changes=True).iteration == 1
    # Some settings change the meaning of saved rows although the arrays still fit. They must not be changed.
    regrouped = change(rollout={"group_size": 4}, replay={"capacity": 64}, prompts={"max_tokens": 20}, seed=3)
    with raises_with(ConfigError, "rollout.group_size 8 -> 4", "prompts.max_tokens") as error:
        checkpointer.restore(target, regrouped, allow_config_changes=True)
    assert "seed" not in str(error.value) and "--allow_config_changes" not in str(error.value)
    # The reward functions must not change if the run was stopped between rounds: earlier rounds have scores.
    other = change(rewards={"functions": ("length",)}, seed=3)
    assert checkpointer.restore(target, other, allow_config_changes=True).iteration == 1
    checkpointer.save(2, make_state(), {"rounds": [{}]}, CONFIG, pass_rate=None, is_inside=True)
    checkpointer.wait()
    with raises_with(ConfigError, "rewards.functions ('task',) -> ('length',)") as error:
        checkpointer.restore(target, other, allow_config_changes=True)
    assert "seed" not in str(error.value) and "--allow_config_changes" not in str(error.value)


def test_rows_in_pages_are_not_cut(checkpointer):
    """Pages have the same shape for shorter completions, so a longer saved row would lose its end."""
    padded = make_state()
    paged = padded | {"ring": padded["ring"] | {"pages": {"first": jnp.zeros((8, 4), jnp.int32)}}}
    shorter, longer = (change(sampling={"max_completion_tokens": n}) for n in (8, 32))
    for iteration, state, allowed in ((1, padded, (longer, shorter)), (2, paged, (longer,))):
        save(checkpointer, iteration, state)
        checkpointer.wait()
        for config in allowed:
            found = checkpointer.restore(abstract(state), config, allow_config_changes=True)
            assert found.iteration == iteration
    with raises_with(ConfigError, "sampling.max_completion_tokens 16 -> 8"):
        checkpointer.restore(abstract(paged), shorter, allow_config_changes=True)


def test_a_run_does_not_go_back(checkpointer):
    """Otherwise the run would end at once, with fewer iterations than it had."""
    save(checkpointer, 3, make_state())
    checkpointer.wait()
    with refused("num_iterations", 2, "3"):
        checkpointer.restore(abstract(make_state()), change(num_iterations=2), allow_config_changes=True)


def test_another_function_or_setting_of_it_or_file_of_ones_own_is_refused(checkpointer, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def halved(x, *, weight: float = 0.5):\n    return weight * x.reward\n")
    method = {"surrogate": {"high": 0.3}, "reward_terms": [f"{own}:halved"]}
    config = freeze({"algorithm": method})
    checkpointer.save(1, make_state(), {}, config, pass_rate=None)
    checkpointer.wait()
    target = abstract(make_state())
    assert checkpointer.restore(target, config, allow_config_changes=False).iteration == 1

    def refusal(**changed):
        with pytest.raises(ConfigError) as error:
            checkpointer.restore(target, freeze({"algorithm": method | changed}), allow_config_changes=False)
        return str(error.value)

    assert "algorithm.surrogate.high 0.3 -> 0.2" in refusal(surrogate="clipped")
    said = refusal(surrogate={"name": "cispo", "high": 0.3})
    assert "algorithm.surrogate 'clipped' -> 'cispo'" in said and "algorithm.surrogate.high" not in said
    assert f"algorithm.reward_terms ('{own}:halved',) -> ()" in refusal(reward_terms=[])
    assert f"algorithm.reward_terms.{own}:halved.weight 0.5 -> 1.0" in refusal(
        reward_terms=[{"name": f"{own}:halved", "weight": 1.0}]
    )
    own.write_text(own.read_text() + "# another\n")
    assert f"algorithm.reward_terms.{own}:halved.source '" in refusal()


@pytest.mark.parametrize(
    "settings",
    [
        {"rewards": {"functions": ("FILE:f",)}},
        {"environments": {"factory": "FILE:f"}, "sampling": {"max_completion_tokens": 256}},
        {"external": {"paths": ("FILE:f",), "groups_per_iteration": 1}, "replay": {"capacity": 72}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_another_content_of_a_file_of_ones_own_is_refused(checkpointer, tmp_path, settings):
    file = tmp_path / "mine.py"
    file.write_text(first := "def f(prompts, completions): return [0.0] * len(prompts)\n")
    again = lambda: freeze(json.loads(json.dumps(settings).replace("FILE", str(file))))  # as a process of its own
    config = again()
    state = place(make_state(), mesh(8, 1))
    checkpointer.save(1, state, {}, config, pass_rate=None)
    checkpointer.wait()
    checkpointer.check_config(again(), abstract(state), allow_changes=False)
    file.write_text("def f(prompts, completions): return [1.0] * len(prompts)\n")
    checkpointer.save(2, state, {}, config, pass_rate=None)  # the run goes on with the function that it began with
    checkpointer.wait()
    with raises_with(ConfigError, "mine.py:f", "--allow_config_changes"):
        checkpointer.check_config(again(), abstract(state), allow_changes=False)
    checkpointer.check_config(again(), abstract(state), allow_changes=True)
    file.write_text(first)
    checkpointer.check_config(again(), abstract(state), allow_changes=False)


def test_a_checkpoint_is_due_by_iterations_and_by_minutes(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    settings = CheckpointConfig(every_iterations=4, every_minutes=2.0)
    with contextlib.closing(Checkpointer(tmp_path, settings)) as found:
        assert [found.is_due(i) for i in (3, 4)] == [False, True]
        now[0] += 119
        assert not found.is_due(5)
        now[0] += 1
        assert found.is_due(5)
        save(found, 5, place(make_state(), mesh(8, 1)))
        assert not found.is_due(6)
    with contextlib.closing(Checkpointer(tmp_path, CheckpointConfig(every_minutes=0.0))) as found:
        now[0] += 1e6
        assert not found.is_due(8)


def test_one_is_due_that_would_be_kept_for_its_pass_rate(tmp_path, monkeypatch):
    with contextlib.closing(Checkpointer(tmp_path, CheckpointConfig(keep_last=1, keep_best=2))) as found:
        assert not found.is_due(1) and not found.is_due(1, None) and found.is_due(1, 0.0)
        for iteration, pass_rate in ((2, 0.5), (4, None), (6, 0.7)):
            save(found, iteration, make_state(iteration), pass_rate)
        assert [found.is_due(8, rate) for rate in (0.4, 0.5, 0.6, 0.8, None)] == [False, False, True, True, False]
        assert found.is_due(3, 0.4)  # of a run that has gone back: what comes later is no longer its own
        monkeypatch.setattr(checkpoint.hosts, "exchange", lambda own: [(0.0, not own[1])])  # the first host says so
        assert [found.is_due(8, rate) for rate in (0.4, 0.8)] == [True, False]
    with contextlib.closing(Checkpointer(tmp_path, CheckpointConfig())) as found:
        monkeypatch.undo()
        assert not found.is_due(8, 1.0)


def test_settings_that_change_no_result_may_change(checkpointer):
    save(checkpointer, 1, make_state())
    checkpointer.wait()
    free = change(
        num_iterations=99,
        checkpoint={"keep_last": 9},
        metrics={"tensorboard": False},
        rewards={"num_workers": 7},
        optimizer={"offload": True},
        replay={"memory": "host"},
        eval={"every_iterations": 5},
    )
    assert checkpointer.restore(abstract(make_state()), free, allow_config_changes=False).iteration == 1


def test_a_decaying_schedule_makes_the_length_of_the_run_matter(tmp_path):
    decaying = change(optimizer={"schedule": "cosine"})
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.save(1, make_state(), {}, decaying, pass_rate=None)
    checkpointer.wait()
    longer = dataclasses.replace(decaying, num_iterations=99)
    with raises_with(ConfigError, "num_iterations 10 -> 99"):
        checkpointer.restore(abstract(make_state()), longer, allow_config_changes=False)
    checkpointer.close()


def test_arrays_that_do_not_fit_are_named(checkpointer):
    save(checkpointer, 1, make_state())
    checkpointer.wait()
    other = make_state()
    other["ring"]["tokens"] = jnp.zeros((16, 8), jnp.int32)
    other["ring"]["ref_logp"] = jnp.zeros((8, 8))
    other["slots"] = other["slots"][:1]
    names = ["ring/ref_logp", "slots/1", "ring/tokens", "int32[8, 8]", "int32[16, 8]"]
    with raises_with(ConfigError, *names) as error:
        checkpointer.restore(abstract(other), CONFIG, allow_config_changes=False)
    with raises_with(ConfigError, str(error.value)):  # before anything is compiled
        checkpointer.check_config(CONFIG, abstract(other), allow_changes=True)


# ---- damage --------------------------------------------------------------------------------------------------------


def large_state(seed: int) -> Any:
    """Return a state with more of each dtype than orbax writes among its indices, so that each has files of its own."""
    rng = np.random.default_rng(seed)
    small = {"q": rng.normal(size=(64, 64)), "k": rng.normal(size=4096).astype(jnp.bfloat16)}
    params = {name: jnp.asarray(x, x.dtype if name == "k" else jnp.float32) for name, x in small.items()}
    ring = {
        "reason": rng.integers(-100, 100, 5000).astype(np.int8),
        "trainable": rng.random(5000) < 0.5,
        "tokens": rng.integers(0, 2**31, (40, 50)).astype(np.int32),
    }
    return {"train": {"params": {"policy": params}}, "ring": jax.tree.map(jnp.asarray, ring)}


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """Return a workdir with the checkpoints 1 and 2."""
    workdir = tmp_path_factory.mktemp("two_saved")
    checkpointer = Checkpointer(workdir, CheckpointConfig(keep_last=2))
    for iteration in (1, 2):
        save(checkpointer, iteration, large_state(iteration), cursor=[iteration])
    checkpointer.close()
    return workdir


@pytest.fixture
def copy(two_saved, tmp_path):
    shutil.copytree(two_saved, tmp_path / "copy")
    return tmp_path / "copy"


def resume(workdir):
    checkpointer = Checkpointer(workdir, CheckpointConfig(keep_last=2))
    try:
        target = abstract(large_state(0))
        checkpointer.check_config(CONFIG, target, allow_changes=False)
        return checkpointer.restore(target, CONFIG, allow_config_changes=False)
    finally:
        checkpointer.close()


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def files_of(checkpoint):
    """Return each file that is read again, by a fixed name. The files of arrays have random names."""
    texts = {"host": "host/metadata", "config": "config/metadata", "index": "state/manifest.ocdbt"}
    arrays = sorted((checkpoint / "state").glob("**/d/*"), key=lambda path: path.stat().st_size)
    return {name: checkpoint / path for name, path in texts.items()} | {"arrays": arrays[-1]}


@pytest.mark.parametrize("harm", [pathlib.Path.unlink, cut, flip, lambda path: path.write_bytes(b"")],
                         ids=["missing", "cut", "flipped", "empty"])  # fmt: skip
@pytest.mark.parametrize("name", ["host", "config", "index", "arrays"])
def test_a_damaged_file_makes_the_checkpoint_before_it_be_taken_and_is_named(name, harm, copy, capfd):
    harm(files_of(copy / "checkpoints" / "2")[name])
    restored = resume(copy)
    assert (restored.iteration, restored.host_state) == (1, {"cursor": [1]})
    assert_same(restored.device_state, large_state(1))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"warning: checkpoint {copy / 'checkpoints' / '2'} ")
    assert len(lines[0]) < 700

    shutil.rmtree(copy / "checkpoints" / "1")
    with raises_with(ConfigError, str(copy / "checkpoints" / "2")) as error:
        resume(copy)
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


def test_files_that_orbax_alone_reads_are_not_missed(copy, capfd):
    """Orbax's own files of sharding, tree and marks: the other files contain the same information."""
    step = copy / "checkpoints" / "2"
    needed = {*files_of(step).values(), *(step / "state").glob("**/d/*"), *(step / "state").glob("**/manifest.ocdbt")}
    for path in (path for path in step.rglob("*") if path.is_file() and path not in needed):
        path.unlink()
    assert resume(copy).iteration == 2 and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "name", ["train/params/policy/q", "train/params/policy/k", "ring/reason", "ring/trainable", "ring/tokens"]
)
def test_one_bit_of_an_array_that_flips_is_seen(name, copy, capfd):
    array = large_state(2)
    for part in name.split("/"):
        array = array[part]
    raw = np.asarray(array).tobytes()
    found = [(path, path.read_bytes().find(raw)) for path in (copy / "checkpoints" / "2" / "state").glob("**/d/*")]
    (path, start), = [place for place in found if place[1] >= 0]  # fmt: skip
    flip(path, start + len(raw) // 3)
    assert resume(copy).iteration == 1
    assert f"array {name} " in capfd.readouterr().err
    if "params" not in name:  # the weights alone are whole
        restore_params(copy)
        assert capfd.readouterr().err == ""
        return
    for target in (None, abstract(large_state(0)["train"]["params"]["policy"])):
        params, _ = restore_params(copy, target)
        assert_same(params, large_state(1)["train"]["params"]["policy"])
        assert "checkpoints/2" in capfd.readouterr().err
    with raises_with(ConfigError, "checkpoints/2", f"array {name}"):
        restore_params(copy / "checkpoints" / "2")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_cast_is_not_compared_and_the_rest_is(dtype, copy, capfd):
    saved = large_state(2)["train"]["params"]["policy"]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), saved)
    params, _ = restore_params(copy, like)
    assert_same(params, jax.tree.map(lambda x: x.astype(dtype), saved))
    (path,) = [path for path in (copy / "checkpoints" / "2" / "state").glob("**/d/*")
               if np.asarray(saved["k"]).tobytes() in path.read_bytes()]  # fmt: skip
    flip(path, path.read_bytes().find(np.asarray(saved["k"]).tobytes()))
    restore_params(copy, like)
    assert ("array train/params/policy/k " in capfd.readouterr().err) == (dtype == jnp.bfloat16)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        # From gcsfs if a bucket answers 502; from a network share; from a disk; from tensorstore after all retries.
        ("host", lambda: pytest.importorskip("requests").exceptions.ProxyError(), "ProxyError"),
        ("host", lambda: TimeoutError("too slow"), "TimeoutError: too slow"),
        ("config", lambda: OSError(errno.EIO, os.strerror(errno.EIO)), "OSError: [Errno 5] Input/output error"),
        (
            "arrays",
            lambda: ValueError("ABORTED: All 32 retry attempts failed: 502 [source]"),
            "ValueError: ABORTED: All 32 ",
        ),
    ],
)
def test_what_cannot_be_read_now_is_not_damaged(name, error, said, copy, monkeypatch, capfd):
    """A run must not skip the newest checkpoint, whose files the next save would remove."""
    read = pathlib.Path.read_bytes

    def failing(path):
        if path == copy / "checkpoints" / "2" / name / "metadata":
            raise error()
        return read(path)

    part = "host/ or config/"
    if name == "arrays":
        part = "array "
        monkeypatch.setattr(checkpoint_files.tensorstore, "open", mock.Mock(side_effect=error()))
    monkeypatch.setattr(pathlib.Path, "read_bytes", failing)
    with raises_with(MachineError, part, f"{copy}/checkpoints/2", said) as raised:
        resume(copy)
    assert "[source]" not in str(raised.value)
    monkeypatch.undo()
    assert resume(copy).iteration == 2 and capfd.readouterr().err == ""


def test_a_folder_that_cannot_be_listed_is_not_one_without_checkpoints(copy, monkeypatch):
    """``is_dir`` returns False for a bucket that does not answer. The run must not begin anew."""
    monkeypatch.setattr(pathlib.Path, "is_dir", lambda path: False)
    monkeypatch.setattr(pathlib.Path, "iterdir", mock.Mock(side_effect=ConnectionResetError("gone")))
    with raises_with(MachineError, str(copy), "ConnectionResetError: gone"):
        checkpoint_files.steps_in(copy)
    monkeypatch.undo()
    assert (
        checkpoint_files.steps_in(copy / "none")
        == checkpoint_files.steps_in(copy / "checkpoints" / "2" / "host" / "metadata")
        == []
    )


def test_a_damaged_checkpoint_is_replaced_when_its_iteration_comes_again(copy, capfd):
    flip(files_of(copy / "checkpoints" / "2")["host"])
    checkpointer = Checkpointer(copy, CheckpointConfig(keep_last=2))
    assert checkpointer.restore(abstract(large_state(0)), CONFIG, allow_config_changes=False).iteration == 1
    save(checkpointer, 2, large_state(5), cursor=[5])
    checkpointer.close()
    capfd.readouterr()
    restored = resume(copy)
    assert (restored.iteration, restored.host_state, capfd.readouterr().err) == (2, {"cursor": [5]}, "")


def test_a_damaged_checkpoint_that_was_passed_over_pushes_out_no_whole_one(tmp_path):
    """The damaged checkpoint is newer than the next saved one, and was the best."""
    opened = lambda last: Checkpointer(tmp_path, CheckpointConfig(keep_last=last, keep_best=1))
    found, target = tmp_path / "checkpoints", abstract(large_state(0))
    with contextlib.closing(opened(2)) as checkpointer:
        for iteration, pass_rate in ((8, 0.5), (10, 0.9)):
            save(checkpointer, iteration, large_state(iteration), pass_rate)
    flip(files_of(found / "10")["arrays"])
    for fails in (True, False):  # the write; all is there until the next one is whole
        checkpointer = opened(1)
        assert checkpointer.restore(target, CONFIG, allow_config_changes=False).iteration == 8
        assert checkpointer.is_due(9, 0.6) and not checkpointer.is_due(9, 0.4)
        assert checkpointer.best().endswith(f"{found / '8'}, pass rate 0.500")
        with mock.patch.object(os, "rename", side_effect=OSError) if fails else contextlib.nullcontext():
            save(checkpointer, 9, large_state(9), 0.4)
            with pytest.raises(OSError) if fails else contextlib.nullcontext():
                checkpointer.close()
        assert {path.name for path in found.iterdir() if path.name.isdigit()} == {"8", "10" if fails else "9"}
    assert restore_params(tmp_path / "best")[0]["q"].shape == (64, 64)


def test_settings_that_changed_are_no_damage(copy, capfd):
    checkpointer = Checkpointer(copy, CheckpointConfig(keep_last=2))
    with raises_with(ConfigError, "checkpoints/2", "seed 0 -> 3"):
        checkpointer.restore(abstract(large_state(0)), change(seed=3), allow_config_changes=False)
    checkpointer.close()
    assert capfd.readouterr().err == ""


# ---- weights alone -------------------------------------------------------------------------------------------------


def test_params_alone_are_restored_from_workdir_checkpoints_or_one_checkpoint(tmp_path):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    for iteration in (1, 2):
        save(checkpointer, iteration, place(make_state(iteration), mesh(8, 1)))
    checkpointer.close()
    for directory, seed in ((tmp_path, 2), (tmp_path / "checkpoints", 2), (tmp_path / "checkpoints" / "1", 1)):
        expected = host_copy(make_state(seed)["train"].params["policy"])
        on_host, config = restore_params(directory)
        assert isinstance(on_host["norm"], np.ndarray)
        assert_same(on_host, expected)
        assert to_json(config) == to_json(CONFIG)
    target = abstract(place(make_state()["train"].params["policy"], mesh(2, 4)))
    on_device, _ = restore_params(tmp_path, target)
    assert on_device["layers"]["q"].sharding == target["layers"]["q"].sharding
    assert_same(on_device, expected := host_copy(make_state(2)["train"].params["policy"]))
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), expected)
    assert restore_params(tmp_path, half)[0]["layers"]["q"].dtype == jnp.bfloat16
    with raises_with(ConfigError, "extra"):
        restore_params(tmp_path, {**target, "extra": target["norm"]})


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_params_of_a_directory_without_checkpoints_are_an_error_that_names_it(tmp_path, name):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with raises_with(ConfigError, str(tmp_path / name)):
        restore_params(tmp_path / name)
