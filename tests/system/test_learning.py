"""The whole loop learns: the debug config, as it is in configs/ and with a critic, on one device."""

import importlib.util
import json
import pathlib

import jax
import pytest
from support.building import compile_once

from jaxrl_llm import train as train_module
from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import checkpoint, sharding
from jaxrl_llm.runtime.programs import compile_all

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "debug.py"


def settings():
    """Those of the file, and no files that nobody reads."""
    spec = importlib.util.spec_from_file_location("debug_config", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.checkpoint.export = False
    config.metrics.tensorboard = False
    return config


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    monkeypatch.setattr(train_module.sharding, "make_mesh", lambda _: mesh)


@pytest.fixture(scope="module")
def compiled():
    """The programs of the run, by name: no seed is in them, so that every seed can use those of the first."""
    return {}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
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
    assert max(row["update/sampler_learner_gap_max_nats"] or 0.0 for row in metrics) < 1e-4


# What a critic changes; the sampler is that of the run above.
OF_THE_LEARNER = {"init_state", "init_ring", "insert", "update", "annotate", "checksums_train", "checksums_ring"}


@pytest.mark.slow
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
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in row.items() if k.split("/")[0] in ("rollout", "update", "replay")} for row in rows]
        return kept, (workdir / "samples.jsonl").read_text(), (workdir / "hf" / "model.safetensors").read_bytes()

    assert left(tmp_path / "whole") == left(tmp_path / "pieces")
    rows = read_metrics(tmp_path / "whole")
    # Measured: 0.10 at first, 0.6 at last; 64 completions of 8 bytes have a deviation of 0.02 of their mean.
    assert rows[0]["rollout/reward_mean"] < 0.2 and rows[-1]["rollout/reward_mean"] > 0.4
    assert all(row["update/value_loss"] > 0 for row in rows)
    params, _ = checkpoint.restore_params(tmp_path / "whole")
    assert set(params) == {"blocks", "embedding", "final_norm"}
    assert b"critic" not in (tmp_path / "whole" / "hf" / "model.safetensors").read_bytes()
