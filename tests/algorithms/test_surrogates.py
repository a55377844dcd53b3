"""Every surrogate compared with float64 loops, identities between surrogates, and their fixed points on a bandit."""

import dataclasses
import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import surrogates as oracle
from support.building import algorithm_config
from support.refusal import refused

from jaxrl_llm.algorithms.divergences import kl_estimate
from jaxrl_llm.algorithms.inputs import Tokens
from jaxrl_llm.algorithms.surrogates import SURROGATES, surrogate_terms
from jaxrl_llm.algorithms.tracing import reads_of_surrogate
from jaxrl_llm.settings.use import Chosen, keywords


class Numbers(NamedTuple):
    """Settings of the surrogates by the names of the oracle."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    beta: float = 0.3
    group_size: int = 4


SETTINGS = Numbers()
NAMES = sorted(SURROGATES)
RATIOS = ("clipped", "sequence_clipped", "gspo", "cispo")  # to the old policy
B, T = 8, 6


def surrogate(name, numbers):
    """Return the surrogate with the oracle's numbers as its settings, all given explicitly."""
    low, high = numbers.clip_low, numbers.clip_high
    said = {"low": low, "high": high, "dual": numbers.dual_clip, "cap": 1 + high}
    said |= dict.fromkeys(("beta", "tau", "eta"), numbers.beta)
    if name in oracle.BOUND_THE_RATIO:
        said |= {"low": 1 - low, "high": 1 + high}
    own = {setting: said.get(setting, default) for setting, (_, default) in keywords(SURROGATES[name]).items()}
    return algorithm_config(surrogate={"name": name, **own}).surrogate


def declare(fact, value):
    """Return the surrogates that declare this value of a fact."""
    return {name for name in NAMES if getattr(surrogate(name, SETTINGS).facts, fact) == value}


ROW_RATIOS = sorted(declare("base", "old") - declare("of_token", True))


def tokens(policy, old, behaviour, ref, advantage, reward, mask, group_size=SETTINGS.group_size):
    columns = {"ref_logp": jnp.asarray(ref)}
    arrays = map(jnp.asarray, (policy, old, behaviour, advantage, reward, mask))
    return Tokens(*arrays, group_size=group_size, columns=columns)


def replace(x, **changes):
    """Return a copy with other fields; ``ref_logp`` is treated as a field."""
    if "ref_logp" in changes:
        changes["columns"] = {"ref_logp": changes.pop("ref_logp")}
    return dataclasses.replace(x, **changes)


def random_tokens(seed=0, *, spread=0.4):
    """Return two groups of four ragged rows. One row has no token, and one group is tied."""
    rng = np.random.default_rng(seed)
    mask = np.arange(T)[None, :] < np.array([1, 6, 3, 4, 5, 0, 2, 6])[:, None]
    base = rng.normal(-1.5, 0.5, (B, T))
    near = lambda: np.where(mask, base + rng.normal(0, spread, (B, T)), 0).astype(np.float32)
    reward = np.array([0, 1, 0.5, -1, -0.3, 1, -0.3, -2], np.float32)
    policy, old, behaviour, ref = near(), near(), near(), near()
    advantage = np.where(mask, rng.normal(size=(B, 1)), 0).astype(np.float32)
    return tokens(policy, old, behaviour, ref, advantage, reward, mask)


def rows_of(x):
    """Return the rows in the form of the oracle, in float64."""
    names = {"policy": x.policy_logp, "old": x.old_logp, "behaviour": x.behaviour_logp, "ref": x.ref_logp}
    names["advantage"] = x.advantage
    rows = []
    for i, keep in enumerate(np.asarray(x.mask)):
        row = {name: [float(v) for v in np.asarray(values)[i][keep]] for name, values in names.items()}
        rows.append(row | {"reward": float(x.reward[i])})
    return rows


@functools.cache
def compiled(name, numbers=SETTINGS):
    """Return a compiled function (x, weights [B,T]) -> gradient of the weighted sum of terms, (terms, is_clipped)."""
    chosen = surrogate(name, numbers)

    def total(policy_logp, given, weight):
        x = Tokens(policy_logp, **given, group_size=numbers.group_size)
        term, is_clipped = surrogate_terms(chosen, x)
        return jnp.sum(weight * term), (term, is_clipped)

    gradient = jax.jit(jax.grad(total, has_aux=True))

    def call(x, weight):
        names = ("old_logp", "behaviour_logp", "advantage", "reward", "mask", "columns")
        given = {name: getattr(x, name) for name in names}
        return jax.tree.map(np.asarray, gradient(x.policy_logp, given, weight))

    return call


def row_weights(x):
    """Return a number per row, spread over the tokens of the row."""
    length = np.maximum(np.asarray(x.mask).sum(axis=1, keepdims=True), 1)
    return np.where(x.mask, np.linspace(0.5, 2, B)[:, None] / length, 0).astype(np.float32)


@pytest.mark.parametrize("name", [*NAMES, "clipped, dual"])
def test_terms_and_gradients_are_those_of_float64_loops(name):
    settings = SETTINGS._replace(dual_clip=1.3) if "dual" in name else SETTINGS
    name = name.split(",")[0]
    x = random_tokens()
    weight = row_weights(x)
    gradient, (term, _) = compiled(name, settings)(x, weight)

    s = {**surrogate(name, settings).settings, **settings._asdict(), "fixed": rows_of(x)}
    expected = getattr(oracle, name)(rows_of(x), s)
    for i, keep in enumerate(np.asarray(x.mask)):
        np.testing.assert_allclose(term[i][keep], expected[i], rtol=2e-5, atol=2e-5)

    def loss(i, t, step):
        rows = rows_of(x)
        rows[i]["policy"][t] += step
        terms = getattr(oracle, name)(rows, s)
        return sum(
            float(w) * v
            for i, keep in enumerate(np.asarray(x.mask))
            for w, v in zip(weight[i][keep], terms[i], strict=True)
        )

    for i, t in zip(*np.nonzero(np.asarray(x.mask)), strict=True):
        if name in ROW_RATIOS:  # the token form has the row's ratio, and of its gradient each token's own alone
            continue
        slope = (loss(i, t, 1e-5) - loss(i, t, -1e-5)) / 2e-5
        np.testing.assert_allclose(gradient[i, t], slope, rtol=2e-4, atol=2e-5, err_msg=f"{name} {i} {t}")


@pytest.mark.parametrize("name", ROW_RATIOS)
def test_the_token_form_of_the_sequence_ratio_has_the_sequences_gradient(name):
    # One advantage per row and the mean over its tokens: d(-min(u A, clip(u) A))/d logp_t = -u A d(log u)/d logp_t
    # unclipped.
    x = random_tokens(1, spread=1.2)
    length = np.maximum(x.mask.sum(axis=1, keepdims=True), 1)
    gradient, (_, is_clipped) = compiled(name)(x, np.where(x.mask, 1 / length, 0).astype(np.float32))
    s = SETTINGS._asdict()
    seen = set()
    for i in np.nonzero(x.mask.any(axis=1))[0]:
        for t in np.nonzero(x.mask[i])[0]:
            values = []
            for step in (1e-5, -1e-5):
                rows = rows_of(x)
                rows[i]["policy"][t] += step
                values.append(getattr(oracle, name)(rows, s)[i][0])
            np.testing.assert_allclose(gradient[i, t], (values[0] - values[1]) / 2e-5, rtol=2e-4, atol=2e-5)
            seen.add(bool(is_clipped[i, t]))
    assert seen == {True, False}


@pytest.mark.parametrize("name", NAMES)
def test_gradient_at_a_masked_token_is_exactly_zero_and_what_it_holds_changes_nothing(name):
    x = random_tokens()
    weight = np.where(x.mask, np.float32(0.5), 0)
    junk = lambda v, seed: np.where(x.mask, v, np.random.default_rng(seed).normal(-2, 1, (B, T))).astype("f")
    fields = ("policy_logp", "old_logp", "behaviour_logp", "ref_logp", "advantage")
    spoilt = replace(x, **{field: junk(getattr(x, field), seed) for seed, field in enumerate(fields)})
    (expected, (term_expected, _)), (value, (term, _)) = (compiled(name)(rows, weight) for rows in (x, spoilt))
    assert (value[~x.mask] == 0).all() and (value[x.mask] != 0).any()
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(term[x.mask], term_expected[x.mask])


# --- identities ---


@pytest.mark.parametrize("name", [*RATIOS, "reinforce", "remix_centred", "agro", "gvpo", "kimi_k15"])
def test_without_a_step_every_one_is_reinforce(name):
    x = random_tokens()
    same = replace(x, old_logp=x.policy_logp, behaviour_logp=x.policy_logp, ref_logp=x.policy_logp)
    gradient, (_, is_clipped) = compiled(name, SETTINGS._replace(clip_low=0.0, clip_high=0.0, dual_clip=0.0))(
        same, np.asarray(x.mask, np.float32) / np.maximum(x.mask.sum(axis=1, keepdims=True), 1)
    )
    is_of_row = name in ("agro", "gvpo", "kimi_k15", "sequence_clipped")  # each token bears the row's whole loss
    spread = 1 if is_of_row else np.maximum(x.mask.sum(axis=1, keepdims=True), 1)
    np.testing.assert_allclose(gradient, np.where(x.mask, -x.advantage / spread, 0), rtol=1e-6)
    assert not is_clipped[x.mask].any()


def one_token(policy, old, behaviour, advantage):
    as_row = lambda v: np.full((1, 1), v, np.float32)
    rows = map(as_row, (policy, old, behaviour, 0.0, advantage))
    return tokens(*rows, np.zeros(1, np.float32), np.ones((1, 1), bool))


def slope(name, x, **settings):
    gradient, (_, is_clipped) = compiled(name, SETTINGS._replace(**settings))(x, np.ones((1, 1), np.float32))
    return gradient.item(), is_clipped.item()


def test_clip_is_active_on_one_side_alone():
    # Bounds [0.8, 1.3]. u = 2: A = 1 -> min(2, 1.3) = 1.3 clipped; A = -1 -> min(-2, -1.3) = -2, not clipped.
    # u = 1/2: A = 1 -> min(.5, .8) = .5, not clipped; A = -1 -> min(-.5, -.8) = -.8 clipped. A = 0: nothing.
    ratio = np.array([[2.0, 2.0, 0.5, 0.5, 2.0]], np.float32)
    advantage = np.array([[1.0, -1.0, 1.0, -1.0, 0.0]], np.float32)
    behaviour = np.full((1, 5), -1.5, np.float32)
    mask = np.ones((1, 5), bool)
    x = tokens(behaviour + np.log(ratio), behaviour, behaviour, behaviour, advantage, np.zeros(1, np.float32), mask)
    gradient, (loss, is_clipped) = compiled("clipped", SETTINGS._replace(clip_high=0.3))(x, np.ones((1, 5), np.float32))
    np.testing.assert_allclose(loss, [[-1.3, 2.0, -0.5, 0.8, 0.0]], rtol=1e-6)
    assert is_clipped.tolist() == [[True, False, False, True, False]]
    # d(-u A)/d logp = -u A where not clipped.
    np.testing.assert_allclose(gradient, [[0.0, 2.0, -0.5, 0.0, 0.0]], rtol=1e-6)
    assert gradient[0, 0] == 0 and gradient[0, 3] == 0


def test_outside_the_clip_the_weight_form_keeps_a_gradient_and_the_ratio_form_has_none():
    # u = e^2, A = 1: clipped at 1.28. The weight form: -1.28 A.
    x = one_token(-1.0, -3.0, -3.0, 1.0)
    assert slope("clipped", x) == (0.0, True)
    np.testing.assert_allclose(slope("cispo", x), (-1.28, True), rtol=1e-6)
    # Beyond 20 nats the exponential is cut, also where float32 has no such number.
    np.testing.assert_allclose(slope("cispo", one_token(-1.0, -300.0, -3.0, 1.0), clip_high=3e9)[0], -np.exp(20), 1e-5)


def test_dual_clip_bounds_what_a_negative_advantage_can_do():
    # u = e^2 = 7.4, A = -1: without it the slope is u; with a bound of 3 the loss is 3 and the slope 0.
    x = one_token(-1.0, -3.0, -3.0, -1.0)
    np.testing.assert_allclose(slope("clipped", x)[0], np.exp(2), rtol=1e-6)
    assert slope("clipped", x, dual_clip=3.0) == (0.0, True)
    assert slope("gspo", x, dual_clip=3.0) == (0.0, True)


def test_a_window_about_the_old_policy_does_not_bind_at_the_old_policy():
    # policy = old, both e^1 times the behaviour: the plain clip binds, the centred one has the slope -u A.
    x = one_token(-1.0, -1.0, -2.0, 1.0)
    assert slope("clipped", replace(x, old_logp=x.behaviour_logp)) == (0.0, True)
    value, is_clipped = slope("remix_centred", x)
    np.testing.assert_allclose(value, -np.e, rtol=1e-6)
    assert not is_clipped
    # A further step up is clipped, one down is not.
    assert slope("remix_centred", replace(x, policy_logp=x.policy_logp + np.float32(0.2)))[1]
    assert not slope("remix_centred", replace(x, policy_logp=x.policy_logp - np.float32(0.2)))[1]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    ("name", "policy", "behaviour"),
    [("clipped", -np.inf, -1.0), *((name, 0.0, -200.0) for name in (*RATIOS, "remix_centred"))],
)
def test_impossible_or_huge_ratios_have_a_finite_gradient_and_none_without_an_advantage(
    name, policy, behaviour, advantage
):
    found = slope(name, one_token(policy, behaviour, behaviour, advantage))[0]
    assert np.isfinite(found) and (advantage or found == 0)


def test_a_long_row_far_from_its_old_policy_costs_the_batch_nothing():
    """100 tokens are each 0.9 nats more likely than before. e^90 overflows float32, and inf times 0 is NaN."""
    mask = np.array([[True] * 100, [True] * 100])
    old, advantage = np.full((2, 100), -1.0, np.float32), np.array([[0.0], [-1.0]], np.float32) * mask
    x = tokens(old + np.float32(0.9), old, old, old, advantage.astype(np.float32), np.zeros(2, np.float32), mask)
    slopes, _ = compiled("sequence_clipped")(x, np.ones_like(old))
    assert (slopes[0] == 0).all()
    np.testing.assert_allclose(slopes[1], 100 * np.exp(20.0), rtol=1e-5)  # of each token's share of the row's term


def test_a_group_of_one_is_pulled_to_its_anchor_alone():
    # Its advantage is 0: the slope is beta times the log-ratio; centred on its own mean, 0.
    x = one_token(-1.0, -1.5, -1.5, 0.0)
    np.testing.assert_allclose(slope("kimi_k15", x, group_size=1)[0], 0.3 * 0.5, rtol=1e-6)
    assert slope("gvpo", x, group_size=1)[0] == 0


def test_the_frozen_reference_as_old_policy_makes_the_two_variance_losses_one():
    x = random_tokens()
    x = replace(x, old_logp=x.ref_logp)
    for one, other in zip(*(jax.tree.leaves(compiled(n)(x, row_weights(x))) for n in ("agro", "gvpo")), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_tied_group_at_its_anchor_has_no_gradient_at_all():
    x = random_tokens()
    x = replace(x, advantage=0 * x.advantage, ref_logp=x.policy_logp, old_logp=x.policy_logp, reward=0 * x.reward)
    for name in ("clipped", "gspo", "cispo", "reinforce", "agro", "gvpo", "kimi_k15", "inpo"):
        assert (compiled(name)(x, row_weights(x))[0] == 0).all(), name


@pytest.mark.parametrize(("behind", "baseline"), [(0.0, 10 / 11), (np.log(0.5), 40 / 41), (np.log(0.01), 640 / 641)])
def test_vcpos_baseline_leaves_the_least_variance_of_what_the_loss_adds_up(behind, baseline):
    """Rows of 1 and 10 tokens of p = 1/2 with rewards 0 and 1.

    The second row's ratio to the behaviour policy is 1, 2, or cut at 8.
    """
    mask = np.arange(10)[None, :] < np.array([1, 10])[:, None]
    logp = np.where(mask, np.log(0.5), 0).astype(np.float32)
    behaviour = logp + np.where(mask, [[0.0], [behind / 10]], 0).astype(np.float32)
    x = tokens(logp, logp, behaviour, logp, 0 * logp, np.array([0, 1], np.float32), mask)
    slope, _ = compiled("vcpo", SETTINGS._replace(clip_high=7.0, group_size=2))(x, np.ones_like(logp))
    weight = np.array([1.0, min(np.exp(-behind), 8.0)])
    np.testing.assert_allclose(slope[[0, 1], 0], -weight * (np.array([0, 1]) - baseline), rtol=1e-5, atol=2e-6)
    _, is_cut = surrogate("vcpo", SETTINGS._replace(clip_high=7.0))(replace(x, group_size=2))
    np.testing.assert_array_equal(is_cut, mask & np.array([[False], [weight[1] == 8]]))
    # The variance of a row's gradient is that of W (r - b) times the norm, here length^(1/2) of a token's.
    grid = np.linspace(0, 1, 100_001)
    variance = (weight[:, None] ** 2 * np.array([[1], [10]]) * (np.array([[0], [1]]) - grid) ** 2).sum(axis=0)
    assert grid[variance.argmin()] == pytest.approx(baseline, abs=1e-5)


# --- the table and what it declares ---


def test_unknown_ones_are_named():
    with refused("surrogate", "ppo", *(f"'{name}'" for name in NAMES)):
        algorithm_config(surrogate="ppo")


def test_what_is_left_to_a_correction_is_declared():
    assert declare("base", "old") >= {*RATIOS}
    assert declare("base", "policy") >= {"reinforce", "opmd"}


@pytest.mark.parametrize("name", sorted(declare("base", "old")))
def test_a_ratio_of_each_token_does_not_depend_on_the_rows_other_tokens(name):
    x = random_tokens()
    is_first = np.arange(T)[None, :] == 0
    other = replace(x, policy_logp=jnp.where(is_first, x.policy_logp + np.float32(0.01), x.policy_logp))
    later = x.mask & ~is_first
    terms = [surrogate_terms(surrogate(name, SETTINGS), rows)[0] for rows in (x, other)]
    assert surrogate(name, SETTINGS).facts.of_token == bool((terms[0] == terms[1])[later].all())


@pytest.mark.parametrize("name", NAMES)
def test_what_a_surrogate_reads_is_what_it_declares(name):
    x, chosen = random_tokens(), surrogate(name, SETTINGS)
    term = lambda x: surrogate_terms(chosen, x)[0]
    expected = term(x)
    differs = lambda x: bool((term(x) != expected)[x.mask].any())
    if chosen.facts.columns:
        assert chosen.facts.columns == {"ref_logp"}
        with pytest.raises(AttributeError, match="ref_logp"):
            term(dataclasses.replace(x, columns={}))
        assert differs(replace(x, ref_logp=x.ref_logp - x.mask * x.reward[:, None]))
    else:
        assert not differs(dataclasses.replace(x, columns={}))
    reads_old = chosen.facts.base == "old" or chosen.facts.reads_old
    assert bool((term(replace(x, old_logp=x.old_logp - x.mask)) != expected).any()) == reads_old
    # Rewards, or advantages.
    read = reads_of_surrogate(chosen)
    assert differs(replace(x, reward=x.reward - jnp.arange(B))) == ("reward" in read)
    assert differs(replace(x, advantage=2 * x.advantage)) == ("advantage" in read)
    assert reads_old == ("old_logp" in read) and chosen.facts.columns <= read
    # Groups: another row's log-probs change this row's term.
    other = np.array(x.policy_logp)
    other[1] -= 1.0
    seen = term(replace(x, policy_logp=jnp.asarray(other)))[2]
    seen_reward = term(replace(x, reward=x.reward - np.eye(B, dtype=np.float32)[1]))[2]
    coupled = bool((seen != expected[2]).any() | (seen_reward != expected[2]).any())
    assert coupled == chosen.facts.siblings


def test_every_surrogate_names_its_source():
    for name, function in SURROGATES.items():
        assert "Source:" in inspect.getdoc(function), name


def test_terms_alone_have_no_bound_and_are_a_number_for_each_token():
    x = random_tokens()
    term, is_clipped = surrogate_terms(Chosen("own", function=lambda x: 2 * x.policy_logp), x)
    np.testing.assert_array_equal(term, 2 * x.policy_logp)
    assert is_clipped.shape == x.mask.shape and not is_clipped.any()
    for wrong in (x.reward, (x.policy_logp, x.reward), 0.0):
        with refused("algorithm.surrogate", "own"):
            surrogate_terms(Chosen("own", function=lambda x, wrong=wrong: wrong), x)


# --- fixed points on a bandit: four actions, one group of sixteen completions of one token ---

BETA = 0.5
REWARD = np.array([-0.2, -0.6, -1.0, -2.0], np.float32)
REFERENCE = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
OPTIMUM = np.exp(REFERENCE + REWARD / BETA) / np.exp(REFERENCE + REWARD / BETA).sum()
DATA = {"uniform": (4, 4, 4, 4), "expert": (10, 4, 1, 1), "stale": (1, 2, 3, 10)}


@functools.cache
def bandit(name, rate, steps):
    """Return a function (actions [16], behaviour_logp [16]) -> policy after gradient descent on that one batch."""
    is_plain = name == "kl policy gradient"
    chosen = surrogate("reinforce" if is_plain else name, Numbers(clip_high=0.2, beta=BETA))

    def loss(logits, action, behaviour_logp, step_is_on_policy):
        logp = jax.nn.log_softmax(logits)
        column = lambda v: v[action][:, None]
        reward = jnp.asarray(REWARD)[action]
        ref_logp, advantage = column(jnp.asarray(REFERENCE)), (reward - jnp.mean(reward))[:, None]
        mask = jnp.ones((16, 1), bool)
        x = tokens(column(logp), ref_logp, behaviour_logp[:, None], ref_logp, advantage, reward, mask, group_size=16)
        weight = jnp.where(step_is_on_policy, jax.lax.stop_gradient(jnp.exp(logp[action] - behaviour_logp)), 1.0)
        term, _ = surrogate_terms(chosen, x)
        if is_plain:
            term += BETA * kl_estimate(column(logp), ref_logp, kind="k2")
        return jnp.mean(weight[:, None] * term)

    @jax.jit
    def run(action, behaviour_logp, on_policy):
        gradient = jax.grad(loss)
        start = jnp.zeros(4)
        return jax.lax.fori_loop(
            0, steps, lambda _, z: z - rate * gradient(z, action, behaviour_logp, on_policy), start
        )

    def descend(data, *, on_policy=False):
        counts = np.array(DATA[data])
        action = np.repeat(np.arange(4), counts)
        logits = run(action, np.log(counts / 16).astype(np.float32)[action], on_policy)
        return np.asarray(jax.nn.softmax(logits), np.float64)

    return descend


def divergence(p, q):
    return float(np.sum(p * np.log(np.maximum(p, 1e-30) / q)))


@pytest.mark.parametrize("name", ["agro", "gvpo"])
def test_regressions_reach_the_same_optimum_from_any_data(name):
    for data in DATA:
        assert divergence(bandit(name, 1.0, 4000)(data), OPTIMUM) < 1e-5, data


def test_the_policy_gradient_with_a_divergence_needs_samples_of_its_own():
    descend = bandit("kl policy gradient", 0.5, 4000)
    assert divergence(descend("uniform", on_policy=True), OPTIMUM) < 1e-5
    assert divergence(descend("expert", on_policy=True), OPTIMUM) < 1e-5
    for data in ("expert", "stale"):
        assert divergence(descend(data), OPTIMUM) > 0.05, data


def test_the_squared_log_ratio_bounds_what_a_reused_batch_can_do():
    start = np.exp(REFERENCE)
    bounded = divergence(bandit("kimi_k15", 0.5, 4000)("expert"), start)
    free = divergence(bandit("reinforce", 0.5, 4000)("expert"), start)
    assert bounded < 0.7 < 1.5 < free


def test_pairwise_regression_finds_the_nash_policy_of_rock_paper_scissors():
    # Groups of two: every ordered pair of actions, weighed by the old policy, which becomes the new one in turn.
    beats = {(0, 2), (2, 1), (1, 0)}
    pairs = [(a, b) for a in range(3) for b in range(3)]
    action = np.array(pairs).reshape(-1)
    reward = np.array([[(a, b) in beats, (b, a) in beats] for a, b in pairs], np.float32).reshape(-1)
    inpo = surrogate("inpo", SETTINGS._replace(beta=1.0))

    def loss(logits, old):
        column = lambda v: jax.nn.log_softmax(v)[action][:, None]
        policy = column(logits)
        mask = jnp.ones((18, 1), bool)
        x = tokens(policy, column(old), column(old), column(jnp.zeros(3)), 0 * policy, reward, mask, group_size=2)
        pair = jnp.exp(column(old).reshape(9, 2).sum(axis=1))
        return jnp.sum(jnp.repeat(pair, 2)[:, None] * inpo(x)) / 2

    @jax.jit
    def iterate(old):
        return jax.lax.fori_loop(0, 200, lambda _, z: z - 0.5 * jax.grad(loss)(z, old), old)

    logits = jnp.log(jnp.array([0.7, 0.2, 0.1]))
    for _ in range(40):
        logits = iterate(logits)
    np.testing.assert_allclose(jax.nn.softmax(logits), np.full(3, 1 / 3), atol=1e-3)
