import jax
import numpy as np
import pytest
from reference import advantages as oracle

from jaxrl_llm.ops.advantages import group_advantages

compute = jax.jit(group_advantages, static_argnames=("num_groups", "kind"))
KINDS = ["grpo", "dr_grpo", "leave_one_out"]


def advantages(reward, group, kind, valid=None, num_groups=None):
    """In a table of 64 rows and 9 groups, the rest invalid or empty, so that one program serves every test."""
    num_rows = len(reward)
    valid = np.ones(num_rows, bool) if valid is None else valid
    reward, group, valid = (
        np.pad(np.asarray(x, dtype), (0, 64 - num_rows))
        for x, dtype in ((reward, np.float32), (group, np.int32), (valid, bool))
    )
    advantage, has_signal = compute(reward, group, valid, num_groups=9, kind=kind)
    return np.asarray(advantage)[:num_rows], np.asarray(has_signal)[: num_groups or group.max() + 1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Rewards 1, 0, 0, 0: mean 1/4, population std sqrt(3)/4, so (3/4)/(sqrt(3)/4) = sqrt(3) and -1/sqrt(3).
        ("grpo", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        # The others' mean: 0 for the first; 1/3 for each other.
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_success_of_four_by_hand(kind, expected):
    advantage, has_signal = advantages([1, 0, 0, 0], [0, 0, 0, 0], kind)
    # eps = 1e-6 in the divisor moves "grpo" by 1e-6 / (sqrt(3)/4) = 2.3e-6 of itself.
    np.testing.assert_allclose(advantage, expected, rtol=4e-6)
    assert has_signal.tolist() == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_tied_groups_are_exactly_zero_for_any_reward_value_and_size(kind):
    for size in range(2, 40):
        for value in (0.1, 0.3, 1 / 3, 1e-8, 12345.678, -0.7):
            advantage, has_signal = advantages(np.full(size, value), np.zeros(size), kind)
            assert (advantage == 0).all(), (size, value)
            assert not has_signal.any()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_one_and_empty_groups_are_exactly_zero(kind):
    # Group 0: one row. Group 1: one valid row of two. Group 2: no valid row. Group 3: no row.
    valid = [True, True, False, False, False]
    advantage, has_signal = advantages([5, 1, 0, 3, 4], [0, 1, 1, 2, 2], kind, valid=valid, num_groups=4)
    assert advantage.tolist() == [0] * 5
    assert has_signal.tolist() == [False] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_members_do_not_move_the_baseline_whatever_their_reward(kind):
    alone, _ = advantages([1, 0, 0.5], [0, 0, 0], kind)
    for ignored in (7.0, np.nan, np.inf):
        reward, valid = [1, ignored, 0, 0.5], [True, False, True, True]
        advantage, _ = advantages(reward, [0] * 4, kind, valid=valid)
        assert float(advantage[1]) == 0
        np.testing.assert_allclose(advantage[np.array([0, 2, 3])], alone, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_matches_float64_loops_on_ragged_scattered_groups(kind):
    rng = np.random.default_rng(0)
    reward, group = rng.normal(size=61).astype(np.float32), rng.integers(0, 9, 61)
    valid = rng.random(61) < 0.8
    advantage, _ = advantages(reward, group, kind, valid=valid, num_groups=9)
    # Groups of about 7 with rewards of order 1: centring loses at most a few float32 ulps of 1.
    np.testing.assert_allclose(advantage, oracle.group_advantages(reward, group, valid, kind), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_permuting_rows_permutes_advantages(kind):
    rng = np.random.default_rng(1)
    reward, group = rng.normal(size=24).astype(np.float32), np.repeat(np.arange(4), 6)
    order = rng.permutation(24)
    straight, _ = advantages(reward, group, kind)
    shuffled, _ = advantages(reward[order], group[order], kind)
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-5, atol=1e-6)


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_1():
    rng = np.random.default_rng(2)
    reward, group = rng.normal(size=20).astype(np.float32), np.repeat(np.arange(4), 5)
    centred, _ = advantages(reward, group, "dr_grpo")
    leave_one_out, _ = advantages(reward, group, "leave_one_out")
    np.testing.assert_allclose(leave_one_out, centred * 5 / 4, rtol=1e-6)


def test_grpo_has_unit_variance_and_ignores_the_scale_of_rewards():
    reward = np.random.default_rng(3).normal(size=16).astype(np.float32)
    advantage, _ = advantages(reward, [0] * 16, "grpo")
    scaled, _ = advantages(10 * reward, [0] * 16, "grpo")
    np.testing.assert_allclose(np.std(np.asarray(advantage, np.float64)), 1, rtol=1e-5)
    np.testing.assert_allclose(scaled, advantage, rtol=1e-5)


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'ppo'"):
        advantages([1, 0], [0, 0], "ppo")
