import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import losses as oracle
from support.building import algorithm_config
from support.refusal import refused

from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, CROSS_ENTROPIES
from jaxrl_llm.algorithms.inputs import Batch


def weights(mask, trainable, group_id, *, kind, max_completion_tokens):
    """Return the weights of rows for which the aggregation reads no other field."""
    return compiled(kind, max_completion_tokens)(*map(jnp.asarray, (mask, trainable, group_id)))


@functools.cache
def compiled(kind, max_completion_tokens):
    aggregation = algorithm_config(aggregation=kind).aggregation

    def call(mask, trainable, group_id):
        unread = dict.fromkeys(("correct", "prompt_length", "length"))
        sizes = {"width": mask.shape[1], "max_length": max_completion_tokens}
        return aggregation(mask, Batch(trainable=trainable, group_id=group_id, **unread, **sizes))

    return jax.jit(call)


def test_aggregation_by_hand():
    # Row 0: tokens 1, 2, 3. Row 1: token 10. Row 2 is not trainable; row 3 has no token.
    term = jnp.array([[1.0, 2.0, 3.0, 9.0], [10.0, 9.0, 9.0, 9.0], [9.0] * 4, [9.0] * 4])
    mask = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    trainable = jnp.array([True, True, False, True])
    group_id = jnp.array([7, 7, 7, 3])
    # 16 / 4 tokens; (6/3 + 10/1) / 2 rows; 16 / (2 rows * 4 tokens); one prompt of 4 tokens.
    expectations = {"token_mean": 4.0, "sequence_mean": 6.0, "constant_length": 2.0, "prompt_mean": 4.0}
    assert set(expectations) == set(AGGREGATIONS)
    for kind, expected in expectations.items():
        weight = weights(mask, trainable, group_id, kind=kind, max_completion_tokens=4)
        np.testing.assert_allclose(jnp.sum(weight * term), expected, rtol=1e-6)
        assert (np.asarray(weight)[~np.asarray(mask & trainable[:, None])] == 0).all()
    # Two prompts: (6/3 + 10/1) / 2.
    weight = weights(mask, trainable, jnp.array([7, 3, 7, 3]), kind="prompt_mean", max_completion_tokens=4)
    np.testing.assert_allclose(jnp.sum(weight * term), 6.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["answers", "environment"])
def test_what_an_environment_wrote_is_a_mean_over_all_rows(name):
    # Of 4 trainable rows two have something to predict, 2 tokens and 1; the last is not trainable.
    prompt_length, length = jnp.array([3, 2, 1, 1, 3]), jnp.array([5, 4, 3, 2, 5])
    sampled = jnp.array([[0, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0] * 5], bool)
    batch = Batch(jnp.arange(5) < 4, jnp.zeros(5, int), jnp.zeros(5, bool), prompt_length, length, 5, 5, sampled)
    expected = {
        "answers": [[0, 0, 0, 1 / 8, 1 / 8], [0, 0, 1 / 4, 0, 0], [0] * 5, [0] * 5, [0] * 5],
        "environment": [[0, 1 / 8, 1 / 8, 0, 0], [0, 1 / 4, 0, 0, 0], [0] * 5, [0] * 5, [0] * 5],
    }
    np.testing.assert_allclose(CROSS_ENTROPIES[name](batch), expected[name], rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(AGGREGATIONS))
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


@pytest.mark.parametrize("kind", sorted(AGGREGATIONS))
def test_a_batch_without_a_trainable_token_has_zero_weights(kind):
    for mask, trainable in ((jnp.zeros((3, 4), bool), jnp.ones(3, bool)), (jnp.ones((3, 4), bool), jnp.zeros(3, bool))):
        weight = weights(mask, trainable, jnp.arange(3), kind=kind, max_completion_tokens=4)
        np.testing.assert_array_equal(weight, np.zeros((3, 4)))


def test_unknown_kinds_are_named():
    with refused("aggregation", "mean", "'token_mean'", "'sequence_mean'"):
        algorithm_config(aggregation="mean")
