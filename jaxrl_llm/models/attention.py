"""Grouped-query attention of new tokens to themselves, to their group's prompt and to their row's cache.

A query attends to up to three pieces. Each piece has its own matmuls, and the softmax sums merge the pieces:

    the prompt of its group      keys and values are stored and read once for all rows of the group
    the cache of its row         tokens decoded earlier; only the blocks with live tokens are read
    the new tokens               causally, or by the rule of packed lines or of whole groups

All three callers use the same arithmetic, so that sampler and learner agree:

    learner        new tokens alone, or new tokens after a shared prompt
    prefill        new tokens alone
    decode step    all three pieces, with one new token

Rows are right-padded. Padding comes after all real queries of a row, so causal attention never includes it.

Letters: B rows, P prompts, G rows of a group, T new tokens, L prompt width, C cache width, N query heads, K key heads,
R = N/K, X = R*T queries of a key head, H head size, M data shards, W places of a block.
Does not know: parameters, where prompts and caches come from.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.models.kernels import learner as kernels

# Replaces minus infinity, because all keys of a piece may be hidden and inf - inf is nan.
HIDDEN = -1e30
BLOCK_PLACES = 64  # the smallest cache block for which the branch that skips it pays off on a CPU

# Sum of e^(score - max) * value, sum of e^(score - max), and max, over the keys of a piece.
Piece = tuple[jax.Array, jax.Array, jax.Array]


@flax.struct.dataclass
class Prompt:
    """Rotated keys and values of prompts: by layer outside the blocks, of one layer inside a block.

    Without ``member`` the batch is P groups of G consecutive rows.
    """

    keys: jax.Array  # [P,K,L,H]
    values: jax.Array  # [P,K,L,H]
    visible: jax.Array  # [P,L] bool
    member: jax.Array | None = None  # [M,P/M*G] i32 row in the shard of each prompt's g-th member; unused: any row
    place: jax.Array | None = None  # [M,B/M] i32 inverse of ``member``: each row's place in its shard's groups


@flax.struct.dataclass
class Groups:
    """Visibility rule for rows that each hold a whole group: one prompt, then G completions, each padded to full width.

    The tokens of a completion attend to the prompt and to the same completion, as if it directly followed the prompt.
    """

    prompt_length: jax.Array  # [B] i32
    prompt_width: int = flax.struct.field(pytree_node=False)  # L
    size: int = flax.struct.field(pytree_node=False)  # G


@flax.struct.dataclass
class Cache:
    """Rotated keys and values of each row's earlier tokens: by layer outside the blocks, of one layer inside a block.

    The cache is a ring buffer. The tokens of a row are contiguous, and the newest token is just before ``end``. The
    other positions must hold finite numbers, because attention multiplies them by zero.
    """

    keys: tuple[jax.Array, ...]  # blocks of [B,K,H,W]; for the TPU kernel, one block [B,K,C,H] (``block_shapes``)
    values: tuple[jax.Array, ...]  # blocks of [B,K,W,H]
    length: jax.Array  # [B] i32 number of tokens to attend to
    end: jax.Array  # [] i32 position after the newest token, the same for all rows


def attend(
    q_BTNH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    *,
    prompt: Prompt | None = None,
    visible: jax.Array | Groups | None = None,
    window: int = 0,
    positions: jax.Array | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Return softmax attention. Scores and softmax are float32.

    Args:
        q_BTNH: queries, rotated.
        k_BKTH, v_BKTH: keys (rotated) and values of the same T new tokens.
        prompt: the prompts' keys and values of this layer.
        visible: the new tokens that each new token attends to; None = causal. Otherwise [B,T,T] bool (ops.packing),
            the result of ``kernels.of_lines``, or the rule of whole groups.
        window: a token attends to itself and the ``window - 1`` tokens before it; 0 = to all tokens before it.
            Ignored if ``visible`` is a mask: the mask already includes the window.
        positions: [B,T] i32 in the row; required by a window.
        sinks: [N] one more score per head in the softmax, without a value. The kernels do not support sinks.
        implementation: "xla" (this module), or a kernel of ``kernels.choose``.

    Returns:
        [B,T,N,H] in the dtype of the queries.
    """
    if isinstance(visible, Groups):
        return _attend_groups(q_BTNH, k_BKTH, v_BKTH, visible, window, positions, sinks, implementation)
    B, T, N, H = q_BTNH.shape
    is_mask = not (visible is None or isinstance(visible, kernels.Units))
    if is_mask or window >= T + (0 if prompt is None else prompt.keys.shape[2]):
        window = 0
    if implementation != "xla":
        assert sinks is None, "kernels.choose"
        return kernels.attend(q_BTNH, k_BKTH, v_BKTH, prompt, visible, implementation, window or None)
    K = k_BKTH.shape[1]
    q = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, N // K * T, H)
    pieces = [_attend_new(q, k_BKTH, v_BKTH, visible, window)]
    if prompt is not None:
        pieces.append(_attend_prompt(q, prompt, window, positions))
    pieces += _attend_sinks(q, sinks)
    out = _merge(pieces).astype(q_BTNH.dtype)
    return out.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def attend_next(q_B1NH, k_BK1H, v_BK1H, *, prompt, cache, window=0, positions=None, sinks=None, implementation="xla"):
    """Return attention of one new token per row, and write the token into the cache.

    Args:
        q_B1NH, k_BK1H, v_BK1H, window, positions, sinks: as in ``attend``.
        prompt, cache: the ``Prompt`` and the ``Cache`` of this layer.

    Returns:
        [B,1,N,H] in the dtype of the queries, and the cache's keys and values with the new token at ``cache.end``.
    """
    B, _, N, H = q_B1NH.shape
    q = (q_B1NH * H**-0.5).reshape(B, k_BK1H.shape[1], -1, H)
    places = sum(x.shape[2] for x in cache.values)
    window = window if window < places + prompt.keys.shape[2] else 0
    of_prompt = _attend_prompt(q, prompt, window, positions)
    length = jnp.minimum(cache.length, window - 1) if window else cache.length
    cache = cache.replace(length=length, end=cache.end % places)
    if implementation == "splash":
        out, keys, values = kernels.decode(q, k_BK1H, v_BK1H, of_prompt, cache)
        return out.reshape(B, 1, N, H), ((keys,), (values,))
    pieces = [_attend_new(q, k_BK1H, v_BK1H), of_prompt, *_attend_cache(q, cache), *_attend_sinks(q, sinks)]
    out = _merge(pieces).astype(q.dtype)

    # All rows write to the same position, so no scatter is needed. The written values depend on the attention output.
    # XLA therefore writes the caches after it reads them, in place; otherwise it would copy them. Values
    # that are not finite, or whose output is nan, are written as zeros, so that the cache stays finite.
    def put(blocks, new_BK1H, axis):
        W = blocks[0].shape[axis]
        new = jnp.moveaxis(jnp.where(jnp.isfinite(new_BK1H) & ~jnp.isnan(out[:, :, :1]), new_BK1H, 0), 2, axis)

        def into(i, x):
            place = jnp.clip(cache.end - i * W, 0, W - 1)
            old = jax.lax.dynamic_slice_in_dim(x, place, 1, axis)
            token = new if len(blocks) == 1 else jnp.where(cache.end // W == i, new, old)
            return jax.lax.dynamic_update_slice_in_dim(x, token, place, axis)

        return tuple(into(i, x) for i, x in enumerate(blocks))

    return out.reshape(B, 1, N, H), (put(cache.keys, k_BK1H, 3), put(cache.values, v_BK1H, 2))


def _attend_groups(q_BTNH, k_BKTH, v_BKTH, groups: Groups, window, positions, sinks, implementation: str) -> jax.Array:
    L = groups.prompt_width
    keys, values = k_BKTH[:, :, :L], v_BKTH[:, :, :L]
    how = {"window": window, "sinks": sinks, "implementation": implementation}
    of_prompt = attend(q_BTNH[:, :L], keys, values, **how)

    def rows(x):  # [B,K,G*C,H] -> [B*G,K,C,H]
        B, K, _, H = x.shape
        return x.reshape(B, K, groups.size, -1, H).swapaxes(1, 2).reshape(B * groups.size, K, -1, H)

    # Split and join queries with heads before tokens, like keys. Otherwise a TPU moves them twice.
    of_completions = attend(
        rows(q_BTNH[:, L:].swapaxes(1, 2)).swapaxes(1, 2),
        rows(k_BKTH[:, :, L:]),
        rows(v_BKTH[:, :, L:]),
        prompt=Prompt(keys, values, visible=jnp.arange(L)[None, :] < groups.prompt_length[:, None]),
        positions=positions[:, L:].reshape(len(positions) * groups.size, -1) if window else None,
        **how,
    )
    B, _, N, H = q_BTNH.shape
    out_BNGCH = of_completions.reshape(B, groups.size, -1, N, H).transpose(0, 3, 1, 2, 4)
    return jnp.concatenate([of_prompt, out_BNGCH.reshape(B, N, -1, H).swapaxes(1, 2)], axis=1)


def _merge(pieces) -> jax.Array:
    """Return the softmax attention over the keys of all pieces.

    Each piece is (sum of e^(score - max) * value, sum of e^(score - max), max) over its keys.
    """
    if len(pieces) == 1:
        out, total, _ = pieces[0]
        return out / total[..., None]
    top = pieces[0][2]
    for _, _, peak in pieces[1:]:
        top = jnp.maximum(top, peak)
    scale = [jnp.exp(peak - top) for _, _, peak in pieces]
    out = sum(x * w[..., None] for (x, _, _), w in zip(pieces, scale, strict=True))
    return out / sum(t * w for (_, t, _), w in zip(pieces, scale, strict=True))[..., None]


def _attend_keys(q_BKXH, keys_BKSH, values_BKSH, visible):
    """Return a piece (see ``_merge``): attention to the visible ones of S keys, computed by matmuls."""
    scores = jnp.einsum("BKXH,BKSH->BKXS", q_BKXH, keys_BKSH, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores, HIDDEN)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - peak[..., None])
    out = jnp.einsum("BKXS,BKSH->BKXH", weights.astype(values_BKSH.dtype), values_BKSH)
    return out, jnp.sum(weights, axis=-1), peak


def _attend_new(q_BKXH, k_BKTH, v_BKTH, visible=None, window=0):
    T, X = k_BKTH.shape[2], q_BKXH.shape[2]
    if T == 1:  # a token attends to itself
        scores = jnp.sum(q_BKXH.astype(jnp.float32) * k_BKTH.astype(jnp.float32), axis=-1)
        return jnp.broadcast_to(v_BKTH, q_BKXH.shape), jnp.ones_like(scores), scores
    if visible is None:
        visible = jnp.tril(jnp.ones((T, T), bool))[None]
        visible &= ~jnp.tril(visible, -window) if window else True
    by_token = lambda x_BKX: x_BKX.reshape(*x_BKX.shape[:2], X // T, -1, *x_BKX.shape[3:])
    q, pieces, size = by_token(q_BKXH), [], -(-T // query_blocks(T))
    for start in range(0, T, size):
        stop = min(start + size, T)  # no query of this block attends to keys from ``stop`` on
        first = max(0, start + 1 - window) if window else 0
        block = q[:, :, :, start:stop].reshape(*q_BKXH.shape[:2], -1, q_BKXH.shape[-1])
        seen = jnp.tile(visible[:, start:stop, first:stop], (1, X // T, 1))[:, None]
        keys, values = k_BKTH[:, :, first:stop], v_BKTH[:, :, first:stop]
        pieces.append([by_token(x) for x in _attend_keys(block, keys, values, seen)])
    whole = [jnp.concatenate(blocks, axis=3) for blocks in zip(*pieces, strict=True)]
    return tuple(x.reshape(*x.shape[:2], X, *x.shape[4:]) for x in whole)


def query_blocks(T: int) -> int:
    """Return the number of blocks for T queries. A block computes no scores for keys after its last query."""
    return min(4, -(-T // 192))  # one block computes twice as many scores as causal attention needs


def _attend_prompt(q_BKXH, prompt: Prompt, window, positions_BT):
    B, _, X, _ = q_BKXH.shape
    P, _, L, _ = prompt.keys.shape

    def to_prompts(x):  # [B,K,X,H] -> [P,K,G*X,H]
        _, K, X, H = x.shape
        if prompt.member is not None:  # rows to groups, inside each shard
            M = prompt.member.shape[0]
            x = jax.vmap(lambda rows, member: rows[member])(x.reshape(M, B // M, K, X, H), prompt.member)
        return x.reshape(P, -1, K, X, H).swapaxes(1, 2).reshape(P, K, -1, H)

    visible = prompt.visible[:, None, None, :]
    if window:
        at = to_prompts(jnp.tile(positions_BT, (1, X // positions_BT.shape[1]))[:, None, :, None])
        visible = visible & (at - jnp.arange(L)[None, None, None, :] < window)
    values = jnp.where(prompt.visible[:, None, :, None], prompt.values, 0)  # 0 * nan is nan
    out, total, peak = _attend_keys(to_prompts(q_BKXH), prompt.keys, values, visible)

    def to_rows(x):  # [P,K,G*X,...] -> [B,K,X,...]
        x = x.reshape(P, x.shape[1], -1, X, *x.shape[3:]).swapaxes(1, 2)
        if prompt.member is None:
            return x.reshape(B, *x.shape[2:])
        x = x.reshape(prompt.member.shape[0], -1, *x.shape[2:])
        return jax.vmap(lambda groups, place: groups[place])(x, prompt.place).reshape(B, *x.shape[2:])

    return to_rows(out), to_rows(total), to_rows(peak)


def _attend_cache(q_BKXH, cache: Cache):
    """Return one piece (see ``_merge``) per cache block. Blocks without visible tokens are not read."""
    count, W = len(cache.values), cache.values[0].shape[2]
    age = (cache.end - 1 - jnp.arange(count * W)) % (count * W)
    visible = (age[None, :] < cache.length[:, None]).reshape(-1, 1, 1, count, W)

    def read(i):
        return _attend_keys(q_BKXH, cache.keys[i].swapaxes(2, 3), cache.values[i], visible[:, :, :, i])

    if count == 1:
        return [read(0)]
    nothing = (jnp.zeros_like(q_BKXH), *(jnp.full(q_BKXH.shape[:3], x) for x in (0.0, HIDDEN)))
    return [jax.lax.cond(jnp.any(visible[:, :, :, i]), lambda i=i: read(i), lambda: nothing) for i in range(count)]


def _attend_sinks(q_BKXH: jax.Array, sinks_N: jax.Array | None) -> list[Piece]:
    """Return one piece (see ``_merge``) with one score per head and no value, or no piece without sinks."""
    if sinks_N is None:
        return []
    B, K, X, _ = q_BKXH.shape
    score_BKX = jnp.repeat(sinks_N.astype(jnp.float32).reshape(1, K, -1), X * K // sinks_N.size, axis=2)
    score_BKX = jnp.broadcast_to(score_BKX, (B, K, X))
    return [(jnp.zeros_like(q_BKXH), jnp.ones_like(score_BKX), score_BKX)]


def block_shapes(tokens: int, head_size: int, implementation: str) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Return the number of blocks of a cache for ``tokens``, and the last two dimensions of its keys and values.

    - "xla": up to four blocks, each a separate array, because XLA would copy the parts that it reads of one array.
      Keys have tokens as the innermost dimension, which suits matmuls on a CPU.
    - "cudnn": one block, which is read without a branch.
    - "splash": one block; keys have the head size as the innermost dimension.
    """
    if implementation == "splash":
        return 1, *[(kernels.cache_length(tokens), head_size)] * 2
    count = 1 if implementation == "cudnn" else min(4, -(-tokens // BLOCK_PLACES))
    width = -(-tokens // (8 * count)) * 8
    return count, (head_size, width), (width, head_size)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply the rotary embedding to the two halves of each head, in Hugging Face's convention.

    If the tables are shorter than half a head, only the first dimensions of the head are rotated.
    """
    turned = 2 * cos.shape[-1]
    if turned < x_BTNH.shape[-1]:
        return jnp.concatenate([rotate(x_BTNH[..., :turned], cos, sin), x_BTNH[..., turned:]], axis=-1)
    halves = x_BTNH.astype(jnp.float32).reshape(*x_BTNH.shape[:-1], 2, -1)
    cos, sin = cos[:, :, None, None, :], jnp.stack([-sin, sin], axis=2)[:, :, None]
    rotated = (halves * cos + halves[..., ::-1, :] * sin).reshape(x_BTNH.shape)  # no split: a TPU would pad each half
    return rotated.astype(x_BTNH.dtype)
