import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import sampling as oracle

from jaxrl_llm.ops.filters import Filter, filter_logits, keep_support, support_of
from jaxrl_llm.ops.sampling import sample_inverse_cdf, surprise_moments, token_logp

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LARGEST_UNIFORM = np.float32(1 - 2**-24)
SETTINGS = [
    OFF,
    {**OFF, "temperature": 0.7, "top_k": 5},
    {**OFF, "top_p": 0.6},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]
draw = jax.jit(sample_inverse_cdf)
jit_with = jax.jit(filter_logits, static_argnames="settings")
jit_logp = jax.jit(token_logp)


def jit_filter(logits, *, keep_token=None, **settings):
    return jit_with(logits, Filter(**settings), keep_token=keep_token)


def test_filters_by_hand():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))

    def kept(**settings):
        return np.asarray(jit_filter(logits, **{**OFF, **settings}) > -np.inf).tolist()

    assert kept(top_k=2) == [True, True, False, False]
    # Mass 0.4 < 0.65 <= 0.7.
    assert kept(top_p=0.65) == [True, True, False, False]
    assert kept(top_p=0.75) == [True, True, True, False]
    # 0.2 / 0.4 >= 0.45 > 0.1 / 0.4.
    assert kept(min_p=0.45) == [True, True, True, False]
    # Of the top two, 0.4 / 0.7 = 0.57 of the mass is enough for 0.5; without top_k 0.4 would not be.
    assert kept(top_k=2, top_p=0.5) == [True, False, False, False]
    assert kept(top_p=0.5) == [True, True, False, False]
    # p^(1/2) is flatter: 0.316 of the mass in the first, so 0.35 needs two.
    assert kept(temperature=2.0, top_p=0.35) == [True, True, False, False]


def test_ties_at_a_threshold_are_kept():
    logits = jnp.array([1.0, 0.0, -0.0, 0.0, -1.0])
    for settings in ({"top_k": 2}, {"top_p": 0.5}):
        kept = np.asarray(jit_filter(logits, **{**OFF, **settings})) > -np.inf
        assert kept.tolist() == [True, True, True, True, False]


def test_the_most_likely_token_stays_under_the_tightest_settings():
    logits = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        filtered = np.asarray(jit_filter(logits, **{**OFF, **settings}))
        np.testing.assert_array_equal(np.sum(filtered > -np.inf, axis=-1), np.ones(6))
        np.testing.assert_array_equal(np.argmax(filtered, axis=-1), np.argmax(logits, axis=-1))


@pytest.mark.parametrize("settings", SETTINGS)
def test_filters_match_float64_loops(settings):
    logits = np.random.default_rng(1).normal(size=(12, 97)).astype(np.float32) * 2
    probability = [oracle.softmax(row) for row in np.asarray(jit_filter(logits, **settings))]
    expected = np.stack([oracle.distribution(row, **settings) for row in logits])
    np.testing.assert_array_equal(np.asarray(probability) > 0, expected > 0)
    np.testing.assert_allclose(probability, expected, rtol=1e-5)


def test_filters_that_are_off_cost_nothing():
    program = str(jax.make_jaxpr(functools.partial(filter_logits, settings=Filter(**OFF)))(jnp.zeros((2, 8))))
    assert not any(word in program for word in ("sort", "top_k", "max", "select", "div", "exp"))


def test_a_token_to_keep_stays_and_changes_nothing_else():
    logits = np.random.default_rng(2).normal(size=(5, 30)).astype(np.float32)
    worst, rows = logits.argmin(axis=-1), np.arange(5)
    settings = {**OFF, "top_k": 3, "temperature": 0.8}
    plain = np.asarray(jit_filter(logits, **settings))
    kept = np.array(jit_filter(logits, **settings, keep_token=worst))
    np.testing.assert_allclose(kept[rows, worst], logits[rows, worst] / 0.8, rtol=1e-6)
    kept[rows, worst] = -np.inf
    np.testing.assert_array_equal(kept, plain)
    inside = logits.argmax(axis=-1)
    np.testing.assert_array_equal(jit_filter(logits, **settings, keep_token=inside), plain)


@pytest.mark.parametrize("num_tokens", [1000, 1024])  # with a block to fill up, and without
def test_a_token_without_mass_is_not_drawn_where_weights_end(num_tokens):
    # The first block's few tokens have weights at and below the least that float32 has; the number drawn is 0.
    random = np.random.default_rng(7)
    logits = random.normal(size=(64, num_tokens)).astype(np.float32)
    logits[:, 700] = 10.0
    edge = random.uniform(-100.0, -70.0, (64, 256))
    logits[:, :256] = np.where(random.random((64, 256)) < 0.05, edge, -np.inf)
    token, logp = draw(logits, np.zeros(64, np.float32))
    chosen = logits[np.arange(64), token]
    assert np.isfinite(chosen).all()
    exact = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(logp, chosen - exact, rtol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_logp_and_entropy_match_float64_and_their_gradients_are_finite(settings):
    logits = np.random.default_rng(3).normal(size=(12, 97)).astype(np.float32) * 2
    token = logits.argmax(axis=-1)
    expected = np.stack([oracle.distribution(row, **settings) for row in logits])
    entropy_expected = -np.sum(np.where(expected > 0, expected * np.log(np.maximum(expected, 1e-300)), 0), axis=-1)

    @jax.jit
    def values_and_gradients(x):
        values, pull_back = jax.vjp(lambda y: token_logp(filter_logits(y, Filter(**settings)), jnp.asarray(token)), x)
        one, zero = jnp.ones(12), jnp.zeros(12)
        return *values, pull_back((one, zero))[0], pull_back((zero, one))[0]

    logp, entropy, logp_gradient, entropy_gradient = values_and_gradients(logits)
    np.testing.assert_allclose(logp, np.log(expected[np.arange(12), token]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy, entropy_expected, rtol=1e-5, atol=2e-6)
    # d logp / d logit_v = ([v = token] - p_v) / temperature, and 0 for a token filtered out;
    # d entropy / d logit_v = -p_v (log p_v + entropy) / temperature.
    one_hot = np.eye(97)[token]
    np.testing.assert_allclose(logp_gradient, (one_hot - expected) / settings["temperature"], atol=1e-6)
    log_expected = np.log(np.where(expected > 0, expected, 1.0))
    by_hand = -expected * (log_expected + entropy_expected[:, None]) / settings["temperature"]
    np.testing.assert_allclose(entropy_gradient, by_hand, atol=2e-6)


def test_entropy_of_a_certain_token_is_zero_and_an_impossible_token_has_no_nan_gradient():
    logits = jnp.array([0.5, -jnp.inf, -jnp.inf])
    logp, entropy = jit_logp(logits, jnp.int32(0))
    assert logp == 0 and entropy == 0
    # Token 1 is impossible: -inf, and through the surrogate's exp a ratio, and a gradient, of 0.
    logits = jnp.array([0.5, -5.0, 0.1])
    settings = {**OFF, "top_k": 2}
    assert jit_logp(jit_filter(logits, **settings), jnp.int32(1))[0] == -jnp.inf
    ratio = jax.jit(jax.grad(lambda x: jnp.exp(token_logp(filter_logits(x, Filter(**settings)), jnp.int32(1))[0])))
    gradient = ratio(logits)
    np.testing.assert_array_equal(gradient, np.zeros(3))


@pytest.mark.parametrize("num_tokens", [7, 256, 1000])
def test_draw_is_the_inverse_of_the_float64_cdf(num_tokens):
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(1, num_tokens)).astype(np.float32) * 3
    logits[:, rng.random(num_tokens) < 0.3] = -np.inf
    probability = oracle.softmax(logits[0])
    cdf = np.cumsum(probability)
    uniform = rng.random(2000, dtype=np.float32)
    token, logp = draw(jnp.tile(logits, (2000, 1)), uniform)
    expected = np.searchsorted(cdf, uniform.astype(np.float64), side="right")
    # Rounding of float32 sums may move a uniform within 1e-6 of a step of the CDF to the neighbour.
    near_step = np.abs(cdf[None, :] - uniform[:, None]).min(axis=1) < 1e-6
    assert near_step.mean() < 0.02
    np.testing.assert_array_equal(np.asarray(token)[~near_step], expected[~near_step])
    np.testing.assert_allclose(logp, np.log(probability[np.asarray(token)]), rtol=1e-5, atol=1e-6)


def test_draw_and_token_logp_agree():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(64, 600)).astype(np.float32)
    logits = jit_filter(logits, temperature=0.9, top_k=50, top_p=0.95, min_p=0.0)
    token, logp = draw(logits, rng.random(64, dtype=np.float32))
    np.testing.assert_allclose(logp, jit_logp(logits, token)[0], atol=2e-6)


@pytest.mark.parametrize("num_tokens", [5, 256, 777])
def test_a_token_of_probability_zero_is_never_drawn(num_tokens):
    # The ends of the unit interval meet runs of impossible tokens at either end, whole impossible blocks in
    # the middle, weights that underflow to 0 and totals whose rounding can reach the threshold.
    rng = np.random.default_rng(6)
    rows = []
    for scale in (0.0, 1.0, 30.0):
        for _ in range(8):
            logits = rng.normal(size=num_tokens).astype(np.float32) * scale
            start, stop = sorted(rng.integers(0, num_tokens, 2))
            logits[start:stop] = -np.inf
            logits[: num_tokens // 5] = logits[num_tokens - num_tokens // 5 :] = -np.inf
            logits[num_tokens // 2] = 0.0
            rows.append(logits)
    rows = np.stack(rows)
    for u in (0.0, 2.0**-24, 0.5, 1 - 2.0**-23, LARGEST_UNIFORM):
        token, logp = draw(rows, np.full(len(rows), u, np.float32))
        chosen = rows[np.arange(len(rows)), np.asarray(token)]
        assert (np.exp(chosen - rows.max(axis=-1)) > 0).all()
        assert np.isfinite(logp).all() and (np.asarray(logp) <= 0).all()


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_possible_token():
    logits = np.full((1, 700), -np.inf, np.float32)
    logits[0, [3, 300, 650]] = 0.0
    assert draw(logits, np.zeros(1, np.float32))[0].tolist() == [3]
    assert draw(logits, np.full(1, LARGEST_UNIFORM))[0].tolist() == [650]


def test_frequencies_pass_a_chi_square_test():
    # 20000 draws, 40 tokens with p >= 0.001 lumped as they are: chi-square of 39 degrees of freedom has mean 39 and
    # standard deviation sqrt(78) = 8.83. P(X > 110) < 1e-8 (Laurent-Massart: P(X - k > 2 sqrt(k x) + 2 x) <= e^-x;
    # x = 18.5 gives 39 + 53.7 + 37 = 129.7 at 1e-8), so the bound 130 raises a false alarm with probability < 1e-8.
    rng = np.random.default_rng(7)
    logits = rng.normal(size=40).astype(np.float32)
    probability = oracle.softmax(logits)
    assert probability.min() * 20000 > 5
    uniform = jax.random.uniform(jax.random.key(0), (20000,))
    token, _ = draw(jnp.tile(logits[None, :], (20000, 1)), uniform)
    count = np.bincount(np.asarray(token), minlength=40)
    assert np.sum((count - 20000 * probability) ** 2 / (20000 * probability)) < 130


def by_part(function, parts, *args):
    """Call ``function(*args, axis)`` on this many devices.

    Each has its part of the last dimension of the first argument.
    """
    mesh = jax.make_mesh((parts,), ("part",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:parts])
    specs = (jax.P(None, "part"), *(jax.P() for _ in args[1:]))
    mapped = lambda *args: function(*args, ("part",))
    return jax.jit(jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False))(*args)


# Parts of 33, 250 and 768 tokens: less than a block, no multiple of blocks, and three blocks.
@pytest.mark.parametrize(
    ("num_tokens", "parts"),
    [(264, 8), pytest.param(1000, 4, marks=pytest.mark.tier("slow")), pytest.param(1536, 2, marks=pytest.mark.slow)],
)
def test_devices_with_parts_of_a_vocabulary_draw_what_one_draws(num_tokens, parts):
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(4000, num_tokens)).astype(np.float32) * 3
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[:2000, : num_tokens // parts] = -np.inf  # no token of the first part
    logits[2000:3000, -(num_tokens // parts) :] = -np.inf  # nor of the last
    uniform = rng.random(4000, dtype=np.float32)
    uniform[::100], uniform[1::100] = 0.0, LARGEST_UNIFORM
    token, logp = by_part(sample_inverse_cdf, parts, logits, uniform)
    probability = np.stack([oracle.softmax(row) for row in logits])
    cdf = np.cumsum(probability, axis=1)
    expected = np.argmax(cdf > uniform[:, None].astype(np.float64), axis=1)
    near_step = np.abs(cdf - uniform[:, None]).min(axis=1) < 1e-6
    assert near_step.mean() < 0.05
    np.testing.assert_array_equal(np.asarray(token)[~near_step], expected[~near_step])
    np.testing.assert_array_equal(np.asarray(token)[~near_step], np.asarray(draw(logits, uniform)[0])[~near_step])
    chosen = probability[np.arange(4000), token]
    assert (chosen > 0).all()
    np.testing.assert_allclose(logp, np.log(chosen), rtol=1e-5, atol=1e-6)
    moments = by_part(surprise_moments, parts, logits)
    surprise = -np.log(np.where(probability > 0, probability, 1))
    entropy = np.sum(probability * surprise, axis=1)
    np.testing.assert_allclose(moments[0], entropy, rtol=1e-5)
    np.testing.assert_allclose(moments[1], np.sum(probability * surprise**2, axis=1) - entropy**2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [3, 20, 60])  # fewer than a part has, and more
def test_devices_with_parts_of_a_vocabulary_keep_the_support_that_one_keeps(size):
    """With ties within parts and across parts: the first of the tied ids at the end stay."""
    rng = np.random.default_rng(9)
    logits = rng.integers(0, 6, (50, 96)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.4] = -np.inf
    support = by_part(lambda x, axis: support_of(x, size, axis), 4, logits)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :size]
    rows = np.arange(50)[:, None]
    possible = logits[rows, order] > -np.inf
    expected = np.sort(np.where(possible, order, np.iinfo(np.int32).max), axis=1)
    np.testing.assert_array_equal(support, expected)
    kept = np.full_like(logits, -np.inf)
    for row, ids in enumerate(expected):
        ids = ids[ids < 96]
        kept[row, ids] = logits[row, ids]
    whole = lambda x, support, axis: jax.lax.all_gather(keep_support(x, support, axis), axis, axis=1, tiled=True)
    np.testing.assert_array_equal(by_part(whole, 4, logits, expected.astype(np.int32)), kept)
