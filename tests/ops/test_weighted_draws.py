import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxrl_llm.ops import weighted_draws as draws

NUM_KEYS = 8_000


def sequential(weights, num):
    """Return the probability of every ordered outcome of ``num`` draws in proportion to the remaining weights."""
    outcomes = {}
    for order in itertools.permutations([i for i, w in enumerate(weights) if w > 0], num):
        probability, left = 1.0, sum(weights)
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        outcomes[order] = probability
    return outcomes


def draw_many(weights, length, *, num, max_length, seed=0, num_keys=NUM_KEYS, taken=None):
    """Draw with one shard per key. Slot = 2 * position + 1, so that slots and positions cannot be confused."""
    weights = jnp.asarray(weights, jnp.float32)

    @jax.jit
    def run(keys):
        return draws.draw(
            keys,
            lambda position: 2 * position + 1,
            jnp.full(keys.shape[0], length, jnp.int32),
            lambda slot: weights[jnp.minimum(slot // 2, len(weights) - 1)],
            num=num,
            max_length=max_length,
            taken=taken,
        )

    slots, is_drawn = jax.tree.map(np.asarray, run(jax.random.split(jax.random.key(seed), num_keys)))
    return slots, is_drawn


@pytest.mark.parametrize(
    ("candidates", "weights"),
    # Of 5 things: all sorted, and few or many candidates whose lack the sort makes good. With 3 candidates for two
    # draws nearly every shard needs it, with 4 and full weights a third of them.
    [(5, (1, 1, 0.5, 0.5, 0)), (4, (1, 1, 1, 1, 1)), (3, (1, 0.6, 0.3, 0.3, 0.1))],
)
def test_every_order_has_the_probability_of_a_sequential_draw(candidates, weights, monkeypatch):
    monkeypatch.setattr(draws, "MIN_CANDIDATES", candidates)
    monkeypatch.setattr(draws, "CANDIDATES_PER_DRAW", 1)
    slots, is_drawn = draw_many(weights, 5, num=2, max_length=5)
    assert is_drawn.all()
    expected = sequential(weights, 2)
    seen, counts = np.unique(slots // 2, axis=0, return_counts=True)
    shares = {tuple(order): count / NUM_KEYS for order, count in zip(seen.tolist(), counts, strict=True)}
    assert set(shares) == set(expected)
    for order, p in expected.items():  # binomial: 5 standard deviations, 20 orders: false alarm < 20 * 6e-7
        assert abs(shares[order] - p) < 5 * np.sqrt(p * (1 - p) / NUM_KEYS), order


def test_a_draw_does_not_depend_on_the_other_shards(monkeypatch):
    monkeypatch.setattr(draws, "MIN_CANDIDATES", 3)
    monkeypatch.setattr(draws, "CANDIDATES_PER_DRAW", 1)
    keys = jax.random.split(jax.random.key(1), 12)

    @jax.jit
    def run(keys):
        length = jnp.full(len(keys), 9)
        return draws.draw(keys, lambda p: p, length, lambda s: jnp.ones(s.shape), num=3, max_length=9)

    together = np.asarray(run(keys)[0])
    others = jax.random.split(jax.random.key(2), 12)
    for shard in range(12):
        among_others = run(others.at[shard].set(keys[shard]))[0]
        np.testing.assert_array_equal(among_others[shard], together[shard])
    assert len({tuple(row) for row in together.tolist()}) > 6


def test_what_is_taken_or_has_no_weight_or_lies_outside_is_not_drawn_and_the_lack_is_marked():
    # 1000 positions, 600 of them filled, of which 590 have weight 0 and two are taken: 8 are left for 10 draws.
    weights = np.zeros(1000)
    weights[50:60] = weights[700:] = 1
    taken = (jnp.full((3, 3), 101), jnp.ones((3, 3), bool))
    taken = (taken[0].at[:, 1].set(103).at[:, 2].set(105), taken[1].at[:, 2].set(False))
    slots, is_drawn = draw_many(weights, 600, num=10, max_length=1000, num_keys=3, taken=taken)
    assert is_drawn.sum(axis=1).tolist() == [8, 8, 8]
    for row, real in zip(slots, is_drawn, strict=True):
        assert real[:8].all() and set(row[real].tolist()) == {2 * p + 1 for p in range(52, 60)}


def test_a_long_ring_is_drawn_from_without_being_sorted():
    # 16 draws from 10^6 equal slots: the branch that sorts them would be taken with probability below 1e-60, and no
    # array of that size exists outside of it.
    def run(keys):
        return draws.draw(keys, lambda p: p, jnp.array([10**6]), lambda s: jnp.ones(s.shape), num=16, max_length=10**6)

    def sizes(jaxpr, inside=True):
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars)
            if eqn.primitive.name != "cond":
                for sub in jaxprs_in_params(eqn.params):
                    yield from sizes(sub)

    keys = jax.random.split(jax.random.key(0), 1)
    assert max(sizes(jax.make_jaxpr(run)(keys).jaxpr)) < 10**4
    slots, is_drawn = jax.jit(run)(keys)
    assert is_drawn.all() and len(set(np.asarray(slots)[0].tolist())) == 16


def test_a_chain_takes_the_second_where_the_first_ends():
    first = (jnp.array([[4, 5, 0], [7, 0, 0]]), jnp.array([[True, True, False], [True, False, False]]))
    second = (jnp.array([[1, 2, 3], [8, 9, 0]]), jnp.array([[True, True, True], [True, False, False]]))
    slots, is_drawn = jax.jit(draws.chain)(first, second)
    np.testing.assert_array_equal(jnp.where(is_drawn, slots, 0), [[4, 5, 1], [7, 8, 0]])
    np.testing.assert_array_equal(is_drawn, [[True, True, True], [True, True, False]])
