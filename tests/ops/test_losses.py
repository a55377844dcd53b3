import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import losses as oracle

from jaxrl_llm.ops.losses import aggregation_weights, clipped_surrogate, kl_estimate

surrogate = jax.jit(clipped_surrogate, static_argnames=("clip_low", "clip_high"))
kl = jax.jit(kl_estimate, static_argnames="kind")
weights = jax.jit(aggregation_weights, static_argnames=("kind", "max_completion_tokens"))
AGGREGATIONS = ["token_mean", "sequence_mean", "constant_length"]


def test_clip_is_active_on_one_side_alone():
    # Bounds [0.8, 1.3]. u = 2: A = 1 -> min(2, 1.3) = 1.3 clipped; A = -1 -> min(-2, -1.3) = -2, not clipped.
    # u = 1/2: A = 1 -> min(.5, .8) = .5, not clipped; A = -1 -> min(-.5, -.8) = -.8 clipped. A = 0: nothing.
    ratio = jnp.array([[2.0, 2.0, 0.5, 0.5, 2.0]])
    advantage = jnp.array([[1.0, -1.0, 1.0, -1.0, 0.0]])
    behaviour = jnp.full((1, 5), -1.5)

    def total(policy):
        loss, is_clipped = surrogate(policy, behaviour, advantage, clip_low=0.2, clip_high=0.3)
        return loss.sum(), (loss, is_clipped)

    gradient, (loss, is_clipped) = jax.grad(total, has_aux=True)(behaviour + jnp.log(ratio))
    np.testing.assert_allclose(loss, [[-1.3, 2.0, -0.5, 0.8, 0.0]], rtol=1e-6)
    assert is_clipped.tolist() == [[True, False, False, True, False]]
    # d(-u A)/d logp = -u A where not clipped.
    np.testing.assert_allclose(gradient, [[0.0, 2.0, -0.5, 0.0, 0.0]], rtol=1e-6)
    assert gradient[0, 0] == 0 and gradient[0, 3] == 0


def test_ratio_one_gives_the_gradient_of_reinforce():
    rng = np.random.default_rng(0)
    logp = jnp.asarray(rng.normal(size=(3, 7)) - 2, jnp.float32)
    advantage = jnp.asarray(rng.normal(size=(3, 7)), jnp.float32)
    # Also with bounds of zero width: at the bound itself the unclipped branch holds.
    for width in (0.2, 0.0):
        gradient = jax.grad(lambda x, w=width: surrogate(x, logp, advantage, clip_low=w, clip_high=w)[0].sum())(logp)
        np.testing.assert_array_equal(gradient, -advantage)


def test_surrogate_matches_float64_loops():
    rng = np.random.default_rng(1)
    policy, behaviour, advantage = rng.normal(size=(3, 5, 11)).astype(np.float32)
    loss, _ = surrogate(policy, behaviour, advantage, clip_low=0.2, clip_high=0.28)
    expected = oracle.clipped_surrogate(policy, behaviour, advantage, 0.2, 0.28)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("policy", "behaviour"), [(-jnp.inf, -1.0), (0.0, -200.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_impossible_or_huge_ratios_have_no_nan_gradient(policy, behaviour, advantage):
    gradient = jax.grad(
        lambda x: surrogate(x, jnp.float32(behaviour), jnp.float32(advantage), clip_low=0.2, clip_high=0.2)[0]
    )(jnp.float32(policy))
    assert not jnp.isnan(gradient)


def test_kl_estimators_by_hand():
    # d = ln 2: k1 = ln 2, k2 = ln(2)^2 / 2, k3 = 1/2 - 1 + ln 2.
    log2 = np.log(2.0)
    for kind, expected in {"k1": log2, "k2": log2**2 / 2, "k3": log2 - 0.5}.items():
        value = kl(jnp.full((1, 1), -1.0), jnp.full((1, 1), -1.0 - log2), kind=kind)
        np.testing.assert_allclose(value, [[expected]], rtol=1e-6)


def test_expected_kl_estimates_and_gradients_are_what_the_docstring_says():
    # Exact expectations over a vocabulary of 5: E_p k1 = E_p k3 = KL(p || q). Gradients of the estimate on
    # tokens of p (sampling held fixed): k1 -> 0, k2 -> grad KL(p || q), k3 -> grad KL(q || p).
    rng = np.random.default_rng(2)
    logits, ref_logits = jnp.asarray(rng.normal(size=(2, 5)), jnp.float32)
    ref = jax.nn.log_softmax(ref_logits)
    sampling = jax.nn.softmax(logits)

    def expected(kind):
        return lambda x: jnp.sum(sampling * kl_estimate(jax.nn.log_softmax(x), ref, kind=kind))

    def forward(x):
        policy = jax.nn.log_softmax(x)
        return jnp.sum(jnp.exp(policy) * (policy - ref))

    def backward(x):
        return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(x)))

    def gradient(function):
        return jax.jit(jax.grad(function))(logits)

    np.testing.assert_allclose(expected("k1")(logits), forward(logits), rtol=1e-5)
    np.testing.assert_allclose(expected("k3")(logits), forward(logits), rtol=1e-5)
    np.testing.assert_allclose(gradient(expected("k1")), np.zeros(5), atol=1e-6)
    np.testing.assert_allclose(gradient(expected("k2")), gradient(forward), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient(expected("k3")), gradient(backward), rtol=1e-4, atol=1e-6)


def test_aggregation_by_hand():
    # Row 0: tokens 1, 2, 3. Row 1: token 10. Row 2 is not trainable; row 3 has no token.
    term = jnp.array([[1.0, 2.0, 3.0, 9.0], [10.0, 9.0, 9.0, 9.0], [9.0] * 4, [9.0] * 4])
    mask = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    trainable = jnp.array([True, True, False, True])
    # 16 / 4 tokens; (6/3 + 10/1) / 2 rows; 16 / (2 rows * 4 tokens).
    for kind, expected in {"token_mean": 4.0, "sequence_mean": 6.0, "constant_length": 2.0}.items():
        weight = weights(mask, trainable, kind=kind, max_completion_tokens=4)
        np.testing.assert_allclose(jnp.sum(weight * term), expected, rtol=1e-6)
        assert (np.asarray(weight)[~np.asarray(mask & trainable[:, None])] == 0).all()


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_aggregation_matches_float64_loops_for_any_row_order_padding_and_split(kind):
    rng = np.random.default_rng(3)
    term = rng.normal(size=(8, 6)).astype(np.float32)
    mask = np.arange(6)[None, :] < rng.integers(0, 7, 8)[:, None]
    trainable = rng.random(8) < 0.7
    expected = oracle.aggregate(term, mask, trainable, kind, 6)

    def total(term, mask, trainable, parts=1):
        weight = np.asarray(weights(mask, trainable, kind=kind, max_completion_tokens=6))
        return sum(np.sum(w * t) for w, t in zip(np.split(weight, parts), np.split(term, parts), strict=True))

    order = rng.permutation(8)
    wide = ((0, 0), (0, 3))
    np.testing.assert_allclose(total(term, mask, trainable), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total(term, mask, trainable, parts=4), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total(term[order], mask[order], trainable[order]), expected, rtol=1e-5, atol=1e-6)
    padded = total(np.pad(term, wide, constant_values=5), np.pad(mask, wide), trainable)
    np.testing.assert_allclose(padded, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_batch_without_a_trainable_token_has_zero_weights(kind):
    for mask, trainable in ((jnp.zeros((3, 4), bool), jnp.ones(3, bool)), (jnp.ones((3, 4), bool), jnp.zeros(3, bool))):
        weight = weights(mask, trainable, kind=kind, max_completion_tokens=4)
        np.testing.assert_array_equal(weight, np.zeros((3, 4)))


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_gradient_at_a_masked_token_is_exactly_zero(kind):
    rng = np.random.default_rng(4)
    policy, behaviour, advantage = jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32)
    mask = jnp.asarray(rng.random((4, 5)) < 0.6)
    trainable = jnp.array([True, True, False, True])
    active = mask & trainable[:, None]
    # What an update does: constants at dead positions before any arithmetic, so even NaN there is harmless.
    policy = jnp.where(active, policy, jnp.nan)

    def loss(x):
        x = jnp.where(active, x, 0.0)
        b = jnp.where(active, behaviour, 0.0)
        term, _ = clipped_surrogate(x, b, advantage, clip_low=0.2, clip_high=0.2)
        return jnp.sum(aggregation_weights(mask, trainable, kind=kind, max_completion_tokens=5) * term)

    gradient = jax.jit(jax.grad(loss))(policy)
    assert (np.asarray(gradient)[~np.asarray(active)] == 0).all()
    assert (np.asarray(gradient)[np.asarray(active)] != 0).any()
    assert not np.isnan(gradient).any()


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(jnp.zeros((1, 1)), jnp.zeros((1, 1)), kind="k4")
    with pytest.raises(ValueError, match="'mean'"):
        aggregation_weights(jnp.ones((1, 1), bool), jnp.ones(1, bool), kind="mean", max_completion_tokens=1)
