"""The whole loop learns with the debug config, unchanged and with a critic, on one device.

A reward function that misbehaves in many ways is counted and does not stop the run.
"""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import psutil
import pytest
from support.building import compile_once

from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.runtime.weights import restore_params
from jaxrl_llm.settings.use import use

ROOT = pathlib.Path(__file__).parents[2]
FUNCTIONS = ROOT / "tests" / "fixtures" / "reward_functions.py"
FAILS = {"missing package": "error", "stop": "timeout", "junk": "error", "KeyboardInterrupt": "error",
         "crash": "error", "close all": "error"}  # fmt: skip


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings():
    """Return the settings of the file, without output files that no test reads."""
    config = load(ROOT / "configs" / "debug.py").get_config()
    config.checkpoint.export = False
    config.metrics.tensorboard = False
    return config


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    monkeypatch.setattr(train_module.sharding, "make_mesh", lambda _: mesh)


@pytest.fixture(scope="module")
def compiled():
    """Return the run's programs by name. They contain no seed, so every seed can use the same programs."""
    return {}


@pytest.mark.tier("learning")  # plain: test_update compares gradients with a float64 model; test_sft learns answers
@pytest.mark.parametrize("seed", [0])
def test_reward_climbs_from_chance_to_nearly_all(seed, compiled, tmp_path, monkeypatch):
    config = settings()
    config.seed = seed

    monkeypatch.setattr(train_module, "compile_all", compile_once(compiled))
    assert train_module.train(freeze(config), tmp_path) == 0

    metrics = read_metrics(tmp_path)
    reward = [row["rollout/reward_mean"] for row in metrics]
    # 26 of 256 bytes are lower-case letters. 64 completions of 8 bytes: a standard deviation of 0.02 of the mean.
    assert 0.02 < reward[0] < 0.2
    # Measured with seeds 0 / 1 / 2: 0.94 / 0.95 / 0.95 at the end.
    assert min(reward[-3:]) > 0.8
    before, after = (json.loads((tmp_path / f"eval_{when}.json").read_text()) for when in ("before", "after"))
    assert before["pass_rate"] < 0.2 and after["pass_rate"] > 0.8
    assert after["pass_rate"] == metrics[-1]["eval/pass_rate"]
    # It has learned a set of letters, not one string: entropy stays near log 26 = 3.3 nats.
    assert metrics[-1]["update/entropy_nats"] > 2.0
    # Sampler and learner stay one model over all its updates. Measured: 2e-6 nats.
    gaps = [row["update/sampler_learner_gap_max_nats"] for row in metrics]
    measured = [gap for gap in gaps if gap is not None]  # where a batch had rollouts of the weights at hand
    assert measured and 0 < max(measured) < 1e-5


@pytest.mark.tier("learning")  # plain: failures are counted in tests/scoring/test_rewards.py
@pytest.mark.parametrize(("most", "status"), [(1.0, 0), (0.0, 1)])
def test_a_run_survives_its_reward_function_or_stops_with_a_checkpoint(
    most, status, compiled, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(train_module, "compile_all", compile_once(compiled))
    config = settings()
    config.num_iterations = 2
    config.metrics.samples_per_iteration = 64
    config.eval.num_prompts = 0
    config.rewards.functions = (f"{FUNCTIONS}:moody",)
    config.rewards.timeout_s = 1.5
    config.rewards.max_failure_frac = most
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    assert train_module.train(freeze(config), tmp_path) == status

    metrics, moods = read_metrics(tmp_path), load(FUNCTIONS).MOODS
    assert len(metrics) == (1 if status else 2)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for number, values in enumerate(metrics, 1):
        mine = [row for row in rows if row["iteration"] == number]
        failures = [FAILS.get(moods.get(row["prompt"][-2])) for row in mine]
        assert len(mine) == 64 and 0 < sum(map(bool, failures)) < 64
        assert [row["reward"] is None for row in mine] == [bool(failure) for failure in failures]
        for row, failure in zip(mine, failures, strict=True):
            assert failure or row["reward"] == len(set(row["completion"]) & set("abcdefghijklmnopqrstuvwxyz")) / 8
        assert values["reward/error_count"] == failures.count("error")
        assert values["reward/timeout_count"] == failures.count("timeout")
        assert np.isfinite(values["update/grad_norm"])
    assert any((tmp_path / "checkpoints").iterdir())
    printed = capfd.readouterr()
    assert ("error: " in printed.err and "rewards.max_failure_frac=" in printed.err) == bool(status)
    assert len(printed.err) < 2**20
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


# What a critic changes; the sampler is that of the run above.
OF_THE_LEARNER = {"init_state", "init_ring", "insert", "update", "annotate", "checksums_train", "checksums_ring"}


@pytest.mark.tier("learning")
def test_reward_climbs_with_a_critic_that_is_resumed_bitwise_and_not_left_to_others(compiled, tmp_path, monkeypatch):
    config = settings()
    config.algorithm.advantage = use("gae", gae_lambda=0.95)
    config.algorithm.critic.clip = 0.2
    config.eval.num_prompts = 0
    config.checkpoint.export = True
    own = {}

    def compile_own(programs, mesh):
        shared = {name: compiled[name] for name in programs if name in compiled and name not in OF_THE_LEARNER}
        if not own:
            own.update(compile_all({name: p for name, p in programs.items() if name not in shared}, mesh))
        return shared | own

    monkeypatch.setattr(train_module, "compile_all", compile_own)
    for name, pieces in (("whole", [10]), ("pieces", [6, 10])):
        (tmp_path / name).mkdir()
        for config.num_iterations in pieces:
            assert train_module.train(freeze(config), tmp_path / name) == 0

    def left(workdir):
        rows = read_metrics(workdir)
        kept = [{k: v for k, v in row.items() if k.split("/")[0] in ("rollout", "update", "replay")} for row in rows]
        return kept, (workdir / "samples.jsonl").read_text(), (workdir / "hf" / "model.safetensors").read_bytes()

    assert left(tmp_path / "whole") == left(tmp_path / "pieces")
    rows = read_metrics(tmp_path / "whole")
    # Measured: 0.10 at first, 0.6 at last; 64 completions of 8 bytes have a deviation of 0.02 of their mean.
    assert rows[0]["rollout/reward_mean"] < 0.2 and rows[-1]["rollout/reward_mean"] > 0.4
    assert all(row["update/value_loss"] > 0 for row in rows)
    params, _ = restore_params(tmp_path / "whole")
    assert set(params) == {"blocks", "embedding", "final_norm"}
    assert b"critic" not in (tmp_path / "whole" / "hf" / "model.safetensors").read_bytes()
