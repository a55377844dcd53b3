"""A config and ten lines of JSON with tests are enough to train. A wrong line stops the run before it begins."""

import dataclasses
import json

import grain  # noqa: F401, whose flags outlive a command
import jax
import numpy as np
import pytest
from support.command_line import DEBUG_CONFIG, run_command

from jaxrl_llm.config import MeshConfig, PromptsConfig, RewardsConfig
from jaxrl_llm.questions import tasks
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import sharding
from jaxrl_llm.scoring.rewards import RewardPool
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE

# What a model of noise writes is a comment of a function that is there; now and then there is a line end in it.
PROMPT = "def f{i}():\n    return {i}  # "
TEST = "def check(candidate):\n    assert candidate() == {i}\n    assert candidate() < 9\n"
CODE_TESTS = "jaxrl_llm.scoring.code_tests"


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "tasks.jsonl"
    rows = [{"prompt": PROMPT, "test": TEST, "entry_point": "f{i}"} for _ in range(10)]
    texts = [{key: text.replace("{i}", str(i)) for key, text in row.items()} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return path


@pytest.fixture
def run(lines, tmp_path, monkeypatch, capfd):
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    monkeypatch.setattr(sharding, "make_mesh", lambda _: mesh)

    def call(*settings):
        return run_command(
            "train",
            f"--config={DEBUG_CONFIG}",
            f"--workdir={tmp_path / 'run'}",
            "--config.prompts.source=code",
            f"--config.prompts.name={lines}",
            *("--config.num_iterations=2", "--config.eval.num_prompts=0", "--config.checkpoint.export=False"),
            *("--config.metrics.tensorboard=False", "--config.replay.capacity=128"),
            *(f"--config.{setting}" for setting in settings),
            monkeypatch=monkeypatch,
            capfd=capfd,
        )

    return call


def test_the_run_s_reward_pool_tells_a_failed_test_from_a_failed_sandbox(lines, monkeypatch):
    config = PromptsConfig(source="code", name=str(lines), arguments={"sandbox": {"seconds": 0.3}})
    examples = tasks.load(config, seed=0).examples
    rewards = RewardsConfig(num_workers=1)
    with RewardPool(rewards, task_scorer=tasks.scorer(config), examples=examples) as pool:
        answers = ["right", "\n    return 1 / 0", "\n    while True: pass", "\n    [0] * 10**10"]
        answers[1:] = [answer.replace("\n", "\ndef f3():\n") for answer in answers[1:]]
        judged = pool.collect([pool.submit(examples[3], answers)])
        assert (judged.total.tolist(), judged.outcome.tolist()) == ([1, 0, 0, 0], [OUTCOME_SCORE] * 4)
        columns = examples[3].columns | {"sandbox": {"isolation": "bubblewrap"}}
        monkeypatch.setenv("PATH", "/nowhere")
        failing = dataclasses.replace(examples[3], columns=columns)
    with RewardPool(rewards, task_scorer=tasks.scorer(config), examples=examples) as pool:
        judged = pool.collect([pool.submit(failing, ["right"])])
        assert np.isnan(judged.total).all() and judged.outcome.tolist() == [OUTCOME_ERROR]
        assert "SandboxError: bubblewrap: bwrap is not installed" in judged.errors[0]


@pytest.mark.slow
def test_ten_lines_train(run, tmp_path):
    done = run(
        "prompts.arguments={'sandbox': {'seconds': 2.0}}",
        f"rewards.functions=('{CODE_TESTS}:share', '{CODE_TESTS}:stopped')",
        "rewards.weights=(1.0, 0.0)",
    )
    assert not done.status, done.err[-2000:]
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 2
    for row in rows:
        assert (row["reward/error_count"], row["reward/timeout_count"]) == (0, 0)
        assert 0 < row["rollout/reward_mean"] < 1
        assert row["rollout/reward_function_1"] == row["rollout/reward_mean"] and row["rollout/reward_function_2"] == 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["parts"][f"{CODE_TESTS}:stopped"] for sample in samples} == {0.0}
    # Line 10 asks for less than nine and not less, so that of it half of the tests can pass.
    assert {sample["reward"] for sample in samples} <= {0.0, 0.5, 1.0}


def test_a_wrong_key_is_named_with_file_and_line_before_the_run(run, lines, tmp_path):
    lines.write_text(lines.read_text() + '{"prompt": "p", "tests": ["assert f()"]}\n')
    done = run()
    assert done.status
    last = done.err.strip().splitlines()[-1]
    assert last.startswith(f"error: {lines}:11: must have one of `test_list` (MBPP) and `test` (HumanEval)")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
