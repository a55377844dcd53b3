import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import shaping as oracle
from support.building import algorithm_config
from support.refusal import refused
from support.rows import make_rows

from jaxrl_llm.algorithms import shaping
from jaxrl_llm.config import freeze
from jaxrl_llm.ops.groups import group_rows


@functools.cache
def compiled(place, name, settings, max_length):
    """Return a compiled function (advantage, fields of rows) -> result."""
    (chosen,) = getattr(algorithm_config(**{place: [{"name": name, **dict(settings)}]}), place)

    def call(advantage, groups, fields):
        rows = make_rows(groups, **fields, max_length=max_length)
        return chosen(rows) if advantage is None else chosen(advantage, rows)

    return jax.jit(call)


def arrays(fields):
    return jax.tree.map(jnp.asarray, fields)


def added(name, groups, fields, *, max_length=16, **settings):
    """Return the values that a reward term adds to the rows, and the values for its memory."""
    result = compiled("reward_terms", name, tuple(settings.items()), max_length)(None, groups, arrays(fields))
    return result if isinstance(result, tuple) else (result, {})


def reshaped(name, advantage, groups, fields, **settings):
    """Return an advantage after a reshaping. The advantage is [B] for rows of one token, or [B,S]."""
    advantage = jnp.asarray(advantage, jnp.float32)
    tokens = advantage if advantage.ndim == 2 else advantage[:, None]
    result = compiled("reshaping", name, tuple(settings.items()), 16)(tokens, groups, arrays(fields))
    return np.asarray(result).reshape(advantage.shape)


def length_reward(length, correct, groups, weight=1.0):
    return added("length_reward", groups, {"length": length, "correct": correct}, weight=weight)[0]


def entropy_factor(row_entropy, groups, strength=1.0):
    """Return the entropy factors of rows of one token, from advantages of 1."""
    fields = {"columns": {"entropy": jnp.asarray(row_entropy, jnp.float32)[:, None]}}
    return reshaped("entropy_factor", np.ones(len(row_entropy)), groups, fields, strength=strength)


def duration_factor(length, valid, exponent):
    """Return the duration factors, from advantages of 1."""
    groups = group_rows(np.zeros(len(length), np.int32), valid, 1)
    untimed = {name: np.zeros((len(length), 1), np.float32) for name in ("turn_reward", "turn_seconds")}
    fields = {"length": length, "columns": untimed}
    return reshaped("duration_factor", np.ones(len(length)), groups, fields, exponent=exponent)


def rows(seed=0, n=40, num_groups=7):
    rng = np.random.default_rng(seed)
    group, valid = rng.integers(0, num_groups, n).astype(np.int32), rng.random(n) < 0.8
    length = rng.integers(1, 17, n).astype(np.int32)
    return group, valid, length, rng.random(n) < 0.5, group_rows(group, valid, num_groups)


def one_group(n):
    return group_rows(np.zeros(n, np.int32), np.ones(n, bool), 1)


def test_overlong_penalty_by_hand_and_by_loops():
    # Limit 10, buffer 4: free up to 6, then a quarter a token; truncation at 10 costs 1.
    length = np.array([1, 6, 7, 9, 10])
    penalty, learned = added("overlong_penalty", one_group(5), {"length": length}, max_length=10, buffer=4)
    np.testing.assert_array_equal(penalty, [0, 0, -0.25, -0.75, -1])
    assert not learned
    length = np.arange(1, 17)
    for buffer in (1, 5, 16):
        penalty, _ = added("overlong_penalty", one_group(16), {"length": length}, buffer=buffer)
        np.testing.assert_allclose(penalty, oracle.overlong_penalty(length, 16, buffer), atol=1e-7)


def test_length_reward_prefers_the_short_and_never_rewards_a_wrong_answer():
    group, correct = one_group(4), np.array([True, False, True, False])
    # Lengths 2..10: 1/2, 1/4, -1/4, -1/2; the wrong one of length 4 gets none of its 1/4.
    value = length_reward(np.array([2, 4, 8, 10]), correct, group)
    np.testing.assert_allclose(value, [0.5, 0, -0.25, -0.5])
    np.testing.assert_allclose(length_reward(np.array([2, 4, 8, 10]), correct, group, 0.5), [0.25, 0, -0.125, -0.25])
    assert not np.any(length_reward(np.full(4, 3), correct, group))
    group, valid, length, correct, groups = rows()
    expected = oracle.length_reward(length, correct, group, valid)
    np.testing.assert_allclose(length_reward(length, correct, groups), expected, atol=1e-6)


def test_a_short_answers_bonus_is_for_correct_answers_within_the_target():
    fields = {"length": np.array([3, 3, 4, 9]), "correct": np.array([True, False, True, True])}
    bonus, learned = added("short_answer", one_group(4), fields, tokens=4, bonus=0.5)
    np.testing.assert_array_equal(bonus, [0.5, 0, 0.5, 0])
    assert not learned


def test_a_question_is_as_hard_as_its_group_says():
    # Of six rows 4, 3, 2 and 1 are correct: two thirds and one third are the bounds. In the last one does not count.
    group, correct = np.repeat([0, 1, 2, 3], 6), np.arange(24) % 6 < np.repeat([4, 3, 2, 1], 6)
    valid = np.arange(24) != 20
    row_class = shaping.difficulty(jnp.asarray(correct & valid), group_rows(group, valid, 4))
    np.testing.assert_array_equal(row_class[valid], np.repeat([0, 1, 1, 2], 6)[valid])
    np.testing.assert_array_equal(row_class[valid], oracle.difficulty(correct & valid, group, valid)[valid])


def test_answers_within_each_length_are_counted_by_loops():
    """Right and wrong answers count. Rows that are not trained on do not count."""
    group, valid, length, correct, groups = rows(5)
    correct = correct & valid
    row_class = shaping.difficulty(jnp.asarray(correct), groups)
    np.testing.assert_array_equal(row_class[valid], oracle.difficulty(correct, group, valid)[valid])
    counted = shaping.answers_within(*map(jnp.asarray, (length, row_class)), groups, grid=(2, 8, 16))
    np.testing.assert_array_equal(counted, oracle.answers_within(length, correct, group, valid, (2, 8, 16)))
    assert np.asarray(counted)[:, -1].min() > 0


def test_positive_amplification_by_the_rule():
    correct = np.array([True, True, False, False, False])
    advantage = np.array([0.2, -0.3, 0.2, 0.0, -0.3])
    amplified = reshaped("amplify_positive", advantage, one_group(5), {"correct": correct}, factor=3.0)
    np.testing.assert_allclose(amplified, [1, 1, 0.6, 0, -0.3], rtol=1e-6)
    # Of several tokens those off the completion stay 0.
    mask = np.arange(3)[None, :] < np.array([1, 3, 2, 2, 1])[:, None]
    advantage = np.where(mask, advantage[:, None], 0)
    amplified = reshaped("amplify_positive", advantage, one_group(5), {"correct": correct, "mask": mask}, factor=3.0)
    np.testing.assert_allclose(amplified, mask * np.array([[1], [1], [0.6], [0], [-0.3]]), rtol=1e-6)


def test_entropy_factor_prefers_the_sure_and_turns_no_sign():
    group = one_group(2)
    # Mean 2: 1 + (2 - 1)/2 and 1 - (3 - 2)/2; ten times as strong the second would be -4.
    np.testing.assert_allclose(entropy_factor([1.0, 3.0], group), [1.5, 0.5])
    np.testing.assert_allclose(entropy_factor([1.0, 3.0], group, strength=10.0), [6, 0])
    np.testing.assert_array_equal(entropy_factor(np.zeros(2), group), [1, 1])
    group, valid, length, _, groups = rows(1)
    entropy = np.float32(length / 7)
    expected = oracle.entropy_factor(entropy, group, valid, 1.0)
    np.testing.assert_allclose(entropy_factor(entropy, groups), expected, rtol=1e-5, atol=1e-6)


def test_the_entropy_of_a_row_is_the_mean_over_its_tokens():
    group, valid, length, _, groups = rows(2)
    mask = np.arange(16)[None, :] < length[:, None]
    rng = np.random.default_rng(3)
    entropy, advantage = rng.random(mask.shape).astype(np.float32), rng.normal(size=(len(mask), 1)) * mask
    fields = {"columns": {"entropy": np.where(mask, entropy, np.nan)}, "mask": mask, "length": length}
    means = np.array([row[keep].astype(np.float64).mean() for row, keep in zip(entropy, mask, strict=True)])
    expected = advantage * oracle.entropy_factor(means, group, valid, 1.0)[:, None]
    result = reshaped("entropy_factor", advantage, groups, fields, strength=1.0)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_entropy_bonus_is_the_smaller_of_both_and_nothing_where_there_is_no_advantage():
    rng = np.random.default_rng(2)
    advantage = rng.normal(size=(5, 6)).astype(np.float32)
    entropy = rng.random((5, 6)).astype(np.float32)
    advantage[2] = 0
    mask = np.ones((5, 6), bool)

    def lifted(entropy, limit):
        fields = {"columns": {"entropy": entropy}, "mask": mask}
        return reshaped("entropy_bonus", advantage, one_group(5), fields, coefficient=2.0, limit=limit)

    result = lifted(entropy, 0.4)
    expected = advantage + oracle.entropy_bonus(advantage, entropy, 2.0, 0.4)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=2e-7)
    assert not np.any(result[2]) and np.min(result - advantage) >= 0
    # With a limit above 1 no sign turns round.
    np.testing.assert_array_equal(np.sign(lifted(100 * entropy, 2.0)), np.sign(advantage))


def test_duration_factor_without_an_environment_is_the_length_over_the_mean_to_a_power():
    factor = duration_factor(np.array([1, 3, 8]), np.array([True, True, False]), exponent=1.0)
    np.testing.assert_allclose(factor, [0.5, 1.5, 4])  # the mean of what is trained on is 2
    _, valid, length, _, _ = rows(5)
    for exponent in (0.5, 2.0):
        expected = oracle.duration_factor(length, valid, exponent)
        np.testing.assert_allclose(duration_factor(length, valid, exponent=exponent), expected, rtol=1e-5)
    np.testing.assert_array_equal(duration_factor(np.array([4, 2]), np.zeros(2, bool), exponent=1.0), [1, 1])


@pytest.mark.parametrize(("exponent", "learns_the_slow_one"), [(0.0, False), (1.0, True)])
def test_a_slow_good_action_is_learned_only_where_duration_weighs(exponent, learns_the_slow_one):
    # A bandit whose pulls come as they finish: slow gives 1 after 10 tokens, fast 0.5 after one. Reward is advantage.
    reward, duration = np.array([1.0, 0.5]), np.array([10, 1])
    logits, rng = np.zeros(2), np.random.default_rng(0)
    for _ in range(400):
        policy = np.exp(logits) / np.exp(logits).sum()
        finished = policy / duration
        arm = rng.choice(2, 200, p=finished / finished.sum())
        factor = duration_factor(duration[arm], np.ones(200, bool), exponent)
        logits += 0.5 * ((factor * reward[arm])[:, None] * (np.eye(2)[arm] - policy)).mean(axis=0)
    assert policy[0] > 0.9 if learns_the_slow_one else policy[0] < 0.1


def test_order_of_rows_changes_nothing():
    group, valid, length, correct, _ = rows(3)
    order = np.random.default_rng(4).permutation(len(group))
    entropy = np.float32(length / 5)

    def both(group, valid, length, correct, entropy):
        groups = group_rows(group, valid, 7)
        return np.asarray(length_reward(length, correct, groups)), entropy_factor(entropy, groups)

    columns = (group, valid, length, correct, entropy)
    for straight, shuffled in zip(both(*columns), both(*(x[order] for x in columns)), strict=True):
        np.testing.assert_allclose(shuffled, straight[order], rtol=1e-5, atol=1e-6)


def test_unknown_ones_are_named():
    with refused("reward_terms[0]", "short", "'overlong_penalty'"):
        algorithm_config(reward_terms=["short"])
    with refused("reshaping[1]", "bonus", "'amplify_positive'"):
        algorithm_config(reshaping=["entropy_bonus", "bonus"])


def test_reward_mask_takes_the_advantage_of_its_tokens_alone():
    mask = np.array([[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0]], bool)
    marked = np.array([[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    advantage = np.array([[0, 1, 2, 3, 4, 0], [0, 0, 0, -5, -6, 0], [0, 0, 7, 0, 0, 0]])
    expected = [[0, 1, 0, 0, 4, 0], [0, 0, 0, 0, -6, 0], [0, 0, 7, 0, 0, 0]]
    fields = {"mask": mask, "columns": {"reward_mask": marked}}
    np.testing.assert_array_equal(reshaped("reward_mask", advantage, one_group(3), fields), expected)
    none = fields | {"columns": {"reward_mask": 0 * marked}}
    np.testing.assert_array_equal(reshaped("reward_mask", advantage, one_group(3), none), advantage)


def test_reward_mask_is_for_completions_of_one_turn():
    settings = {"environments": {"factory": "jaxrl_llm.examples.maze:plain", "max_answer_tokens": 4}}
    with refused("environments.factory", "jaxrl_llm.examples.maze:plain", "algorithm.reshaping.reward_mask"):
        freeze(settings | {"algorithm": {"reshaping": ["reward_mask"]}})
