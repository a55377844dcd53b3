import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import advantages as oracle
from support.building import algorithm_config
from support.refusal import refused
from support.rows import make_rows

from jaxrl_llm.algorithms import baselines, turns
from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.ops.groups import group_rows

DELTA_V, PART_WEIGHTS = -0.1, (1.0, 0.5)
ROWS, GROUPS = 64, 9


def chosen(kind):
    return algorithm_config(advantage={"name": kind, "delta_v": DELTA_V} if kind == "asymre" else kind).advantage


# The advantages without a critic. New ones are tested without a change of this file.
KINDS = [kind for kind in ADVANTAGES if "value" not in chosen(kind).facts.columns]
# These compare siblings. A tied group teaches nothing under the relative ones.
SIBLINGS = [kind for kind in KINDS if chosen(kind).facts.siblings]
RELATIVE = [kind for kind in SIBLINGS if not algorithm_config(advantage=kind).tied_teaches]


@functools.partial(jax.jit, static_argnames="kind")
def compute(reward, group, valid, extra, kind):
    """Return the advantage of rows that have its declared columns. "poise" predicts the given baseline of each row."""
    advantage, baseline = chosen(kind), extra["baseline"]
    remembered = advantage.facts.memory.columns if advantage.facts.memory else ()
    features = baselines.num_features(1)
    columns = {"hidden": baseline[:, None], "entropy": jnp.zeros((ROWS, 1))} | dict.fromkeys(remembered, baseline)
    rows = make_rows(
        group_rows(group, valid, GROUPS),
        reward=reward,
        parts=tuple(zip(jnp.moveaxis(extra["parts"], 1, 0), PART_WEIGHTS, strict=True)),
        columns={name: columns[name] for name in (*advantage.facts.columns, *remembered)},
        # The last feature is the hidden state, and its coefficient is 1 over what the ridge holds back.
        memory={"regression": jnp.zeros((features, features + 1)).at[-1, -1].set(baselines.RIDGE)},
    )
    value = advantage(rows)
    return value[0] if isinstance(value, tuple) else value


def extra_of(reward, seed=0):
    """Return parts that add up to the reward and are tied whenever the reward is, and baselines."""
    rng, n = np.random.default_rng(seed), len(reward)
    reward = np.asarray(reward, np.float32)
    parts = np.stack([0.75 * reward, 0.5 * reward], axis=1)
    return {"parts": parts, "baseline": rng.random(n)}


def advantages(reward, group, kind, valid=None, extra=None):
    """Return the advantages of rows in a table of 64 rows and 9 groups.

    The rest is invalid or empty, so that one program serves every test.
    """
    n = len(reward)
    valid = np.ones(n, bool) if valid is None else valid
    pad = lambda x, dtype: np.pad(np.asarray(x, dtype), [(0, ROWS - n)] + [(0, 0)] * (np.ndim(x) - 1))
    extra = {name: pad(x, np.float32) for name, x in (extra or extra_of(reward)).items()}
    result = np.asarray(compute(pad(reward, np.float32), pad(group, np.int32), pad(valid, bool), extra, kind))
    assert (result[n:] == 0).all()
    return result[:n]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Rewards 1, 0, 0, 0: mean 1/4, population std sqrt(3)/4, so (3/4)/(sqrt(3)/4) = sqrt(3) and -1/sqrt(3).
        ("grpo", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        # The others' mean: 0 for the first; 1/3 for each other.
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # The batch is this one group.
        ("reinforce_pp", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ("brorl", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        # Baseline 1/4 - 1/10.
        ("asymre", [0.85, -0.15, -0.15, -0.15]),
        ("mc_grpo", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_one_success_of_four_by_hand(kind, expected):
    # eps = 1e-6 in the divisor moves "grpo" by 1e-6 / (sqrt(3)/4) = 2.3e-6 of itself.
    np.testing.assert_allclose(advantages([1, 0, 0, 0], [0, 0, 0, 0], kind), expected, rtol=4e-6)


@pytest.mark.parametrize("kind", RELATIVE)
def test_tied_groups_are_exactly_zero_for_any_reward_value_and_size(kind):
    values = (0.1, 0.3, 1 / 3, 1e-8, 12345.678, -0.7)
    tables = [(size, values) for size in range(2, 11)]
    tables += [(size, [value]) for size in (11, 17, 23, 39) for value in (0.1, 1 / 3)]
    for size, tied in tables:
        # Beside a group that is not tied, whose mean and std the batch takes.
        reward, group = np.repeat(tied, size), np.repeat(np.arange(len(tied)), size)
        advantage = advantages([*reward, 0, 1, 5], [*group, 8, 8, 8], kind)
        assert (advantage[: len(reward)] == 0).all(), (size, tied)
        assert (advantage[len(reward) :] != 0).any()


def test_in_a_tied_group_asymre_gives_every_row_minus_delta_v():
    np.testing.assert_array_equal(advantages(np.full(7, 0.3), np.zeros(7), "asymre"), np.full(7, np.float32(0.1)))


def test_a_tied_batch_is_exactly_zero_where_the_batch_is_compared():
    for value in (0.1, 1 / 3, 12345.678):
        reward, group = np.full(30, value), np.arange(30) % 5
        assert (advantages(reward, group, "reinforce_pp") == 0).all()
        extra = extra_of(reward) | {"baseline": np.full(30, 0.25)}
        assert (advantages(reward, group, "mssr", extra=extra) == 0).all()


@pytest.mark.parametrize("kind", SIBLINGS)
def test_rows_without_siblings_are_exactly_zero(kind):
    # Group 0: one row. Group 1: one valid row of two. Group 2: no valid row. Group 3: no row.
    valid = [True, True, False, False, False]
    assert advantages([5, 1, 0, 3, 4], [0, 1, 1, 2, 2], kind, valid=valid).tolist() == [0] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_valid_row_everything_is_exactly_zero(kind):
    assert advantages([1, 2, 3], [0, 0, 1], kind, valid=[False] * 3).tolist() == [0] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_members_do_not_move_the_others_whatever_their_reward(kind):
    keep, extra = np.array([0, 2, 3]), extra_of([1, 7, 0, 0.5])
    alone = advantages([1, 0, 0.5], [0, 0, 0], kind, extra={name: x[keep] for name, x in extra.items()})
    for ignored in (7.0, np.nan, np.inf):
        extra["parts"][1] = ignored
        advantage = advantages([1, ignored, 0, 0.5], [0] * 4, kind, valid=[True, False, True, True], extra=extra)
        assert float(advantage[1]) == 0
        np.testing.assert_allclose(advantage[keep], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_matches_float64_loops_on_ragged_scattered_groups_in_any_order(kind):
    rng = np.random.default_rng(0)
    reward, group = rng.normal(size=61).astype(np.float32), rng.integers(0, GROUPS, 61)
    valid, order = rng.random(61) < 0.8, rng.permutation(61)
    extra = extra_of(reward) | {"parts": rng.normal(size=(61, 2)).astype(np.float32)}
    settings = {"delta_v": DELTA_V, "part_weights": PART_WEIGHTS, **extra}
    expected = oracle.group_advantages(reward, group, valid, kind, **settings)
    # Groups of about 7 with rewards of order 1: centring loses at most a few float32 ulps of 1.
    np.testing.assert_allclose(advantages(reward, group, kind, valid, extra), expected, rtol=1e-5, atol=1e-6)
    shuffled = {name: x[order] for name, x in extra.items()}
    advantage = advantages(reward[order], group[order], kind, valid[order], shuffled)
    np.testing.assert_allclose(advantage, expected[order], rtol=1e-5, atol=1e-6)


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_1():
    rng = np.random.default_rng(2)
    reward, group = rng.normal(size=20).astype(np.float32), np.repeat(np.arange(4), 5)
    centred, leave_one_out = advantages(reward, group, "dr_grpo"), advantages(reward, group, "leave_one_out")
    np.testing.assert_allclose(leave_one_out, centred * 5 / 4, rtol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp", "brorl", "gdpo"])
def test_divided_by_a_std_it_has_unit_variance_and_ignores_the_scale_of_rewards(kind):
    reward, group = np.random.default_rng(3).normal(size=32).astype(np.float32), np.repeat(np.arange(2), 16)
    advantage, scaled = advantages(reward, group, kind), advantages(10 * reward, group, kind)
    np.testing.assert_allclose(np.std(np.asarray(advantage, np.float64)), 1, rtol=1e-5)
    np.testing.assert_allclose(scaled, advantage, rtol=1e-5)


def test_brorl_weighs_groups_by_their_spread_where_grpo_makes_them_equal():
    reward, group = [0, 1, 0, 10], [0, 0, 1, 1]
    np.testing.assert_allclose(np.abs(advantages(reward, group, "grpo")), 1, rtol=1e-5)
    # Centred: +-1/2 and +-5; the batch's std is sqrt((1/4 + 25) / 2).
    expected = np.array([-0.5, 0.5, -5, 5]) / np.sqrt(12.625)
    np.testing.assert_allclose(advantages(reward, group, "brorl"), expected, rtol=1e-5)


def test_the_median_never_explodes_where_two_valued_rewards_have_no_absolute_deviation():
    for size in (3, 5):
        for pattern in range(2**size):
            reward = [pattern >> i & 1 for i in range(size)]
            advantage = advantages(reward, np.zeros(size), "mc_grpo")
            assert set(np.abs(advantage).tolist()) <= {0.0, 1.0}
            assert 0 in advantage  # an odd group's median is one of its own rewards


def test_the_median_turns_fewer_signs_round_than_the_mean_where_one_reward_is_far_off():
    # Rewards are the row's worth, +-1 around 0, but one row in ten is 20 too high; three rows a group.
    rng = np.random.default_rng(4)
    flips = {"mc_grpo": 0, "dr_grpo": 0}
    for _ in range(20):
        worth = rng.permuted(np.tile([-1.0, 0.0, 1.0], (GROUPS, 1)), axis=1).ravel()
        reward, group = worth + 20 * (rng.random(3 * GROUPS) < 0.1), np.repeat(np.arange(GROUPS), 3)
        for kind in flips:
            flips[kind] += int((advantages(reward, group, kind) * worth < 0).sum())
    assert 2 * flips["mc_grpo"] < flips["dr_grpo"]


def test_gdpo_tells_apart_what_the_total_cannot():
    # Two answers a question. Question 0: (0, 0) against (1, 0); question 1: (0, 0) against (1, 1).
    parts, group = np.array([[0, 0], [1, 0], [0, 0], [1, 1]]), [0, 0, 1, 1]
    total = parts.sum(axis=1)
    np.testing.assert_allclose(advantages(total, group, "grpo"), [-1, 1, -1, 1], rtol=1e-5)
    # By itself each part gives +-1 where it differs; with weights 1 and 1/2 the sums are +-1 and +-3/2.
    expected = np.array([-1, 1, -1.5, 1.5]) / np.sqrt((1 + 2.25) / 2)
    extra = extra_of(total) | {"parts": parts}
    np.testing.assert_allclose(advantages(total, group, "gdpo", extra=extra), expected, rtol=1e-5)
    # A group whose totals are tied has a signal where its parts have one.
    parts = np.array([[1, 0], [0, 1]])
    advantage = advantages([1, 1], [0, 0], "gdpo", extra=extra_of([1, 1]) | {"parts": parts})
    np.testing.assert_allclose(advantage, [1, -1], rtol=1e-5)  # +-1 -+1/2, whitened


def test_mssr_and_poise_do_not_need_the_siblings_to_differ():
    # Two questions that are always, or never, answered: the one was expected to be 1/2, the other 0.
    reward, group = [1, 1, 0, 0], [0, 0, 1, 1]
    extra = extra_of(reward) | {"baseline": [0.5, 0.5, 0, 0]}
    np.testing.assert_allclose(advantages(reward, group, "mssr", extra=extra), [1, 1, -1, -1], rtol=1e-5)
    np.testing.assert_array_equal(advantages(reward, group, "poise", extra=extra), [0.5, 0.5, 0, 0])


def test_a_prediction_of_the_row_itself_does_not_touch_its_own_advantage():
    reward, group = [1, 0, 1], [0, 0, 0]
    advantage = advantages(reward, group, "poise", extra=extra_of(reward) | {"baseline": [0.2, 0.4, 0.9]})
    other = advantages(reward, group, "poise", extra=extra_of(reward) | {"baseline": [7.0, 0.4, 0.9]})
    np.testing.assert_allclose(advantage[0], 1 - 0.65, rtol=1e-6)
    np.testing.assert_allclose(other[0], advantage[0], rtol=1e-5)
    assert (np.abs(other[1:] - advantage[1:]) > 1).all()


def test_a_critic_learns_the_reward_as_it_is():
    reward, group, valid = jnp.array([1, 0.5, 7, 1]), np.array([0, 0, 1, 1]), np.array([True, True, False, True])
    mask = np.arange(3)[None, :] < np.array([1, 3, 2, 2])[:, None]
    value = jnp.asarray(np.random.default_rng(5).random((4, 3)), jnp.float32)
    rows = make_rows(group_rows(group, valid, 2), reward=reward, mask=jnp.asarray(mask), columns={"value": value})
    advantage, learned = chosen("gae")(rows)
    expected = np.where(mask, np.array([1, 0.5, 0, 1])[:, None], 0)
    np.testing.assert_array_equal(learned["returns"], expected)
    assert ((advantage != 0) == (expected != 0)).all()


def test_what_a_tied_group_teaches_is_declared():
    # A group of equal rewards beside one that is not.
    for kind in KINDS:
        advantage = advantages([1, 1, 0, 1], [0, 0, 1, 1], kind)
        assert bool(advantage[:2].any()) == algorithm_config(advantage=kind).tied_teaches, kind
    assert not algorithm_config(advantage={"name": "asymre", "delta_v": 0.0}).tied_teaches
    # Groups of one are enough for an advantage that does not compare siblings.
    for kind in KINDS:
        assert (kind in SIBLINGS) == (not advantages([1, 0], [0, 1], kind).any()), kind
    assert not [kind for kind in ("gae", "turn_gae", "step_gae") if chosen(kind).facts.siblings]


def test_unknown_kind_is_named_and_the_others_are_those_of_the_config():
    allowed = [f"'{kind}'" for kind in (*ADVANTAGES, *turns.ADVANTAGES)]
    with refused("advantage", "ppo", *allowed):
        algorithm_config(advantage="ppo")
