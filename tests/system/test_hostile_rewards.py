"""A run whose reward function misbehaves in one way after the other: all of it is counted, none of it stops the run."""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import psutil
import pytest
from support.building import compile_once

from jaxrl_llm import train as train_module
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import sharding

ROOT = pathlib.Path(__file__).parents[2]
FAILS = {"missing package": "error", "stop": "timeout", "junk": "error", "KeyboardInterrupt": "error",
         "crash": "error", "close all": "error"}  # fmt: skip


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiled = {}  # the programs of the first of the runs, which are those of the second too


@pytest.mark.parametrize(("most", "status"), [(1.0, 0), (0.0, 1)])
def test_a_run_survives_its_reward_function_or_stops_with_a_checkpoint(most, status, tmp_path, monkeypatch, capfd):
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    monkeypatch.setattr(train_module.sharding, "make_mesh", lambda _: mesh)
    monkeypatch.setattr(train_module, "compile_all", compile_once(compiled))
    functions = ROOT / "tests" / "fixtures" / "reward_functions.py"
    config = load(ROOT / "configs" / "debug.py").get_config()
    config.num_iterations = 2
    config.checkpoint.export = False
    config.metrics.tensorboard = False
    config.metrics.samples_per_iteration = 64
    config.eval.num_prompts = 0
    config.rewards.functions = (f"{functions}:moody",)
    config.rewards.timeout_s = 3.0
    config.rewards.max_failure_frac = most
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    assert train_module.train(freeze(config), tmp_path) == status

    metrics, moods = read_metrics(tmp_path), load(functions).MOODS
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
    assert ("error: " in printed.err and "of the rewards failed" in printed.err) == bool(status)
    assert len(printed.err) < 2**20
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
