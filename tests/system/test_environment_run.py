"""A run whose completions have several turns, as in the documentation."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from support import building
from support.refusal import refused

from jaxrl_llm.commands import evaluate as evaluate_module
from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import freeze
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_NAMES

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "write_an_environment.md").read_text()
ENVIRONMENTS = ROOT / "tests" / "fixtures" / "environments.py"
SETTINGS = {
    "num_iterations": 2,
    "prompts.max_tokens": 32,
    "sampling.max_completion_tokens": 24,
    "rollout.prompts_per_iteration": 4,
    "rollout.group_size": 2,
    "rollout.slots": 5,
    "rollout.chunk_steps": 3,
    "replay.capacity": 16,
    "update.batch_size": 8,
    "update.micro_batch_size": 8,
    "eval.num_prompts": 4,
    "eval.num_samples": 2,
    "checkpoint.export": False,
    "metrics.tensorboard": False,
    "metrics.samples_per_iteration": 8,
}


def block(text, after):
    return re.search(r"```\w+\n(.*?)```", text[text.index(after) :], re.DOTALL)[1]


@pytest.fixture
def run(tmp_path, monkeypatch):
    mesh = sharding.make_mesh(building.ONE, jax.devices()[:1])
    monkeypatch.setattr(sharding, "make_mesh", lambda _: mesh)
    monkeypatch.chdir(tmp_path)

    def call(settings):
        config = freeze(building.settings_of(ROOT / "configs" / "debug.py", SETTINGS | settings))
        status = train_module.train(config, tmp_path / "run")
        samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
        return status, read_metrics(tmp_path / "run"), [json.loads(line) for line in samples], config

    return call


@pytest.mark.slow
def test_the_documented_game_trains_by_a_config_alone(run, tmp_path):
    (tmp_path / "game.py").write_text(block(PAGE, "`game.py`:"))
    (tmp_path / "numbers.jsonl").write_text(block(PAGE, "`numbers.jsonl`"))
    shown = re.findall(r"config\.([\w.]+) = (.*)", block(PAGE, "## 3. Set the config"))
    settings = {name: eval(value) for name, value in shown}
    assert len(settings) == 11
    # A random model of bytes calls no tool: its turns end at letters.
    small = {
        "model.path": "random:debug",
        "prompts.system_prompt": "",
        "prompts.chat_template": False,
        "sampling.max_completion_tokens": 80,
        "sampling.stop_tokens": ("a", "b", "c"),
    }
    status, metrics, samples, _ = run({"eval.num_prompts": 4} | settings | small)
    assert status == 0 and len(metrics) == 2
    assert [line["rollout/turns_mean"] for line in metrics] == [1.0, 1.0]
    assert {row["parts"]["environment"] for row in samples} == {0.0}
    assert all(line["reward/error_count"] == 0 for line in metrics)


@pytest.mark.tier("slow")  # plain: tests/actor/test_turns.py and tests/conversations
@pytest.mark.parametrize("is_evaluated", [False, True])
def test_turns_are_played_trained_on_and_evaluated(run, tmp_path, is_evaluated):
    settings = {} if is_evaluated else {"eval.num_prompts": 0}
    settings |= {"environments.factory": f"{ENVIRONMENTS}:brief", "environments.max_answer_tokens": 2}
    settings |= {"prompts.chat_template": False, "sampling.stop_tokens": tuple("abcdefgh")}
    settings |= {"algorithm.advantage": "gigpo", "algorithm.cross_entropies": ("answers",)}
    scores = f"{ROOT / 'tests' / 'fixtures' / 'environments.py'}:number_of_turns"
    status, metrics, samples, config = run(settings | {"rewards.functions": (scores,)})
    assert status == 0 and min(line["rollout/turns_mean"] for line in metrics) > 1.2
    assert max(line["update/sampler_learner_gap_max_nats"] for line in metrics) < 1e-4  # measured: 3e-6
    assert all(0 < line["time/environment_s"] < line["time/generate_s"] for line in metrics)
    assert min(line["update/answers_nats"] for line in metrics) > 1  # of some 256 tokens
    # What the function was given: by its reward, how many turns of each completion.
    turns = [row["reward"] for row in samples]
    assert np.mean(turns) == pytest.approx(np.mean([line["rollout/turns_mean"] for line in metrics]))
    assert {row["stop_reason"] for row in samples} <= {*STOP_NAMES[1:]}
    if not is_evaluated:
        return
    evaluated = json.loads((tmp_path / "run" / "eval_after.json").read_text())
    assert evaluated["reward_mean"] > 1.0
    again = evaluate_module.evaluate(config, "", str(tmp_path / "run"), 2)
    assert [row["completion"] for row in again["samples"]] == [row["completion"] for row in evaluated["samples"]]


@pytest.mark.slow
def test_failures_of_an_environment_are_those_of_its_rewards_and_do_not_stop_the_run(run):
    settings = {"environments.factory": f"{ENVIRONMENTS}:sometimes", "environments.max_answer_tokens": 8}
    settings |= {"prompts.chat_template": False, "sampling.stop_tokens": tuple("abcdefgh")}
    status, metrics, samples, _ = run(settings | {"rewards.max_failure_frac": 1.0})
    assert status == 0
    failed = sum(line["reward/error_count"] for line in metrics)
    assert 0 < failed < 16 and sum(row["reward"] is None for row in samples) == failed


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sampling.stop_strings": (";",)}, ("sampling.stop_strings", (";",), "environments.factory")),
        ({"metrics.share_rollouts": True}, ("metrics.share_rollouts", True, "environments.factory")),
        (
            {"environments.max_answer_tokens": 23},
            ("environments.max_answer_tokens", 23, "sampling.max_completion_tokens"),
        ),
        ({"environments.max_turns": 0}, ("environments.max_turns", 0)),
        (
            {"environments.factory": "", "rewards.functions": ("environment",)},
            ("rewards.functions", ("environment",), "environments.factory"),
        ),
        (
            {"environments.factory": "", "environments.max_answer_tokens": 64, "environments.max_turn_tokens": 4},
            ("environments.max_turn_tokens", 4, "environments.factory"),
        ),
        ({"prompts.source": "maze", "prompts.name": "small"}, ("prompts.name", "small", "prompts.source='maze'")),
        (
            {"rewards.functions": ("environment",)},
            ("rewards.functions", "environment", f"{ENVIRONMENTS}:brief", "get_reward"),
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_anything_is_compiled(run, settings, named, monkeypatch):
    monkeypatch.setattr(train_module, "compile_all", None)
    with refused(*named):
        run({"environments.factory": f"{ENVIRONMENTS}:brief", "environments.max_answer_tokens": 2} | settings)


@pytest.mark.slow
def test_rows_that_an_agent_has_played_are_trained_on(run):
    """Prompts of later iterations are open, so requests wait across updates of the weights."""
    settings = {"environments.factory": f"{ENVIRONMENTS}:two_letters", "environments.max_answer_tokens": 40}
    settings |= {
        "prompts.max_tokens": 64,
        "sampling.max_completion_tokens": 80,
        "sampling.stop_tokens": tuple("abcdefgh"),
    }
    settings |= {"rewards.functions": ("environment",), "rollout.lookahead_prompts": 4, "rollout.max_lag_iterations": 2}
    settings |= {"num_iterations": 12, "rollout.prompts_per_iteration": 8, "rollout.group_size": 8, "rollout.slots": 48}
    settings |= {"replay.capacity": 64, "update.batch_size": 64, "update.micro_batch_size": 64, "eval.num_prompts": 0}
    status, metrics, samples, _ = run(settings)
    assert status == 0 and sum(line["reward/error_count"] for line in metrics) == 0
    assert metrics[0]["update/sampler_learner_gap_max_nats"] < 1e-4  # measured: 1e-6
    assert any(row["age"] > 0 for row in samples)  # begun under earlier weights, and kept
    rewards = [line["rollout/reward_mean"] for line in metrics]  # of 64 rows each
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15  # measured: 0.28 to 0.55
