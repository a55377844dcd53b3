"""Corrections compared with float64 loops, and the values that they leave unchanged."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import corrections as oracle
from support.building import algorithm_config
from support.refusal import refused

from jaxrl_llm.algorithms import corrections, surrogates
from jaxrl_llm.algorithms.corrections import CORRECTIONS
from jaxrl_llm.algorithms.inputs import Ratios, Tokens
from jaxrl_llm.algorithms.surrogates import reinforce
from jaxrl_llm.settings.use import keywords

KINDS = sorted(CORRECTIONS)
BOUNDS = {"low": 0.5, "high": 2.0}
clipped = functools.partial(surrogates.clipped, low=0.2, high=0.2)


@functools.cache
def compiled(kind, low, high, is_carried):
    bounds = {name: value for name, value in {"low": low, "high": high}.items() if name in keywords(CORRECTIONS[kind])}
    chosen = algorithm_config(correction={"name": kind, **bounds}).correction

    def call(log_ratio, mask, policy_log_ratio, threshold):
        nothing = jnp.zeros(mask.shape)
        # As the update has them: constants, and 0 off the mask.
        x = Tokens(policy_log_ratio, log_ratio, nothing, nothing, jnp.zeros(len(mask)), mask).only(mask)
        log_ratios = jax.lax.stop_gradient((x.old_logp - x.behaviour_logp, x.policy_logp - x.behaviour_logp))
        log_weight, is_kept = chosen(Ratios(*log_ratios, mask, threshold))
        return corrections.weight(log_weight, is_kept, is_carried=is_carried), is_kept

    return jax.jit(call)


def weigh(log_ratio, mask, *, kind, low, high, threshold=0.0, policy_log_ratio=None, is_carried=False):
    """Return the weights and the mask of kept tokens.

    Without a ratio of the current policy, the given ratio is used for it.
    """
    policy_log_ratio = log_ratio if policy_log_ratio is None else policy_log_ratio
    arrays = map(jnp.asarray, (log_ratio, mask, policy_log_ratio, threshold))
    return compiled(kind, low, high, is_carried)(*arrays)


@functools.partial(jax.jit, static_argnames="limit")
def threshold_of(log_ratio, mask, limit):
    return corrections.second_moment_threshold(Ratios(log_ratio, log_ratio, mask), limit=limit)


def tokens(policy, old, behaviour, advantage, mask):
    arrays = map(jnp.asarray, (policy, old, behaviour, advantage, np.zeros(len(mask), np.float32), mask))
    return Tokens(*arrays)


def random_ratios(seed=0, shape=(5, 6)):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.6, shape).astype(np.float32), rng.random(shape) < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_float64_loops(kind):
    log_ratio, mask = random_ratios()
    bounds = dict(kind=kind, **BOUNDS)
    poisoned = np.where(mask, log_ratio, np.nan)
    policy = log_ratio + np.random.default_rng(4).normal(0, 0.6, mask.shape).astype(np.float32)
    seen = np.where(mask, policy, np.nan)
    weight, is_kept = weigh(poisoned, mask, **bounds, threshold=0.3, policy_log_ratio=seen)
    expected = np.array(oracle.weights(log_ratio, mask, **bounds, threshold=0.3, policy=policy))
    np.testing.assert_allclose(weight, expected, rtol=1e-5)
    np.testing.assert_array_equal(is_kept, expected > 0)
    # Where the term carries the ratio itself only the choice is left.
    weight, _ = weigh(poisoned, mask, **bounds, threshold=0.3, policy_log_ratio=seen, is_carried=True)
    np.testing.assert_array_equal(weight, (expected > 0).astype(np.float32))
    assert (expected[mask] != np.exp(log_ratio[mask])).any() or kind == "importance"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_the_behaviour_policy_drew_has_weight_one(kind):
    _, mask = random_ratios()
    own = np.zeros(mask.shape, np.float32)
    weight, _ = weigh(own, mask, kind=kind, **BOUNDS, threshold=0.0, policy_log_ratio=own)
    np.testing.assert_array_equal(weight, mask.astype(np.float32))


def test_unknown_kinds_are_named():
    with refused("correction", "some", *(f"'{kind}'" for kind in [*KINDS, "none"])):
        algorithm_config(correction="some")


def test_a_weight_that_no_float32_can_square_is_cut():
    weight = corrections.weight(jnp.array([[100.0, -100.0, 100.0]]), jnp.array([[True, True, False]]), is_carried=False)
    np.testing.assert_allclose(weight, [[np.exp(36), np.exp(-36), 0]], rtol=1e-5)


def test_what_corrections_declare_is_what_they_do():
    log_ratio, mask = random_ratios()
    policy = log_ratio + np.random.default_rng(4).normal(0, 0.6, mask.shape).astype(np.float32)
    for kind in KINDS:
        chosen = algorithm_config(correction=kind).correction
        _, is_kept = weigh(log_ratio, mask, kind=kind, **BOUNDS, threshold=0.3)
        assert bool((np.asarray(is_kept) != mask).any()) == chosen.facts.masks, kind
        # Of the batch it asks what it then compares with.
        assert (chosen.facts.over_batch is corrections.second_moment_threshold) == (kind == "second_moment")
        weights = [weigh(log_ratio, mask, kind=kind, **BOUNDS, policy_log_ratio=x)[0] for x in (log_ratio, 3 + policy)]
        assert bool((weights[0] != weights[1]).any()) == chosen.facts.of_token, kind


@pytest.mark.parametrize("limit", [0.0, 0.01, 0.1, 0.3, 10.0])
def test_second_moment_keeps_as_many_as_fit(limit):
    log_ratio, mask = random_ratios(1)
    log_ratio[0, :2] = 0.5  # a tie, and with its sign turned
    log_ratio[1, 0] = -0.5
    mask[0, :2] = mask[1, 0] = True
    threshold = threshold_of(log_ratio, mask, limit)
    kept = set(zip(*map(np.ndarray.tolist, np.nonzero(mask & (log_ratio**2 <= np.asarray(threshold)))), strict=True))
    assert kept == oracle.second_moment_kept(log_ratio, mask, limit)


def test_second_moment_of_no_token_and_of_equal_tokens():
    log_ratio, mask = random_ratios()
    assert np.isfinite(threshold_of(log_ratio, np.zeros_like(mask), 0.1))
    # All equal: all stay, or none.
    same = np.full((2, 3), 0.5, np.float32)
    assert (
        threshold_of(same, np.ones((2, 3), bool), 0.3) >= 0.25 > 0.2 >= threshold_of(same, np.ones((2, 3), bool), 0.2)
    )


def test_decoupled_with_the_behaviour_as_old_policy_is_the_plain_clip():
    rng = np.random.default_rng(2)
    policy, behaviour, advantage = rng.normal(size=(3, 4, 5)).astype(np.float32)
    mask = np.ones((4, 5), bool)
    x = tokens(policy, behaviour, behaviour, advantage, mask)

    def loss(policy, kind):
        weight = weigh(x.old_logp - x.behaviour_logp, mask, kind=kind, **BOUNDS, threshold=0.1)[0]
        return jnp.sum(weight * clipped(dataclasses.replace(x, policy_logp=policy))[0])

    plain = jax.grad(lambda p: jnp.sum(clipped(dataclasses.replace(x, policy_logp=p))[0]))(policy)
    for kind in KINDS:
        if kind != "policy_truncated":  # it looks at the current policy, whose ratio is cut below
            np.testing.assert_array_equal(jax.grad(loss)(policy, kind), plain)


def test_the_whole_ratio_of_the_current_policy_is_cut_as_the_released_code_cuts_it():
    """The loss is max(-A e^(lp - adj), -A e^(clip(lp - prox) + prox - adj)), adj = max(behaviour, lp - log 3)."""
    rng = np.random.default_rng(5)
    policy, old, behaviour, advantage = rng.normal(size=(4, 6, 5)).astype(np.float32)
    mask = np.ones(policy.shape, bool)
    x = tokens(policy, old, behaviour, advantage, mask)
    ratios = {"policy_log_ratio": policy - behaviour, "kind": "policy_truncated", "low": 0.5, "high": 3.0}
    term = weigh(old - behaviour, mask, **ratios)[0] * clipped(x)[0]
    adjusted = np.maximum(behaviour, policy - np.log(3.0))
    near = np.clip(policy - old, np.log(0.8), np.log(1.2)) + old
    expected = np.maximum(-advantage * np.exp(policy - adjusted), -advantage * np.exp(near - adjusted))
    np.testing.assert_allclose(term, expected, rtol=1e-5)
    assert (policy - behaviour > np.log(3.0)).sum() > 3


def test_discrepancy_and_staleness_are_factors_of_the_whole_ratio_until_one_is_masked():
    # behaviour -> old by e^0.1 and e^1.5, old -> current by e^0.05: unmasked the two factors are the whole ratio.
    behaviour = np.array([[-2.0, -2.0]], np.float32)
    old = behaviour + np.array([[0.1, 1.5]], np.float32)
    x = tokens(old + np.float32(0.05), old, behaviour, np.ones((1, 2), np.float32), np.ones((1, 2), bool))
    term, is_clipped = clipped(x)
    whole, _ = weigh(old - behaviour, x.mask, kind="importance", **BOUNDS)
    np.testing.assert_allclose(-whole * term, np.exp(x.policy_logp - behaviour), rtol=1e-5)
    # The staleness alone is clipped; the discrepancy alone is masked.
    masked, is_kept = weigh(old - behaviour, x.mask, kind="token_masked", **BOUNDS)
    assert not is_clipped.any() and is_kept.tolist() == [[True, False]] and masked[0, 1] == 0


def test_importance_weights_make_the_gradient_that_of_the_current_policys_own_samples():
    # Expectations over a vocabulary of 4: E_behaviour[w A grad logp] = E_policy[A grad logp].
    rng = np.random.default_rng(3)
    logits, behaviour_logits = rng.normal(size=(2, 4)).astype(np.float32)
    advantage = rng.normal(size=(1, 4)).astype(np.float32)
    behaviour_logp = jax.nn.log_softmax(behaviour_logits)[None]
    mask = np.ones((1, 4), bool)

    def loss(logits, drawn_by, kind):
        logp = jax.nn.log_softmax(logits)[None]
        x = tokens(logp, logp, drawn_by, advantage, mask)
        weight = weigh(logp - drawn_by, mask, kind=kind, **BOUNDS)[0]
        return jnp.sum(jnp.exp(drawn_by) * weight * reinforce(x))

    own = jax.grad(loss)(logits, jax.nn.log_softmax(logits)[None], "importance")
    np.testing.assert_allclose(jax.grad(loss)(logits, behaviour_logp, "importance"), own, rtol=1e-4, atol=1e-6)
    assert np.abs(jax.grad(loss)(logits, behaviour_logp, "token_truncated") - own).max() > 1e-3


def test_the_effective_sample_size_by_hand():
    # Weights 1, 1, 1, 1, 12: 16^2 / (5 * 148) = 0.3459.
    ratio = jnp.array([1.0, 1, 1, 1, 12])
    scale = lambda w, n: float(corrections.effective_sample_size(w.sum(), jnp.square(w).sum(), jnp.float32(n)))
    np.testing.assert_allclose(scale(ratio, 5) ** 2, 256 / 740, rtol=1e-6)
    np.testing.assert_allclose(scale(jnp.ones(7), 7), 1, rtol=1e-6)
    assert scale(jnp.zeros(3), 0) == 1
    share = corrections.effective_share(*jnp.array([[16.0, 0, 7], [148, 0, 7], [5, 0, 7]]))
    np.testing.assert_allclose(share, [256 / 740, 1, 1], rtol=1e-6)
    # A row is one sequence, cut at 36 nats; a row without a token has no part.
    log_ratio = jnp.array([[0.5, 0.25], [30.0, 30.0], [9.0, 9.0]])
    mask = jnp.array([[True, True], [True, True], [False, False]])
    np.testing.assert_allclose(corrections.sequence_ratio(log_ratio, mask), [np.exp(0.75), np.exp(36), 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "far", "nats", "share"),
    [
        (128, 128, 60.0, 1.0),
        (128, 128, -60.0, 1.0),
        (512, 12, 60.0, 12 / 512),
        (512, 12, -60.0, 500 / 512),
        (16384, 16384, 60.0, 1.0),
    ],
)
def test_the_effective_sample_size_of_rows_that_are_as_far_as_can_be(rows, far, nats, share):
    # Of n rows some are e^36 times as likely, or as unlikely, as the others: those count that weigh the most.
    log_ratio = jnp.where(jnp.arange(rows) < far, nats, 0.0)[:, None]
    ratio = corrections.sequence_ratio(log_ratio, jnp.ones((rows, 1), bool))
    scale = corrections.effective_sample_size(ratio.sum(), jnp.square(ratio).sum(), jnp.float32(rows))
    np.testing.assert_allclose(scale, np.sqrt(share), rtol=1e-5)
