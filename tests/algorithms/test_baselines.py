import jax.numpy as jnp
import numpy as np
from reference import shaping as oracle

from jaxrl_llm.algorithms import baselines


def test_gradient_square_of_tokens_by_hand_and_off_the_mask_nothing_counts():
    # Tokens of probability 1/2 and 1/4: 1/4 + 9/16; a token that was certain adds nothing.
    logp = np.log(np.array([[0.5, 0.25, 1.0], [0.5, 1.0, 1.0]]))
    mask = np.array([[True, True, True], [True, True, False]])
    logp[1, 2] = np.nan
    np.testing.assert_allclose(baselines.gradient_square(logp, mask), [0.8125, 0.25], rtol=1e-6)


def test_gradient_square_is_at_most_the_squared_norm_of_the_softmax_gradient():
    rng = np.random.default_rng(0)
    for probabilities in rng.dirichlet(np.ones(6), size=20):
        taken = rng.integers(6)
        norm = np.sum((np.eye(6)[taken] - probabilities) ** 2)
        share = baselines.gradient_square(np.log(probabilities[taken]).reshape(1, 1), np.ones((1, 1), bool))[0]
        # The others' squares add up to at most (1 - p)^2.
        assert norm / 2 - 1e-6 <= share <= norm + 1e-6


def test_row_features_by_hand():
    logp = -np.array([[1.0, 3.0, np.nan], [np.nan, 2.0, 2.0]])
    entropy = np.array([[0.5, 0.5, np.nan], [np.nan, 1.0, 2.0]])
    hidden = np.array([[2.0, 0, 0, 4], [0, 6, 0, 0]])
    mask = np.array([[True, True, False], [False, True, True]])
    features = baselines.row_features(logp, entropy, hidden, mask, max_length=4)
    expected = [[1, 0.5, 2, 1, 0.5, 0, 1, 0, 0, 2], [1, 0.5, 2, 0, 1.5, 0.5, 0, 3, 0, 0]]
    np.testing.assert_allclose(features, expected, rtol=1e-6)
    assert features.shape[1] == baselines.num_features(4)


def test_ridge_from_running_sums_is_the_fit_to_all_rows():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(50, 4)).astype(np.float32), rng.normal(size=50).astype(np.float32)
    valid = rng.random(50) < 0.7
    spoilt, y_spoilt = np.where(valid[:, None], x, np.nan), np.where(valid, y, np.nan)
    sums = sum(
        baselines.regression_sums(spoilt[half], y_spoilt[half], valid[half]) for half in (slice(0, 25), slice(25, 50))
    )
    expected = x @ oracle.ridge(x[valid], y[valid], 0.5)
    np.testing.assert_allclose(baselines.ridge_predict(x, sums, ridge=0.5), expected, rtol=1e-4, atol=1e-5)


def test_ridge_predicts_nothing_from_nothing_and_finds_what_features_tell():
    rng = np.random.default_rng(2)
    x = np.concatenate([np.ones((400, 1)), rng.random((400, 3))], axis=1).astype(np.float32)
    assert not np.any(baselines.ridge_predict(x, jnp.zeros((4, 5))))
    # Success is likelier for short and sure answers.
    chance = np.clip(1.2 - 0.6 * x[:, 1] - 0.8 * x[:, 2], 0, 1)
    reward = (rng.random(400) < chance).astype(np.float32)
    sums = baselines.regression_sums(x, reward, np.ones(400, bool))
    assert np.corrcoef(baselines.ridge_predict(x, sums), chance)[0, 1] > 0.9
