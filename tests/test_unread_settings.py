"""Settings that would have no effect, or another effect, are refused before a run starts.

The settings that a run reads are measured: every attribute of the config that a ghost run reads is recorded.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_config
from support import building, ghosts
from support.refusal import refused
from test_config import ALIVE, ENVIRONMENTS, SETTINGS

from jaxrl_llm import config as config_module
from jaxrl_llm import method_config
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS
from jaxrl_llm.algorithms.inputs import Batch, Tokens
from jaxrl_llm.algorithms.surrogates import SURROGATES, surrogate_terms
from jaxrl_llm.config import Config, ConfigError, flatten, freeze, from_json, recorded, to_json
from jaxrl_llm.runtime.checkpoint_files import config_of
from jaxrl_llm.settings import schema
from jaxrl_llm.sweeps.points import with_point

CRITIC = {"algorithm.advantage": "gae"}
TURNS = {"environments.factory": f"{ENVIRONMENTS}:slow", "environments.max_answer_tokens": 4}
SOFT_VALUES = {"algorithm.surrogate": "spo", "algorithm.aggregation": "sequence_mean"}
SINGLE = {"replay.unit": "rollout"}

OWN_FUNCTIONS = """
from jaxrl_llm.algorithms.use import needs


def newest(x):
    return 1.0 / (1.0 + x.age)


def of_rewards(x):
    return -x.reward[:, None] * x.policy_logp


def of_both(x):
    return -(x.reward[:, None] + x.advantage) * x.policy_logp


@needs(siblings=True, is_centred_reward=True)
def centred(x):
    return x.reward


@needs(counts_rows_alike=True)
def rows_alike(mask, x):
    return mask / mask.sum(axis=1, keepdims=True)
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_FUNCTIONS)
    return path


def frozen(settings):
    return freeze(with_point({}, settings))


def refusal(settings):
    """Return the error of freezing these settings, or ""."""
    try:
        frozen(settings)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("path", "value", "needed"),
    [
        ("replay.priority", "surprise", {"replay.draw": "priority"}),
        ("replay.admission", "likely", SINGLE | {"replay.capacity": 256, "replay.positive_fraction": 0.5}),
        ("algorithm.critic.gradient_share", 0.2, CRITIC),
        ("algorithm.critic.learning_rate", 1e-2, CRITIC),
        ("algorithm.critic.clip", 0.2, CRITIC),
        ("algorithm.critic.bins", 8, CRITIC),
        ("algorithm.critic.low", -1.0, CRITIC | {"algorithm.critic.bins": 8}),
        ("algorithm.critic.high", 2.0, CRITIC | {"algorithm.critic.bins": 8}),
        ("environments.max_turns", 3, TURNS),
        ("environments.max_turn_tokens", 3, TURNS),
        ("environments.max_answer_tokens", 3, TURNS),
        ("environments.num_workers", 3, TURNS),
        ("environments.timeout_s", 3.0, TURNS),
        ("sampling.support_tokens", 8, {"sampling.top_p": 0.9}),
        ("sampling.support_tokens", 8, {"sampling.min_p": 0.1}),
        ("eval.every_iterations", 2, {"eval.num_prompts": 8}),
        ("checkpoint.keep_best", 1, {"eval.num_prompts": 8}),
        ("model.reference_path", "random:debug_wide", {"algorithm.divergence": "reference"}),
        ("model.lora.alpha", 8.0, {"model.lora.rank": 4}),
        ("model.lora.module_steps", 30, {"model.lora.rank": 4, "model.lora.modules": 2}),
        ("update.weights", "rollout", {"rollout.weights": "int8"}),
        ("prompts.bad_row", "skip", {"prompts.source": "jsonl", "prompts.name": "x.jsonl"}),
        ("prompts.bad_row", "skip", TURNS),
        ("optimizer.b1", 0.8, {"optimizer.name": "subset_norm"}),
        ("optimizer.reset_every_steps", 2, {"optimizer.name": "subset_norm"}),
    ],
)
def test_a_setting_is_refused_where_nothing_reads_it(path, value, needed):
    without = {"optimizer.name": "adafactor"} if path.startswith("optimizer.") else {}
    said = refusal(without | {path: value})
    assert said.startswith(f"{path}={value!r}") or f"{path}='{value}'" in said
    assert repr(flatten(Config())[path]) in said and len(said.splitlines()) == 1
    assert flatten(frozen(needed | {path: value}))[path] == value


def test_bins_of_a_critic_that_is_one_number_have_no_range():
    assert refusal(CRITIC | {"algorithm.critic.low": -1.0}).startswith("algorithm.critic.low=-1.0 ")


@pytest.mark.parametrize("surrogate", ["spo", "spo_cross_entropy", "inpo", "vcpo"])
def test_an_advantage_for_a_surrogate_that_reads_rewards_is_refused(surrogate):
    aggregation = "constant_length" if surrogate == "vcpo" else "sequence_mean"
    method = {"algorithm.surrogate": surrogate, "algorithm.aggregation": aggregation}
    assert not frozen(method).has_critic
    for advantage in ("gae", "dr_grpo", "poise"):
        assert refusal(method | {"algorithm.advantage": advantage}).startswith(f"algorithm.advantage='{advantage}")
    # Draws by |advantage| look at it all the same, draws by rewards do not.
    drawn = method | {"algorithm.advantage": "dr_grpo", "replay.draw": "priority"}
    assert frozen(drawn).algorithm.advantage.name == "dr_grpo"
    assert refusal(drawn | {"replay.priority": "reward"}).startswith("algorithm.advantage='dr_grpo'")


def test_what_functions_of_the_users_own_read_is_traced(own):
    assert refusal({"replay.draw": f"{own}:newest", "replay.priority": "reward"}).startswith("replay.priority='reward'")
    reads_rewards = {"algorithm.surrogate": f"{own}:of_rewards", "algorithm.advantage": "dr_grpo"}
    assert refusal(reads_rewards).startswith("algorithm.advantage='dr_grpo'")
    reads_both = reads_rewards | {"algorithm.surrogate": f"{own}:of_both"}
    assert frozen(reads_both).reads_advantage


# Settings that need another one to be read, and yet are accepted without it.
ACCEPTED = {
    "eval.num_samples": "`evaluate` reads it of the same file, whose eval.num_prompts may be given on its command line",
    "eval.slots": "likewise",
    "eval.temperature": "likewise",
    # What stands in the last column of ALIVE is there to see a difference, not because the setting needs it.
    "model.routing_replay": "",
    **dict.fromkeys(("checkpoint.every_iterations", "checkpoint.every_minutes", "checkpoint.keep_last"), ""),
    **dict.fromkeys(("mesh.data", "mesh.sampler_tensor", "mesh.rules"), ""),
    **dict.fromkeys(("prompts.source", "prompts.special_tokens", "prompts.long_prompt", "prompts.chat_template"), ""),
    **dict.fromkeys(("prompts.arguments", "prompts.chat_template_kwargs", "rewards.timeout_s"), ""),
    "algorithm.divergence": "",
}


def test_every_setting_that_needs_another_is_refused_without_it():
    """The table of test_config has the other settings that each setting needs for an effect."""
    accepted = {path for path, (value, _, needed) in ALIVE.items() if needed and not refusal(SETTINGS | {path: value})}
    assert accepted == {*ACCEPTED} & {path for path, (*_, needed) in ALIVE.items() if needed}


# ---- what a run looks at --------------------------------------------------------------------------------------------

# Modules and functions that look at every setting alike, to check, show, compare or store it.
OF_SETTINGS = tuple(module.__file__ for module in (config_module, method_config, schema))
LOOK_AT_ALL = {"complaint", "flatten", "_leaves", "unread", "record", "to_json", "chosen_functions"}
SHOW = ("limits.py", "checkpoint_files.py", "cli.py", "html.py")


def groups(cls, prefix=""):
    """Yield (dataclass, dotted path) of a config's groups."""
    for field in dataclasses.fields(cls):
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default) and "slot" not in field.metadata:
            yield from groups(type(default), f"{prefix}{field.name}.")
    yield cls, prefix


def is_read_by_a_run(frame):
    """Return whether code of a run reads a setting, directly or through a property of the config."""
    while frame is not None:
        path = frame.f_code.co_filename
        if frame.f_code.co_name in LOOK_AT_ALL:
            return False
        if path not in OF_SETTINGS and not path.startswith("<") and not path.endswith("dataclasses.py"):
            return "/jaxrl_llm/" in path and not path.endswith(SHOW)
        frame = frame.f_back
    return False


@pytest.fixture
def read_settings(monkeypatch):
    """Return a set to which the dotted path of every setting is added that a run reads from now on."""
    read = set()
    monkeypatch.setattr(ghosts, "GHOSTS", {})  # a program that is known already would not be traced
    for cls, prefix in groups(Config):
        fields, plain = {field.name for field in dataclasses.fields(cls)}, cls.__getattribute__

        def look(self, name, *, fields=fields, prefix=prefix, plain=plain):
            if name in fields and is_read_by_a_run(sys._getframe(1)):
                read.add(prefix + name)
            return plain(self, name)

        monkeypatch.setattr(cls, "__getattribute__", look)
    return read


# Read by name among all (runtime.sharding), by a run that writes a second checkpoint, or by one that makes a mesh.
READ_ELSEWHERE = {"rollout.slots", "replay.capacity", "replay.unit", "checkpoint.grace_s"}
READ_ELSEWHERE |= {path for path in ALIVE if path.startswith("mesh.")}


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"eval.num_prompts": 8}, marks=pytest.mark.slow),
        pytest.param({"replay.draw": "priority", "algorithm.divergence": "reference"}, marks=pytest.mark.slow),
        pytest.param({"model.lora.rank": 4, "sampling.top_k": 4}, marks=pytest.mark.slow),
    ],
    ids=["plain", "evaluated", "priorities", "adapters"],
)
def test_what_a_run_never_looks_at_is_refused(given, read_settings, tmp_path, monkeypatch):
    config = frozen(SETTINGS | given)
    test_config.ghost_run(config, tmp_path, monkeypatch)
    unread = {*flatten(Config(), whole=True)} - read_settings - READ_ELSEWHERE
    assert "update.batch_size" in read_settings and "environments.timeout_s" in unread
    accepted = {path for path in unread if not refusal(SETTINGS | given | {path: ALIVE[path][0]})}
    assert accepted <= {*ACCEPTED}


# ---- runs that learn nothing ----------------------------------------------------------------------------------------

NO_REWARD = {"rewards.weights": (0.0,)}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"algorithm.divergence": "reference"},  # the starting model, which the policy is
        {"model.reference_path": "random:debug_wide", "algorithm.divergence": {"name": "reference", "coefficient": 0}},
        {"algorithm.entropy_bonus": {"name": "constant", "coefficient": 0.0}},
        {"algorithm.cross_entropies": [{"name": "environment", "coefficient": 0.0}]},
        {"rewards.functions": ("task", "math"), "rewards.weights": (0.0, 0.0)},
        CRITIC,
        SOFT_VALUES,
    ],
)
def test_rewards_of_no_weight_are_refused(given):
    assert refusal(NO_REWARD | given).startswith("rewards.weights=(0.0,")


@pytest.mark.parametrize(
    "given",
    [
        {"model.reference_path": "random:debug_wide", "algorithm.divergence": "reference"},
        {"model.reference_path": "random:debug_wide"} | SOFT_VALUES,
        {"algorithm.entropy_bonus": "constant"},
        {"algorithm.entropy_bonus": {"name": "adaptive", "coefficient": 0.0}},
        {"algorithm.cross_entropies": ["environment"]},
        {"algorithm.reward_terms": ["overlong_penalty"]},
        {"rewards.functions": ("task", "math"), "rewards.weights": (0.0, 1.0)},
    ],
)
def test_rewards_of_no_weight_are_accepted_beside_what_teaches(given):
    assert 0.0 in frozen(NO_REWARD | given).rewards.weights


def test_rewards_of_no_weight_are_accepted_with_a_loss_of_the_users_own(own):
    assert frozen(NO_REWARD | {"algorithm.surrogate": f"{own}:of_both"}).learns_without_rewards


def test_a_rate_of_zero_is_refused_and_a_schedule_that_begins_at_zero_is_not():
    assert refusal({"optimizer.learning_rate": 0}).startswith("optimizer.learning_rate=0.0 must be more than 0")
    assert refusal(CRITIC | {"algorithm.critic.learning_rate": 0}).startswith("algorithm.critic.learning_rate=0.0")
    assert frozen({"optimizer.warmup_steps": 5, "optimizer.schedule": "cosine"}).optimizer.learning_rate > 0


# ---- other objectives than the method's -----------------------------------------------------------------------------

REGRESSIONS = ("agro", "gvpo", "kimi_k15")
OF_ROWS = (*REGRESSIONS, "sequence_clipped", "gspo", "spo", "spo_cross_entropy", "inpo")


def test_what_surrogates_ask_of_other_places_is_declared():
    def asked(place, fact):
        return {name for name, function in SURROGATES.items() if function.declared_facts.get(place) == fact}

    assert asked("advantage", "is_centred_reward") >= {*REGRESSIONS}
    assert asked("aggregation", "counts_rows_alike") >= {*OF_ROWS}
    assert asked("aggregation", "sums_tokens") >= {"vcpo"}


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_surrogate_of_rows_takes_no_mean_over_tokens(name):
    method = {"algorithm.surrogate": name} | ({"algorithm.advantage": "dr_grpo"} if name in REGRESSIONS else {})
    for aggregation in {*AGGREGATIONS} - {"sequence_mean"}:
        said = refusal(method | {"algorithm.aggregation": aggregation})
        assert said.startswith(f"algorithm.aggregation='{aggregation}' must be 'sequence_mean' ")
        assert f"algorithm.surrogate='{name}'" in said
    assert frozen(method | {"algorithm.aggregation": "sequence_mean"}).algorithm.surrogate.name == name


@pytest.mark.parametrize("name", REGRESSIONS)
@pytest.mark.parametrize("advantage", ["grpo", "leave_one_out", "mc_grpo", "asymre", "reinforce_pp", "gae"])
def test_a_regression_takes_only_the_reward_less_its_groups_mean(name, advantage):
    method = {"algorithm.surrogate": name, "algorithm.aggregation": "sequence_mean"}
    said = refusal(method | {"algorithm.advantage": advantage})
    assert said.startswith(f"algorithm.advantage='{advantage}' must be 'dr_grpo' for algorithm.surrogate='{name}'")
    reshaped = method | {"algorithm.advantage": "dr_grpo", "algorithm.reshaping": ["amplify_positive"]}
    assert refusal(reshaped).startswith("algorithm.reshaping=('amplify_positive',) must be ()")


def test_vcpo_takes_a_sum_over_tokens():
    assert refusal({"algorithm.surrogate": "vcpo"}).startswith("algorithm.aggregation='token_mean' must be 'constant")


def test_functions_of_the_users_own_may_declare_what_a_regression_asks_for(own):
    method = {"algorithm.surrogate": "agro", "algorithm.advantage": f"{own}:centred"}
    config = frozen(method | {"algorithm.aggregation": f"{own}:rows_alike"})
    assert config.algorithm.advantage.name == f"{own}:centred"
    assert refusal(method | {"algorithm.aggregation": f"{own}:newest"})


def test_equal_rows_count_alike_however_long_they_are():
    """What the fact ``counts_rows_alike`` promises, and ``sums_tokens``: of the whole table, and of nobody else."""
    mask = np.arange(6)[None, :] < np.array([[1], [4], [6], [2]])
    batch = Batch(
        trainable=np.ones(4, bool),
        group_id=np.array([0, 0, 1, 1]),
        correct=np.ones(4, bool),
        prompt_length=np.zeros(4, int),
        length=mask.sum(axis=1),
        width=6,
        max_length=6,
    )
    for name, function in AGGREGATIONS.items():
        weight = np.asarray(function(mask, batch))
        of_rows = weight.sum(axis=1)
        facts = getattr(function, "declared_facts", {})
        assert facts.get("counts_rows_alike", False) == bool(np.allclose(of_rows, of_rows[0])), name
        fewer = batch._replace(trainable=np.array([True, True, True, False]))
        constant = np.allclose(np.asarray(function(mask, fewer))[0, 0] * 3, weight[0, 0] * 4)
        is_sum = constant and np.allclose(weight[mask], weight[0, 0])
        assert facts.get("sums_tokens", False) == is_sum, name


BETA, START = 0.5, 0.25  # of the pull to the reference, and the reference's rate of success


def settled(name, advantage):
    """Return the rate of success that a regression settles at, on samples of the reference in their proportions."""
    coefficient = {"tau": BETA} if name == "kimi_k15" else {"beta": BETA}
    surrogate = building.algorithm_config(surrogate={"name": name, **coefficient}).surrogate
    reward = jnp.array([1.0, 0.0, 0.0, 0.0])
    logp_of = lambda rate: jnp.log(jnp.where(reward > 0, rate, 1 - rate))[:, None]

    def loss(logit):
        policy, start = logp_of(jax.nn.sigmoid(logit)), logp_of(START)
        values = jnp.asarray(advantage, jnp.float32)[:, None]
        columns = {"ref_logp": start}
        rows = Tokens(policy, start, start, values, reward, jnp.ones((4, 1), bool), group_size=4, columns=columns)
        return jnp.mean(surrogate_terms(surrogate, rows)[0])

    slope = jax.jit(jax.grad(loss))
    logit = jnp.log(START / (1 - START))
    for _ in range(2000):
        logit -= slope(logit)
    return float(jax.nn.sigmoid(logit))


def test_regressions_settle_at_the_papers_optimum_with_the_advantage_that_they_ask_for():
    """The maximum of E[r] - beta KL(policy || reference) is reference e^(r / beta) / Z, of two outcomes."""
    success = START * np.exp(1 / BETA)
    optimum = success / (success + 1 - START)
    assert optimum == pytest.approx(0.711, abs=5e-4)
    gain = np.array([0.75, -0.25, -0.25, -0.25])
    for name in ("agro", "gvpo"):
        assert settled(name, gain) == pytest.approx(optimum, abs=1e-4)
        assert settled(name, gain / gain.std()) == pytest.approx(0.971, abs=1e-3)  # what it was with "grpo"
    # Not centred, the square pulls each log-ratio to gain / tau by itself: the root of the expected gradient.
    rates = np.linspace(START, 0.999, 200_001)[:-1]
    right, wrong = gain[0] - BETA * np.log(rates / START), gain[1] - BETA * np.log((1 - rates) / (1 - START))
    slope = START * (1 - rates) * right - (1 - START) * rates * wrong
    assert settled("kimi_k15", gain) == pytest.approx(rates[np.argmin(np.abs(slope))], abs=1e-4)


# ---- records of runs ------------------------------------------------------------------------------------------------

# As an older version may have run them.
REFUSED_NOW = (
    {"replay.priority": "surprise"},
    {"environments.max_turns": 6},
    {"rewards.weights": (0.0,)},
    {"optimizer.learning_rate": 0.0},
    {"algorithm.surrogate": "agro"},
    {"eval.every_iterations": 5},
    {"update.batch_size": 48, "update.micro_batch_size": 32},
)


@pytest.mark.parametrize("settings", REFUSED_NOW, ids=lambda settings: next(iter(settings)))
def test_a_record_of_a_run_that_would_be_refused_today_can_be_read(settings, tmp_path):
    assert refusal(settings)
    mapping = schema.as_mapping(recorded(with_point({}, settings)))
    read = config_of({"config": json.loads(json.dumps(mapping))}, tmp_path)
    assert {path: flatten(read)[path] for path in settings} == settings
    assert from_json(to_json(read)) == read


def test_a_record_with_a_setting_that_this_version_does_not_have_names_the_checkpoint(tmp_path):
    with refused("replay.speed", 1, str(tmp_path)):
        config_of({"config": {"replay": {"speed": 1}}}, pathlib.Path(tmp_path))
