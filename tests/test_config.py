"""Configuration: what freeze accepts and refuses, round trips, and that every setting has an effect.

Each setting has a row in ``ALIVE``: another value, a probe, and other settings that are needed. A function of a method
has a row in ``OF_FUNCTIONS`` only if its settings need more than another value. A probe always reads a product of the
code (the text of a program, the loaded questions, the files of a run), never the config itself. A new setting without a
row in ``ALIVE`` fails, and so does a setting that nothing reads.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from jax.interpreters import partial_eval
from support import building, ghosts
from support.building import ONE, TINY, mesh_of, needs_reasoning_gym
from support.refusal import ANY, refused

from jaxrl_llm import config as config_module
from jaxrl_llm.actor import actor, stop_strings
from jaxrl_llm.actor.episodes import Conversations, Turn
from jaxrl_llm.actor.evaluation import questions
from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.algorithms import surrogates
from jaxrl_llm.algorithms.inputs import Sizes
from jaxrl_llm.algorithms.memory import Memory
from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import Config, ConfigError, flatten, freeze, from_json, to_json
from jaxrl_llm.conversations.environment import Environment
from jaxrl_llm.learner import faults
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models.files import peft, pretrained
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import PromptStream
from jaxrl_llm.reports.metrics import cost_values, rollout_values
from jaxrl_llm.run import assemble, model_of
from jaxrl_llm.runtime import bucket, hosts, run_record, sharding
from jaxrl_llm.runtime.checkpoint import Checkpointer
from jaxrl_llm.scoring.rewards import RewardPool
from jaxrl_llm.settings.schema import differences
from jaxrl_llm.settings.use import keywords, use
from jaxrl_llm.sweeps.points import with_point
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, STOP_EOS, STOP_STRING, Example, Rewards, Sums

ROOT = pathlib.Path(__file__).parents[1]
FUNCTIONS = ROOT / "tests" / "fixtures" / "reward_functions.py"
ENVIRONMENTS = ROOT / "tests" / "fixtures" / "environments.py"


# ---- freeze ----------------------------------------------------------------------------------------------------

# A surrogate that reads rewards, and what regressions of log-ratios on rewards ask for.
SOFT_VALUES = {"surrogate": "spo", "aggregation": "sequence_mean"}
REGRESSION = {"algorithm.advantage": "dr_grpo", "algorithm.aggregation": "sequence_mean"}
ROWS_ALIKE = {"algorithm.aggregation": "sequence_mean"}


def test_every_config_file_loads_and_freezes():
    files = sorted((ROOT / "configs").glob("*.py"))
    assert files
    for path in files:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = freeze(module.get_config())
        assert from_json(to_json(config)) == config
        assert f"--config=configs/{path.name}" in module.__doc__


def test_the_defaults_are_a_config():
    assert freeze(config_module.defaults()) == freeze({}) == Config()
    with pytest.raises(AttributeError, match="group_sise"):
        config_module.defaults().rollout.group_sise = 3


@pytest.mark.parametrize(
    ("key", "value", "no_effect", "replacement"),
    [
        ("solved_fraction", 0.5, 0.0, "replay.retirement=solved"),
        ("fresh_batches", True, False, "replay.draw=fresh_or_older"),
        ("fresh_from_iteration", 3, 0, "replay.draw.fresh_from_iteration"),
    ],
)
def test_a_config_file_refuses_settings_of_earlier_versions(key, value, no_effect, replacement):
    """The value that had no effect is accepted."""
    config = config_module.defaults()
    with refused(f"replay.{key}", value, replacement):
        config.replay[key] = value
    config.replay[key] = no_effect
    assert freeze(config) == Config()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sede": 1}, ("sede", 1, "seed")),
        ({"algorithm": {"surogate": "gspo"}}, ("algorithm.surogate", "gspo", "algorithm.surrogate")),
        ({"mesh": {"zzzz": 1}}, ("mesh.zzzz", 1, "data, fsdp, expert, context, tensor")),
        ({"update": 3}, ("update", 3)),
        ({"seed": 1.0}, ("seed", 1.0)),
        ({"seed": True}, ("seed", True)),
        ({"seed": -1}, ("seed", -1)),
        ({"sampling": {"temperature": "1"}}, ("sampling.temperature", "1")),
        ({"sampling": {"stop_strings": [1]}}, ("sampling.stop_strings[0]", 1)),
        ({"sampling": {"stop_strings": ("",)}}, ("sampling.stop_strings", ("",))),
        ({"sampling": {"top_p": 0}}, ("sampling.top_p", 0.0)),
        ({"optimizer": {"learning_rate": float("inf")}}, ("optimizer.learning_rate", float("inf"))),
        ({"rollout": {"group_size": 0}}, ("rollout.group_size", 0)),
        (
            {"rollout": {"group_size": 1}, "update": {"batch_size": 8, "micro_batch_size": 8}},
            ("rollout.group_size", 1, "algorithm.advantage='grpo'"),
        ),
        (
            {
                "rollout": {"group_size": 1},
                "update": {"batch_size": 8, "micro_batch_size": 8},
                "algorithm": {"advantage": "reinforce_pp", "surrogate": "vcpo"},
            },
            ("rollout.group_size", 1, "algorithm.surrogate='vcpo'"),
        ),
        (
            {
                "environments": {"factory": f"{ENVIRONMENTS}:brief", "max_answer_tokens": 4},
                "algorithm": {"reward_terms": ["overlong_penalty"]},
            },
            ("environments.factory", f"{ENVIRONMENTS}:brief", "algorithm.reward_terms.overlong_penalty"),
        ),
        ({"algorithm": {"advantage": "mssr", "overlong_filter": True}}, ("algorithm.overlong_filter", True)),
        (
            {"algorithm": {"reward_terms": [use("overlong_penalty", buffer=17)]}},
            ("algorithm.reward_terms.overlong_penalty.buffer", 17, "sampling.max_completion_tokens=16"),
        ),
        ({"algorithm": {"advantage": use("gdpo", gate=0.5)}}, ("algorithm.advantage.gate", 0.5)),
        (
            {"algorithm": {"advantage": use("asymre", delta_v=float("nan"))}},
            ("algorithm.advantage.delta_v", float("nan")),
        ),
        (
            {"algorithm": {"reshaping": ["reward_mask", "amplify_positive"]}},
            ("algorithm.reshaping", ("reward_mask", "amplify_positive")),
        ),
        (
            {"algorithm": {"advantage": "gigpo", "reshaping": ["amplify_positive"]}},
            ("algorithm.reshaping", ("amplify_positive",)),
        ),
        (
            {"algorithm": {"advantage": "gae", "reshaping": ["entropy_factor"]}},
            ("algorithm.reshaping", ("entropy_factor",), "algorithm.advantage='gae'"),
        ),
        ({"algorithm": {"critic": {"bins": 1}}}, ("algorithm.critic.bins", 1)),
        ({"algorithm": {"critic": {"low": 1}}}, ("algorithm.critic.low", 1.0, "algorithm.critic.high=1.0")),
        (
            {"algorithm": {"critic": {"bins": 5, "clip": 0.2}}},
            ("algorithm.critic.clip", 0.2, "algorithm.critic.bins=5"),
        ),
        (
            {"model": {"reference_path": "random:debug"}},
            ("model.reference_path", "random:debug", "algorithm.divergence"),
        ),
        ({"algorithm": {"reference_reset_iterations": (50,)}}, ("algorithm.reference_reset_iterations", (50,))),
        (
            {"algorithm": {"reference_reset_iterations": (0,), "divergence": use("reference", coefficient=0.1)}},
            ("algorithm.reference_reset_iterations", (0,)),
        ),
        ({"model": {"remat": "some"}}, ("model.remat", "some")),
        ({"update": {"micro_batch_size": 24}}, ("update.micro_batch_size", 24, "update.batch_size=64")),
        ({"replay": {"capacity": 32}}, ("replay.capacity", 32, "update.batch_size=64")),
        ({"replay": {"capacity": 96}}, ("replay.capacity", 96)),
        (
            {"replay": {"positive_fraction": 0.5, "unit": "rollout"}},
            ("replay.positive_fraction", 0.5, "replay.capacity=64"),
        ),
        (
            {"replay": {"capacity": 128, "positive_fraction": 0.5}},
            ("replay.positive_fraction", 0.5, "replay.unit='rollout'"),
        ),
        (
            {"replay": {"capacity": 256, "delay_iterations": 2, "capacity_tokens": 9000}},
            ("replay.capacity_tokens", 9000),
        ),
        ({"replay": {"capacity_tokens": 3000}}, ("replay.capacity_tokens", 3000)),
        (
            {"replay": {"capacity": 128, "capacity_tokens": 6144, "positive_fraction": 0.5, "unit": "rollout"}},
            ("replay.positive_fraction", 0.5, "replay.capacity_tokens=6144"),
        ),
        (  # 256 rows for all, of 64 an iteration: when one of them is overwritten, it is 4 iterations old
            {"replay": {"capacity": 512, "positive_fraction": 0.5, "max_age_steps": 3, "unit": "rollout"}},
            ("replay.positive_fraction", 0.5, "replay.max_age_steps=3"),
        ),
        ({"external": {"paths": ("a",)}}, ("external.groups_per_iteration", 0, "external.paths")),
        ({"external": {"groups_per_iteration": 1}}, ("external.groups_per_iteration", 1, "external.paths")),
        (
            {"external": {"paths": ("a",), "groups_per_iteration": 8}, "sampling": {"top_p": 0.5}},
            ("sampling.top_k", 0, "sampling.top_p=0.5", "sampling.min_p=0.0"),
        ),
        (
            {"external": {"paths": ("a",), "groups_per_iteration": 8}, "replay": {"capacity": 192}},
            ("replay.capacity", 192),
        ),
        (
            {"algorithm": {"cross_entropies": [use("imitation", coefficient=0.1)]}},
            ("algorithm.cross_entropies", ("imitation",)),
        ),
        (
            {"algorithm": {"cross_entropies": [use("environment", coefficient=0.1)]}, "prompts": {"max_tokens": 1}},
            ("prompts.max_tokens", 1, "algorithm.cross_entropies"),
        ),
        *(
            (
                {"replay": {"capacity": 512, name: value}, "update": {"batch_size": 256}},
                ("update.batch_size", 256, f"{most} rollouts", f"replay.{name}={value}"),
            )
            for name, value, most in (
                ("delay_iterations", 2, 64),
                ("max_age_steps", 2, 192),
            )
        ),
        ({"replay": {"delay_iterations": 1}}, ("replay.delay_iterations", 1)),
        (
            {"replay": {"capacity": 256, "delay_iterations": 3, "max_age_steps": 2}},
            ("replay.delay_iterations", 3, "replay.max_age_steps=2"),
        ),
        (
            {"algorithm": {"advantage": use("mssr", decay=0.8, decay_moving=0.9)}},
            ("algorithm.advantage.decay_moving", 0.9, "algorithm.advantage.decay=0.8"),
        ),
        (
            {"algorithm": {"advantage": "asymre"}, "rollout": {"max_resample_rounds": 1}},
            ("rollout.max_resample_rounds", 1, "algorithm.advantage='asymre'"),
        ),
        (
            {
                "algorithm": {"reshaping": [use("amplify_positive", factor=0.5)]} | SOFT_VALUES,
            },
            ("algorithm.reshaping=(amplify_positive(factor=0.5))", ANY, "algorithm.surrogate"),
        ),
        (
            {"algorithm": {"reward_terms": ["length_reward"]} | SOFT_VALUES},
            ("algorithm.reward_terms=(length_reward(weight=0.1))", ANY, "algorithm.surrogate"),
        ),
        ({"rollout": {"max_lag_iterations": 2}}, ("rollout.max_lag_iterations", 2, "rollout.lookahead_prompts")),
        ({"rollout": {"stale_cache": "keep"}}, ("rollout.stale_cache", "keep", "rollout.lookahead_prompts")),
        ({"sampling": {"top_k": 65, "support_tokens": 64}}, ("sampling.top_k", 65, "sampling.support_tokens=64")),
        (
            {
                "replay": {"capacity": 512, "draw": use("uniform_then_fresh", fresh_from_iteration=9)},
                "update": {"batch_size": 256},
            },
            ("update.batch_size", 256),
        ),
        (
            {"replay": {"draw": "fresh_or_older", "fresh_fraction": 0.5}},
            ("replay.fresh_fraction", 0.5, "replay.draw='fresh_or_older'"),
        ),
        (
            {"replay": {"capacity": 256, "draw": "fresh_or_older", "delay_iterations": 2}},
            ("replay.delay_iterations", 2, "replay.draw='fresh_or_older'"),
        ),
        ({"replay": {"fresh_batches": True}}, ("replay.fresh_batches", True)),
        ({"replay": {"solved_fraction": 0.5}}, ("replay.solved_fraction", 0.5)),
        (
            {"replay": {"capacity": 256, "delay_iterations": 3, "fresh_fraction": 0.5}},
            ("replay.delay_iterations", 3, "replay.fresh_fraction=0.5"),
        ),
        (
            {
                "rollout": {"group_size": 1, "max_resample_rounds": 1},
                "algorithm": {"advantage": "mssr"},
                "update": {"batch_size": 8, "micro_batch_size": 8},
            },
            ("rollout.max_resample_rounds", 1, "rollout.group_size=1"),
        ),
        ({"rollout": {"slots": 65}}, ("rollout.slots", 65)),
        ({"rewards": {"weights": (1.0, 2.0)}}, ("rewards.weights", (1.0, 2.0), "rewards.functions=('task',)")),
        ({"rewards": {"functions": ("a:b", "a:b"), "weights": (1, 1)}}, ("rewards.functions", ("a:b", "a:b"))),
        *(
            ({"prompts": {"source": x}, "eval": {"name": "y"}}, ("eval.name", "y", f"prompts.source='{x}'"))
            for x in ("letters", "maze", "kolmogorov")
        ),
        ({"prompts": {"name": "x"}}, ("prompts.name", "x", "prompts.source='letters'")),
        ({"prompts": {"source": "jsonl"}}, ("prompts.name", "")),
        ({"prompts": {"size": 0}}, ("prompts.size", 0)),
        ({"checkpoint": {"keep_best": 1}}, ("checkpoint.keep_best", 1, "eval.num_prompts=0")),
        (
            {"prompts": {"source": "jsonl", "name": "x"}, "eval": {"name": "y"}},
            ("eval.name", "y", "eval.num_prompts=0"),
        ),
        (
            {"algorithm": {"surrogate": "agro"}, "update": {"micro_batch_size": 4}},
            ("update.micro_batch_size", 4, "rollout.group_size=8"),
        ),
        ({"update": {"pack_width": 4096}}, ("update.pack_width", 4096, "update.micro_batch_tokens")),
        ({"update": {"pack_width": 9, "micro_batch_tokens": 9}}, ("update.pack_width", 9, "160 tokens")),
        ({"update": {"micro_batch_tokens": 100}}, ("update.micro_batch_tokens", 100)),
        (
            {"algorithm": {"surrogate": "agro"}, "replay": {"unit": "rollout"}},
            ("replay.unit", "rollout", "algorithm.surrogate='agro'"),
        ),
        (
            {"algorithm": {"old_policy": "start", "surrogate": "reinforce"}},
            ("algorithm.old_policy", "start", "algorithm.surrogate='reinforce'"),
        ),
        ({"algorithm": {"surrogate": "remix_centred"}}, ("algorithm.old_policy", "behaviour")),
        ({"algorithm": {"correction": "token_truncated"}}, ("algorithm.correction", "token_truncated")),
        (
            {
                "algorithm": {
                    "correction": "policy_truncated",
                    "surrogate": "gspo",
                    "old_policy": "start",
                    "aggregation": "sequence_mean",
                }
            },
            ("algorithm.correction", "policy_truncated"),
        ),
        (
            {"algorithm": {"old_policy": use("ewma", decay=0.5), "divergence": "ewma"}},
            ("algorithm.old_policy.decay", 0.5, "algorithm.divergence.decay=0.9"),
        ),
    ],
)
def test_freeze_names_the_key_the_value_and_what_is_allowed(settings, named):
    with refused(*named):
        freeze(settings)


SURROGATES = ", ".join(map(repr, surrogates.SURROGATES))


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        # The function.
        ({"surrogate": "clip"}, ("algorithm.surrogate", "clip", SURROGATES, "'path/to/file.py:function'")),
        ({"divergence": "kl"}, ("algorithm.divergence", "kl")),
        ({"surrogate": "none"}, ("algorithm.surrogate", "none")),
        ({"surrogate": 3}, ("algorithm.surrogate", 3, "use(NAME, ...)", SURROGATES)),
        ({"surrogate": {"name": ["cispo"]}}, ("algorithm.surrogate", {"name": ["cispo"]})),
        ({"reward_terms": ["grpo"]}, ("algorithm.reward_terms[0]", "grpo")),
        ({"reward_terms": "length_reward"}, ("algorithm.reward_terms", "length_reward")),
        ({"reward_terms": {"name": "length_reward"}}, ("algorithm.reward_terms", ANY, "use(NAME, ...)")),
        (
            {"reward_terms": ["length_reward", use("length_reward", weight=0.2)]},
            ("algorithm.reward_terms", ("length_reward", "length_reward")),
        ),
        # Its settings.
        ({"surrogate": {"lo": 0.1}}, ("algorithm.surrogate.lo", 0.1, "low")),
        ({"surrogate": use("cispo", dual=3.0)}, ("algorithm.surrogate.dual", 3.0)),
        ({"advantage": {"gate": 0.5}}, ("algorithm.advantage.gate", 0.5)),
        ({"advantage": {"norm_decay": 0.5}}, ("algorithm.advantage.norm_decay", 0.5)),
        ({"surrogate": {"dual": 0.5}}, ("algorithm.surrogate.dual", 0.5)),
        ({"surrogate": {"low": 1.5}}, ("algorithm.surrogate.low", 1.5)),
        ({"surrogate": {"low": "0.1"}}, ("algorithm.surrogate.low", "0.1")),
        ({"surrogate": {"high": True}}, ("algorithm.surrogate.high", True)),
        ({"divergence": use("reference", estimator="k4")}, ("algorithm.divergence.estimator", "k4")),
        ({"divergence": use("ewma", coefficient=-1)}, ("algorithm.divergence.coefficient", -1.0)),
        (
            {"reward_terms": [use("short_answer", tokens=0, every_iterations=5)]},
            ("algorithm.reward_terms[0].tokens", 0),
        ),
        # One of the user's own.
        ({"surrogate": "none.py:f"}, ("algorithm.surrogate", "none.py:f")),
        ({"surrogate": "no_such_module:f"}, ("algorithm.surrogate", "no_such_module:f", "ModuleNotFoundError")),
        ({"surrogate": "os:path"}, ("algorithm.surrogate", "os:path")),
        ({"surrogate": "sys:exit"}, ("algorithm.surrogate", "sys:exit")),
        (
            {"surrogate": "shutil:copy"},
            ("algorithm.surrogate", "shutil:copy", "(tokens)", "(src, dst, *, follow_symlinks=True)"),
        ),
    ],
)
def test_a_function_or_setting_of_one_that_is_not_there_is_refused_with_what_is(algorithm, named):
    with refused(*named):
        freeze({"algorithm": algorithm})


@pytest.mark.parametrize("key", [1, None, "x\ny", ("a",)])
def test_a_key_that_is_no_name_is_refused_in_one_line(key):
    for settings in ({key: 2}, {"update": {key: 2}}, {"algorithm": {"surrogate": {key: 2}}}):
        with pytest.raises(ConfigError) as refused:
            freeze(settings)
        assert len(str(refused.value).splitlines()) == 1 and repr(key) in str(refused.value)


def test_freeze_converts_what_means_the_same():
    config = freeze({"optimizer": {"learning_rate": 1}, "sampling": {"stop_strings": ["a"]}})
    assert isinstance(config.optimizer.learning_rate, float) and config.sampling.stop_strings == ("a",)
    assert freeze({"algorithm": {"surrogate": "cispo"}}) == freeze({"algorithm": {"surrogate": use("cispo", high=5)}})
    # Without a name: of the default function.
    assert (
        freeze({"algorithm": {"surrogate": {"high": 0.3}}}).algorithm.surrogate
        == freeze({"algorithm": {"surrogate": use("clipped", high=0.3)}}).algorithm.surrogate
    )
    terms = ["length_reward", use("overlong_penalty", buffer=2)]
    (first, second) = freeze({"algorithm": {"reward_terms": terms}}).algorithm.reward_terms
    assert (first.name, first.settings, second.name, second.settings) == (
        *("length_reward", {"weight": 0.1}),
        *("overlong_penalty", {"buffer": 2}),
    )


OWN = """
from typing import Literal

def tempered(x, *, power: float = 0.5, steps: tuple[int, ...] = (1, 2), kind: Literal["a", "b"] = "a", count: int):
    return -x.advantage * x.policy_logp * power

def halved(x, *, weight: float = 0.5):
    return weight * x.reward
"""


def test_a_function_of_ones_own_has_its_keywords_as_settings(own):
    config = freeze({"algorithm": {"surrogate": use(f"{own}:tempered", count=3), "reward_terms": [f"{own}:halved"]}})
    surrogate, (term,) = config.algorithm.surrogate, config.algorithm.reward_terms
    assert surrogate.settings == {"power": 0.5, "steps": (1, 2), "kind": "a", "count": 3}
    tokens = types.SimpleNamespace(advantage=3.0, policy_logp=-2.0)
    assert surrogate(tokens) == 3.0 and term(types.SimpleNamespace(reward=4.0)) == 2.0
    for settings, named in (
        ({}, ("algorithm.surrogate.count",)),
        ({"count": 1, "pwoer": 2}, ("algorithm.surrogate.pwoer", 2, "power")),
        ({"count": 1.5}, ("algorithm.surrogate.count", 1.5)),
        ({"count": 1, "kind": "c"}, ("algorithm.surrogate.kind", "c", "'a', 'b'")),
        ({"count": 1, "steps": (1, "x")}, ("algorithm.surrogate.steps[1]", "x")),
    ):
        with refused(*named):
            freeze({"algorithm": {"surrogate": use(f"{own}:tempered", **settings)}})


def test_a_config_survives_json_and_what_differs_is_named():
    config = freeze({"seed": 3, "prompts": {"arguments": {"a": [1, 2]}}, "sampling": {"stop_strings": ("x", "y")}})
    assert from_json(to_json(config)) == config
    other = freeze(with_point(json.loads(to_json(config)), {"algorithm.surrogate.low": 0.1}))
    assert differences(config, other) == {"algorithm.surrogate.low": (0.2, 0.1)}
    assert differences(config, config) == {}


def test_functions_survive_json_and_what_differs_is_named(own):
    method = {
        "advantage": use("mssr", decay=0.8, decay_moving=0.5),
        "reward_terms": [use("short_answer", tokens=2, every_iterations=3), f"{own}:halved"],
        "reshaping": ["duration_factor", use("entropy_bonus", limit=0.5)],
        "surrogate": use(f"{own}:tempered", steps=[3], count=7),
        "correction": use("token_masked", low=0.1),
        "divergence": use("ewma", coefficient=0.1, decay=0.99, estimator="k1"),
        "entropy_bonus": use("adaptive", target=0.5),
        "cross_entropies": [use("environment", coefficient=0.01)],
    }
    config = freeze({"algorithm": method, "replay": {"draw": use("age", scale_iterations=2.0)}})
    again = from_json(to_json(config))
    assert again == config and from_json(to_json(again)) == config and differences(config, again) == {}
    assert from_json(run_record.record(config)) == config
    assert hash(again.algorithm.surrogate) == hash(config.algorithm.surrogate)
    saved = json.loads(to_json(config))["algorithm"]
    assert saved["correction"] == {"name": "token_masked", "low": 0.1, "high": 2.0}
    assert saved["surrogate"]["name"] == f"{own}:tempered" and saved["step_size"] == {"name": "none"}

    # The same function in a file that is another is another; and json tells which one a run had.
    own.write_text(OWN + "# another\n")
    changed = freeze({"algorithm": method, "replay": {"draw": use("age", scale_iterations=2.0)}})
    assert set(differences(config, changed)) == {
        "algorithm.surrogate.source",
        f"algorithm.reward_terms.{own}:halved.source",
    }
    assert differences(config, from_json(to_json(config))) == {}

    plain, cispo = Config(), freeze({"algorithm": {"surrogate": "cispo", "reward_terms": ["length_reward"]}})
    assert differences(plain, cispo) == {
        "algorithm.surrogate": ("clipped", "cispo"),
        "algorithm.surrogate.low": (0.2, 0.0),
        "algorithm.surrogate.high": (0.2, 5.0),
        "algorithm.surrogate.dual": (0.0, None),
        "algorithm.reward_terms": ((), ("length_reward",)),
        "algorithm.reward_terms.length_reward.weight": (None, 0.1),
    }
    whole = differences(plain, cispo, whole=True)
    assert {path: (old, new) for path, (old, new) in whole.items() if path == "algorithm.surrogate"} == {
        "algorithm.surrogate": (plain.algorithm.surrogate, cispo.algorithm.surrogate)
    }
    assert set(whole) == {"algorithm.surrogate", "algorithm.reward_terms"}


def test_rates_and_averages_are_scaled_from_the_batch_size_that_they_are_meant_for(tmp_path):
    """Four times the rollouts per step:

    rates are doubled, and averages are over a quarter of the steps, the same number of rollouts.
    """
    method = {
        "old_policy": use("ewma", decay=0.9),
        "divergence": use("ewma", decay=0.9),
        "advantage": use("reinforce_pp", norm_decay=0.8),
    }
    given = {"algorithm": method}
    config = freeze(given | {"update": {"scaled_from_batch_size": 16}}).scaled()  # the default is 64
    assert (config.optimizer.learning_rate, config.algorithm.critic.learning_rate) == (2e-5, 2e-3)
    # Centres of mass 9 and 4 steps become 9/4 and 1.
    assert config.algorithm.old_policy["decay"] == pytest.approx(2.25 / 3.25)
    assert config.algorithm.divergence["decay"] == config.algorithm.average_decay == pytest.approx(2.25 / 3.25)
    assert config.algorithm.advantage["norm_decay"] == pytest.approx(0.5)
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms.use import needs\n\n@needs('average_logp')\n"
        "def averaged(x, *, decay: float = 0.9):\n    return x.policy_logp - x.average_logp\n"
    )
    method = {"surrogate": f"{tmp_path / 'own.py'}:averaged"}
    own = freeze({"algorithm": method, "update": {"scaled_from_batch_size": 16}}).scaled()
    assert own.algorithm.average_decay == pytest.approx(2.25 / 3.25)
    plain = freeze(given)
    assert plain.scaled() == plain and config.scaled() == config


def test_a_smaller_batch_at_a_scaled_rate_goes_as_far_on_as_many_rollouts():
    """Adam with dominant noise: batches of 64 and 16 of the same gradients, with mean 0.02 and standard deviation 1."""

    def distance(batch_size, rate):
        optimizer, steps = optax.adam(rate), 65536 // batch_size
        noise = jax.random.normal(jax.random.key(0), (steps, 256)) / np.sqrt(batch_size)

        def step(carry, noise):
            x, state = carry
            updates, state = optimizer.update(0.02 + noise, state)
            return (x + updates, state), None

        start = jnp.zeros(256)
        return -float(jnp.mean(jax.lax.scan(step, (start, optimizer.init(start)), noise)[0][0]))

    small = freeze({"update": {"batch_size": 16, "micro_batch_size": 16, "scaled_from_batch_size": 64}}).scaled()
    large = distance(64, 1e-5)
    assert small.optimizer.learning_rate == pytest.approx(0.5e-5)
    # Measured: 1.01; with the rate as it was 2.02.
    assert distance(16, small.optimizer.learning_rate) == pytest.approx(large, rel=0.05)
    assert distance(16, 1e-5) > 1.9 * large


# ---- every setting is alive ----------------------------------------------------------------------------------------

# Every number that is counted in rows divides over eight devices.
SETTINGS = {
    "num_iterations": 3,
    "prompts.size": 40,
    "sampling.max_completion_tokens": 8,
    "rollout.prompts_per_iteration": 8,
    "rollout.group_size": 2,
    "rollout.slots": 8,
    "replay.capacity": 32,
    "rewards.num_workers": 1,
    "update.batch_size": 16,
    "update.micro_batch_size": 8,
    "update.updates_per_iteration": 2,
    "update.logp_chunk_tokens": 8,
    "metrics.tensorboard": False,
    "checkpoint.export": False,
}


def text_of(traced):
    """Return the text of a program without parts that its results do not need, and without addresses.

    A setting that is read and then not used changes nothing.
    """
    needed, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars), instantiate=True)
    return re.sub(r"0x[0-9a-f]+", "", str(needed))


@functools.cache
def program_text(config_text, name, arch=TINY):
    """Return the text of a traced program, which takes half the time of a lowered one."""
    run = assemble(from_json(config_text), arch, (257,), mesh_of(ONE))
    program = run.programs()[name]
    with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
        traced = jax.jit(program.fn).trace(*program.args)
    return text_of(traced.jaxpr.jaxpr)


NO_LAYERS = dataclasses.replace(TINY, num_layers=0)  # traced in half the time


def program(name, arch=NO_LAYERS):
    """Return a probe of the text of one program of the run on one device."""

    def look(config, folder, monkeypatch):
        return program_text(to_json(config), name, arch)

    look.__name__ = name
    return look


def drawn(config, folder, monkeypatch):
    """Return the text of the updates' program, with the optimizer step after the draw removed."""

    def step(self, state, ring, iteration, key, draw, base):
        ring, batch, sums = draw(ring, key)
        return state, ring, sums.union(Sums({"batch": batch}))

    monkeypatch.setattr(Update, "step", step)
    return program_text.__wrapped__(to_json(config), "update")


def optimizer(config, folder, monkeypatch):
    """Return the text of the run's optimizer for a single matrix."""
    made, matrix = assemble(config, TINY, (257,), mesh_of(ONE)).learner.update.optimizer, jnp.zeros((2, 3))
    traced = jax.make_jaxpr(lambda gradient: made.update(gradient, made.init(matrix), matrix))(matrix)
    return text_of(traced.jaxpr)


def program_of_experts(name):
    """Return the same probe for a model with experts."""
    return program(name, dataclasses.replace(TINY, num_experts=6, experts_per_token=2))


def shapes(config, folder, monkeypatch):
    """Return the shapes of all arrays that a run keeps on the device."""
    run = assemble(config, TINY, (257,), mesh_of(ONE))
    kept = (
        run.learner.abstract_ring,
        run.sampler.abstract_state(),
        run.eval_sampler and run.eval_sampler.abstract_state(),
    )
    return [(x.shape, x.dtype) for x in jax.tree.leaves(kept)]


def mesh(config, folder, monkeypatch):
    return dict(sharding.make_mesh(config.mesh).shape)


def sampler_mesh(config, folder, monkeypatch):
    return dict(sharding.sampler_mesh(config.mesh, sharding.make_mesh(config.mesh)).shape)


def layout(config, folder, monkeypatch):
    """Return the layout of the learner's weights on a mesh of two devices."""
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:2])
    return [x.sharding.spec for x in jax.tree.leaves(assemble(config, TINY, (257,), mesh).learner.params)]


def model(config, folder, monkeypatch):
    return pretrained.resolve(config.model.path).architecture()


def begun(config, folder, monkeypatch):
    """Return one of the adapters at the start of training. The folder "adapters" has others."""
    monkeypatch.chdir(folder)
    mesh, lora = mesh_of(ONE), dataclasses.replace(config.model.lora, path="")
    made = Model(TINY, lora=lora)
    peft.export(peft.begin(made, mesh, seed=7), made, make_byte_tokenizer(), "adapters", "random:debug")
    found = peft.begin(model_of(config, TINY, mesh), mesh, seed=0)
    return jax.device_get(found["blocks"]["q_lora_a"]).tolist()


def loaded_models(config, folder, monkeypatch):
    """Return the shapes of the models whose weights a run loads."""
    shapes, random = [], pretrained._random

    def noted(path, setting):
        source = random(path, setting)
        load = lambda model, mesh, *, seed: shapes.append(model.arch) or source.load_params(model, mesh, seed=seed)
        return dataclasses.replace(source, load_params=load)

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "_random", noted)
        ghost_run(config, folder, monkeypatch)
    return shapes


def compares(config, folder, monkeypatch):
    """Return how often hosts compare their values."""
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(hosts, "agree_on_copies", lambda *_, **__: asked.append(1))
        ghost_run(config, folder, monkeypatch)
    return len(asked)


def kernel_of_a_tpu(config, folder, monkeypatch):
    devices = np.array([types.SimpleNamespace(platform="tpu")])
    tpu = types.SimpleNamespace(shape=mesh_of(ONE).shape, size=1, devices=devices)
    return assemble(config, TINY, (257,), tpu).model.attention


def loaded(config, folder, monkeypatch):
    """Return the token ids of the questions, held out and in the stream's order, and the skipped rows."""
    train, held_out, skipped = questions(config, make_byte_tokenizer())
    order = PromptStream(train, config.prompts, Ledger(), seed=config.seed).next_batch(8)
    return [[row.tokens.tolist() for row in rows] for rows in (train, held_out)], skipped, order.tokens.tolist()


def spelled(config, folder, monkeypatch):
    """Return the token ids of the questions by a tokenizer that has special tokens in its vocabulary."""
    return [row.tokens.tolist() for row in questions(config, make_byte_tokenizer())[0]]


def rendered(config, folder, monkeypatch):
    """Return the token ids of the questions by a chat template with a switch."""
    tokenizer = make_byte_tokenizer()
    tokenizer._fast.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}?{% endif %}"
    return [row.tokens.tolist() for row in questions(config, tokenizer)[0]]


def ends(config, folder, monkeypatch):
    """Return the ids that end a completion of a run."""
    found, whole = [], train_module.assemble

    def noted(config, arch, eos_ids, *others):
        found.append(eos_ids)
        return whole(config, arch, eos_ids, *others)

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "assemble", noted)
        ghost_run(config, folder, monkeypatch)
    return found


def scores(config, folder, monkeypatch):
    """Return the reward pool's scores of two completions, one of them slow, and the number of processes."""
    with RewardPool(config.rewards, task_scorer=tasks.scorer(config.prompts)) as pool:
        processes = len(psutil.Process().children())
        columns = {"allowed": "slow", "answer": "a"}
        rewards = pool.collect([pool.submit(Example("p", columns), ["slow", "low!"])])
    return processes, rewards.total.tolist(), rewards.outcome.tolist()


def answered(config, folder, monkeypatch):
    """Return the state of a row after its second turn, and the number of processes that answer."""
    with Environment(config) as environment:
        processes = len(psutil.Process().children())
        reply = environment.ask(0, Example("p", {}), ["a", "b"], ["b"])
        turn = Turn("b", 4, reply)
        Conversations(environment, make_byte_tokenizer(), config)._judge(turn, 2)
    return processes, turn.verdict, turn.answer


def stops(config, folder, monkeypatch):
    """Return the effect of a stop string on a row that a chunk of decoding has left at "a;b"."""
    sampler = assemble(config, TINY, (257,), mesh_of(ONE)).sampler
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(sampler._empty))
    state.tokens[0, 0, 0, 1:4] = list(b"a;b")
    state.length[0, 0] = 4
    stop_rows = lambda s, length: (s, (np.where(length > 0, STOP_STRING, s.stop_reason), length))
    generator = Generator(sampler, {"stop_rows": stop_rows}, make_byte_tokenizer().decode)
    generator.state = jax.tree.map(jnp.asarray, state)
    generator.adopt(0, 0, 0, 0, None, [0])
    scanned = np.zeros(state.stop_reason.shape, np.int64)
    reasons, _ = stop_strings.stop(generator, state.stop_reason, np.asarray(state.length), scanned)
    return np.asarray(reasons).tolist()


def taken_from(config, folder, monkeypatch):
    """Return the folder from which a run would load compiled programs."""
    asked = []
    monkeypatch.setattr(train_module, "load_all", lambda programs, mesh, folder: asked.append(folder))
    ghost_run(config, folder, monkeypatch)
    return asked


def cache(config, folder, monkeypatch):
    """Return the folder in which a run would keep its compiled programs."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir
    try:
        ghost_run(config, folder, monkeypatch)
        return jax.config.jax_compilation_cache_dir
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def external(config, folder, monkeypatch):
    """Return the token ids of external rollouts at the start of an iteration."""
    source = building.external_of(assemble(config, TINY, (257,), mesh_of(ONE)))
    return np.asarray(source.next_groups(0, lambda group: None).rows.tokens).tolist()


def remembered(config, folder, monkeypatch):
    """Return the memory of a question that was answered right twice while the policy moved."""
    rewards = Rewards(np.ones(1, np.float32), {}, np.zeros(1, np.int8))
    memory = Memory(config.algorithm.of_credit, (), Sizes(4, 8), Ledger())
    sums = {name: np.ones(shape) for name, shape in memory.whole.items()}
    for _ in range(2):
        memory.observe(rewards, [0], {"kl_behaviour_sum": 1.0, "token_count": 10} | sums)
    known = memory.scores(rewards, [0])
    return [{name: x.tolist() for name, x in given.items()} for given in (known.columns, known.memory)]


def retires(config, folder, monkeypatch):
    """Return the questions that are asked after one question was answered right."""
    stream = PromptStream(questions(config, make_byte_tokenizer())[0], config.prompts, Ledger(), seed=config.seed)
    stream.ledger.observe([stream.question_id(0)], np.ones(1, bool), np.ones(1, bool))
    return stream.next_batch(4).group_id.tolist()


def failures(config, folder, monkeypatch):
    """Return whether a run stops when half of its rewards failed."""
    outcome = np.array([OUTCOME_SCORE, OUTCOME_ERROR], np.int8)
    return actor.too_many_failures(config, Rewards(np.array([1.0, np.nan]), {}, outcome))


def gap(config, folder, monkeypatch):
    """Return the message if sampler and learner differ by 0.01 nats."""
    return faults.gap_message(config, {"own_token_count": 1, "gap_max": 0.01, "gap_sum": 0.01, "gap_high_count": 0})


def broken(config, folder, monkeypatch):
    """Return the message after two non-finite updates in a row. The ring and the drawn rows are empty."""
    monkeypatch.setattr(faults, "compile_all", lambda *_: {"last_drawn": lambda ring: ring})
    found = faults.Faults(config, sharding.make_mesh(config.mesh))
    found.observe({"nonfinite_run": 2.0, "own_token_count": 0.0}, 2, None)
    return found.failure(folder)


def time_to_write(config, folder, monkeypatch):
    """Return the message about a checkpoint that took ten seconds to write."""
    monkeypatch.setattr(Checkpointer, "_last_write_s", lambda self: 10.0)
    with contextlib.closing(Checkpointer(folder, config.checkpoint)) as checkpointer:
        return checkpointer.last_write()


def checkpoints_in(config, folder, monkeypatch):
    """Return the folder of checkpoints, in a bucket or in the workdir."""
    monkeypatch.setattr(bucket, "place", lambda where, field: folder / str(where).removeprefix(bucket.PREFIX))
    with contextlib.closing(Checkpointer(folder, config.checkpoint)) as checkpointer:
        return checkpointer.directory


def passes(config, folder, monkeypatch):
    rewards = Rewards(np.array([0.25, 0.75]), {}, np.zeros(2, np.int8))
    group = FinishedGroup(0, None, [1, 1], [STOP_EOS, STOP_EOS])
    return rollout_values(config, [group], rewards, 0)["rollout/pass_rate"]


def costs(config, folder, monkeypatch):
    seconds = {"time/generate_s": 1.0, "time/reward_s": 0.0, "time/update_s": 1.0}
    return cost_values(config, seconds | {"replay/drawn_rows": 16, "rollout/generated_rows": 16}, 0.0)


def ghost_run(config, folder, monkeypatch):
    """Return the files of a run whose programs return zeros."""
    ghosts.haunt(monkeypatch)
    workdir = folder / f"run{time.monotonic_ns()}"
    workdir.mkdir()
    assert train_module.train(config, workdir) == 0
    lines = {name: len((workdir / name).read_text().splitlines()) for name in ("metrics.jsonl", "samples.jsonl")}
    evaluations = sum('"eval/pass_rate"' in line for line in (workdir / "metrics.jsonl").read_text().splitlines())
    checkpoints = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    return sorted(path.name for path in workdir.iterdir()), checkpoints, lines, evaluations


def opened(config, folder, monkeypatch):
    """Return the number of questions that a ghost run takes from the stream in each iteration."""
    taken, take = [], PromptStream.next_batch
    with monkeypatch.context() as patch:
        patch.setattr(PromptStream, "next_batch", lambda self, n: taken.append(n) or take(self, n))
        ghost_run(config, folder, monkeypatch)
    return taken


def asked(config, folder, monkeypatch):
    """Return the number of rollouts per iteration of a ghost run in which all answers are equal."""
    ghost_run(config, folder, monkeypatch)
    lines = (max(folder.glob("run*")) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["rollout/generated_rows"] for line in lines]


def rows(*prompts):
    return "".join(json.dumps(p if isinstance(p, dict) else {"prompt": p}) + "\n" for p in prompts)


FILES = {
    "four.jsonl": rows("a", "b", "c", "d"),
    "five.jsonl": rows("a", "b", "c", "d", "e"),
    "messages.jsonl": rows({"messages": [{"role": "user", "content": "hi"}]}),
    "bad.jsonl": rows("a") + "{\n",
    "long.jsonl": rows("a", "b" * 40),
    "special.jsonl": rows("a<|eos|>"),
    "shown.jsonl": rows({"prompt": "a", "completions": ["b", "c"]}),
    "told.jsonl": rows({"prompt": "a", "completions": ["d", "e"]}),
}
FOUR = {"prompts.source": "jsonl", "prompts.name": "four.jsonl"}
GYM = {"prompts.source": "reasoning_gym", "prompts.name": "chain_sum", "prompts.max_tokens": 128}
EVALUATED = {"eval.num_prompts": 8}
CHECKPOINTED = {"checkpoint.every_iterations": 1, "checkpoint.keep_last": 1}
WITH_KL = {"algorithm.divergence": "reference"}
SHOWN = {"external.paths": ("shown.jsonl",), "external.groups_per_iteration": 8, "replay.capacity": 64}
CRITIC = {"algorithm.advantage": "gae"}
ADAPTERS = {"model.lora.rank": 4}
SINGLE = {"replay.unit": "rollout"}
BINS = CRITIC | {"algorithm.critic.bins": 8}

# setting -> (another value, where to look, what else must be set)
TURNS = {"environments.factory": f"{ENVIRONMENTS}:slow", "prompts.chat_template": False}
TURNS |= {"environments.max_answer_tokens": 4}  # two turns fit beside it
ALIVE = {
    "seed": (1, loaded, {}),
    "num_iterations": (4, ghost_run, {}),
    "compilation_cache": ("/tmp/other", cache, {}),
    "executables": ("docs", taken_from, {}),
    "model.path": ("random:debug_wide", model, {}),
    "model.reference_path": ("random:debug_wide", loaded_models, WITH_KL),
    "model.compute_dtype": ("bfloat16", program("decode", TINY), {}),
    "model.param_dtype": ("bfloat16", program("update", TINY), {}),
    "model.remat": ("none", program("update", TINY), {}),
    "model.attention": ("xla", kernel_of_a_tpu, {}),
    "model.lora.rank": (2, program("update", TINY), {}),
    "model.lora.alpha": (8.0, program("decode", TINY), ADAPTERS),
    "model.lora.rank_stabilised": (True, program("decode", TINY), ADAPTERS),
    "model.lora.dora": (True, program("decode", TINY), ADAPTERS),
    "model.lora.targets": (("q", "v"), program("decode", TINY), ADAPTERS),
    "model.lora.path": ("adapters", begun, ADAPTERS),
    "model.lora.modules": (2, program("update", TINY), ADAPTERS),
    "model.lora.module_steps": (30, program("update", TINY), ADAPTERS | {"model.lora.modules": 2}),
    "model.routing_replay": (True, program_of_experts("update"), {}),
    "prompts.source": ("letters", loaded, FOUR),
    "prompts.name": ("five.jsonl", loaded, FOUR),
    "prompts.arguments": ({"min_terms": 6, "max_terms": 6}, loaded, GYM),
    "prompts.size": (30, loaded, {}),
    "prompts.max_tokens": (40, shapes, {}),
    "prompts.system_prompt": ("Be kind.", loaded, {}),
    "prompts.chat_template": (False, loaded, {"prompts.source": "jsonl", "prompts.name": "messages.jsonl"}),
    "prompts.chat_template_kwargs": ({"enable_thinking": True}, rendered, {"prompts.max_tokens": 200}),
    "prompts.special_tokens": (True, spelled, {"prompts.source": "jsonl", "prompts.name": "special.jsonl"}),
    "prompts.bad_row": ("skip", loaded, {"prompts.source": "jsonl", "prompts.name": "bad.jsonl"}),
    "prompts.long_prompt": ("skip", loaded, {"prompts.source": "jsonl", "prompts.name": "long.jsonl"}),
    "prompts.shuffle": (False, loaded, {}),
    "prompts.retire_pass_rate": (0.9, retires, {}),
    "sampling.temperature": (0.5, program("decode"), {}),
    "sampling.top_k": (3, program("decode"), {}),
    "sampling.top_p": (0.9, program("update"), {}),
    "sampling.min_p": (0.1, program("decode"), {}),
    "sampling.support_tokens": (8, shapes, {"sampling.top_p": 0.9}),
    "sampling.max_completion_tokens": (6, shapes, {}),
    "sampling.stop_strings": ((";",), stops, {}),
    "sampling.stop_tokens": (("a",), ends, {}),
    "rollout.prompts_per_iteration": (16, shapes, {}),
    "rollout.group_size": (4, shapes, {}),
    "rollout.slots": (16, shapes, {}),
    "rollout.chunk_steps": (3, program("decode"), {}),
    "rollout.lookahead_prompts": (8, shapes, {}),
    "rollout.max_lag_iterations": (1, opened, {"rollout.lookahead_prompts": 16}),
    "rollout.stale_cache": ("keep", program("reread"), {"rollout.lookahead_prompts": 16}),
    "rollout.max_resample_rounds": (2, asked, {}),
    "rollout.weights": ("int8", program("decode", TINY), {}),
    "rewards.functions": ((f"{FUNCTIONS}:length",), scores, {}),
    "rewards.weights": ((0.5,), scores, {}),
    "rewards.num_workers": (2, scores, {}),
    "rewards.timeout_s": (0.05, scores, {"rewards.functions": (f"{FUNCTIONS}:score",)}),
    "rewards.max_failure_frac": (0.4, failures, {}),
    "rewards.pass_threshold": (0.5, passes, {}),
    "environments.factory": (f"{ENVIRONMENTS}:slow", program("decode"), {"sampling.max_completion_tokens": 96}),
    "environments.max_turns": (2, answered, TURNS),
    "environments.max_answer_tokens": (2, program("decode"), TURNS),
    "environments.max_turn_tokens": (2, program("decode"), TURNS),
    "environments.num_workers": (3, answered, TURNS),
    "environments.timeout_s": (0.05, answered, TURNS),
    "algorithm.advantage": ("leave_one_out", program("insert"), {}),
    "algorithm.reward_terms": (("overlong_penalty",), program("insert"), {}),
    "algorithm.reshaping": (("amplify_positive",), program("insert"), {}),
    "algorithm.overlong_filter": (True, program("insert"), {}),
    "algorithm.surrogate": ("cispo", program("update"), {}),
    "algorithm.old_policy": ("interpolated", program("update"), {}),
    "algorithm.correction": ("token_masked", program("update"), {}),
    "algorithm.step_size": ("effective_sample_size", program("update"), {}),
    "algorithm.aggregation": ("constant_length", program("update"), {}),
    "algorithm.divergence": ("convex", program("update"), WITH_KL),
    "algorithm.reference_reset_iterations": ((1,), program("update"), WITH_KL),
    "algorithm.entropy_bonus": ("constant", program("update"), {}),
    "algorithm.cross_entropies": (("environment",), program("update"), {}),
    "algorithm.critic.gradient_share": (0.2, program("update"), CRITIC),
    "algorithm.critic.learning_rate": (1e-2, program("update"), CRITIC),
    "algorithm.critic.clip": (0.2, program("update"), CRITIC),
    "algorithm.critic.bins": (8, program("annotate"), CRITIC),
    "algorithm.critic.low": (-1.0, program("annotate"), BINS),
    "algorithm.critic.high": (2.0, program("annotate"), BINS),
    "replay.capacity": (64, shapes, {}),
    "replay.capacity_tokens": (1280, shapes, {}),
    "replay.positive_fraction": (0.5, program("insert"), SINGLE),
    "replay.admission": ("likely", program("insert"), SINGLE | {"replay.positive_fraction": 0.5}),
    "replay.draw": ("age", drawn, {}),
    "replay.priority": ("surprise", program("insert"), {"replay.draw": "priority"}),
    "replay.delay_iterations": (1, drawn, {}),
    "replay.latest_visit": (True, program("insert"), {}),
    "replay.min_ess": (0.5, program("update"), {}),
    "replay.retirement": ("solved", program("insert"), {}),
    "replay.max_age_steps": (2, drawn, {}),
    "replay.max_uses": (2, drawn, {}),
    "replay.fresh_fraction": (0.5, drawn, {}),
    "replay.unit": ("rollout", program("update"), {}),
    "replay.skip_tied": (True, program("insert"), {}),
    "replay.cost_ratio": (5.28, costs, {}),
    "replay.shards": (2, shapes, {}),
    "external.paths": (("told.jsonl",), external, SHOWN),
    "external.groups_per_iteration": (24, program("insert"), SHOWN),
    "replay.memory": ("host", program("update"), {}),
    "update.batch_size": (8, program("update"), {}),
    "update.micro_batch_size": (4, program("update"), {}),
    "update.pack_width": (96, program("update"), SINGLE | {"update.micro_batch_tokens": 480}),
    "update.micro_batch_tokens": (480, program("update"), {}),
    "update.load_balance": (0.1, program_of_experts("update"), {}),
    "update.updates_per_iteration": (3, program("update"), {}),
    "update.weights": ("rollout", program("update", TINY), {"rollout.weights": "int8"}),
    "update.logp_chunk_tokens": (64, program("update"), {}),
    "update.scaled_from_batch_size": (4, program("update"), {}),
    "update.max_sampler_learner_gap_nats": (0.001, gap, {}),
    "optimizer.name": ("adafactor", optimizer, {}),
    "optimizer.moment_dtype": ("bfloat16", optimizer, {}),
    "optimizer.learning_rate": (1e-3, program("update"), {}),
    "optimizer.schedule": ("cosine", optimizer, {}),
    "optimizer.warmup_steps": (2, optimizer, {}),
    "optimizer.b1": (0.8, optimizer, {}),
    "optimizer.b2": (0.9, optimizer, {}),
    "optimizer.eps": (1e-6, optimizer, {}),
    "optimizer.weight_decay": (0.1, optimizer, {}),
    "optimizer.max_grad_norm": (0.5, optimizer, {}),
    "optimizer.reset_every_steps": (2, optimizer, {}),
    "optimizer.offload": (True, program("update"), {}),
    "mesh.data": (4, mesh, {"mesh.fsdp": 2, "mesh.data": 2, "mesh.tensor": 2}),
    "mesh.fsdp": (2, mesh, {}),
    "mesh.expert": (2, mesh, {}),
    "mesh.context": (2, mesh, {}),
    "mesh.tensor": (2, mesh, {}),
    "mesh.sampler_tensor": (2, sampler_mesh, {"mesh.fsdp": 4}),
    "mesh.rules": ({"embed": None}, layout, {"mesh.fsdp": 2}),
    "update.max_nonfinite_steps": (2, broken, {}),
    "checkpoint.grace_s": (5.0, time_to_write, {}),
    "checkpoint.bucket": ("gs://my-bucket/run", checkpoints_in, {}),
    "checkpoint.every_iterations": (1, ghost_run, {"checkpoint.keep_last": 5}),
    "checkpoint.every_minutes": (1e-9, ghost_run, {"checkpoint.keep_last": 5}),
    "checkpoint.keep_last": (2, ghost_run, CHECKPOINTED),
    "checkpoint.keep_best": (3, ghost_run, CHECKPOINTED | EVALUATED | {"eval.every_iterations": 1}),
    "checkpoint.export": (True, ghost_run, {}),
    "eval.every_iterations": (1, ghost_run, EVALUATED),
    "eval.num_prompts": (8, shapes, {}),
    "eval.num_samples": (2, shapes, EVALUATED),
    "eval.slots": (5, shapes, EVALUATED),
    "eval.temperature": (0.5, program("eval_decode"), EVALUATED),
    "eval.name": ("five.jsonl", loaded, FOUR | {"eval.num_prompts": 2}),
    "metrics.tensorboard": (True, ghost_run, {}),
    "metrics.samples_per_iteration": (2, ghost_run, {}),
    "metrics.share_rollouts": (True, ghost_run, {}),
    "metrics.compare_hosts": (True, compares, {}),
}


CREDIT, LOSS, MEMORY = program("insert"), program("update"), remembered
GROUPED = {"replay.unit": "group"}
GDPO = {"rewards.functions": ("a:b", "c:d"), "rewards.weights": (1.0, 1.0)}
PLAIN = {"algorithm.surrogate": "reinforce"}
MOVED = {"algorithm.old_policy": "interpolated"}
ANSWERED = {"environments.factory": f"{ENVIRONMENTS}:brief", "environments.max_answer_tokens": 4}
BRANCHED = ANSWERED | {"rollout.group_size": 4, "rollout.prompts_per_iteration": 4}

# place -> function -> (setting -> another value, where to look, what else must be set). A function without a row needs
# no other settings: ``another_value`` chooses the value, and ``LOOKS`` has the probe of its place.
OF_FUNCTIONS = {
    "algorithm.advantage": {
        "reinforce_pp": ({"norm_decay": 0.9}, CREDIT, {}),
        "brorl": ({"norm_decay": 0.9}, CREDIT, {}),
        "asymre": ({"delta_v": -0.2}, CREDIT, {}),
        "gdpo": ({"gate": 0.5, "norm_decay": 0.9}, CREDIT, GDPO),
        "poise": ({"decay": 0.5}, MEMORY, {}),
        "gae": ({"gae_lambda": 0.9, "discount": 0.9, "norm_decay": 0.9}, CREDIT, {}),
        "turn_returns": ({"discount": 0.9, "std": False}, CREDIT, {}),
        "mt_grpo": ({"coefficient": 0.5}, CREDIT, {}),
        "ui_s1": ({"discount": 0.9, "weight": 0.5, "std": False, "matched": 0.5, "min_std": 0.1}, CREDIT, {}),
        "logo": ({"branch_rows": 2, "branch_turns": 2, "weight": 0.5, "std": False}, CREDIT, BRANCHED),
        "step_values": ({"branch_rows": 2, "branch_turns": 2, "std": True}, CREDIT, BRANCHED),
        "turn_gae": ({"gae_lambda": 0.9, "discount": 0.9, "norm_decay": 0.9}, CREDIT, {}),
        "step_gae": ({"gae_lambda": 0.9, "discount": 0.9, "norm_decay": 0.9}, CREDIT, {}),
    },
    "algorithm.reward_terms": {
        "overlong_penalty": ({"buffer": 2}, CREDIT, {}),
        "length_reward": ({"weight": 0.5}, CREDIT, {}),
        "short_answer": ({"tokens": 2, "bonus": 1.0, "every_iterations": 1}, CREDIT, {}),
    },
    "algorithm.reshaping": {
        "amplify_positive": ({"factor": 2.0}, CREDIT, {}),
        "entropy_factor": ({"strength": 2.0}, CREDIT, {}),
        "entropy_bonus": ({"coefficient": 3.0, "limit": 0.5}, CREDIT, {}),
        "duration_factor": ({"exponent": 2.0}, CREDIT, {}),
        "without_wrong_turns": ({"below": 0.5}, CREDIT, {}),
    },
    "algorithm.surrogate": {
        "clipped": ({"low": 0.1, "high": 0.3, "dual": 3.0}, LOSS, {}),
        "sequence_clipped": ({"low": 0.1, "high": 0.3, "dual": 3.0}, LOSS, ROWS_ALIKE),
        "gspo": ({"low": 0.1, "high": 0.3, "dual": 3.0}, LOSS, ROWS_ALIKE),
        "opmd": ({"tau": 0.2}, LOSS, {}),
        "remix_centred": ({"low": 0.1, "high": 0.3}, LOSS, MOVED),
        "agro": ({"beta": 0.2}, LOSS, GROUPED | REGRESSION),
        "gvpo": ({"beta": 0.2}, LOSS, GROUPED | REGRESSION),
        "kimi_k15": ({"tau": 0.2}, LOSS, REGRESSION),
        "spo": ({"beta": 0.2}, LOSS, GROUPED | ROWS_ALIKE),
        "spo_cross_entropy": ({"beta": 0.2}, LOSS, GROUPED | ROWS_ALIKE),
        "inpo": ({"eta": 0.2}, LOSS, GROUPED | ROWS_ALIKE),
        "vcpo": ({"cap": 3.0}, LOSS, GROUPED | {"algorithm.aggregation": "constant_length"}),
    },
    "algorithm.old_policy": {"ewma": ({"decay": 0.5}, LOSS, {})},
    "algorithm.correction": {
        "token_truncated": ({"high": 3.0}, LOSS, PLAIN),
        "policy_truncated": ({"high": 3.0}, LOSS, MOVED),
        "token_masked": ({"low": 0.1, "high": 3.0}, LOSS, PLAIN),
        "sequence_truncated": ({"high": 3.0}, LOSS, PLAIN),
        "sequence_masked": ({"low": 0.1, "high": 3.0}, LOSS, PLAIN),
        "second_moment": ({"limit": 0.1}, LOSS, PLAIN),
    },
    "algorithm.divergence": {
        "reference": ({"coefficient": 0.2, "estimator": "k1"}, LOSS, {}),
        "convex": ({"coefficient": 0.2, "estimator": "k1"}, LOSS, {}),
        "ewma": ({"coefficient": 0.2, "estimator": "k1", "decay": 0.5}, LOSS, {}),
    },
    "algorithm.entropy_bonus": {
        "constant": ({"coefficient": 0.01}, LOSS, {}),
        "adaptive": ({"coefficient": 0.01, "target": 0.5, "rate": 1e-3}, LOSS, {}),
    },
    "algorithm.cross_entropies": {
        "environment": ({"coefficient": 0.1}, LOSS, {}),
        "answers": ({"coefficient": 0.1}, LOSS, ANSWERED),
        "imitation": ({"coefficient": 0.5}, LOSS, SHOWN),
    },
    "replay.draw": {
        "priority": ({"exponent": 2.0}, drawn, {}),
        "age": ({"scale_iterations": 2.0}, drawn, {}),
        "fresh_or_older": ({"fresh_share": 0.2, "fresh_from_iteration": 3}, drawn, {}),
        "uniform_then_fresh": ({"fresh_from_iteration": 2}, drawn, {}),
    },
    "replay.retirement": {"solved": ({"share": 0.5}, program("insert"), {})},
}


def in_each(*looks):
    """Return the probe that returns the results of several probes."""
    return lambda config, folder, monkeypatch: [look(config, folder, monkeypatch) for look in looks]


LOOKS = {
    **dict.fromkeys(("algorithm.reward_terms", "algorithm.reshaping", "replay.priority", "replay.retirement"), CREDIT),
    "algorithm.advantage": in_each(CREDIT, MEMORY),
    "replay.draw": drawn,
}


def another_value(settings, path, default):
    """Return a value of a function's setting that is allowed and is not its default."""
    candidates = [not default] if isinstance(default, bool) else [default / 2, 2 * default, default + 1, 0.5]
    for value in map(type(default), candidates):
        with contextlib.suppress(ConfigError):
            freeze(with_point({}, settings | {path: value}))
            if value != default:
                return value
    raise AssertionError(f"{path}: say in OF_FUNCTIONS which other value is allowed")


# Where to look for a setting that is seen elsewhere than the others of its function.
ELSEWHERE = {
    **{
        f"algorithm.advantage={name}.{key}": program("decode")
        for name in ("logo", "step_values")
        for key in ("branch_rows", "branch_turns")
    },
    "algorithm.entropy_bonus=adaptive.coefficient": program("init_state"),
}


# Defaults that must not change, with the paper that a number is from. Zeros leave something out. A new function needs
# no row.
DEFAULTS = {
    "algorithm.advantage": {
        "reinforce_pp": {"norm_decay": 0.0},
        "brorl": {"norm_decay": 0.0},
        "asymre": {"delta_v": -0.1},  # arXiv:2604.08706
        "gdpo": {"gate": 0.0, "norm_decay": 0.0},
        "mssr": {"decay": 0.9, "decay_moving": 0.0, "norm_decay": 0.0},  # arXiv:2512.18215, 0.875 to 0.96
        "poise": {"decay": 0.9},
        "gae": {"gae_lambda": 1.0, "discount": 1.0, "norm_decay": 0.0},  # arXiv:2503.24290
        "turn_returns": {"discount": 1.0, "std": True},
        "mt_grpo": {"coefficient": 1.0},  # arXiv:2505.11821
        "gigpo": {"discount": 0.95, "weight": 1.0, "std": True},  # arXiv:2505.10978
        "ui_s1": {"discount": 0.5, "weight": 1.0, "std": True, "matched": 1.0, "min_std": 0.3},  # arXiv:2509.11543
        "logo": {"branch_rows": 4, "branch_turns": 1, "weight": 1.0, "std": True},
        "step_values": {"branch_rows": 4, "branch_turns": 1, "std": False},
        "turn_gae": {"gae_lambda": 1.0, "discount": 1.0, "norm_decay": 0.0},
        "step_gae": {"gae_lambda": 1.0, "discount": 1.0, "norm_decay": 0.0},
    },
    "algorithm.reward_terms": {
        "overlong_penalty": {"buffer": 4},  # arXiv:2503.14476, a quarter of the longest
        "length_reward": {"weight": 0.1},
        "short_answer": {"tokens": 4, "bonus": 0.5, "every_iterations": 0},  # the bonus, arXiv:2505.15612
    },
    "algorithm.reshaping": {
        "amplify_positive": {"factor": 3.0},  # arXiv:2601.03715
        "entropy_factor": {"strength": 1.0},  # arXiv:2508.11356
        "entropy_bonus": {"coefficient": 0.4, "limit": 2.0},  # arXiv:2506.14758
        "duration_factor": {"exponent": 1.0},
        "without_wrong_turns": {"below": 0.0},
    },
    "algorithm.surrogate": {
        "clipped": {"low": 0.2, "high": 0.2, "dual": 0.0},  # arXiv:1707.06347
        "sequence_clipped": {"low": 0.2, "high": 0.2, "dual": 0.0},  # arXiv:2604.08706
        "gspo": {"low": 3e-4, "high": 4e-4, "dual": 0.0},  # arXiv:2507.18071
        "cispo": {"low": 0.0, "high": 5.0},
        "opmd": {"tau": 0.1},
        "remix_centred": {"low": 0.2, "high": 0.2},
        "agro": {"beta": 0.1},
        "gvpo": {"beta": 0.1},
        "kimi_k15": {"tau": 0.1},
        "spo": {"beta": 1.0},
        "spo_cross_entropy": {"beta": 1.0},
        "inpo": {"eta": 7.5e-3},  # arXiv:2407.00617
        "vcpo": {"cap": 8.0},  # arXiv:2602.17616
    },
    "algorithm.old_policy": {"ewma": {"decay": 0.9}},
    "algorithm.correction": {
        "token_truncated": {"high": 2.0},
        "policy_truncated": {"high": 100.0},  # arXiv:2110.00641
        "token_masked": {"low": 0.5, "high": 2.0},
        "sequence_truncated": {"high": 2.0},
        "sequence_masked": {"low": 0.5, "high": 2.0},
        "second_moment": {"limit": 0.04},  # arXiv:2510.01161
    },
    "algorithm.divergence": {
        "reference": {"coefficient": 0.04, "estimator": "k3"},  # arXiv:2402.03300
        "convex": {"coefficient": 0.04, "estimator": "k3"},
        "ewma": {"coefficient": 0.04, "decay": 0.9, "estimator": "k3"},
    },
    "algorithm.entropy_bonus": {
        "constant": {"coefficient": 0.001},
        "adaptive": {"coefficient": 0.001, "target": 0.2, "rate": 1e-4},  # the target, arXiv:2505.22312
    },
    "algorithm.cross_entropies": {name: {"coefficient": 0.05} for name in ("environment", "answers", "imitation")},
    "replay.draw": {
        "priority": {"exponent": 1.0},
        "age": {"scale_iterations": 4.0},
        "fresh_or_older": {"fresh_share": 0.6, "fresh_from_iteration": 0},
        "uniform_then_fresh": {"fresh_from_iteration": 50},  # arXiv:2507.06892
    },
    "replay.retirement": {"solved": {"share": 1.0}},
}


def test_defaults_of_functions_are_those_of_the_papers_where_these_say_one():
    found = {}
    for path, name, key in settings_of_functions():
        slot = places()[path]
        _, default = {**slot.settings, **keywords(slot.table[name])}[key]
        found.setdefault(path, {}).setdefault(name, {})[key] = default
    for path, functions in DEFAULTS.items():
        for name, defaults in functions.items():
            assert found[path][name] == defaults, name


def places():
    """Return every place for a function: dotted path -> its slot."""
    groups = {"algorithm": Config().algorithm, "replay": Config().replay}
    fields = ((f"{name}.{field.name}", field) for name, group in groups.items() for field in dataclasses.fields(group))
    return {path: field.metadata["slot"] for path, field in fields if "slot" in field.metadata}


def settings_of_functions():
    """Return ``(place, function, setting)`` of every function in the package."""
    tables = ((path, slot, name, function) for path, slot in places().items() for name, function in slot.table.items())
    return [(path, name, key) for path, slot, name, f in tables for key in {**slot.settings, **keywords(f)}]


def carried_out(look, settings, folder, monkeypatch):
    """Return the result of the probe under these settings."""
    settings = dict(settings)
    for name in ("prompts.name", "eval.name"):
        if settings.get(name) in FILES:
            (folder / settings[name]).write_text(FILES[settings[name]])
            settings[name] = str(folder / settings[name])
    for name in settings.get("external.paths", ()):
        (folder / name).write_text(FILES[name])
    settings["external.paths"] = tuple(str(folder / name) for name in settings.get("external.paths", ()))
    return look(freeze(with_point({}, settings)), folder, monkeypatch)


def seen(look, settings, folder, monkeypatch):
    """Return the result of the probe. The message of a refusal counts as a result too."""
    try:
        return carried_out(look, settings, folder, monkeypatch)
    except ConfigError as error:
        return str(error)


BEFORE = {}  # what is seen before the change; several rows of ghosts begin alike


WHOLE_RUNS = (asked, cache, compares, ends, ghost_run, loaded_models, opened, taken_from)


def setting(path):
    """Return a case of a setting in its tier: quantised weights need a package, and some looks take a whole run."""
    needs_package = path.endswith(".weights") and path != "rewards.weights"
    if needs_package:
        return pytest.param(path, marks=pytest.mark.tier("extras"))
    # Plain: test_unread_settings.py, that a run reads the setting.
    _, look, _ = ALIVE.get(path, (None, None, None))
    return pytest.param(path, marks=[pytest.mark.tier("slow")] * (look in WHOLE_RUNS))


@pytest.mark.parametrize("path", [setting(name) for name in sorted(flatten(Config(), whole=True))])
def test_every_setting_changes_something(path, tmp_path, monkeypatch):
    assert path in ALIVE, f"{path} is a new setting: say in ALIVE where it can be seen"
    other, look, given = ALIVE[path]
    if given.get("prompts.source") == "reasoning_gym":
        needs_reasoning_gym()
    if path.endswith(".weights") and path != "rewards.weights":
        pytest.importorskip("qwix")
    settings = SETTINGS | given
    assert flatten(freeze(with_point({}, settings)))[path] != other
    begins = str(settings) if look is ghost_run else path
    if begins not in BEFORE:
        BEFORE[begins] = seen(look, settings, tmp_path, monkeypatch)
    assert seen(look, settings | {path: other}, tmp_path, monkeypatch) != BEFORE[begins]


def most_are_slow(rows):
    """Mark all except the first of each place as slow."""
    places, params = set(), []
    for path, name, key in rows:
        marks = () if path not in places else pytest.mark.slow
        places.add(path)
        params.append(pytest.param(path, name, key, id=f"{path}={name}.{key}", marks=marks))
    return params


@pytest.mark.parametrize(("path", "name", "key"), most_are_slow(settings_of_functions()))
def test_every_setting_of_a_function_changes_something(path, name, key, tmp_path, monkeypatch):
    others, look, given = OF_FUNCTIONS.get(path, {}).get(name, ({}, LOOKS.get(path, LOSS), {}))
    look = ELSEWHERE.get(f"{path}={name}.{key}", look)
    is_listed = places()[path].several
    settings = SETTINGS | given | {path: (name,) if is_listed else name}
    setting = f"{path}.{name}.{key}" if is_listed else f"{path}.{key}"
    default = flatten(freeze(with_point({}, settings)))[setting]
    other = others[key] if key in others else another_value(settings, setting, default)
    assert other != default
    before = carried_out(look, settings, tmp_path, monkeypatch)
    assert carried_out(look, settings | {setting: other}, tmp_path, monkeypatch) != before


@pytest.mark.tier("slow")  # plain: test_every_setting_changes_something
@pytest.mark.parametrize("look", [ghost_run, scores, loaded, optimizer, drawn], ids=lambda look: look.__name__)
def test_what_is_seen_changes_with_settings_alone(look, tmp_path, monkeypatch):
    assert seen(look, SETTINGS, tmp_path, monkeypatch) == seen(look, SETTINGS, tmp_path, monkeypatch)


@pytest.mark.tier("slow")  # plain: test_every_setting_changes_something
def test_the_text_of_a_program_changes_with_settings_alone():
    config = to_json(freeze(with_point({}, SETTINGS)))
    for name in ("update", "decode", "insert"):
        assert program_text.__wrapped__(config, name) == program_text(config, name)


def test_no_row_is_of_a_setting_that_is_gone():
    assert set(ALIVE) == set(flatten(Config(), whole=True))
    rows = {(path, name, key) for path, of in OF_FUNCTIONS.items() for name, (keys, *_) in of.items() for key in keys}
    assert rows <= set(settings_of_functions())
