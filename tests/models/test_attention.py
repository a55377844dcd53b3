"""Attention over a shared prompt, a row's cache and new tokens equals softmax attention over all of their keys."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention as oracle

from jaxrl_llm.models.attention import Cache, Groups, Prompt, attend, attend_next, block_shapes, query_blocks

H, K = 4, 2


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def expected(q, new_k, new_v, before):
    """Return [B,T,N,H] computed by loops; ``before(b)`` returns a row's earlier keys and values, each [K,S,H]."""
    B, T, N, _ = q.shape
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(B, T, N):
        k = n // (N // K)
        keys, values = before(b)
        keys = np.concatenate([keys[k], new_k[b, k, : t + 1]])
        values = np.concatenate([values[k], new_v[b, k, : t + 1]])
        out[b, t, n] = oracle.attend(q[b, t, n], keys, values)
    return out


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31), groups=st.integers(1, 3), size=st.integers(1, 4), T=st.integers(1, 5))
def test_rows_of_groups_attend_to_their_prompt_and_causally_to_themselves(seed, groups, size, T):
    rng = np.random.default_rng(seed)
    L, N, B = int(rng.integers(1, 7)), K * int(rng.integers(1, 4)), groups * size
    q, k, v = normal(rng, B, T, N, H), normal(rng, B, K, T, H), normal(rng, B, K, T, H)
    length = rng.integers(1, L + 1, groups)
    keys, values = normal(rng, groups, K, L, H), normal(rng, groups, K, L, H)
    truth = expected(
        q, k, v, lambda b: (keys[b // size, :, : length[b // size]], values[b // size, :, : length[b // size]])
    )
    hidden = np.arange(L)[None, :] >= length[:, None]
    keys[hidden[:, None].repeat(K, 1)] = np.nan
    values[hidden[:, None].repeat(K, 1)] = np.nan
    out = jax.jit(attend)(q, k, v, prompt=Prompt(keys, values, visible=~hidden))
    np.testing.assert_allclose(out, truth, atol=2e-6)


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**31), groups=st.integers(1, 3), size=st.integers(1, 4))
def test_a_row_that_is_a_whole_group_is_its_rows_behind_their_prompt_gradients_included(seed, groups, size):
    rng = np.random.default_rng(seed)
    L, C, N = int(rng.integers(1, 7)), int(rng.integers(1, 5)), K * int(rng.integers(1, 4))
    T, length = L + size * C, rng.integers(1, L + 1, groups)
    q, k, v = normal(rng, groups, T, N, H), normal(rng, groups, K, T, H), normal(rng, groups, K, T, H)
    # What stands past a prompt means nothing: neither the completions see it nor the prompt.
    at = np.arange(T)[None, :]
    padding = (at >= length[:, None]) & (at < L)
    k, v = (np.where(padding[:, None, :, None], 1e4, x).astype(np.float32) for x in (k, v))

    def seen(p, t):
        """Return the positions to which token t of row p attends:

        in its prompt up to itself, or the prompt and its completion.
        """
        own = (t - L) // C
        return [j for j in range(t + 1) if j < min(L, length[p]) or (t >= L and j >= L and (j - L) // C == own)]

    truth = np.zeros(q.shape)
    for p, t, n in np.ndindex(groups, T, N):
        kept = seen(p, t)
        truth[p, t, n] = oracle.attend(q[p, t, n], k[p, n // (N // K)][kept], v[p, n // (N // K)][kept])
    rule = Groups(jax.numpy.asarray(length), prompt_width=L, size=size)
    out = np.asarray(jax.jit(attend)(q, k, v, visible=rule))
    real = ~padding
    np.testing.assert_allclose(out[real], truth[real], atol=2e-6)

    mask = np.zeros((groups, T, T), bool)
    for p, t in np.ndindex(groups, T):
        mask[p, t, seen(p, t)] = True
    weight = np.where(real[..., None, None], normal(rng, *q.shape), 0)
    loss = lambda rule: lambda *qkv: (weight * attend(*qkv, visible=rule)).sum()
    by_rule, by_mask = (jax.jit(jax.grad(loss(x), (0, 1, 2)))(q, k, v) for x in (rule, mask))
    for a, b in zip(by_rule, by_mask, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31), T=st.integers(150, 800), masked=st.booleans())
def test_many_new_tokens_are_attended_block_by_block_and_nothing_changes_gradients_included(seed, T, masked):
    rng = np.random.default_rng(seed)
    N = K * int(rng.integers(1, 4))
    q, k, v, grad_out = (normal(rng, 1, *shape, H) for shape in ((T, N), (K, T), (K, T), (T, N)))
    seen = np.tril(rng.random((T, T)) < 0.2) | np.eye(T, dtype=bool) if masked else np.tril(np.ones((T, T), bool))
    truth, gradients = oracle.attend_whole(q[0], k[0], v[0], seen, grad_out[0])
    out, pull = jax.vjp(jax.jit(lambda *qkv: attend(*qkv, visible=seen[None] if masked else None)), q, k, v)
    np.testing.assert_allclose(out[0], truth, atol=4e-6)
    for ours, theirs in zip(pull(grad_out), gradients, strict=True):
        np.testing.assert_allclose(ours[0], theirs, atol=1e-5)


def test_long_lines_are_attended_in_up_to_four_blocks():
    assert [query_blocks(T) for T in (2, 192, 193, 432, 577, 4096)] == [1, 1, 2, 3, 4, 4]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31), shards=st.integers(1, 2))
def test_slots_in_any_order_attend_to_their_groups_prompt_their_cache_and_the_new_token(seed, shards):
    rng = np.random.default_rng(seed)
    entries, size, slots = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 8))
    L, N = int(rng.integers(1, 7)), K * int(rng.integers(1, 4))
    count, W = int(rng.integers(1, 4)), int(rng.choice([1, 7, 16, 128]))
    C = count * W
    Z, P = shards * slots, shards * entries
    q, k, v = normal(rng, Z, 1, N, H), normal(rng, Z, K, 1, H), normal(rng, Z, K, 1, H)
    prompt_length = rng.integers(0, L + 1, P)  # none is visible to a row that starts at a prompt's only token
    live = rng.integers(0, min(C, int(rng.integers(1, C + 1))) + 1, Z)
    prompt_k, prompt_v = normal(rng, P, K, L, H), normal(rng, P, K, L, H)
    cache_k, cache_v = normal(rng, Z, K, C, H), normal(rng, Z, K, C, H)

    # Each shard's slots take some of its rows, each row at most once; the other slots are idle.
    member = np.zeros((shards, entries * size), np.int32)
    place = np.zeros((shards, slots), np.int32)
    busy = np.zeros((shards, slots), bool)
    for m in range(shards):
        rows = rng.permutation(entries * size)[:slots]
        for slot, row in zip(rng.permutation(slots), rows, strict=False):
            member[m, row], place[m, slot], busy[m, slot] = slot, row, True
    entry = (np.arange(shards)[:, None] * entries + place // size).reshape(-1)

    def before(z):
        n, c = prompt_length[entry[z]], live[z]
        keys = np.concatenate([prompt_k[entry[z], :, :n], cache_k[z, :, :c]], axis=1)
        return keys, np.concatenate([prompt_v[entry[z], :, :n], cache_v[z, :, :c]], axis=1)

    truth = expected(q, k, v, before)
    visible = np.arange(L)[None, :] < prompt_length[:, None]
    prompt_k, prompt_v = (np.where(visible[:, None, :, None], x, np.nan) for x in (prompt_k, prompt_v))
    # A row's tokens lie up to a place that is one for all, maybe round the cache's end.
    end = int(rng.integers(0, C))
    token = live[:, None] - 1 - (end - 1 - np.arange(C)[None, :]) % C  # at each place, negative where none is
    lie = lambda x: np.take_along_axis(x, np.maximum(token, 0)[:, None, :, None], axis=2)
    # What is not to be seen weighs nothing, however large.
    cache_k, cache_v = (np.where(token[:, None, :, None] >= 0, lie(x), 1e30) for x in (cache_k, cache_v))
    blocks = lambda x: tuple(np.split(x.astype(np.float32), count, axis=2))
    cache_k, cache_v = tuple(x.swapaxes(2, 3) for x in blocks(cache_k)), blocks(cache_v)
    out, kept = jax.jit(attend_next)(
        q,
        k,
        v,
        prompt=Prompt(prompt_k.astype(np.float32), prompt_v.astype(np.float32), visible, member, place),
        cache=Cache(cache_k, cache_v, live, end),
    )
    busy = busy.reshape(-1)
    np.testing.assert_allclose(np.asarray(out)[busy], truth[busy], atol=2e-6)
    cache_k[end // W][:, :, :, end % W] = k[:, :, 0]
    cache_v[end // W][:, :, end % W] = v[:, :, 0]
    jax.tree.map(np.testing.assert_array_equal, kept, (cache_k, cache_v))


def test_a_row_gone_wrong_shows_it_and_leaves_nothing_to_the_next_in_its_slot():
    rng, wrong = np.random.default_rng(0), np.array([0, np.nan, np.inf, 0], np.float32)[:, None, None, None]
    q, k, v = normal(rng, 4, 1, K, H), normal(rng, 4, K, 1, H), normal(rng, 4, K, 1, H)
    prompt = Prompt(normal(rng, 4, K, 2, H), normal(rng, 4, K, 2, H), np.ones((4, 2), bool))
    blocks = lambda *shape: tuple(normal(rng, 4, K, *shape) for _ in range(2))
    cache = Cache(blocks(H, 8), blocks(8, H), np.full(4, 3, np.int32), np.int32(9))
    step = jax.jit(lambda v: attend_next(q, k, v, prompt=prompt, cache=cache))
    (sound, kept), (out, after) = (step(v + x) for x in (0 * wrong[:1], wrong))
    assert not np.isfinite(out[1:3]).any() and all(np.isfinite(x).all() for x in jax.tree.leaves(after))
    keep = lambda tree: jax.tree.map(lambda x: x[np.array([0, 3])], tree)
    jax.tree.map(np.testing.assert_array_equal, keep((out, after)), keep((sound, kept)))


def test_a_cache_lies_in_up_to_four_blocks_of_at_least_64_places_and_in_one_for_a_kernel():
    blocks = {7: (1, 8), 64: (1, 64), 100: (2, 56), 256: (4, 64), 600: (4, 152)}
    for tokens, (count, width) in blocks.items():
        assert block_shapes(tokens, 16, "xla") == (count, (16, width), (width, 16))
    assert block_shapes(600, 16, "splash") == (1, (640, 16), (640, 16))
    assert block_shapes(600, 16, "cudnn") == (1, (16, 600), (600, 16))


def test_gradients_pass_through_the_pieces():
    """Gradients are compared with central differences of the float64 definition along a random direction."""
    rng = np.random.default_rng(0)
    P, G, L, T, N = 2, 2, 3, 2, 4
    arrays = [normal(rng, P * G, T, N, H), normal(rng, P * G, K, T, H), normal(rng, P * G, K, T, H)]
    arrays += [normal(rng, P, K, L, H), normal(rng, P, K, L, H)]
    weight, direction = normal(rng, P * G, T, N, H), [normal(rng, *x.shape) for x in arrays]

    def loss(q, k, v, keys, values):
        return (attend(q, k, v, prompt=Prompt(keys, values, np.ones((P, L), bool))) * weight).sum()

    def truth(step):
        q, k, v, keys, values = (x.astype(np.float64) + step * d for x, d in zip(arrays, direction, strict=True))
        return (expected(q, k, v, lambda b: (keys[b // G], values[b // G])) * weight).sum()

    gradient = jax.jit(jax.grad(loss, range(5)))(*arrays)
    slope = sum((np.asarray(g) * d).sum() for g, d in zip(gradient, direction, strict=True))
    np.testing.assert_allclose(slope, (truth(1e-5) - truth(-1e-5)) / 2e-5, rtol=1e-5)
