import functools

import jax
import numpy as np
import pytest
from reference import advantages as oracle

from jaxrl_llm import credit
from jaxrl_llm.config import CreditConfig
from jaxrl_llm.types import Rollout

WIDTH = 7


def make_rollout(group_id, seed=0):
    num_rows, rng = len(group_id), np.random.default_rng(seed)
    prompt_length = rng.integers(1, 4, num_rows).astype(np.int32)
    return Rollout(
        tokens=rng.integers(0, 9, (num_rows, WIDTH)).astype(np.int32),
        prompt_length=prompt_length,
        length=(prompt_length + rng.integers(1, WIDTH - 3, num_rows)).astype(np.int32),
        behaviour_logp=-rng.random((num_rows, WIDTH)).astype(np.float32),
        group_id=np.asarray(group_id, np.int32),
        prompt_id=np.asarray(group_id, np.int32),
        policy_version=np.zeros((num_rows, WIDTH), np.int32),
        stop_reason=np.ones(num_rows, np.int8),
    )


@functools.partial(jax.jit, static_argnames=("kind", "num_groups"))
def _assign(rollout, reward, trainable, kind, num_groups):
    return credit.assign(rollout, reward, trainable, None, config=CreditConfig(advantage=kind), num_groups=num_groups)


def assign(rollout, reward, trainable=None, *, kind="grpo", num_groups):
    reward = np.asarray(reward, np.float32)
    trainable = np.ones(len(reward), bool) if trainable is None else np.asarray(trainable)
    experience, degenerate = _assign(rollout, reward, trainable, kind, num_groups)
    return jax.tree.map(np.asarray, experience), int(degenerate)


def test_a_rows_advantage_stands_on_its_completion_and_zero_elsewhere():
    rollout = make_rollout([5, 5])
    # Dr. GRPO on rewards 1, 0: +-1/2.
    experience, _ = assign(rollout, [1, 0], kind="dr_grpo", num_groups=1)
    for row, value in enumerate([0.5, -0.5]):
        expected = np.zeros(WIDTH)
        expected[rollout.prompt_length[row] : rollout.length[row]] = value
        np.testing.assert_array_equal(experience.advantage[row], expected)
    np.testing.assert_array_equal(experience.rollout.tokens, rollout.tokens)
    assert experience.ref_logp is None


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "leave_one_out"])
def test_groups_are_named_by_group_id_wherever_the_rows_stand(kind):
    rng = np.random.default_rng(1)
    group_id = np.repeat([900, 3, 2**31 - 2, 41], 4)
    reward, order = rng.random(16).astype(np.float32), rng.permutation(16)
    rollout = make_rollout(group_id)
    straight, _ = assign(rollout, reward, kind=kind, num_groups=4)
    shuffled, _ = assign(jax.tree.map(lambda x: x[order], rollout), reward[order], kind=kind, num_groups=4)
    np.testing.assert_allclose(shuffled.advantage, straight.advantage[order], rtol=1e-5, atol=1e-6)
    first = straight.advantage[np.arange(16), rollout.prompt_length]
    expected = oracle.group_advantages(reward, group_id, np.ones(16, bool), kind)
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)


def test_equal_text_does_not_merge_groups():
    rollout = make_rollout([0, 0, 1, 1])
    same = jax.tree.map(lambda x: np.repeat(x[:1], 4, axis=0), rollout).replace(group_id=rollout.group_id)
    # Merged, the mean would be 1/2 for all; apart, group 0 is tied at 1 and group 1 is +-1/2 around 1/2.
    experience, degenerate = assign(same, [1, 1, 1, 0], kind="dr_grpo", num_groups=2)
    np.testing.assert_array_equal(experience.advantage[:, rollout.prompt_length[0]], [0, 0, 0.5, -0.5])
    assert degenerate == 1


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "leave_one_out"])
def test_tied_groups_are_exactly_zero_and_counted(kind):
    rollout, reward = make_rollout([0, 0, 0, 1, 1, 1]), [0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
    experience, degenerate = assign(rollout, reward, kind=kind, num_groups=2)
    assert (experience.advantage[:3] == 0).all() and (experience.advantage[3:] != 0).any()
    assert degenerate == 1


def test_failed_rewards_take_no_part_and_a_group_without_rewards_is_degenerate():
    # Group 7: rewards 1, failed, 0. Group 8: one known reward. Group 9: none.
    group_id, trainable = [7, 7, 7, 8, 8, 9, 9], np.array([1, 0, 1, 1, 0, 0, 0], bool)
    rollout = make_rollout(group_id)
    for junk in (0.0, np.nan, 5.0):
        reward = np.where(trainable, [1, 0, 0, 1, 0, 0, 0], junk)
        experience, degenerate = assign(rollout, reward, trainable, kind="dr_grpo", num_groups=3)
        first = experience.advantage[np.arange(7), rollout.prompt_length]
        np.testing.assert_array_equal(first, [0.5, 0, -0.5, 0, 0, 0, 0])
        np.testing.assert_array_equal(experience.reward, [1, 0, 0, 1, 0, 0, 0])
        np.testing.assert_array_equal(experience.trainable, trainable)
        assert degenerate == 2


def test_padding_rows_may_carry_any_group_id():
    # Three padding rows with ids of their own, sorting before the two groups of the iteration.
    rollout, trainable = make_rollout([-3, -2, -1, 0, 4, 0, 4]), [False] * 3 + [True] * 4
    experience, degenerate = assign(rollout, [9, 9, 9, 1, 0, 0, 1], trainable, kind="dr_grpo", num_groups=2)
    first = experience.advantage[np.arange(7), rollout.prompt_length]
    np.testing.assert_array_equal(first, [0, 0, 0, 0.5, -0.5, -0.5, 0.5])
    assert degenerate == 0
