import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import losses as oracle

from jaxrl_llm.algorithms.losses import adapted_entropy_coefficient, aggregation_weights, kl_estimate, reference_share

kl = jax.jit(kl_estimate, static_argnames="kind")
weights = jax.jit(aggregation_weights, static_argnames=("kind", "max_completion_tokens"))
AGGREGATIONS = ["token_mean", "sequence_mean", "constant_length", "prompt_mean"]


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
    group_id = jnp.array([7, 7, 7, 3])
    # 16 / 4 tokens; (6/3 + 10/1) / 2 rows; 16 / (2 rows * 4 tokens); one prompt of 4 tokens.
    expectations = {"token_mean": 4.0, "sequence_mean": 6.0, "constant_length": 2.0, "prompt_mean": 4.0}
    for kind, expected in expectations.items():
        weight = weights(mask, trainable, group_id, kind=kind, max_completion_tokens=4)
        np.testing.assert_allclose(jnp.sum(weight * term), expected, rtol=1e-6)
        assert (np.asarray(weight)[~np.asarray(mask & trainable[:, None])] == 0).all()
    # Two prompts: (6/3 + 10/1) / 2.
    weight = weights(mask, trainable, jnp.array([7, 3, 7, 3]), kind="prompt_mean", max_completion_tokens=4)
    np.testing.assert_allclose(jnp.sum(weight * term), 6.0, rtol=1e-6)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_aggregation_matches_float64_loops_for_any_row_order_padding_and_split(kind):
    rng = np.random.default_rng(3)
    term = rng.normal(size=(8, 6)).astype(np.float32)
    mask = np.arange(6)[None, :] < rng.integers(0, 7, 8)[:, None]
    trainable = rng.random(8) < 0.7
    group_id = rng.integers(0, 4, 8).astype(np.int32)
    expected = oracle.aggregate(term, mask, trainable, kind, 6, group_id)

    def total(term, mask, trainable, parts=1, group_id=group_id):
        weight = np.asarray(weights(mask, trainable, group_id, kind=kind, max_completion_tokens=6))
        return sum(np.sum(w * t) for w, t in zip(np.split(weight, parts), np.split(term, parts), strict=True))

    order = rng.permutation(8)
    wide = ((0, 0), (0, 3))
    np.testing.assert_allclose(total(term, mask, trainable), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total(term, mask, trainable, parts=4), expected, rtol=1e-5, atol=1e-6)
    shuffled = total(term[order], mask[order], trainable[order], group_id=group_id[order])
    np.testing.assert_allclose(shuffled, expected, rtol=1e-5, atol=1e-6)
    padded = total(np.pad(term, wide, constant_values=5), np.pad(mask, wide), trainable)
    np.testing.assert_allclose(padded, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_batch_without_a_trainable_token_has_zero_weights(kind):
    for mask, trainable in ((jnp.zeros((3, 4), bool), jnp.ones(3, bool)), (jnp.ones((3, 4), bool), jnp.zeros(3, bool))):
        weight = weights(mask, trainable, jnp.arange(3), kind=kind, max_completion_tokens=4)
        np.testing.assert_array_equal(weight, np.zeros((3, 4)))


def test_the_reference_gives_way_to_the_previous_policy_by_schedule():
    # 1 up to step 50, then a tenth less every 10 steps begun, half at the end.
    shares = [float(reference_share(jnp.int32(step))) for step in (0, 50, 51, 60, 61, 95, 1000)]
    np.testing.assert_allclose(shares, [1, 1, 0.9, 0.9, 0.8, 0.5, 0.5], rtol=1e-6)


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(jnp.zeros((1, 1)), jnp.zeros((1, 1)), kind="k4")
    with pytest.raises(ValueError, match="'mean'"):
        aggregation_weights(
            jnp.ones((1, 1), bool), jnp.ones(1, bool), jnp.zeros(1, int), kind="mean", max_completion_tokens=1
        )


def test_the_entropy_coefficient_by_hand():
    # Target 0.2 nats, rate 0.01. Below, above, at the target, and one that would fall below 0.
    coefficient, entropy = jnp.array([0.05, 0.05, 0.05, 0.004]), jnp.array([0.1, 0.3, 0.2, 0.3])
    moved = jax.vmap(lambda c, e: adapted_entropy_coefficient(c, e, target=0.2, rate=0.01))(coefficient, entropy)
    np.testing.assert_allclose(moved, [0.06, 0.04, 0.05, 0.0], rtol=1e-6)
