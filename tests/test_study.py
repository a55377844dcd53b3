"""The replay study: its bandit."""

import numpy as np
import pytest

from studies.bandit import REWARDS, gradient, limit, run, softmax, summary


def test_the_gradient_is_that_of_finite_differences():
    draw = np.random.default_rng(0)
    logits, behaviour = draw.normal(size=8), softmax(draw.normal(size=8))

    def objective(x):
        return behaviour @ ((REWARDS - behaviour @ REWARDS - 0.2) * np.log(softmax(x)))

    found = gradient(softmax(logits), behaviour, REWARDS, 0.2)
    for i, step in enumerate(1e-6 * np.eye(8)):
        np.testing.assert_allclose(found[i], (objective(logits + step) - objective(logits - step)) / 2e-6, atol=1e-8)


@pytest.mark.parametrize("delta_v", [-0.6, -0.2])
def test_below_zero_a_fixed_behaviour_leads_to_the_derived_limit(delta_v):
    behaviour = softmax(np.random.default_rng(1).normal(size=8))
    expected = limit(behaviour, REWARDS, delta_v)
    np.testing.assert_allclose(expected.sum(), 1, atol=1e-9)
    np.testing.assert_allclose(run(behaviour, REWARDS, delta_v, steps=20_000), expected, atol=2e-3)
    assert (expected > 0.01).sum() > 1


def test_stale_data_keep_several_arms_below_zero_and_leave_one_above():
    behaviour = softmax(np.random.default_rng(2).normal(size=8))
    assert summary(run(behaviour, REWARDS, -0.3), REWARDS)[2] >= 2
    assert run(behaviour, REWARDS, 0.1).max() > 0.999
