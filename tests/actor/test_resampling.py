"""Which groups an iteration keeps when it resamples tied groups, and which numbers count the other groups."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.building import EIGHT, ONE, TINY, mesh_of

from jaxrl_llm.actor import resampling
from jaxrl_llm.actor.generator import FinishedGroup
from jaxrl_llm.actor.resampling import is_mixed, sample
from jaxrl_llm.algorithms.inputs import Sizes
from jaxrl_llm.algorithms.memory import Memory
from jaxrl_llm.config import freeze
from jaxrl_llm.learner import credit
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, STOP_EOS, STOP_LENGTH, Rewards, Rollout

P, G = 3, 2


class Script:
    """A generator and a pool whose rewards follow a script. Each row is identified by (prompt, sample)."""

    def __init__(self, rounds):
        self.rounds, self.asked = rounds, 0
        self.sampler = types.SimpleNamespace(mesh=mesh_of(ONE))

    def prompts_wanted(self):
        return P

    def next_batch(self, num):
        first, self.asked = self.asked, self.asked + num
        return range(first, first + num)

    def generate(self, params, prompts, *, version, key, on_finished):
        assert (params, version, key, on_finished) == ("weights", 7, "key", print)
        rewards = self.rounds[prompts[0] // P]
        question = lambda prompt: types.SimpleNamespace(prompt=f"{prompt}?")
        self.rows = np.array([10 * prompt + i for prompt in prompts for i in range(G)])
        self.groups = [
            FinishedGroup(prompt, question(prompt), [1, 2], [STOP_EOS, STOP_LENGTH], ticket=ticket)
            for prompt, ticket in zip(prompts, rewards, strict=True)
        ]
        return self.groups

    def take(self):
        # A prompt of no token, and its completions.
        tokens = jnp.array([[g.group_id, 1] for g in self.groups for _ in range(G)])
        length = jnp.array([size for g in self.groups for size in g.lengths])
        rest = {"tokens": tokens, "prompt_length": 0 * length, "length": length}
        return types.SimpleNamespace(rows=self.rows, policy_version=jnp.full((P * G, 2), 7), **rest)

    def collect(self, tickets):
        total = np.array(tickets, np.float32).ravel()
        outcome = np.where(np.isnan(total), OUTCOME_ERROR, OUTCOME_SCORE).astype(np.int8)
        return Rewards(total, {"f": 2 * total}, outcome)

    def choose(self, first, second, place):
        rows = np.concatenate([first.rows, second.rows]).reshape(-1, G)[np.asarray(place)]
        tokens = np.concatenate([first.tokens, second.tokens]).reshape(-1, G, 2)[np.asarray(place)].reshape(-1, 2)
        return types.SimpleNamespace(**{**vars(first), "rows": rows.ravel(), "tokens": jnp.array(tokens)})

    def sample(self, max_rounds):
        choose = self.choose if max_rounds else None
        config = freeze(
            {
                "rollout": {"max_resample_rounds": max_rounds, "prompts_per_iteration": P},
                "replay": {"unit": "rollout"},
                "update": {"batch_size": P * G, "micro_batch_size": P * G},
            }
        )
        return sample(
            self,
            self.next_batch,
            self.collect,
            choose,
            "weights",
            config=config,
            rounds=[],
            version=7,
            key="key",
            on_finished=print,
        )


MIXED, RIGHT, WRONG = (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def kept(sampled):
    """Return the prompts that stay, after checking that rows and rewards belong to them."""
    prompts = [group.group_id for group in sampled.groups]
    np.testing.assert_array_equal(sampled.rollout.rows, [10 * p + i for p in prompts for i in range(G)])
    np.testing.assert_array_equal(sampled.rewards.total, np.ravel([group.ticket for group in sampled.groups]))
    return prompts


@pytest.mark.parametrize(
    ("rounds", "max_rounds", "stay", "num_rounds", "num_tied_left_out"),
    [
        ([[RIGHT, MIXED, WRONG]], 0, [0, 1, 2], 1, 0),
        ([[MIXED, MIXED, MIXED], [MIXED] * P], 5, [0, 1, 2], 1, 0),
        ([[RIGHT, MIXED, WRONG], [WRONG, MIXED, MIXED]], 5, [1, 4, 5], 2, 3),
        # A mixed group beyond need is left out, and is not tied.
        ([[MIXED, MIXED, WRONG], [MIXED, RIGHT, MIXED]], 5, [0, 1, 3], 2, 2),
        # Where mixed ones run out, tied ones in the order in which they came.
        ([[RIGHT, WRONG, MIXED], [WRONG, MIXED, RIGHT]], 1, [2, 4, 0], 2, 3),
        ([[RIGHT, WRONG, WRONG], [WRONG, WRONG, RIGHT], [WRONG, RIGHT, MIXED]], 2, [8, 0, 1], 3, 6),
    ],
)
def test_mixed_groups_come_first_in_order_and_no_round_is_one_too_many(
    rounds, max_rounds, stay, num_rounds, num_tied_left_out
):
    script = Script(rounds)
    sampled = script.sample(max_rounds)
    assert kept(sampled) == stay
    assert script.asked == P * num_rounds
    # All that was generated is there to be counted.
    assert [group.group_id for group in sampled.asked] == list(range(P * num_rounds))
    np.testing.assert_array_equal(sampled.answers.total, np.ravel(rounds[:num_rounds]))
    assert sampled.num_tied_left_out == num_tied_left_out


def test_a_failed_reward_neither_ties_nor_mixes():
    nan = np.nan
    total = np.array([0, 1, nan, 1, nan, 1, nan, nan, nan, 0, 0, nan, 0.5, 0.25, nan], np.float32)
    outcome = np.where(np.isnan(total), OUTCOME_TIMEOUT, OUTCOME_SCORE)
    groups = [FinishedGroup(i, None, [1] * 3, [STOP_EOS] * 3) for i in range(5)]
    mixed = is_mixed(Rewards(total, {}, outcome), groups, freeze({}))
    np.testing.assert_array_equal(mixed, [True, False, False, False, True])
    # Parts that differ where their sum does not.
    parts = {"a": np.where(np.arange(15) == 9, 0.25, 0), "b": 0 * total}
    mixed = is_mixed(Rewards(total, parts, outcome), groups, of_parts())
    np.testing.assert_array_equal(mixed, np.arange(5) == 3)


def of_parts(weights=(1.0, 1.0), **settings):
    rewards = {"functions": ("a", "b"), "weights": weights}
    return freeze({"algorithm": {"advantage": "gdpo", **settings}, "rewards": rewards})


CASES = {
    "plain": {},
    "cut off rows left out": {"overlong_filter": True},
    "by part": {"advantage": "gdpo"},
    "by part, behind a gate": {"advantage": {"name": "gdpo", "gate": 0.5}},
    "by part, the second of no weight": {"advantage": "gdpo", "weights": (1.0, 0.0)},
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_asked_anew_is_what_credit_says_is_tied(case):
    """Random groups with few different rewards; some rows failed and some were truncated."""
    settings, rng = dict(CASES[case]), np.random.default_rng(0)
    weights = settings.pop("weights", (1.0, 1.0))
    num_groups, size, width = 40, 4, 3
    config = freeze(
        {
            "algorithm": settings,
            "rewards": {"functions": ("a", "b"), "weights": weights},
            "rollout": {"prompts_per_iteration": num_groups, "group_size": size},
            "replay": {"skip_tied": True},
        }
    )
    parts = rng.integers(0, 2, (2, num_groups * size)).astype(np.float32)
    outcome = np.where(rng.random(num_groups * size) < 0.2, OUTCOME_ERROR, OUTCOME_SCORE).astype(np.int8)
    total = np.where(outcome == OUTCOME_SCORE, np.array(weights) @ parts, np.nan).astype(np.float32)
    reasons = rng.choice([STOP_EOS, STOP_LENGTH], num_groups * size).astype(np.int8)
    rewards = Rewards(total, dict(zip("ab", parts, strict=True)), outcome)
    groups = [FinishedGroup(i, None, [1] * size, r) for i, r in enumerate(reasons.reshape(-1, size).tolist())]
    mixed = is_mixed(rewards, groups, config)

    zeros = np.zeros((num_groups * size, width))
    rollout = Rollout(
        tokens=zeros.astype(np.int32),
        prompt_length=np.ones(num_groups * size, np.int32),
        length=np.full(num_groups * size, width, np.int32),
        behaviour_logp=zeros.astype(np.float32),
        group_id=np.repeat(np.arange(num_groups, dtype=np.int32), size),
        policy_version=zeros.astype(np.int32),
        stop_reason=reasons,
    )
    parts_seen = config.rewards.functions if "advantage" in settings else ()
    memory = Memory(config.algorithm.of_credit, parts_seen, Sizes(width=1, max_length=width), Ledger())
    scores = memory.scores(rewards, range(num_groups))
    rows, _ = jax.jit(lambda *given: credit.assign(*given, {}, config))(rollout, scores)
    tied = np.asarray(rows.columns["tied"] | ~rows.trainable).reshape(-1, size).all(axis=1)
    np.testing.assert_array_equal(mixed, ~tied)
    assert 3 < mixed.sum() < num_groups - 3


def test_what_is_shown_is_of_the_rows_that_stay():
    sampled = Script([[WRONG, MIXED, WRONG], [MIXED, WRONG, WRONG]]).sample(1)
    rows = sampled.sample_lines(4, 3, str)
    # Rows 0, 2 and 4 of groups 1, 3 and 0.
    assert [row["prompt"] for row in rows] == ["1?", "3?", "0?"]
    first = {"iteration": 4, "prompt_id": 1, "group_id": 1, "prompt": "1?", "completion": "[1]", "reward": 0.0}
    assert len(sampled.sample_lines(4, 99, str)) == P * G and sampled.sample_lines(4, 0, str) == []
    assert rows[0] == first | {"parts": {"f": 0.0}, "stop_reason": "eos", "policy_version": 7, "age": 0}


@pytest.mark.parametrize("mesh", [ONE, EIGHT])
def test_the_program_takes_whole_groups_wherever_they_lie(mesh):
    settings = {"prompts_per_iteration": 8, "group_size": 2, "slots": 16, "max_resample_rounds": 1}
    sizes = {"update": {"batch_size": 16, "micro_batch_size": 16}, "prompts": {"max_tokens": 2}}
    run = assemble(
        freeze({"rollout": settings, "sampling": {"max_completion_tokens": 2}} | sizes), TINY, (), mesh_of(mesh)
    )
    program = run.programs()["choose"]
    rng = np.random.default_rng(0)
    first, second = (
        jax.tree.map(lambda x: rng.integers(0, 100, x.shape).astype(x.dtype), shapes) for shapes in program.args[:2]
    )
    place = np.int32([15, 0, 8, 7, 3, 9, 14, 1])
    placed = [
        jax.device_put(x, jax.tree.map(lambda s: s.sharding, a))
        for x, a in zip((first, second, place), program.args, strict=True)
    ]
    chosen = compile_all({"choose": program}, run.mesh)["choose"](*placed)
    for actual, one, other in zip(*map(jax.tree.leaves, (chosen, first, second)), strict=True):
        expected = [(one, other)[group // 8][group % 8 * 2 + i] for group in place for i in range(2)]
        np.testing.assert_array_equal(actual, expected)


def test_rewards_with_columns_are_saved_restored_and_selected():
    rng = np.random.default_rng(0)
    columns = {"level": rng.random(4).astype(np.float32), "mask": np.eye(4, 7, dtype=np.float32)}
    total = np.float32([0.1, np.nan, 0.3, 0.4])
    outcome = np.int8([OUTCOME_SCORE, OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_SCORE])
    rewards = Rewards(total, {"f": 2 * total}, outcome, ("late",), columns)
    back = resampling.restored(json.loads(json.dumps(resampling.state_of(rewards))), {})
    assert back.errors == rewards.errors
    for name, column in columns.items():
        np.testing.assert_array_equal(back.columns[name], column)
        assert back.columns[name].dtype == np.float32
    np.testing.assert_array_equal(back.total, total)
    twice = resampling.each_array(lambda *x: np.concatenate(x), rewards, back)
    np.testing.assert_array_equal(twice.columns["mask"], np.concatenate([columns["mask"]] * 2))


def test_rewards_that_an_earlier_version_saved_as_a_list_are_restored():
    saved = [
        [1.0, 0.5],
        {"f": [1.0, 0.5]},
        [0, 0],
        [],
        [[0.5, 0.5], [0.5, 0.0]],
        [[1, 3], []],
        [[2.0, 1.0], [4.0, 0.0]],
    ]
    back = resampling.restored(saved, {"reward_mask": (5,), "turn_seconds": (2,)})
    np.testing.assert_array_equal(back.columns["turn_reward"], [[0.5, 0.5], [0.5, 0.0]])
    np.testing.assert_array_equal(back.columns["turn_seconds"], [[2.0, 1.0], [4.0, 0.0]])
    np.testing.assert_array_equal(back.columns["reward_mask"], [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
