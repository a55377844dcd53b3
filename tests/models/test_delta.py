"""The gated delta rule: chunks, packed lines, groups and steps give the results of its recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import delta as reference

from jaxrl_llm.models import delta_rule
from jaxrl_llm.models.architecture import Delta
from jaxrl_llm.planning.counting import count

B, N, H, V = 2, 3, 6, 5
chunked = jax.jit(delta_rule.chunked)


def inputs(tokens, seed=0, rows=B):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(rows, tokens, N, H)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(rows, tokens, N, V))
    g = -np.exp(rng.normal(size=(rows, tokens, N), scale=2.0) - 2)
    b = 1 / (1 + np.exp(-rng.normal(size=(rows, tokens, N))))
    return [x.astype(np.float32) for x in (q, k, v, g, b)]


def zeros(rows=B):
    return np.zeros((rows, N, H, V), np.float32)


def recurrent(q, k, v, g, b, state):
    """Return outputs [B,T,N,V] and states, each head of each row computed separately."""
    out, after = np.zeros((*q.shape[:3], V)), np.zeros_like(state, np.float64)
    for r in range(len(q)):
        for n in range(N):
            of = (x[r, :, n] for x in (q, k, v, g, b))
            out[r, :, n], after[r, n] = reference.rule(*of, state[r, n])
    return out, after


def test_a_step_convolves_as_rows_do_in_bfloat16():
    """bfloat16 sums depend on their order, which would change outputs by 0.004 here."""
    d, rng, tokens = Delta(2, 4, 8, 6, 4, is_grouped=True), np.random.default_rng(0), 7
    mixed = jnp.asarray(rng.normal(size=(B, tokens, d.channels)), jnp.bfloat16)
    g, b = -rng.random((B, tokens, 4), np.float32), rng.random((B, tokens, 4), np.float32)
    how = {"weight": jnp.asarray(rng.normal(size=(d.channels, 4)), jnp.bfloat16), "d": d}
    rows, *_ = jax.jit(functools.partial(delta_rule._rows, **how))(mixed, g, b)
    states, steps, step = (
        delta_rule.empty_states(d, B, jnp.bfloat16),
        [],
        jax.jit(functools.partial(delta_rule._step, **how)),
    )
    for t in range(tokens):
        out, *states = step(*(x[:, t : t + 1] for x in (mixed, g, b)), *states)
        steps.append(out)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), rows, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 64, 65, 200])
def test_chunks_are_the_recurrence(tokens):
    args = inputs(tokens)
    state = np.random.default_rng(1).normal(size=(B, N, H, V)).astype(np.float32)
    out, after = chunked(*args, state)
    expected, expected_after = recurrent(*args, state)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(after[:, 0], expected_after, atol=2e-5)


def test_keys_all_alike_that_are_corrected_whole_stay_exact():
    q, k, v, g, b = inputs(200)
    k, g, b = np.broadcast_to(k[:, :1], k.shape), np.zeros_like(g), np.ones_like(b)
    out, _ = chunked(q, k, v, g, b, zeros())
    np.testing.assert_allclose(out, recurrent(q, k, v, g, b, zeros())[0], atol=2e-5)


# Of each line its units, each a prompt's length and its rows'; what is left is empty.
LINES = [
    [(70, (3, 5, 90)), (2, (1, 0, 2)), (1, (40, 30, 20))],
    [(30, (34, 1, 63)), (64, (64, 64, 10)), (3, (2, 2, 2))],
]
WIDTH = 350


def lines():
    unit, row = (np.zeros((len(LINES), WIDTH), np.int32) for _ in range(2))
    for n, units in enumerate(LINES):
        at, number = 0, 0
        for u, (prompt, rows) in enumerate(units, start=1):
            for r, length in enumerate((prompt, *rows)):
                place = slice(at, at + length)
                number += r > 0
                unit[n, place], row[n, place] = u, number * (r > 0)
                at += length
    return unit, row


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_a_token_of_a_line_has_its_own_past_alone(shares_prompts):
    args = inputs(WIDTH)
    unit, row = lines()
    if not shares_prompts:
        row = np.zeros_like(row)
    out, _ = chunked(*args, zeros(), unit, row if shares_prompts else None)
    ends = [t for t in range(WIDTH) if t % 13 == 0 or unit[0, t] != unit[0, max(t - 1, 0)]]
    for n in range(B):
        for t in ends:
            past = reference.path(unit[n], row[n], t)
            for head in range(N):
                of = [x[n, past, head] for x in args]
                expected, _ = reference.rule(*of, np.zeros((H, V)))
                np.testing.assert_allclose(out[n, t, head], expected[-1], atol=2e-5, err_msg=f"{n} {t}")


def test_plan_counts_the_rule_s_matmuls():
    """Computed by hand for a head's chunk:

    sums of decays, keys and queries by keys, the inverse, its products, the states.
    """
    n, W = 4, 64
    shapes = *3 * ((B, n * W, N, H),), *2 * ((B, n * W, N),), (B, N, H, H)
    program = chunked.lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    inverse = sum(W // (2 * size) * 2 * 2 * size**3 for size in (1, 2, 4, 8, 16, 32))
    of_chunk = 2 * W**3 + 2 * (2 * W * W * H) + inverse + 2 * W * W * (2 * H) + 3 * (2 * W * H * H) + 2 * W * W * H
    # The inverse begins with products of single numbers, which are no matmul.
    assert count(program.as_text()).total("flops") == pytest.approx(B * N * n * of_chunk, rel=1e-3)


def test_the_gradient_of_chunks_is_that_of_the_recurrence():
    args = inputs(130, rows=1)
    direction = np.random.default_rng(3).normal(size=(1, 130, N, V)).astype(np.float32)

    def steps(q, k, v, g, b):
        def step(state, x):
            q, k, v, g, b = x
            state = jnp.exp(g)[:, None, None] * state
            error = v - jnp.einsum("NHV,NH->NV", state, k)
            state += (b[:, None] * k)[:, :, None] * error[:, None]
            return state, jnp.einsum("NHV,NH->NV", state, q)

        return jax.lax.scan(step, jnp.zeros((N, H, V)), [x[0] for x in (q, k, v, g, b)])[1][None]

    of = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(f(*x) * direction), argnums=(0, 1, 2, 3, 4)))(*args)
    for one, other in zip(of(lambda *x: delta_rule.chunked(*x, zeros(1))[0]), of(steps), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
