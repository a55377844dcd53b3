import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import sampling as oracle

from jaxrl_llm.ops.filters import Filter
from jaxrl_llm.ops.logp import chunked_logp

B, C, D, V = 2, 5, 3, 7
FILTERS = [
    dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    dict(temperature=0.7, top_k=3, top_p=1.0, min_p=0.0),
    dict(temperature=1.3, top_k=0, top_p=0.8, min_p=0.05),
]


def weighted_sum(hidden, head, target, weights, settings):
    """Return the sum of weight_0 logp + weight_1 entropy over the positions, by loops in float64.

    The target always stays a candidate.
    """
    total = 0.0
    for b, c in np.ndindex(target.shape):
        logits = head @ hidden[b, c]
        kept = oracle.kept_tokens(logits, **settings) | {int(target[b, c])}
        p = oracle.softmax([x / settings["temperature"] if v in kept else -np.inf for v, x in enumerate(logits)])
        entropy = -sum(x * np.log(x) for x in p if x > 0)
        total += weights[0][b, c] * np.log(p[target[b, c]]) + weights[1][b, c] * entropy
    return total


@pytest.mark.parametrize("settings", FILTERS, ids=["plain", "top_k", "top_p_min_p"])
def test_the_written_gradient_of_logp_and_entropy_is_that_of_finite_differences(settings):
    # A chunk of 2 of 5 positions: the last chunk has one to spare.
    draw = np.random.default_rng(3)
    hidden, head = draw.normal(size=(B, C, D)), draw.normal(size=(V, D))
    weights, target = draw.normal(size=(2, B, C)), draw.integers(0, V, (B, C))

    def loss(hidden, head):
        logp, entropy = chunked_logp(hidden, head, jnp.asarray(target, jnp.int32), chunk=2, settings=Filter(**settings))
        return jnp.sum(weights[0].astype(np.float32) * logp + weights[1].astype(np.float32) * entropy)

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(jnp.float32(hidden), jnp.float32(head))
    np.testing.assert_allclose(value, weighted_sum(hidden, head, target, weights, settings), rtol=1e-5)
    for array, gradient in zip((hidden, head), gradients, strict=True):
        expected = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept, step = array[index], 1e-6
            ends = []
            for moved in (kept + step, kept - step):
                array[index] = moved
                ends.append(weighted_sum(hidden, head, target, weights, settings))
            array[index] = kept
            expected[index] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=2e-5)


def test_chunks_past_the_last_target_change_nothing_and_keep_no_copy_of_the_head():
    # Chunks of 2 of 5 positions, of which 3 hold a target: the last chunk is not computed.
    draw = np.random.default_rng(5)
    hidden, head = np.float32(draw.normal(size=(B, C, D))), np.float32(draw.normal(size=(V, D)))
    weights, target = draw.normal(size=(2, B, C)).astype(np.float32), draw.integers(0, V, (B, C)).astype(np.int32)
    weights[:, :, 3:] = 0
    poisoned = hidden.copy()
    poisoned[:, 4:] = np.nan

    def loss(hidden, head, live):
        logp, entropy = chunked_logp(hidden, head, target, chunk=2, live=live, settings=Filter(**FILTERS[0]))
        return jnp.sum(weights[0] * logp + weights[1] * entropy), (logp, entropy)

    of_live = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(hidden, head, jnp.int32(3)).compile()
    (value, both), (g_hidden, g_head) = of_live(poisoned, head, jnp.int32(3))
    (expected, _), (all_hidden, all_head) = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head, None)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(g_hidden, all_hidden, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(g_head, all_head, rtol=1e-6, atol=1e-7)
    assert not g_hidden[:, 4:].any() and not any(x[:, 4:].any() for x in both)
    assert f"f32[{V},{D}]" in of_live.as_text() and f"f32[3,{V},{D}]" not in of_live.as_text()


def test_chunks_add_the_heads_gradient_up_in_float32():
    # 64 positions that predict one token: in bfloat16, of 8 bits, the sum of the chunks' gradients would stop growing.
    hidden, target = jnp.ones((1, 64, 1), jnp.bfloat16), jnp.zeros((1, 64), jnp.int32)
    head = jnp.zeros((3, 1), jnp.float32)
    one_at_a_time = {"chunk": 1, "settings": Filter(**FILTERS[0])}
    gradient = jax.jit(jax.grad(lambda head: jnp.sum(chunked_logp(hidden, head, target, **one_at_a_time)[0])))
    # By hand: each position adds 1 - 1/3, -1/3, -1/3, which a chunk has rounded to bfloat16: 171/256 and -171/512.
    expected = 64 * np.array([[171 / 256], [-171 / 512], [-171 / 512]])
    np.testing.assert_array_equal(gradient(head), expected)
