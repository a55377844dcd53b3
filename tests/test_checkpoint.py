"""Checkpoints: what is saved is what was there, nothing half-written is found, changed settings are refused."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.checkpoint import Checkpointer, StopRequest, restore_params
from jaxrl_llm.config import CheckpointConfig, Config, ConfigError, freeze, to_json
from jaxrl_llm.types import Critic, TrainState

CONFIG = freeze({"prompts": {"arguments": {"terms": (1, 2)}}})


def mesh(data: int, fsdp: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def make_state(seed: int = 0) -> Any:
    """Weights, AdamW state, a critic, a ring on the data axis with small integer types, a None and an empty subtree."""
    key = jax.random.key(seed)
    params = {"layers": {"q": jax.random.normal(key, (16, 8))}, "norm": jnp.arange(8, dtype=jnp.bfloat16)}
    head = {"kernel": jnp.full((8, 2), seed, jnp.float32), "bias": jnp.ones(2)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "train": TrainState(params, optimizer.init(params), jnp.int32(seed), None, Critic(head, optimizer.init(head))),
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


def assert_same_bytes(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


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
        assert restored.config == freeze({"prompts": {"arguments": {"terms": [1, 2]}}})
        assert_same_bytes(restored.device_state, state)
        shardings = jax.tree.map(lambda x: x.sharding, restored.device_state)
        assert shardings == jax.tree.map(lambda x: x.sharding, target)


@pytest.mark.parametrize("layout", ["one device", "sharded", "replicated"])
def test_saved_bytes_are_those_at_the_time_of_save_though_the_buffers_are_donated_at_once(checkpointer, layout):
    m = mesh(8, 1)
    sharding = {
        "one device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        "sharded": NamedSharding(m, P("data")),
        "replicated": NamedSharding(m, P()),
    }[layout]
    # 8 MB each: large enough that nothing is copied for being small, and that the write takes longer than the updates.
    fill = jax.jit(
        lambda k: {f"w{i}": jax.random.normal(k, (2048, 1024)) + i for i in range(4)},
        out_shardings={f"w{i}": sharding for i in range(4)},
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
    assert_same_bytes(restored.device_state, expected)


def test_saving_compiles_nothing(checkpointer, caplog):
    replicated = jax.device_put(jnp.ones((24, 40)), NamedSharding(mesh(8, 1), P()))
    state = jax.block_until_ready({"train": place(make_state(), mesh(2, 4)), "replicated": replicated})
    with jax.log_compiles():
        save(checkpointer, 1, state)
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


def test_saving_an_iteration_again_is_harmless_and_going_back_forgets_the_future(checkpointer):
    for iteration in (1, 2):
        save(checkpointer, iteration, make_state(iteration))
        save(checkpointer, iteration, make_state(iteration))
    restore(checkpointer, iteration=1)
    save(checkpointer, 1, make_state(1))
    assert checkpointer.latest_iteration() == 2
    save(checkpointer, 2, make_state(5))
    assert int(restore(checkpointer).device_state["train"].step) == 5
    with pytest.raises(ConfigError, match=r"no checkpoint of iteration 9 .*\[1, 2\]"):
        restore(checkpointer, iteration=9)


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
from jaxrl_llm.checkpoint import Checkpointer
from jaxrl_llm.config import CheckpointConfig, Config
checkpointer = Checkpointer(sys.argv[1], CheckpointConfig())
state = lambda i: jax.block_until_ready({"w": jnp.full((4096, 4096), float(i))})
checkpointer.save(1, state(1), {"i": 1}, Config(), pass_rate=None)
checkpointer.wait()
checkpointer.save(2, state(2), {"i": 2}, Config(), pass_rate=None)
os.kill(os.getpid(), signal.SIGKILL)
"""


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


def test_changed_settings_are_refused_by_name_unless_allowed(checkpointer):
    save(checkpointer, 1, make_state())
    checkpointer.wait()
    target = abstract(make_state())
    changed = change(seed=3, optimizer={"learning_rate": 0.5})
    with pytest.raises(ConfigError) as error:
        checkpointer.restore(target, changed, allow_config_changes=False)
    assert "seed 0 -> 3" in str(error.value) and "optimizer.learning_rate 1e-05 -> 0.5" in str(error.value)
    assert "\n" not in str(error.value)
    assert checkpointer.restore(target, changed, allow_config_changes=True).iteration == 1
    assert checkpointer.restore(target, None, allow_config_changes=False).iteration == 1


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
    with pytest.raises(ConfigError, match="num_iterations 10 -> 99"):
        checkpointer.restore(abstract(make_state()), longer, allow_config_changes=False)
    checkpointer.close()


def test_arrays_that_do_not_fit_are_named(checkpointer):
    save(checkpointer, 1, make_state())
    checkpointer.wait()
    other = make_state()
    other["ring"]["tokens"] = jnp.zeros((16, 8), jnp.int32)
    other["ring"]["ref_logp"] = jnp.zeros((8, 8))
    other["slots"] = other["slots"][:1]
    with pytest.raises(ConfigError) as error:
        checkpointer.restore(abstract(other), CONFIG, allow_config_changes=False)
    message = str(error.value)
    assert "ring/ref_logp is missing" in message and "slots/1 is not expected" in message
    assert "ring/tokens is int32[8, 8], not int32[16, 8]" in message


def test_params_alone_are_restored_from_workdir_checkpoints_or_one_checkpoint(tmp_path):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    for iteration in (1, 2):
        save(checkpointer, iteration, place(make_state(iteration), mesh(8, 1)))
    checkpointer.close()
    for directory, seed in ((tmp_path, 2), (tmp_path / "checkpoints", 2), (tmp_path / "checkpoints" / "1", 1)):
        expected = host_copy(make_state(seed)["train"].params)
        on_host, config = restore_params(directory)
        assert isinstance(on_host["norm"], np.ndarray)
        assert_same_bytes(on_host, expected)
        assert to_json(config) == to_json(CONFIG)
    target = abstract(place(make_state()["train"].params, mesh(2, 4)))
    on_device, _ = restore_params(tmp_path, target)
    assert on_device["layers"]["q"].sharding == target["layers"]["q"].sharding
    assert_same_bytes(on_device, expected := host_copy(make_state(2)["train"].params))
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), expected)
    assert restore_params(tmp_path, half)[0]["layers"]["q"].dtype == jnp.bfloat16
    with pytest.raises(ConfigError, match="extra is missing"):
        restore_params(tmp_path, {**target, "extra": target["norm"]})


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_params_of_a_directory_without_checkpoints_are_an_error_that_names_it(tmp_path, name):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"no .*checkpoint in .*{name}"):
        restore_params(tmp_path / name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_only_asks_and_the_handlers_come_back(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert stop.requested is None
        signal.raise_signal(number)
        assert stop.requested == number.name
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_an_interrupt_after_a_request_is_immediate():
    with pytest.raises(KeyboardInterrupt), StopRequest():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
