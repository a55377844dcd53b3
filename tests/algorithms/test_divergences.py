import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.building import algorithm_config
from support.refusal import refused

from jaxrl_llm.algorithms.divergences import DIVERGENCES, ENTROPY_BONUSES, kl_estimate, reference_share
from jaxrl_llm.algorithms.inputs import Tokens

kl = jax.jit(kl_estimate, static_argnames="kind")


def test_k3_of_a_token_that_the_policy_has_given_up_is_finite():
    # d = -94: e^94 = 7e40 is no float32, and the slope is that at -20, which draws it back; -19: as it is.
    estimate = jax.jit(jax.value_and_grad(lambda logp: kl_estimate(logp, jnp.float32(-1.0), kind="k3")))
    for logp, nats in ((-95.0, 20.0), (-20.0, 19.0)):
        np.testing.assert_allclose(estimate(jnp.float32(logp)), (np.exp(nats) + logp, 1 - np.exp(nats)), rtol=1e-5)


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


ESTIMATES = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}


@pytest.mark.parametrize("kind", sorted(ESTIMATES))
def test_each_anchor_is_held_to_the_policy_that_it_names(kind):
    """The last of three tokens is outside the mask, where the other policies' log-probs may have any value."""
    mask = jnp.array([[True, True, False]])
    policy = jnp.array([[-1.0, -2.0, 0.0]])
    anchors = {"ref": [-1.5, -1.8], "previous": [-0.7, -2.5], "average": [-2.0, -1.0]}
    columns = {f"{name}_logp": jnp.array([[*logp, jnp.nan]]) for name, logp in anchors.items()}
    x = Tokens(policy, policy, policy, 0 * policy, jnp.zeros(1), mask, iteration=jnp.int32(55), columns=columns)
    to = {name: ESTIMATES[kind](np.array([-1.0, -2.0]) - np.array(logp)) for name, logp in anchors.items()}
    # In iteration 55 nine tenths of what ReMix is held to are the reference.
    convex = 0.9 * to["ref"] + 0.1 * to["previous"]
    for name, expected in {"reference": to["ref"], "convex": convex, "ewma": to["average"]}.items():
        chosen = algorithm_config(divergence={"name": name, "estimator": kind}).divergence
        needed = {column: columns[column] for column in chosen.facts.columns}
        found = chosen(dataclasses.replace(x, columns=needed))
        np.testing.assert_allclose(found[0, :2], expected, rtol=1e-5)
        assert np.isfinite(found[0, 2])


def test_the_reference_gives_way_to_the_previous_policy_by_schedule():
    # 1 up to step 50, then a tenth less every 10 steps begun, half at the end.
    shares = [float(reference_share(jnp.int32(step))) for step in (0, 50, 51, 60, 61, 95, 1000)]
    np.testing.assert_allclose(shares, [1, 1, 0.9, 0.9, 0.8, 0.5, 0.5], rtol=1e-6)


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(jnp.zeros((1, 1)), jnp.zeros((1, 1)), kind="k4")
    with refused("divergence.estimator", "k4", "'k1', 'k2', 'k3'"):
        algorithm_config(divergence={"name": "reference", "estimator": "k4"})
    with refused("divergence", "past", "'reference', 'convex', 'ewma', 'none'"):
        algorithm_config(divergence="past")
    assert set(DIVERGENCES) == {"reference", "convex", "ewma"}


def test_the_entropy_coefficient_by_hand():
    # Target 0.2 nats, rate 0.01. Below, above, at the target, and one that would fall below 0.
    coefficient, entropy = jnp.array([0.05, 0.05, 0.05, 0.004]), jnp.array([0.1, 0.3, 0.2, 0.3])
    adaptive = algorithm_config(entropy_bonus={"name": "adaptive", "target": 0.2, "rate": 0.01}).entropy_bonus
    moved = jax.vmap(adaptive)(coefficient, entropy)
    np.testing.assert_allclose(moved, [0.06, 0.04, 0.05, 0.0], rtol=1e-6)
    constant = algorithm_config(entropy_bonus={"name": "constant", "coefficient": 0.05}).entropy_bonus
    np.testing.assert_array_equal(jax.vmap(constant)(coefficient, entropy), coefficient)
    # The weight of the one is a part of a run's state.
    chosen = {name: algorithm_config(entropy_bonus=name).entropy_bonus for name in ENTROPY_BONUSES}
    assert {name for name, one in chosen.items() if one.facts.moves} == {"adaptive"}
