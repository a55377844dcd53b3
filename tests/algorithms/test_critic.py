"""Returns, targets and losses of a critic compared with float64 loops, and the identities that hold for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import values as oracle

from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.algorithms.critic import Bins

SCALAR, BINS = Bins(0, 0.0, 1.0), Bins(20, -0.5, 1.5)
# Jitted as the program has them, and for one compilation in place of one per operation.
lambda_returns = jax.jit(values.lambda_returns)
head_outputs = jax.jit(values.head_outputs)
expected_value = jax.jit(values.expected_value, static_argnums=1)
hl_gauss_target = jax.jit(values.hl_gauss_target, static_argnums=1)
value_loss = jax.jit(values.value_loss, static_argnums=2, static_argnames="clip")


def ragged(seed=0, num_rows=6, width=9):
    """Return values of ragged rows, including a row with one token and a row without tokens."""
    rng = np.random.default_rng(seed)
    first = rng.integers(1, 4, num_rows)
    last = np.minimum(first + rng.integers(1, 7, num_rows), width)
    last[0], last[1] = first[0] + 1, first[1]
    at = np.arange(width)[None, :]
    mask = (at >= first[:, None]) & (at < last[:, None])
    return rng.normal(size=mask.shape).astype(np.float32), rng.normal(size=num_rows).astype(np.float32), mask


# ---- returns


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (0.7, 0.0), (0.95, 1.0)])
def test_returns_less_values_are_the_discounted_sums_of_temporal_differences(discount, gae_lambda):
    value, reward, mask = ragged()
    returns = lambda_returns(value, reward, mask, discount=discount, gae_lambda=gae_lambda)
    expected = oracle.gae(value, reward, mask, discount, gae_lambda)
    np.testing.assert_allclose(np.where(mask, returns - value, 0.0), expected, rtol=1e-5, atol=1e-6)
    assert (np.asarray(returns)[~mask] == 0).all()


def test_without_discount_and_with_lambda_1_the_advantage_is_exactly_reward_less_value():
    value, reward, mask = ragged(1)
    returns = np.asarray(lambda_returns(value, reward, mask, discount=1.0, gae_lambda=1.0))
    np.testing.assert_array_equal(returns, np.where(mask, reward[:, None], 0.0))


def test_a_perfect_critic_has_no_advantage_at_any_lambda():
    _, reward, mask = ragged(2)
    value = np.broadcast_to(reward[:, None], mask.shape)
    for gae_lambda in (0.0, 0.3):
        returns = lambda_returns(value, reward, mask, discount=1.0, gae_lambda=gae_lambda)
        np.testing.assert_allclose(np.where(mask, returns - value, 0.0), 0.0, atol=1e-6)


def test_returns_read_nothing_off_the_mask():
    value, reward, mask = ragged(3)
    settings = {"discount": 0.9, "gae_lambda": 0.8}
    expected = lambda_returns(value, reward, mask, **settings)
    has_tokens = mask.any(axis=1)
    spoilt = np.where(mask, value, np.nan), np.where(has_tokens, reward, np.nan), mask
    np.testing.assert_array_equal(lambda_returns(*spoilt, **settings), expected)
    wider = np.pad(spoilt[0], ((0, 0), (0, 4))), spoilt[1], np.pad(mask, ((0, 0), (0, 4)))
    np.testing.assert_array_equal(lambda_returns(*wider, **settings)[:, : mask.shape[1]], expected)


# ---- the head


def test_a_new_head_predicts_zero_or_the_middle_and_passes_on_a_share_of_its_gradient():
    hidden = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    for bins, expected in ((SCALAR, 0.0), (BINS, 0.5)):
        outputs = head_outputs(values.new_head(4, bins), hidden)
        np.testing.assert_allclose(expected_value(outputs, bins), expected, atol=1e-6)
    head = {"kernel": np.arange(4, dtype=np.float32)[:, None], "bias": np.float32([0.5])}

    total = lambda head, hidden, share: jnp.sum(head_outputs(head, hidden, gradient_share=share))
    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))
    (of_head, of_hidden), (same, half), (_, none) = (gradients(head, hidden, share) for share in (1.0, 0.5, 0.0))
    jax.tree.map(np.testing.assert_array_equal, of_head, same)
    np.testing.assert_array_equal(of_hidden, np.broadcast_to(np.arange(4.0), of_hidden.shape))
    np.testing.assert_array_equal(half, np.asarray(of_hidden) / 2)
    assert not np.asarray(none).any()
    np.testing.assert_array_equal(
        head_outputs(head, hidden, gradient_share=0.3), head_outputs(head, hidden, gradient_share=1.0)
    )


# ---- targets


def test_targets_are_the_gaussians_mass_in_each_bin_and_sum_to_one():
    targets = np.array([-0.5, -0.43, 0.0, 0.05, 0.5, 0.777, 1.49, 1.5, 7.0, -3.0], np.float32)
    p = np.asarray(hl_gauss_target(targets, BINS))
    for row, target in zip(p, targets, strict=True):
        np.testing.assert_allclose(row, oracle.hl_gauss(float(target), *BINS), atol=2e-6)
    np.testing.assert_allclose(p.sum(axis=1), 1.0, rtol=1e-6)


def test_the_mean_of_a_target_is_the_target_within_a_bin():
    width = (BINS.high - BINS.low) / BINS.count
    targets = np.linspace(BINS.low, BINS.high, 101, dtype=np.float32)
    mean = np.asarray(hl_gauss_target(targets, BINS)) @ oracle.centres(*BINS)
    assert np.abs(mean - targets).max() < width
    inside = (targets > BINS.low + 2 * width) & (targets < BINS.high - 2 * width)
    assert np.abs(mean - targets)[inside].max() < 0.02 * width


# ---- losses


@pytest.mark.parametrize(("bins", "clip"), [(SCALAR, 0.0), (SCALAR, 0.2), (BINS, 0.0)])
def test_losses_of_tokens_are_those_of_the_loops(bins, clip):
    rng = np.random.default_rng(4)
    outputs = rng.normal(size=(5, 7, max(bins.count, 1))).astype(np.float32)
    target, old = rng.normal(0.5, 0.5, (2, 5, 7)).astype(np.float32)
    actual = value_loss(outputs, target, bins, old_value=old, clip=clip)
    expected = np.zeros((5, 7))
    for i in np.ndindex(5, 7):
        expected[i] = oracle.loss(outputs[i], float(target[i]), *bins, float(old[i]), clip)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    value = [[oracle.value(token, *bins) for token in row] for row in outputs]
    np.testing.assert_allclose(expected_value(outputs, bins), value, rtol=1e-5, atol=1e-6)


def test_gradients_are_the_error_of_the_value_or_of_the_distribution():
    rng = np.random.default_rng(5)
    target, old = np.float32([[0.3, 0.9]]), np.float32([[0.0, 0.0]])
    gradient = lambda x, **kw: jax.grad(lambda x: jnp.sum(value_loss(x, target, SCALAR, **kw)))(x)
    outputs = np.float32([[[0.5], [0.5]]])
    np.testing.assert_allclose(gradient(outputs)[..., 0], [[0.2, -0.4]], rtol=1e-6)
    # Both have moved 0.5 from the old value: the second, towards its target, beyond the clip. The first overshot.
    np.testing.assert_allclose(gradient(outputs, old_value=old, clip=0.2)[..., 0], [[0.2, 0.0]], rtol=1e-6)

    logits = rng.normal(size=(1, 2, BINS.count)).astype(np.float32)
    gradient = jax.grad(lambda x: jnp.sum(value_loss(x, target, BINS)))(logits)
    expected = [np.subtract(oracle.softmax(logits[0, t]), oracle.hl_gauss(target[0, t], *BINS)) for t in range(2)]
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)


def test_a_head_of_bins_is_calibrated_on_noisy_rewards_of_0_and_1():
    # Five states with success rates of their own; the targets are single draws, never a rate.
    rng, rates = np.random.default_rng(6), np.array([0.05, 0.3, 0.5, 0.8, 1.0])
    drawn = (rng.random((5, 400)) < rates[:, None]).astype(np.float32)
    bins = Bins(25, -0.2, 1.2)

    def loss(logits):
        outputs = jnp.broadcast_to(logits[:, None, :], (*drawn.shape, bins.count))
        return jnp.mean(value_loss(outputs, drawn, bins), axis=1).sum()

    logits = np.zeros((5, bins.count), np.float32)
    descend = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, x: x - 2.0 * jax.grad(loss)(x), x))
    predicted = expected_value(descend(logits), bins)
    # It converges to the mean of what was drawn, no bin width (0.056) away.
    np.testing.assert_allclose(predicted, drawn.mean(axis=1), atol=0.01)
