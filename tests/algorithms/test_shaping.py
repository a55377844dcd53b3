import functools

import jax
import numpy as np
import pytest
from reference import shaping as oracle

from jaxrl_llm.algorithms import shaping
from jaxrl_llm.algorithms.advantages import group_rows

length_reward = jax.jit(shaping.length_reward)
entropy_factor = jax.jit(shaping.entropy_factor)


def rows(seed=0, n=40, num_groups=7):
    rng = np.random.default_rng(seed)
    group, valid = rng.integers(0, num_groups, n).astype(np.int32), rng.random(n) < 0.8
    length = rng.integers(1, 17, n).astype(np.int32)
    return group, valid, length, rng.random(n) < 0.5, group_rows(group, valid, num_groups)


def test_overlong_penalty_by_hand_and_by_loops():
    # Limit 10, buffer 4: free up to 6, then a quarter a token; truncation at 10 costs 1.
    penalty = shaping.overlong_penalty(np.array([1, 6, 7, 9, 10]), max_length=10, buffer=4)
    np.testing.assert_array_equal(penalty, [0, 0, -0.25, -0.75, -1])
    length = np.arange(1, 17)
    for buffer in (1, 5, 16):
        expected = oracle.overlong_penalty(length, 16, buffer)
        np.testing.assert_allclose(shaping.overlong_penalty(length, max_length=16, buffer=buffer), expected, atol=1e-7)


def test_length_reward_prefers_the_short_and_never_rewards_a_wrong_answer():
    group = group_rows(np.zeros(4, np.int32), np.ones(4, bool), 1)
    correct = np.array([True, False, True, False])
    # Lengths 2..10: 1/2, 1/4, -1/4, -1/2; the wrong one of length 4 gets none of its 1/4.
    value = length_reward(np.array([2, 4, 8, 10]), correct, group)
    np.testing.assert_allclose(value, [0.5, 0, -0.25, -0.5])
    assert not np.any(length_reward(np.full(4, 3), correct, group))
    group, valid, length, correct, groups = rows()
    expected = oracle.length_reward(length, correct, group, valid)
    np.testing.assert_allclose(length_reward(length, correct, groups), expected, atol=1e-6)


def test_short_bonus_is_for_correct_answers_within_the_target():
    length, correct = np.array([3, 3, 4, 9]), np.array([True, False, True, True])
    np.testing.assert_array_equal(shaping.short_bonus(length, correct, target=4, bonus=0.5), [0.5, 0, 0.5, 0])


def test_a_question_is_as_hard_as_its_group_says():
    # Of six rows 4, 3, 2 and 1 are correct; in the last group one of the six does not count.
    group, correct = np.repeat([0, 1, 2, 3], 6), np.arange(24) % 6 < np.repeat([4, 3, 2, 1], 6)
    valid = np.arange(24) != 20
    row_class = shaping.difficulty(correct & valid, group_rows(group, valid, 4))
    np.testing.assert_array_equal(row_class[valid], np.repeat([0, 1, 1, 2], 6)[valid])


def test_correct_answers_within_each_length_are_counted_by_loops():
    group, valid, length, correct, groups = rows(5)
    correct = correct & valid
    row_class = shaping.difficulty(correct, groups)
    np.testing.assert_array_equal(row_class[valid], oracle.difficulty(correct, group, valid)[valid])
    counted = shaping.correct_within(length, correct, row_class, groups, grid=(2, 8, 16))
    np.testing.assert_allclose(counted, oracle.correct_within(length, correct, group, valid, (2, 8, 16)), rtol=1e-6)
    assert np.asarray(counted)[:, -1].min() > 0


def test_positive_amplification_by_the_rule():
    correct = np.array([True, True, False, False, False])
    amplified = shaping.amplify_positive(np.array([0.2, -0.3, 0.2, 0.0, -0.3]), correct, factor=3.0)
    np.testing.assert_allclose(amplified, [1, 1, 0.6, 0, -0.3], rtol=1e-6)


def test_entropy_factor_prefers_the_sure_and_turns_no_sign():
    group = group_rows(np.zeros(2, np.int32), np.ones(2, bool), 1)
    # Mean 2: 1 + (2 - 1)/2 and 1 - (3 - 2)/2; ten times as strong the second would be -4.
    np.testing.assert_allclose(entropy_factor(np.array([1.0, 3.0]), group, strength=1.0), [1.5, 0.5])
    np.testing.assert_allclose(entropy_factor(np.array([1.0, 3.0]), group, strength=10.0), [6, 0])
    np.testing.assert_array_equal(entropy_factor(np.zeros(2), group, strength=1.0), [1, 1])
    group, valid, length, _, groups = rows(1)
    entropy = np.float32(length / 7)
    expected = oracle.entropy_factor(entropy, group, valid, 1.0)
    np.testing.assert_allclose(entropy_factor(entropy, groups, strength=1.0), expected, rtol=1e-5, atol=1e-6)


def test_entropy_bonus_is_the_smaller_of_both_and_nothing_where_there_is_no_advantage():
    rng = np.random.default_rng(2)
    advantage = rng.normal(size=(5, 6)).astype(np.float32)
    entropy = rng.random((5, 6)).astype(np.float32)
    advantage[2] = 0
    bonus = shaping.entropy_bonus(advantage, entropy, coefficient=2.0, limit=0.4)
    np.testing.assert_allclose(bonus, oracle.entropy_bonus(advantage, entropy, 2.0, 0.4), rtol=1e-6)
    assert not np.any(bonus[2]) and np.min(bonus) >= 0
    # With a limit above 1 no sign turns round.
    gentle = advantage + shaping.entropy_bonus(advantage, 100 * entropy, coefficient=2.0, limit=2.0)
    np.testing.assert_array_equal(np.sign(gentle), np.sign(advantage))


def test_duration_factor_is_the_length_over_the_mean_to_a_power():
    factor = shaping.duration_factor(np.array([1, 3, 8]), np.array([True, True, False]), exponent=1.0)
    np.testing.assert_allclose(factor, [0.5, 1.5, 4])  # the mean of what is trained on is 2
    _, valid, length, _, _ = rows(5)
    for exponent in (0.5, 2.0):
        expected = oracle.duration_factor(length, valid, exponent)
        np.testing.assert_allclose(shaping.duration_factor(length, valid, exponent=exponent), expected, rtol=1e-5)
    np.testing.assert_array_equal(shaping.duration_factor(np.array([4, 2]), np.zeros(2, bool), exponent=1.0), [1, 1])


@pytest.mark.parametrize(("exponent", "learns_the_slow_one"), [(0.0, False), (1.0, True)])
def test_a_slow_good_action_is_learned_only_where_duration_weighs(exponent, learns_the_slow_one):
    # A bandit whose pulls come as they finish: slow gives 1 after 10 tokens, fast 0.5 after one. Reward is advantage.
    reward, duration = np.array([1.0, 0.5]), np.array([10, 1])
    factor_of = jax.jit(functools.partial(shaping.duration_factor, exponent=exponent))
    logits, rng = np.zeros(2), np.random.default_rng(0)
    for _ in range(400):
        policy = np.exp(logits) / np.exp(logits).sum()
        finished = policy / duration
        arm = rng.choice(2, 200, p=finished / finished.sum())
        factor = np.asarray(factor_of(duration[arm], np.ones(200, bool)))
        logits += 0.5 * ((factor * reward[arm])[:, None] * (np.eye(2)[arm] - policy)).mean(axis=0)
    assert policy[0] > 0.9 if learns_the_slow_one else policy[0] < 0.1


def test_order_of_rows_changes_nothing():
    group, valid, length, correct, _ = rows(3)
    order = np.random.default_rng(4).permutation(len(group))
    entropy = np.float32(length / 5)

    def both(group, valid, length, correct, entropy):
        groups = group_rows(group, valid, 7)
        return length_reward(length, correct, groups), entropy_factor(entropy, groups, strength=1.0)

    columns = (group, valid, length, correct, entropy)
    for straight, shuffled in zip(both(*columns), both(*(x[order] for x in columns)), strict=True):
        np.testing.assert_allclose(shuffled, straight[order], rtol=1e-5, atol=1e-6)
