import dataclasses
import functools
import json
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import advantages as oracle
from reference import shaping as shaping_oracle
from reference import values as value_oracle
from support import ghosts
from support.building import EIGHT, ONE, TINY, mesh_of
from support.refusal import refused

from jaxrl_llm.algorithms import baselines, inputs, shaping
from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.algorithms.facts import AdvantageFacts
from jaxrl_llm.algorithms.inputs import COLUMNS, NUM_DIFFICULTIES, ROW, TOKEN, Column, Sizes
from jaxrl_llm.algorithms.memory import Memory, ShortAnswers, length_grid
from jaxrl_llm.commands import train
from jaxrl_llm.config import freeze, from_json, to_json
from jaxrl_llm.learner import credit
from jaxrl_llm.ops.groups import group_rows
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.settings.use import Chosen, use
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, STOP_EOS, STOP_LENGTH, Rewards, Rollout, Scores

WIDTH, COMPLETION_TOKENS, HIDDEN = 7, 4, 5
SHAPED = {
    "reward_terms": [
        use("overlong_penalty", buffer=2),
        use("length_reward", weight=0.5),
        use("short_answer", tokens=2, bonus=0.25),
    ]
}
RESHAPED = {
    "reshaping": [
        use("amplify_positive", factor=3.0),
        use("entropy_factor", strength=1.0),
        use("entropy_bonus", coefficient=2.0, limit=0.4),
    ],
    "overlong_filter": True,
}
KINDS = tuple(ADVANTAGES)


def memory_of(config, hidden_size=0):
    sizes = Sizes(hidden_size, config.sampling.max_completion_tokens, group_size=config.rollout.group_size)
    part_names = config.rewards.functions if config.algorithm.looks_at_parts else ()
    return Memory(config.algorithm.of_credit, part_names, sizes, Ledger())


def resumed_from(memory, config, hidden_size=0):
    """Return a new learner that is restored from the state of a stopped one."""
    resumed = memory_of(config, hidden_size)
    resumed.restore(json.loads(json.dumps(memory.state())), memory.arrays())
    resumed.ledger.restore(json.loads(json.dumps(memory.ledger.state())))
    return resumed


def test_a_method_that_is_taken_up_later_begins_with_what_it_knows_of_nothing():
    """The run changes its method with --allow_config_changes; the earlier method had no memory."""
    plain, learns = (freeze({"algorithm": {"advantage": name}}) for name in ("grpo", "mssr"))
    memory = memory_of(learns)
    fresh = json.dumps(memory.state())
    memory.restore(memory_of(plain).state(), {"poise": np.ones((7, 8))})  # and of one whose memory is another's
    assert json.dumps(memory.state()) == fresh
    # Or with another grid of lengths, whose counts say nothing of this one's.
    of = lambda tokens: {"algorithm": {"reward_terms": [use("short_answer", tokens=tokens, every_iterations=2)]}}
    none = Rewards(np.zeros(0), {}, np.zeros(0, np.int8))
    memories = {tokens: memory_of(freeze(of(tokens))) for tokens in (8, 4)}
    for tokens, memory in memories.items():
        memory.observe(none, (), {"answers_within": np.ones((NUM_DIFFICULTIES, 16 // tokens + 1))})
    coarse, fine = memories.values()
    kept = json.dumps(fine.state())
    fine.restore(coarse.state(), {})
    assert json.dumps(fine.state()) == kept


def make_rollout(group_id, seed=0):
    num_rows, rng = len(group_id), np.random.default_rng(seed)
    prompt_length = rng.integers(1, 4, num_rows).astype(np.int32)
    completion = rng.integers(1, COMPLETION_TOKENS + 1, num_rows)
    return Rollout(
        tokens=rng.integers(0, 9, (num_rows, WIDTH)).astype(np.int32),
        prompt_length=prompt_length,
        length=(prompt_length + completion).astype(np.int32),
        behaviour_logp=-rng.random((num_rows, WIDTH)).astype(np.float32),
        group_id=np.asarray(group_id, np.int32),
        policy_version=np.zeros((num_rows, WIDTH), np.int32),
        stop_reason=np.where(completion == COMPLETION_TOKENS, STOP_LENGTH, STOP_EOS).astype(np.int8),
        # Nothing that the token's own log-prob says.
        columns={"entropy": 2 * rng.random((num_rows, WIDTH)).astype(np.float32)},
    )


COLUMN_READER = """
from jaxrl_llm.algorithms.use import needs

@needs("level", "weight")
def read(x):
    return -x.level[:, None] * x.weight * x.policy_logp
"""


def test_a_loss_gets_the_columns_of_rewards_that_it_needs(tmp_path, monkeypatch):
    """A new column costs only its row in COLUMNS. Values by position in the completion move to their tokens."""
    monkeypatch.setitem(COLUMNS, "level", Column(False, True, "f32", ROW))
    monkeypatch.setitem(COLUMNS, "weight", Column(True, True, "f32", TOKEN))
    (tmp_path / "reader.py").write_text(COLUMN_READER)
    config = config_of(surrogate=use(f"{tmp_path}/reader.py:read"))
    assert config.reward_columns == {"level": (), "weight": (COMPLETION_TOKENS,)}
    rollout = make_rollout([0] * 4)
    level = np.float32([0.5, 1.5, 2.5, 3.5])
    weight = np.arange(1, 4 * COMPLETION_TOKENS + 1, dtype=np.float32).reshape(4, -1)
    outcome = np.int8([OUTCOME_SCORE, OUTCOME_SCORE, OUTCOME_ERROR, OUTCOME_SCORE])
    rewards = Rewards(level, {"a": level}, outcome, columns={"level": level, "weight": weight})
    functions = (*config.algorithm.of_credit, *config.algorithm.of_loss)
    memory = Memory(functions, (), Sizes(1, COMPLETION_TOKENS, group_size=4), Ledger())
    experience, _ = credit.assign(rollout, memory.scores(rewards, [7]), {}, config)
    np.testing.assert_array_equal(experience.columns["level"], [0.5, 1.5, 0, 3.5])
    for row, (first, end) in enumerate(zip(rollout.prompt_length, rollout.length, strict=True)):
        expected = np.zeros(WIDTH)
        expected[first:end] = weight[row, : end - first] * (row != 2)
        np.testing.assert_array_equal(experience.columns["weight"][row], expected)


def test_the_column_of_the_how_to_reaches_the_advantage_and_the_loss(tmp_path, monkeypatch):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "write_a_method.md").read_text()
    section = page.partition("## A column of your own\n")[2]
    declaration, example = re.findall(r"^```(?:text|python)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    for name, column in eval(f"{{{declaration}}}", vars(inputs)).items():
        monkeypatch.setitem(COLUMNS, name, column)
    file = tmp_path / "checks.py"
    file.write_text(example)
    config = config_of(advantage=use(f"{file}:more_checks"), surrogate=use(f"{file}:by_checks"))
    scores = runpy.run_path(str(file))["reward"]([""] * 4, ["ok ok", "", "ok", "no"])
    total, num_checks = (np.float32([score[name] for score in scores]) for name in ("reward", "num_checks"))
    rewards = Rewards(total, {"a": total}, np.full(4, OUTCOME_SCORE, np.int8), columns={"num_checks": num_checks})
    functions = (*config.algorithm.of_credit, *config.algorithm.of_loss)
    memory = Memory(functions, (), Sizes(1, COMPLETION_TOKENS, group_size=4), Ledger())
    experience, _ = credit.assign(make_rollout([0] * 4), memory.scores(rewards, [7]), {}, config)
    np.testing.assert_array_equal(experience.columns["num_checks"], [2, 0, 1, 0])
    np.testing.assert_allclose(np.max(experience.advantage, axis=1), [1.2, 0, 1.1, 0], rtol=1e-6)


def config_of(num_groups=1, functions=("a",), weights=(1.0,), skip_tied=False, **algorithm):
    return freeze(
        {
            "algorithm": algorithm,
            "rewards": {"functions": functions, "weights": weights},
            "rollout": {"prompts_per_iteration": num_groups},
            "replay": {"capacity": 8 * num_groups, "skip_tied": skip_tied},
            "update": {"batch_size": 8, "micro_batch_size": 8},
            "sampling": {"max_completion_tokens": COMPLETION_TOKENS},
        }
    )


@functools.cache
def compiled(json_text):
    config = from_json(json_text)
    return jax.jit(lambda rollout, scores, columns: credit.assign(rollout, scores, columns, config))


def assign(rollout, reward, trainable=None, *, num_groups, extra=None, **settings):
    """Return rows with credit, and sums. ``extra`` has further values of host and learner by name."""
    reward = reward if isinstance(reward, jax.Array) else np.asarray(reward, np.float32)
    trainable = np.ones(len(reward), bool) if trainable is None else trainable
    trainable = trainable if isinstance(trainable, jax.Array) else np.asarray(trainable)
    run = compiled(to_json(config_of(num_groups, **settings)))
    extra = extra or {}
    named = lambda *names: {name: extra[name] for name in names if name in extra}
    known = {
        "columns": named("question_mean", "turn_reward", "turn_seconds"),
        "memory": named("regression", "moments", "short_answer"),
    }
    scores = Scores(reward, trainable, np.zeros(len(reward), np.int32), parts=extra.get("parts", ()), **known)
    experience, sums = run(rollout, scores, named("hidden", "value", "ref_logp", "generation_logp"))
    return jax.tree.map(np.asarray, experience), jax.tree.map(np.asarray, sums)


def first(experience):
    """Return the advantage at each row's first token."""
    return experience.advantage[np.arange(len(experience.reward)), experience.rollout.prompt_length]


def extra_of(kind, reward, seed=0):
    """Return the inputs from host and learner in addition to rewards. If all rewards are equal, nothing differs."""
    rng = np.random.default_rng(seed)
    if kind == "gdpo":
        return {"parts": (np.asarray(reward, np.float32),)}
    if kind == "mssr":
        return {"question_mean": rng.random(len(reward)).astype(np.float32)}
    if kind == "poise":
        x, y = rng.random((30, baselines.num_features(HIDDEN))), rng.random(30)
        sums = np.concatenate([x.T @ x, (x.T @ y)[:, None]], axis=1).astype(np.float32)
        return {"regression": sums, "hidden": rng.normal(size=(len(reward), HIDDEN)).astype(np.float32)}
    if kind == "gae":
        return {"value": rng.random((len(reward), WIDTH)).astype(np.float32)}
    return {}


def test_a_rows_advantage_stands_on_its_completion_and_zero_elsewhere():
    rollout = make_rollout([5, 5])
    # Dr. GRPO on rewards 1, 0: +-1/2.
    experience, _ = assign(rollout, [1, 0], advantage="dr_grpo", num_groups=1)
    for row, value in enumerate([0.5, -0.5]):
        expected = np.zeros(WIDTH)
        expected[rollout.prompt_length[row] : rollout.length[row]] = value
        np.testing.assert_array_equal(experience.advantage[row], expected)
    np.testing.assert_array_equal(experience.rollout.tokens, rollout.tokens)
    assert not experience.columns.keys() & {"ref_logp", "generation_logp"}
    # What the learner says of the rows' tokens for the loss is kept with them.
    said = {
        name: np.float32(np.random.default_rng(2).normal(size=(2, WIDTH))) for name in ("ref_logp", "generation_logp")
    }
    experience, _ = assign(rollout, [1, 0], advantage="dr_grpo", num_groups=1, extra=said)
    np.testing.assert_array_equal(experience.columns["ref_logp"], said["ref_logp"])
    np.testing.assert_array_equal(experience.columns["generation_logp"], said["generation_logp"])


@pytest.mark.parametrize("kind", ["grpo", "asymre", "gdpo", "mssr", "poise"])
def test_groups_are_named_by_group_id_wherever_the_rows_stand(kind):
    rng = np.random.default_rng(1)
    group_id = np.repeat([900, 3, 2**31 - 2, 41], 4)
    reward, order = rng.random(16).astype(np.float32), rng.permutation(16)
    rollout, extra = make_rollout(group_id), extra_of(kind, reward)
    in_order = lambda tree: jax.tree.map(lambda x: x[order], tree)
    shuffled_extra = {name: x if name == "regression" else in_order(x) for name, x in extra.items()}
    straight, _ = assign(rollout, reward, advantage=kind, num_groups=4, extra=extra)
    shuffled, _ = assign(in_order(rollout), reward[order], advantage=kind, num_groups=4, extra=shuffled_extra)
    np.testing.assert_allclose(shuffled.advantage, straight.advantage[order], rtol=1e-5, atol=1e-6)

    given = {"delta_v": -0.1, "baseline": extra.get("question_mean")}
    if "parts" in extra:
        given |= {"parts": np.stack(extra["parts"], axis=1), "part_weights": (1.0,)}
    ends = rollout.prompt_length, rollout.length
    completions = [
        -rollout.behaviour_logp[i, p:n].astype(np.float64) for i, (p, n) in enumerate(zip(*ends, strict=True))
    ]
    if kind == "poise":
        entropies = [rollout.columns["entropy"][i, p:n] for i, (p, n) in enumerate(zip(*ends, strict=True))]
        features = [
            [1, len(x) / COMPLETION_TOKENS, x.mean(), x.std(), e.mean(), e.std(), *(h / np.sqrt(HIDDEN))]
            for x, e, h in zip(completions, entropies, extra["hidden"].astype(np.float64), strict=True)
        ]
        sums = extra["regression"].astype(np.float64)
        ridge = baselines.RIDGE * np.eye(6 + HIDDEN)
        given["baseline"] = np.array(features) @ np.linalg.solve(sums[:, :-1] + ridge, sums[:, -1])
    expected = oracle.group_advantages(reward, group_id, np.ones(16, bool), kind, **given)
    np.testing.assert_allclose(first(straight), expected, rtol=1e-4, atol=1e-5)


def test_equal_text_does_not_merge_groups():
    rollout = make_rollout([0, 0, 1, 1])
    same = jax.tree.map(lambda x: np.repeat(x[:1], 4, axis=0), rollout).replace(group_id=rollout.group_id)
    # Merged, the mean would be 1/2 for all; apart, group 0 is tied at 1 and group 1 is +-1/2 around 1/2.
    experience, sums = assign(same, [1, 1, 1, 0], advantage="dr_grpo", num_groups=2)
    np.testing.assert_array_equal(experience.advantage[:, rollout.prompt_length[0]], [0, 0, 0.5, -0.5])
    assert sums["degenerate_groups"] == 1


@pytest.mark.parametrize("kind", ["grpo", "mc_grpo", "gdpo"])
def test_tied_groups_are_exactly_zero_and_counted(kind):
    rollout, reward = make_rollout([0, 0, 0, 1, 1, 1]), [0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
    extra = extra_of(kind, reward)
    experience, sums = assign(rollout, reward, advantage=kind, num_groups=2, extra=extra)
    assert (experience.advantage[:3] == 0).all() and (experience.advantage[3:] != 0).any()
    assert sums["degenerate_groups"] == 1


def test_failed_rewards_take_no_part_and_a_group_without_rewards_is_degenerate():
    # Group 7: rewards 1, failed, 0. Group 8: one known reward. Group 9: none.
    group_id, trainable = [7, 7, 7, 8, 8, 9, 9], np.array([1, 0, 1, 1, 0, 0, 0], bool)
    rollout = make_rollout(group_id)
    for junk in (0.0, np.nan, 5.0):
        reward = np.where(trainable, [1, 0, 0, 1, 0, 0, 0], junk)
        experience, sums = assign(rollout, reward, trainable, advantage="dr_grpo", num_groups=3)
        np.testing.assert_array_equal(first(experience), [0.5, 0, -0.5, 0, 0, 0, 0])
        np.testing.assert_array_equal(experience.reward, [1, 0, 0, 1, 0, 0, 0])
        np.testing.assert_array_equal(experience.trainable, trainable)
        assert sums["degenerate_groups"] == 2


def test_padding_rows_may_carry_any_group_id():
    # Three padding rows with ids of their own, sorting before the two groups of the iteration.
    rollout, trainable = make_rollout([-3, -2, -1, 0, 4, 0, 4]), [False] * 3 + [True] * 4
    experience, sums = assign(rollout, [9, 9, 9, 1, 0, 0, 1], trainable, advantage="dr_grpo", num_groups=2)
    np.testing.assert_array_equal(first(experience), [0, 0, 0, 0.5, -0.5, -0.5, 0.5])
    assert sums["degenerate_groups"] == 0


@pytest.mark.parametrize(("kind", "more"), [("gdpo", True), ("mc_grpo", False), ("poise", False), ("gae", False)])
def test_devices_change_nothing(kind, more):
    group_id, reward = np.repeat([0, 1, 2, 3], 4), np.random.default_rng(7).random(16).astype(np.float32)
    rollout, trainable, extra = make_rollout(group_id, seed=8), np.arange(16) % 5 != 3, extra_of(kind, reward)
    settings = {"advantage": kind, "num_groups": 4} | (SHAPED | RESHAPED if more else {})
    expected, sums = assign(rollout, reward, trainable, extra=extra, **settings)
    mesh = mesh_of(EIGHT)
    rows = jax.device_put((rollout, reward, trainable), sharding.leading(mesh, (rollout, reward, trainable)))
    layout = {n: (sharding.replicated if n == "regression" else sharding.leading)(mesh, x) for n, x in extra.items()}
    experience, sharded_sums = assign(*rows, extra=jax.device_put(extra, layout), **settings)
    np.testing.assert_allclose(experience.advantage, expected.advantage, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sharded_sums, sums)


# ---- advantages of tokens


def test_a_critics_advantages_are_of_each_token_and_whitened_over_those_that_count():
    # Rows 3 and 7 have no reward, one row in two was cut short and is left out, short answers are worth more.
    reward, trainable = np.random.default_rng(9).random(12), np.arange(12) % 4 != 3
    rollout = make_rollout(np.arange(12) // 2, seed=9).replace(
        stop_reason=np.where(np.arange(12) % 2, STOP_LENGTH, STOP_EOS).astype(np.int8)
    )
    extra = extra_of("gae", reward)
    at = np.arange(WIDTH)[None, :]
    off = (at < rollout.prompt_length[:, None]) | (at >= rollout.length[:, None])
    extra["value"] = np.where(off, np.nan, extra["value"]).astype(np.float32)
    settings = {
        "advantage": use("gae", discount=0.9, gae_lambda=0.8),
        "reward_terms": [use("short_answer", tokens=2, bonus=0.5)],
        "overlong_filter": True,
    }
    junk = np.where(trainable, reward, np.nan)
    experience, sums = assign(rollout, junk, trainable, num_groups=6, extra=extra, **settings)

    counts = trainable & (rollout.stop_reason == STOP_EOS)
    shaped = reward + 0.5 * ((reward >= 1) & (rollout.length - rollout.prompt_length <= 2))
    mask = ~off & counts[:, None]
    advantage = value_oracle.gae(extra["value"], shaped, mask, 0.9, 0.8)
    np.testing.assert_allclose(experience.advantage, value_oracle.whitened(advantage, mask), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        experience.columns["returns"], np.where(mask, advantage + extra["value"], 0.0), rtol=1e-5
    )
    assert (experience.advantage[~mask] == 0).all()
    assert "value" not in experience.columns
    assert sums["degenerate_groups"] == 0


def test_a_critic_of_an_own_advantage_learns_the_reward_at_each_token(tmp_path):
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms.use import needs\n\n"
        "@needs('value')\ndef less_value(x):\n    return x.reward[:, None] - x.columns['value']\n\n"
        "@needs('value')\ndef halved(x):\n    return x.reward / 2, {'returns': x.columns['value'] / 2}\n\n"
        "@needs('value', base='policy')\ndef over_value(x):\n    return -(x.advantage - x.value) * x.policy_logp\n"
    )
    own = lambda name: f"{tmp_path / 'own.py'}:{name}"
    rollout, trainable = make_rollout([0, 0, 1, 1]), np.array([True, True, True, False])
    value = np.full((4, WIDTH), 0.25, np.float32)
    given = {"trainable": trainable, "num_groups": 2, "extra": {"value": value}}
    terms = {"reward_terms": [use("short_answer", tokens=9, bonus=0.5)]}
    experience, sums = assign(rollout, [1, 0, 2, 3], advantage=own("less_value"), **given, **terms)
    at = np.arange(WIDTH)[None, :]
    mask = (at >= rollout.prompt_length[:, None]) & (at < rollout.length[:, None]) & trainable[:, None]
    expected = np.float32([1.5, 0, 2.5, 0])[:, None] * mask  # right answers have the bonus
    np.testing.assert_array_equal(experience.columns["returns"], expected)
    np.testing.assert_array_equal(experience.advantage, (expected - value) * mask)
    assert "value" not in experience.columns and "returns" not in sums
    # Where the advantage says what it is, that; and a loss that reads what was expected finds it.
    experience, _ = assign(rollout, [1, 0, 2, 3], advantage=own("halved"), surrogate=own("over_value"), **given)
    np.testing.assert_array_equal(experience.columns["returns"], value / 2)
    np.testing.assert_array_equal(experience.columns["value"], value)


def test_a_critic_that_is_right_everywhere_leaves_nothing_to_learn():
    rollout, reward = make_rollout([0, 0, 1, 1]), np.float32([1, 0, 1, 1])
    extra = {"value": np.repeat(reward[:, None], WIDTH, axis=1)}
    experience, sums = assign(rollout, reward, advantage="gae", num_groups=2, extra=extra)
    assert (experience.advantage == 0).all() and sums["degenerate_groups"] == 2


# ---- what the papers' equations say, by hand


def test_single_rollouts_are_lifted_by_the_entropy_of_what_they_were_drawn_from_and_not_by_their_own_surprise():
    """An unlikely token of a confident distribution: p = 0.01 of two, A = -1 gives -1 + min(1 / 0.4, 2 H) = -0.89."""
    p = 0.01
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    rollout = make_rollout([0, 1], seed=2)
    rollout = rollout.replace(
        behaviour_logp=np.full_like(rollout.behaviour_logp, np.log(p)),
        columns={"entropy": np.full_like(rollout.columns["entropy"], entropy)},
    )
    # Rewards 0 and 1 against baselines of 1/2, whitened: -1 and 1.
    extra = {"question_mean": np.float32([0.5, 0.5])}
    lifted = use("entropy_bonus", coefficient=2.0, limit=0.4)
    settings = {"advantage": "mssr", "reshaping": [lifted], "num_groups": 2}
    experience, _ = assign(rollout, [0, 1], extra=extra, **settings)
    np.testing.assert_allclose(first(experience), [-1 + 2 * entropy, 1 + 2 * entropy], rtol=1e-5)
    assert round(first(experience)[0], 2) == -0.89
    # A distribution with much choice: the bonus ends at |A| / .4.
    wide = rollout.with_columns(entropy=np.full_like(rollout.columns["entropy"], 3.0))
    np.testing.assert_allclose(first(assign(wide, [0, 1], extra=extra, **settings)[0]), [1.5, 3.5], rtol=1e-5)


def test_a_group_that_is_all_wrong_teaches_nothing_where_tied_groups_are_left_out_whatever_its_lengths():
    """Dynamic sampling decides by the rewards as scored. With the length penalty they would be -1 and 0."""
    rollout = make_rollout([0, 0, 1, 1]).replace(prompt_length=np.int32([1] * 4), length=np.int32([5, 2, 5, 2]))
    settings = {"advantage": "grpo", "num_groups": 2, "reward_terms": [use("overlong_penalty", buffer=2)]}
    penalised, sums = assign(rollout, [0, 0, 1, 0], **settings)
    np.testing.assert_allclose(first(penalised), [-1, 1, 0, 0], atol=1e-5)
    assert sums["degenerate_groups"] == 1
    np.testing.assert_array_equal(penalised.columns["tied"], [False] * 4)
    # Of the mixed group the right answer is as long as can be, so that its penalty makes it equal: it is mixed still.
    left_out, sums = assign(rollout, [0, 0, 1, 0], skip_tied=True, **settings)
    np.testing.assert_array_equal(first(left_out), [0, 0, 0, 0])
    np.testing.assert_array_equal(left_out.columns["tied"], [True, True, False, False])
    mixed, sums = assign(rollout, [0, 0, 2, 0], skip_tied=True, **settings)
    np.testing.assert_allclose(first(mixed), [0, 0, 1, -1], atol=1e-5)
    np.testing.assert_array_equal(mixed.columns["tied"], [True, True, False, False])
    assert sums["degenerate_groups"] == 1
    # A method that learns from tied groups goes on doing so.
    imitated, _ = assign(make_rollout([0, 0]), [1, 1], advantage="asymre", skip_tied=True, num_groups=1)
    np.testing.assert_allclose(first(imitated), [0.1, 0.1], rtol=1e-6)
    # Where a group does not compare its rows, it is tied when nothing is heard of any of them.
    alone, _ = assign(rollout, [0, 0, 1, 1], advantage="reinforce_pp", num_groups=2)
    np.testing.assert_array_equal(alone.columns["tied"], [False] * 4)


def test_the_groups_mean_reward_is_kept_and_an_advantage_can_be_made_anew_from_it():
    group_id, trainable = np.repeat([5, 2], 4), np.arange(8) != 3
    reward = np.random.default_rng(1).random(8).astype(np.float32)
    experience, _ = assign(make_rollout(group_id), reward, trainable, advantage="asymre", num_groups=2)
    expected = [reward[:3].mean()] * 3 + [0] + [reward[4:].mean()] * 4
    np.testing.assert_allclose(experience.columns["group_mean"], expected, rtol=1e-6)
    again = np.where(trainable, experience.reward - (experience.columns["group_mean"] - 0.1), 0)
    np.testing.assert_allclose(first(experience), again, atol=1e-6)


def test_moments_of_equal_rewards_give_exactly_nothing_and_those_far_from_zero_keep_their_spread():
    settings = {"advantage": use("reinforce_pp", norm_decay=0.9), "num_groups": 1}
    config = config_of(**settings)
    for reward in (0.3, 1.1, 12.3):
        memory, rewards = memory_of(config), np.full(7, reward, np.float32)
        for _ in range(8):
            extra = memory.scores(rewards_of(rewards), [0]).memory
            experience, sums = assign(make_rollout([0] * 7), rewards, extra=extra, **settings)
            memory.observe(rewards_of(rewards), [0], sums)
            assert not experience.advantage.any()
    memory, rewards = memory_of(config), np.float32([999.9, 1000.1] * 4)
    for _ in range(3):
        extra = memory.scores(rewards_of(rewards), [0]).memory
        experience, sums = assign(make_rollout([0] * 8), rewards, extra=extra, **settings)
        memory.observe(rewards_of(rewards), [0], sums)
    np.testing.assert_allclose(first(experience), [-1, 1] * 4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["reinforce_pp", "brorl", "gae"])
def test_advantages_over_the_moments_of_several_iterations_are_those_of_the_source(kind):
    """Three iterations with different means and spreads.

    The expected sums follow the released code, by hand in float64.
    """
    settings = {"advantage": use(kind, norm_decay=0.8), "num_groups": 2}
    config, rng = config_of(**settings), np.random.default_rng(3)
    memory, n, total, squares = memory_of(config), 0.0, 0.0, 0.0
    for iteration in range(3):
        rollout = make_rollout([0, 0, 0, 1, 1, 1], seed=iteration)
        reward = rng.normal(iteration, 1 + iteration, 6).astype(np.float32)
        trainable = np.arange(6) != 4
        extra = memory.scores(rewards_of(reward), [0, 1]).memory | extra_of(kind, reward)
        experience, sums = assign(rollout, reward, trainable, extra=extra, **settings)
        memory.observe(rewards_of(reward), [0, 1], sums)

        mask = (np.arange(WIDTH) >= rollout.prompt_length[:, None]) & (np.arange(WIDTH) < rollout.length[:, None])
        mask &= trainable[:, None]
        if kind == "gae":
            values = (reward[:, None] - extra["value"])[mask].astype(np.float64)
        elif kind == "brorl":
            means = np.where(np.arange(6) < 3, reward[:3].mean(), reward[[3, 5]].mean())
            values = (reward - means)[trainable].astype(np.float64)
        else:
            values = reward[trainable].astype(np.float64)
        n, total = 0.8 * n + len(values), 0.8 * total + values.sum()
        squares = 0.8 * squares + (values**2).sum()
        std = np.sqrt(squares / n - (total / n) ** 2)
        expected = (values - (0 if kind == "brorl" else total / n)) / (std + 1e-6)
        got = experience.advantage[mask] if kind == "gae" else first(experience)[trainable]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        assert (experience.advantage[4] == 0).all()
    resumed = resumed_from(memory, config)
    scores = [one.scores(rewards_of(reward), [0, 1]).memory["moments"] for one in (memory, resumed)]
    np.testing.assert_array_equal(*scores)


# ---- filters and shaping


def test_truncated_rows_are_left_out_of_loss_and_baseline():
    rollout = make_rollout([0, 0, 0, 1, 1, 1]).replace(
        stop_reason=np.array([STOP_EOS, STOP_EOS, STOP_LENGTH] + [STOP_LENGTH] * 3, np.int8)
    )
    settings = {"overlong_filter": True, "reshaping": [use("entropy_bonus", coefficient=2.0, limit=0.4)]}
    experience, sums = assign(rollout, [1, 0, 0, 1, 0, 0], advantage="dr_grpo", num_groups=2, **settings)
    np.testing.assert_array_equal(experience.trainable, [True, True, False, False, False, False])
    # Of group 0 the first two are left, +-1/2, to which the entropy adds; of group 1 nothing.
    assert first(experience)[0] >= 0.5 and first(experience)[1] >= -0.5
    assert (experience.advantage[2:] == 0).all() and sums["degenerate_groups"] == 1
    everything, _ = assign(rollout, [1, 0, 0, 1, 0, 0], advantage="dr_grpo", num_groups=2)
    assert everything.trainable.all()


@pytest.mark.parametrize("kind", ["dr_grpo", "gdpo"])
def test_rewards_are_shaped_for_the_advantage_and_stored_as_scored(kind):
    group_id, reward = np.repeat([0, 1, 2], 5), np.random.default_rng(2).integers(0, 2, 15).astype(np.float32)
    rollout, trainable = make_rollout(group_id, seed=3), np.arange(15) % 7 != 4
    extra = extra_of(kind, reward)
    experience, _ = assign(rollout, reward, trainable, advantage=kind, num_groups=3, extra=extra, **SHAPED)
    length, correct = rollout.length - rollout.prompt_length, reward >= 1
    term = shaping_oracle.overlong_penalty(length, COMPLETION_TOKENS, 2)
    term = term + 0.5 * shaping_oracle.length_reward(length, correct, group_id, trainable)
    term = term + np.where(correct & (length <= 2), 0.25, 0)
    given = {"parts": np.stack([reward, term], axis=1), "part_weights": (1.0, 1.0)} if kind == "gdpo" else {}
    expected = oracle.group_advantages(reward + term, group_id, trainable, kind, **given)
    np.testing.assert_allclose(first(experience), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(experience.reward, np.where(trainable, reward, 0))


def test_a_gate_leaves_of_further_rewards_those_of_rows_whose_first_is_high_enough():
    # First 1, 1, 0, 0; second 1, 0, 1, 0, of which the third's is lost: 1, 0, 0, 0.
    rollout, parts = make_rollout([0] * 4), np.array([[1, 1], [1, 0], [0, 1], [0, 0]], np.float32)
    given = {"num_groups": 1, "functions": ("a", "b"), "weights": (1.0, 1.0)}
    gate, without = use("gdpo", gate=1.0), np.where([[1, 1], [1, 1], [1, 0], [1, 1]], parts, np.float32(0))
    gated, _ = assign(rollout, [2, 1, 1, 0], extra={"parts": tuple(parts.T)}, advantage=gate, **given)
    expected, _ = assign(rollout, [2, 1, 0, 0], extra={"parts": tuple(without.T)}, advantage="gdpo", **given)
    np.testing.assert_array_equal(gated.advantage, expected.advantage)
    np.testing.assert_array_equal(gated.reward, [2, 1, 1, 0])  # as it was scored
    # The third row, with the worst first reward, is now level with the fourth.
    assert first(gated)[0] > first(gated)[1] > first(gated)[2] == first(gated)[3]


def test_advantages_are_amplified_then_weighed_by_confidence_and_duration_then_lifted_by_entropy():
    group_id, reward = np.repeat([0, 1], 4), np.array([1, 0.5, 0, 0, 0, 0, 0, 0], np.float32)
    rollout = make_rollout(group_id, seed=4)
    experience, sums = assign(
        rollout,
        reward,
        advantage="dr_grpo",
        num_groups=2,
        reshaping=[
            use("amplify_positive", factor=3.0),
            use("entropy_factor", strength=1.0),
            use("duration_factor", exponent=0.5),
            use("entropy_bonus", coefficient=2.0, limit=0.4),
        ],
        extra={name: np.zeros((8, 1), np.float32) for name in ("turn_reward", "turn_seconds")},
    )
    # Mean 3/8: the correct row gets 1, the next 3/8, the others -3/8; group 1 is tied and wrong.
    row = np.array([1, 0.375, -0.375, -0.375, 0, 0, 0, 0])
    mask = (np.arange(WIDTH) >= rollout.prompt_length[:, None]) & (np.arange(WIDTH) < rollout.length[:, None])
    entropy = np.where(mask, rollout.columns["entropy"], 0)
    row_entropy = entropy.sum(axis=1) / mask.sum(axis=1)
    row = row * shaping_oracle.entropy_factor(row_entropy, group_id, np.ones(8, bool), 1.0)
    row = row * shaping_oracle.duration_factor(mask.sum(axis=1), np.ones(8, bool), 0.5)
    expected = np.where(mask, row[:, None], 0)
    expected = expected + shaping_oracle.entropy_bonus(expected, entropy, 2.0, 0.4)
    np.testing.assert_allclose(experience.advantage, expected, rtol=1e-5, atol=1e-6)
    assert (experience.advantage[~mask] == 0).all() and (experience.advantage[4:] == 0).all()
    assert sums["degenerate_groups"] == 1


def test_a_group_that_is_all_correct_is_imitated_under_positive_amplification():
    settings = {"advantage": "grpo", "reshaping": [use("amplify_positive", factor=3.0)], "num_groups": 2}
    experience, sums = assign(make_rollout([0, 0, 1, 1]), [1, 1, 0, 0], **settings)
    np.testing.assert_array_equal(first(experience), [1, 1, 0, 0])
    assert sums["degenerate_groups"] == 1


def test_what_lies_off_the_completion_moves_nothing():
    group_id, reward = np.repeat([0, 1], 4), np.random.default_rng(5).random(8)
    rollout = make_rollout(group_id, seed=6)
    at = np.arange(WIDTH)[None, :]
    off = (at < rollout.prompt_length[:, None]) | (at >= rollout.length[:, None])
    spoil = lambda x: np.where(off, np.nan, x).astype(np.float32)
    columns = {"entropy": spoil(rollout.columns["entropy"])}
    spoilt = rollout.replace(behaviour_logp=spoil(rollout.behaviour_logp), columns=columns)
    reshaping = [use("entropy_factor", strength=1.0), use("entropy_bonus", coefficient=2.0, limit=0.4)]
    settings = {"advantage": "poise", "reshaping": reshaping, "num_groups": 2}
    extra = extra_of("poise", reward)
    experience, sums = assign(spoilt, reward, extra=extra, **settings)
    expected, sums_expected = assign(rollout, reward, extra=extra, **settings)
    np.testing.assert_array_equal(experience.advantage, expected.advantage)
    jax.tree.map(np.testing.assert_array_equal, sums, sums_expected)


@pytest.mark.parametrize(
    ("place", "function", "shapes"),
    [
        ("advantage", lambda x: x.reward[:1], ("[B]", "[B, S]", "(1,)")),
        ("reward_terms", lambda x: x.mask, ("[B]", "(2, 7)")),
        ("reshaping", lambda advantage, x: advantage[:, 0], ("[B, S]", "(2,)")),
    ],
)
def test_what_a_function_returns_is_held_to_the_shape_of_its_place(place, function, shapes):
    config, own = config_of(advantage="dr_grpo"), Chosen("own", function=function, facts=AdvantageFacts())
    algorithm = dataclasses.replace(config.algorithm, **{place: own if place == "advantage" else (own,)})
    config = dataclasses.replace(config, algorithm=algorithm)
    scores = Scores(jnp.zeros(2), jnp.ones(2, bool), jnp.zeros(2, jnp.int32), parts=(), columns={}, memory={})
    with refused(f"algorithm.{place}", "own", *shapes):
        credit.assign(jax.tree.map(jnp.asarray, make_rollout([0, 0])), scores, {}, config)


# ---- what is remembered


def rewards_of(total, failed=(), **parts):
    total = np.array(total, np.float32)
    outcome = np.zeros(len(total), np.int8)
    outcome[list(failed)] = OUTCOME_ERROR
    total[list(failed)] = np.nan
    return Rewards(total, {name: np.array(part, np.float32) for name, part in parts.items()}, outcome)


def test_scores_hold_what_the_advantage_asks_for_and_no_failed_reward():
    rewards = rewards_of([1, 9, 0.5], failed=[1], a=[0, np.nan, 1], b=[1, 9, 0])
    scores = memory_of(config_of()).scores(rewards, [4])
    assert scores.parts == () and not scores.columns and not scores.memory
    np.testing.assert_array_equal(scores.reward, [1, 0, 0.5])
    np.testing.assert_array_equal(scores.trainable, [True, False, True])
    # Parts in the order of rewards.functions.
    config = config_of(functions=("b", "a"), weights=(1.0, 0.5), advantage="gdpo")
    scores = memory_of(config).scores(rewards, [4])
    np.testing.assert_array_equal(np.stack(scores.parts, axis=1), [[1, 0], [0, 0], [0, 1]])


def test_the_beta_baseline_of_a_question_is_that_before_its_answers_and_survives_a_checkpoint():
    config = config_of(advantage=use("mssr", decay=0.9))
    memory = memory_of(config)
    # Question 3 is answered by 1 and by one that failed, question 5 by 0 and 0.
    seen = memory.scores(rewards_of([1, 0, 0, 0], failed=[1]), [3, 5]).columns["question_mean"]
    np.testing.assert_array_equal(seen, [0.5] * 4)
    memory.observe(rewards_of([1, 0, 0, 0], failed=[1]), [3, 5], {})
    resumed = resumed_from(memory, config)
    for one in (memory, resumed):
        baseline = one.scores(rewards_of([1, 1]), [5, 3]).columns["question_mean"]
        expected = [shaping_oracle.beta_means([0, 0, 1], 0.9)[2], shaping_oracle.beta_means([1, 1], 0.9)[1]]
        np.testing.assert_allclose(baseline, expected, rtol=1e-6)


def test_the_beta_baseline_learns_what_reward_terms_add():
    """Answers of 8 tokens lose 1 each, so right answers have reward 0 and wrong ones -1."""
    terms = [use("overlong_penalty", buffer=4)]
    config = config_of(advantage=use("mssr", decay=0.9), reward_terms=terms, num_groups=2)
    memory, rollout = memory_of(config), make_rollout([0, 1])
    longest = config.sampling.max_completion_tokens
    rollout = rollout.replace(length=rollout.prompt_length + longest)
    settings = {"advantage": use("mssr", decay=0.9), "reward_terms": terms, "num_groups": 2}
    extra = {"question_mean": np.float32([0.5, 0.5])}
    _, sums = assign(rollout, [1, 0], extra=extra, **settings)
    np.testing.assert_array_equal(sums["shaped_reward"], [0, -1])
    memory.observe(rewards_of([1, 0]), [3, 5], sums)
    seen = memory.scores(rewards_of([1, 0]), [3, 5]).columns["question_mean"]
    # a <- .9 + r, b <- .9 + 1 - r
    np.testing.assert_allclose(seen, [0.9 / 2.8, -0.1 / 2.8], rtol=1e-5)
    memory.observe(rewards_of([1, 0], failed=[1]), [3, 5], sums)
    assert memory.scores(rewards_of([1, 0]), [3, 5]).columns["question_mean"][1] == seen[1]


def test_the_beta_baseline_forgets_faster_while_the_policy_moves():
    config = config_of(advantage=use("mssr", decay=0.9, decay_moving=0.5))
    memory = memory_of(config)
    right, a, b = rewards_of([1.0]), 1.0, 1.0
    # 22 iterations: the first two leave the mean of the last 20 again. Above 0.02 nats a token it forgets no faster.
    kl = [0.5, 0.02, *[0.0] * 18, 0.0, 0.1]
    for i, one in enumerate(kl):
        window = kl[max(0, i - 19) : i + 1]
        decay = 0.9 + (0.5 - 0.9) * min(1.0, np.mean(window) / 0.02)
        a, b = decay * a + 1, decay * b
        memory.observe(right, [0], {"kl_behaviour_sum": np.float32(8 * one), "token_count": np.int32(8)})
        np.testing.assert_allclose(memory.scores(right, [0]).columns["question_mean"], a / (a + b), rtol=1e-6)
        memory = resumed_from(memory, config)


def test_one_iteration_without_a_finite_kl_has_no_say_in_how_fast_the_beta_baseline_forgets():
    config = config_of(advantage=use("mssr", decay=0.9, decay_moving=0.5))
    memory, right, a, b = memory_of(config), rewards_of([1.0]), 1.0, 1.0
    for one, size, decay in ((np.nan, 8, 0.9), (0.01, 8, 0.7), (np.inf, 8, 0.7), (0, 0, 0.7)):  # half of the way to 0.5
        memory.observe(right, [0], {"kl_behaviour_sum": np.float32(8 * one), "token_count": np.int32(size)})
        a, b = decay * a + 1, decay * b
        np.testing.assert_allclose(memory.scores(right, [0]).columns["question_mean"], a / (a + b), rtol=1e-6)


def test_the_beta_baseline_follows_a_question_that_becomes_easier():
    memory, rng = memory_of(config_of(advantage=use("mssr", decay=0.96))), np.random.default_rng(0)
    errors = []
    for step in range(400):
        rate = min(1.0, 0.1 + step / 300)
        reward = rewards_of([float(rng.random() < rate)])
        errors.append(float(memory.scores(reward, [0]).columns["question_mean"][0]) - rate)
        memory.observe(reward, [0], {})
    # 25 answers are remembered: it lags by about 25 steps of 1/300, with a deviation of about 0.1 / sqrt(2).
    assert abs(np.mean(errors[50:])) < 0.1 and np.sqrt(np.mean(np.square(errors[50:]))) < 0.15


def test_the_regression_learns_siblings_rewards_after_use_and_survives_a_checkpoint():
    # Questions 0 and 2 get short answers and are right, 1 and 3 get long ones and are wrong.
    settings = {"advantage": use("poise", decay=0.5), "num_groups": 4}
    config = config_of(**settings)
    rollout = make_rollout(np.repeat([0, 1, 2, 3], 4))
    hard = rollout.group_id % 2 == 1
    rollout = rollout.replace(length=rollout.prompt_length + np.where(hard, 4, 1).astype(np.int32))
    reward, memory = np.where(hard, 0.0, 1.0), memory_of(config, HIDDEN)
    hidden = extra_of("poise", reward)["hidden"]

    def iterate():
        scores = memory.scores(rewards_of(reward), range(4))
        extra = scores.memory | {"hidden": hidden}
        experience, sums = assign(rollout, reward, extra=extra, **settings)
        memory.observe(rewards_of(reward), range(4), sums)
        return first(experience), sums["regression"]

    advantage, sums = iterate()
    np.testing.assert_array_equal(advantage, reward)  # nothing is known yet: the baseline is 0
    for _ in range(3):
        advantage, _ = iterate()
    assert np.abs(advantage).max() < 0.25  # it is predicted now, less what the ridge holds back
    np.testing.assert_allclose(memory.arrays()["poise"], (1 + 0.5 + 0.25 + 0.125) * sums, rtol=1e-5)
    resumed = resumed_from(memory, config, HIDDEN)
    np.testing.assert_array_equal(resumed.arrays()["poise"], memory.arrays()["poise"], strict=True)
    # Checkpoints of earlier versions have the sums as JSON, in float64.
    earlier = memory_of(config, HIDDEN)
    earlier.restore({"poise": memory.arrays()["poise"].astype(float).tolist()}, {})
    np.testing.assert_array_equal(earlier.arrays()["poise"], memory.arrays()["poise"], strict=True)


def test_the_regressions_target_is_the_mean_of_the_siblings():
    rollout = make_rollout([0, 0, 0, 1, 2, 2])
    reward, trainable = np.array([1, 0, 0.5, 1, 1, 7]), np.array([1, 1, 1, 1, 1, 0], bool)
    _, sums = assign(rollout, reward, trainable, advantage="poise", num_groups=3, extra=extra_of("poise", reward))
    # Rows alone in their group take no part. The first feature is 1, so its row counts and adds up.
    np.testing.assert_allclose(sums["regression"][0, 0], 3)
    np.testing.assert_allclose(sums["regression"][0, -1], 0.25 + 0.75 + 0.5, rtol=1e-6)


def test_what_an_environment_answers_makes_no_answer_longer():
    """The policy drew two of three tokens. The answer is short enough for the bonus: 3/2 against 0."""
    rollout = make_rollout([0, 0])
    rollout = rollout.replace(prompt_length=np.int32([1, 1]), length=np.int32([4, 4]))
    rollout.policy_version[:, 2] = -1
    given = {"reward_terms": [use("short_answer", tokens=2, bonus=0.5)], "num_groups": 1}
    experience, _ = assign(rollout, [1, 0], advantage="dr_grpo", **given)
    np.testing.assert_array_equal(first(experience), [0.75, -0.75])


CHOSEN = {"reward_terms": [use("short_answer", tokens=1, bonus=0.25, every_iterations=2)]}


def test_a_short_answer_is_what_its_difficulty_says():
    # Three of three correct, then one, then none: easy, middling, hard, with 3, 1 and 4 tokens for the bonus.
    group_id, reward = np.repeat([0, 1, 2], 3), np.float32([1, 1, 1, 1, 0, 0, 0, 0, 0])
    rollout = make_rollout(group_id)
    rollout = rollout.replace(length=rollout.prompt_length + np.int32([2, 3, 4, 1, 1, 1, 4, 4, 4]))
    extra = {"short_answer": np.float32([3, 1, 4])}
    experience, sums = assign(rollout, reward, advantage="dr_grpo", num_groups=3, extra=extra, **CHOSEN)
    shaped = reward + 0.25 * np.array([1, 1, 0, 1, 0, 0, 0, 0, 0])
    expected = oracle.group_advantages(shaped, group_id, np.ones(9, bool), "dr_grpo")
    np.testing.assert_allclose(first(experience), expected, rtol=1e-5, atol=1e-6)
    # Answers, right or wrong, within 1, 2, 3 and 4 tokens, and all.
    expected = [[0, 1, 2, 3, 3], [3, 3, 3, 3, 3], [0, 0, 0, 3, 3]]
    np.testing.assert_array_equal(sums["answers_within"], expected)


def test_lengths_are_chosen_every_so_many_iterations_and_survive_a_checkpoint():
    """Groups of eight: 5, 2 and 1 eighths of the answers within a length must be right at least."""
    memory, rewards = memory_of(config_of(**CHOSEN)), rewards_of([1.0])
    lengths = lambda: memory.scores(rewards, [0]).memory["short_answer"].tolist()
    within = np.array([[1, 2, 8, 16, 16], [0, 0, 0, 0, 0], [0, 1, 7, 16, 16]], np.float32)
    more = np.array([[1, 6, 8, 16, 16], [0, 0, 0, 0, 0], [0, 1, 7, 16, 16]], np.float32)
    assert lengths() == [4, 4, 4]
    memory.observe(rewards, [0], {"answers_within": within})
    assert lengths() == [4, 4, 4]
    resumed = resumed_from(memory, config_of(**CHOSEN))
    memory.observe(rewards, [0], {"answers_within": more})
    resumed.observe(rewards, [0], {"answers_within": more})
    assert lengths() == [2, 4, 4] and resumed.state() == memory.state()  # 8 of 32, times 5, are one: 2 were not
    # Each choice is of what was seen since the last one: now there are middling ones, whose half is within 1.
    for _ in range(2):
        memory.observe(rewards, [0], {"answers_within": np.float32([[0] * 5, [4, 4, 8, 8, 8], [0, 0, 8, 8, 8]])})
    assert lengths() == [2, 1, 3]


def targets(length, correct, group, valid, *, group_size, tokens, longest):
    """Return the length limit of each class after these rows, and the class of each row."""
    groups = group_rows(group, valid, int(group.max()) + 1)
    row_class, grid = shaping.difficulty(correct, groups), length_grid(tokens, longest)
    counted = np.asarray(shaping.answers_within(length, row_class, groups, grid=grid))
    sizes, rewards = Sizes(width=0, max_length=longest, group_size=group_size), rewards_of(correct)
    memory = ShortAnswers({"tokens": tokens, "every_iterations": 1}, sizes, Ledger())
    memory.observe(rewards, [0], {"answers_within": counted})
    return memory.values(rewards, [0])["short_answer"], np.asarray(row_class)


@pytest.mark.parametrize(
    ("right", "lengths", "target"),
    [
        (8, range(100, 801, 100), 200),  # easy: floor(1/8 * 5) = 0, floor(2/8 * 5) = 1
        (6, [900] * 6 + [150, 200], 200),  # wrong ones are counted as right ones are
        (3, [200, 300, 400, *[1000] * 5], 1000),  # middling: floor(3/8 * 2) = 0
        (4, [300] * 4 + [1000] * 4, 300),  # floor(4/8 * 2) = 1
        (2, [200, 300, *[1000] * 6], 1000),  # hard: floor(2/8) = 0, all must be within
        (0, [100] * 8, 100),
    ],
)
def test_the_length_of_a_difficulty_is_what_the_paper_chooses(right, lengths, target):
    """LASER-D by hand: eight answers to one question, and a grid of lengths from hundreds to a thousand."""
    length, correct, group = np.array([*lengths]), np.arange(8) < right, np.zeros(8, np.int32)
    chosen, row_class = targets(length, correct, group, group == 0, group_size=8, tokens=100, longest=1000)
    assert chosen[row_class[0]] == target
    assert shaping_oracle.short_answer_target([*lengths], 8, range(100, 1001, 100), row_class[0]) == target


@pytest.mark.parametrize("group_size", [2, 6])
def test_lengths_are_chosen_as_by_loops(group_size):
    """Groups of six reach exactly one third and two thirds. In groups of two, medium questions have no length limit."""
    rng, seen = np.random.default_rng(0), set()
    group = np.repeat(np.arange(12, dtype=np.int32), group_size)
    for _ in range(6):
        valid, length = rng.random(len(group)) < 0.9, rng.integers(1, 16, len(group))
        correct = valid & (rng.random(len(group)) < np.repeat(rng.random(12), group_size))
        chosen, _ = targets(length, correct, group, valid, group_size=group_size, tokens=2, longest=15)
        row_class = shaping_oracle.difficulty(correct, group, valid)
        for kind in set(row_class.tolist()) - {-1}:
            lengths = length[row_class == kind].tolist()
            grid = [2, 4, 6, 8, 10, 12, 14, 15]
            assert chosen[kind] == shaping_oracle.short_answer_target(lengths, group_size, grid, kind)
            seen.add((kind, chosen[kind]))
    assert len(seen) > 4


@pytest.mark.parametrize("kind", [*KINDS, "several memories"])
def test_the_program_takes_what_the_host_gives(kind):
    several = {"advantage": use("mssr", norm_decay=0.9), **CHOSEN}
    settings = {"advantage": kind} if kind in KINDS else several
    config = config_of(8, functions=("a", "b"), weights=(1.0, 1.0), **settings)
    expected = assemble(config, TINY, (257,), mesh_of(ONE)).learner.abstract_scores
    memory = memory_of(config, TINY.width)
    given = memory.scores(rewards_of(np.ones(64), a=np.ones(64), b=np.ones(64)), range(8))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), given) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


INTO_THE_RING = {
    "rewards": {"pass_threshold": 0.5},
    "rollout": {"prompts_per_iteration": 2, "group_size": 2},
    "prompts": {"max_tokens": WIDTH - COMPLETION_TOKENS},
    "sampling": {"max_completion_tokens": COMPLETION_TOKENS},
    "update": {"batch_size": 4, "micro_batch_size": 4},
}


def rings(replay, *, reward, trainable=(True,) * 4, **algorithm):
    """Return the ring after three iterations of two groups of two with these rewards, and the run's learner."""
    config = freeze(INTO_THE_RING | {"replay": {"capacity": 8, **replay}, "algorithm": algorithm})
    learner = assemble(config, TINY, (257,), mesh_of(ONE)).learner
    ring, insert, zeros = jax.jit(learner._init_ring)(), jax.jit(learner._insert), np.zeros(4, np.int32)
    scores = Scores(np.float32(reward), np.array(trainable), zeros, parts=(), columns={}, memory={})
    for iteration in range(3):
        rollout = make_rollout(np.array([0, 0, 1, 1]) + 2 * iteration, seed=iteration).replace(columns={})
        ring, _ = insert(ring, rollout, scores, {}, np.int32(iteration))
    return jax.tree.map(lambda x: np.asarray(x)[0], ring), learner


def test_the_reward_that_is_enough_is_the_settings_in_credit_ring_and_loss():
    short = {"reward_terms": [use("short_answer", tokens=COMPLETION_TOKENS, bonus=0.25)]}
    given = {"reward": [0.5, 0, 0.75, 0], "advantage": "dr_grpo", **short}
    ring, learner = rings({"positive_fraction": 0.5, "unit": "rollout"}, **given)
    assert learner.update.pass_threshold == 0.5
    assert ring.slots.reward[4:].tolist() == [0.5, 0.75, 0.5, 0.75]  # of the two iterations before
    # With the bonus 0.75 and 1, half of which is the group's mean.
    assert first(ring.slots)[:4].tolist() == [0.375, -0.375, 0.5, -0.5]


def test_rows_of_a_group_stay_side_by_side_in_the_ring_where_groups_are_drawn():
    ring, _ = rings({"unit": "group"}, reward=[1, 0, 1, 0], trainable=(True, False, True, True))
    assert ring.slots.rollout.group_id.tolist() == [4, 4, 5, 5, 2, 2, 3, 3]


def test_a_run_remembers_over_a_stop_what_was_answered(tmp_path, monkeypatch):
    ghosts.haunt(monkeypatch)
    settings = {
        "prompts": {"size": 8, "retire_pass_rate": 0.9},
        "rollout": {"prompts_per_iteration": 8, "group_size": 1},
        "update": {"batch_size": 8, "micro_batch_size": 8},
        "rewards": {"num_workers": 1},
        "algorithm": {"advantage": "mssr"},
        "checkpoint": {"export": False},
        "metrics": {"tensorboard": False},
    }
    for iterations in (1, 2):
        assert train.train(freeze(settings | {"num_iterations": iterations}), tmp_path) == 0
        saved = json.loads((tmp_path / "checkpoints" / str(iterations) / "host" / "metadata").read_text())
        # Every question is asked once an iteration, and ghosts are wrong: a = 0.9 a, b = 0.9 b + 1 from 1, 1.
        assert len(saved["ledger"]["numbers"]["mssr"]) == 8
        expected = {1: [0.9, 1.9], 2: [0.81, 2.71]}[iterations]
        for _, *counts in saved["ledger"]["numbers"]["mssr"]:
            np.testing.assert_allclose(counts, expected, rtol=1e-6)
        assert sorted(saved["ledger"]["answers"]) == [[q, 0, iterations] for q in range(8)]
    rows = read_metrics(tmp_path)
    assert [row["prompts/retired"] for row in rows] == [0, 0]
