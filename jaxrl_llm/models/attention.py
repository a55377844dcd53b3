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

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.models.kernels import learner as kernels

# This number replaces minus infinity: all keys of a piece may be masked, and inf - inf would be NaN.
HIDDEN = -1e30
# Inside a block the value is one layer's array, outside the blocks a tuple with one entry per layer. A union type would
# not distinguish the two.
ByLayer = Any
BLOCK_PLACES = 64  # the smallest cache block for which the branch that skips it pays off on a CPU


class Piece(NamedTuple):
    """Attention of queries to some of their keys, as softmax sums. ``_merge`` adds the sums of all pieces."""

    weighted_sum: jax.Array  # [B,K,X,H] sum of e^(score - peak) * value
    total: jax.Array  # [B,K,X] f32 sum of e^(score - peak)
    peak: jax.Array  # [B,K,X] f32 largest score


@flax.struct.dataclass
class Prompt:
    """Rotated keys and values of prompts: by layer outside the blocks, of one layer inside a block.

    Without ``member`` the batch is P groups of G consecutive rows.
    """

    keys: ByLayer  # [P,K,L,H]
    values: ByLayer  # [P,K,L,H]
    visible: jax.Array  # [P,L] bool
    member: jax.Array | None = None  # [M,P/M*G] i32 row in the shard of each prompt's g-th member; unused: any row
    # [M,B/M] i32 inverse of ``member``: index of each row among the members of its shard's groups.
    place: jax.Array | None = None


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

    keys: ByLayer  # blocks of [B,K,H,W]; for the TPU kernel, one block [B,K,C,H] (``block_shapes``)
    values: ByLayer  # blocks of [B,K,W,H]
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
        return _attend_groups(
            q_BTNH,
            k_BKTH,
            v_BKTH,
            visible,
            window,
            positions,
            sinks,
            implementation,
        )
    B, T, N, H = q_BTNH.shape
    K = k_BKTH.shape[1]
    R = N // K
    prompt_width = 0 if prompt is None else prompt.keys.shape[2]
    is_mask = not (visible is None or isinstance(visible, kernels.Units))
    if is_mask or window >= T + prompt_width:
        window = 0
    if implementation != "xla":
        assert sinks is None, "kernels.choose"
        return kernels.attend(q_BTNH, k_BKTH, v_BKTH, prompt, visible, implementation, window or None)
    q_BTKRH = (q_BTNH * H**-0.5).reshape(B, T, K, R, H)
    q_BKRTH = q_BTKRH.transpose(0, 2, 3, 1, 4)
    q = q_BKRTH.reshape(B, K, R * T, H)
    pieces = [_attend_new(q, k_BKTH, v_BKTH, visible, window)]
    if prompt is not None:
        pieces.append(_attend_prompt(q, prompt, window, positions))
    pieces += _attend_sinks(q, sinks)
    out = _merge(pieces).astype(q_BTNH.dtype)
    out_BTKRH = out.reshape(B, K, R, T, H).transpose(0, 3, 1, 2, 4)
    return out_BTKRH.reshape(B, T, N, H)


def attend_next(
    q_B1NH: jax.Array,
    k_BK1H: jax.Array,
    v_BK1H: jax.Array,
    *,
    prompt: Prompt,
    cache: Cache,
    window: int = 0,
    positions: jax.Array | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]]:
    """Return attention of one new token per row, and write the token into the cache.

    Args:
        q_B1NH, k_BK1H, v_BK1H, window, positions, sinks: as in ``attend``.
        prompt, cache: the ``Prompt`` and the ``Cache`` of this layer.

    Returns:
        [B,1,N,H] in the dtype of the queries, and the cache's keys and values with the new token at ``cache.end``.
    """
    B, _, N, H = q_B1NH.shape
    q = (q_B1NH * H**-0.5).reshape(B, k_BK1H.shape[1], -1, H)
    num_places = sum(x.shape[2] for x in cache.values)
    if window >= num_places + prompt.keys.shape[2]:
        window = 0
    prompt_piece = _attend_prompt(q, prompt, window, positions)
    length = jnp.minimum(cache.length, window - 1) if window else cache.length
    cache = dataclasses.replace(cache, length=length, end=cache.end % num_places)
    if implementation == "splash":
        out, keys, values = kernels.decode(q, k_BK1H, v_BK1H, prompt_piece, cache)
        return out.reshape(B, 1, N, H), ((keys,), (values,))
    pieces = [
        _attend_new(q, k_BK1H, v_BK1H),
        prompt_piece,
        *_attend_cache(q, cache),
        *_attend_sinks(q, sinks),
    ]
    out = _merge(pieces).astype(q.dtype)
    # The written values depend on the attention output. XLA therefore writes the caches after it reads them, in place;
    # otherwise it would copy them. Values that are not finite, or whose output is nan, are written as zeros, so that
    # the cache stays finite.
    out_B1NH = out.reshape(B, 1, N, H)
    keys = _put(cache.keys, k_BK1H, out, cache.end, axis=3)
    values = _put(cache.values, v_BK1H, out, cache.end, axis=2)
    return out_B1NH, (keys, values)


def _put(
    blocks: tuple[jax.Array, ...],
    new_BK1H: jax.Array,
    out_BKRH: jax.Array,
    end: jax.Array,
    axis: int,
) -> tuple[jax.Array, ...]:
    """Return cache blocks with one new token per row at position ``end``.

    All rows write to the same position, so no scatter is needed.

    Args:
        out_BKRH: the attention output of the new tokens.
        axis: the axis of a block's positions.
    """
    W = blocks[0].shape[axis]
    is_number = jnp.isfinite(new_BK1H) & ~jnp.isnan(out_BKRH[:, :, :1])
    new_BK1H = jnp.where(is_number, new_BK1H, 0)
    new = jnp.moveaxis(new_BK1H, 2, axis)
    new_blocks = []
    for i, block in enumerate(blocks):
        place = jnp.clip(end - i * W, 0, W - 1)
        old = jax.lax.dynamic_slice_in_dim(block, place, 1, axis)
        token = new if len(blocks) == 1 else jnp.where(end // W == i, new, old)
        new_blocks.append(jax.lax.dynamic_update_slice_in_dim(block, token, place, axis))
    return tuple(new_blocks)


def _attend_groups(
    q_BTNH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    groups: Groups,
    window: int,
    positions: jax.Array | None,
    sinks: jax.Array | None,
    implementation: str,
) -> jax.Array:
    """Return attention of rows that each hold a whole group (``Groups``)."""
    B, _, N, H = q_BTNH.shape
    L = groups.prompt_width
    keys = k_BKTH[:, :, :L]
    values = v_BKTH[:, :, :L]
    prompt_out = attend(
        q_BTNH[:, :L],
        keys,
        values,
        window=window,
        sinks=sinks,
        implementation=implementation,
    )
    completion_positions = None
    if window:
        assert positions is not None, "a window needs positions"
        num_completions = len(positions) * groups.size
        completion_positions = positions[:, L:].reshape(num_completions, -1)
    is_prompt_token = jnp.arange(L)[None, :] < groups.prompt_length[:, None]
    prompt = Prompt(keys, values, visible=is_prompt_token)
    # Split and join queries with heads before tokens, like keys. Otherwise a TPU moves them twice.
    q_BNXH = q_BTNH[:, L:].swapaxes(1, 2)
    completion_out = attend(
        _completions(q_BNXH, groups.size).swapaxes(1, 2),
        _completions(k_BKTH[:, :, L:], groups.size),
        _completions(v_BKTH[:, :, L:], groups.size),
        prompt=prompt,
        positions=completion_positions,
        window=window,
        sinks=sinks,
        implementation=implementation,
    )
    out_BGCNH = completion_out.reshape(B, groups.size, -1, N, H)
    out_BNGCH = out_BGCNH.transpose(0, 3, 1, 2, 4)
    out_BXNH = out_BNGCH.reshape(B, N, -1, H).swapaxes(1, 2)
    return jnp.concatenate([prompt_out, out_BXNH], axis=1)


def _completions(x_BKXH: jax.Array, group_size: int) -> jax.Array:
    """Return [B*G,K,C,H], one row per completion, of [B,K,G*C,H], one row per group."""
    B, K, _, H = x_BKXH.shape
    x_BKGCH = x_BKXH.reshape(B, K, group_size, -1, H)
    x_BGKCH = x_BKGCH.swapaxes(1, 2)
    return x_BGKCH.reshape(B * group_size, K, -1, H)


def _merge(pieces: Sequence[Piece]) -> jax.Array:
    """Return the softmax attention over the keys of all pieces."""
    first = pieces[0]
    if len(pieces) == 1:
        return first.weighted_sum / first.total[..., None]
    peak = first.peak
    for piece in pieces[1:]:
        peak = jnp.maximum(peak, piece.peak)
    scales = [jnp.exp(piece.peak - peak) for piece in pieces]
    scaled_pieces = list(zip(pieces, scales, strict=True))
    weighted_sum = sum(piece.weighted_sum * scale[..., None] for piece, scale in scaled_pieces)
    total = jnp.asarray(sum(piece.total * scale for piece, scale in scaled_pieces))
    return weighted_sum / total[..., None]


def _attend_keys(q_BKXH: jax.Array, keys_BKSH: jax.Array, values_BKSH: jax.Array, visible: jax.Array) -> Piece:
    """Return the piece of the visible keys among S keys, computed by matmuls."""
    scores = jnp.einsum(
        "BKXH,BKSH->BKXS",
        q_BKXH,
        keys_BKSH,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(visible, scores, HIDDEN)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - peak[..., None])
    out = jnp.einsum("BKXS,BKSH->BKXH", weights.astype(values_BKSH.dtype), values_BKSH)
    return Piece(out, jnp.sum(weights, axis=-1), peak)


def _attend_new(
    q_BKXH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    visible: jax.Array | None = None,
    window: int = 0,
) -> Piece:
    """Return the piece of the new tokens' own keys. Queries are computed in blocks (``query_blocks``)."""
    B, K, X, H = q_BKXH.shape
    T = k_BKTH.shape[2]
    R = X // T
    if T == 1:  # a token attends to itself
        q32 = q_BKXH.astype(jnp.float32)
        k32 = k_BKTH.astype(jnp.float32)
        scores = jnp.sum(q32 * k32, axis=-1)
        values = jnp.broadcast_to(v_BKTH, q_BKXH.shape)
        return Piece(values, jnp.ones_like(scores), scores)
    if visible is None:
        visible = jnp.tril(jnp.ones((T, T), bool))[None]
        visible &= ~jnp.tril(visible, -window) if window else True

    def by_token(x_BKX: jax.Array) -> jax.Array:
        return x_BKX.reshape(B, K, R, -1, *x_BKX.shape[3:])

    q_BKRTH = by_token(q_BKXH)
    block_size = -(-T // query_blocks(T))
    blocks = []
    for start in range(0, T, block_size):
        stop = min(start + block_size, T)  # no query of this block attends to keys from ``stop`` on
        first = max(0, start + 1 - window) if window else 0
        queries = q_BKRTH[:, :, :, start:stop].reshape(B, K, -1, H)
        block_visible = jnp.tile(visible[:, start:stop, first:stop], (1, R, 1))
        block_visible = block_visible[:, None]
        keys = k_BKTH[:, :, first:stop]
        values = v_BKTH[:, :, first:stop]
        block = _attend_keys(queries, keys, values, block_visible)
        blocks.append([by_token(x) for x in block])
    parts = [jnp.concatenate(block_parts, axis=3) for block_parts in zip(*blocks, strict=True)]
    return Piece(*(x.reshape(B, K, X, *x.shape[4:]) for x in parts))


def query_blocks(T: int) -> int:
    """Return the number of blocks for T queries. A block computes no scores for keys after its last query."""
    return min(4, -(-T // 192))  # a single block computes twice as many scores as causal attention needs


def _attend_prompt(q_BKXH: jax.Array, prompt: Prompt, window: int, positions_BT: jax.Array | None) -> Piece:
    """Return the piece of the keys of each row's prompt."""
    B, _, X, _ = q_BKXH.shape
    P, _, L, _ = prompt.keys.shape

    def to_prompts(x: jax.Array) -> jax.Array:  # [B,K,X,H] -> [P,K,G*X,H]
        _, K, X, H = x.shape
        if prompt.member is not None:  # rows to groups, inside each shard
            M = prompt.member.shape[0]
            by_shard = x.reshape(M, B // M, K, X, H)
            x = _take_in_shard(by_shard, prompt.member)
        x_PGKXH = x.reshape(P, -1, K, X, H)
        return x_PGKXH.swapaxes(1, 2).reshape(P, K, -1, H)

    visible = prompt.visible[:, None, None, :]
    if window:
        assert positions_BT is not None, "a window needs positions"
        positions_BX = jnp.tile(positions_BT, (1, X // positions_BT.shape[1]))
        query_positions = to_prompts(positions_BX[:, None, :, None])
        age = query_positions - jnp.arange(L)[None, None, None, :]
        visible = visible & (age < window)
    values = jnp.where(prompt.visible[:, None, :, None], prompt.values, 0)  # zeros, because 0 * nan is nan
    piece = _attend_keys(to_prompts(q_BKXH), prompt.keys, values, visible)

    def to_rows(x: jax.Array) -> jax.Array:  # [P,K,G*X,...] -> [B,K,X,...]
        x = x.reshape(P, x.shape[1], -1, X, *x.shape[3:])
        x = x.swapaxes(1, 2)
        if prompt.member is None:
            return x.reshape(B, *x.shape[2:])
        assert prompt.place is not None, "``place`` is the inverse of ``member``"
        num_shards = prompt.member.shape[0]
        by_shard = x.reshape(num_shards, -1, *x.shape[2:])
        rows = _take_in_shard(by_shard, prompt.place)
        return rows.reshape(B, *by_shard.shape[2:])

    return Piece(*(to_rows(x) for x in piece))


@jax.vmap
def _take_in_shard(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows of each shard."""
    return x[index]


def _attend_cache(q_BKXH: jax.Array, cache: Cache) -> list[Piece]:
    """Return one piece per cache block. Blocks without visible tokens are not read."""
    count = len(cache.values)
    W = cache.values[0].shape[2]
    age = (cache.end - 1 - jnp.arange(count * W)) % (count * W)
    is_visible = age[None, :] < cache.length[:, None]
    visible = is_visible.reshape(-1, 1, 1, count, W)

    def read(i: int) -> Piece:
        keys = cache.keys[i].swapaxes(2, 3)
        return _attend_keys(q_BKXH, keys, cache.values[i], visible[:, :, :, i])

    if count == 1:
        return [read(0)]
    query_shape = q_BKXH.shape[:3]
    no_keys = Piece(
        jnp.zeros_like(q_BKXH),
        jnp.full(query_shape, 0.0),
        jnp.full(query_shape, HIDDEN),
    )
    pieces = []
    for i in range(count):
        has_live_tokens = jnp.any(visible[:, :, :, i])
        read_block = functools.partial(read, i)
        pieces.append(jax.lax.cond(has_live_tokens, read_block, lambda: no_keys))
    return pieces


def _attend_sinks(q_BKXH: jax.Array, sinks_N: jax.Array | None) -> list[Piece]:
    """Return one piece with one score per head and no value, or no piece without sinks."""
    if sinks_N is None:
        return []
    B, K, X, _ = q_BKXH.shape
    score_1KR = sinks_N.astype(jnp.float32).reshape(1, K, -1)
    score_BKX = jnp.repeat(score_1KR, X * K // sinks_N.size, axis=2)
    score_BKX = jnp.broadcast_to(score_BKX, (B, K, X))
    return [Piece(jnp.zeros_like(q_BKXH), jnp.ones_like(score_BKX), score_BKX)]


def block_shapes(tokens: int, head_size: int, implementation: str) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Return the number of blocks of a cache for ``tokens``, and the last two dimensions of its keys and values.

    - "xla": up to four blocks, each a separate array, because XLA would copy the parts that it reads of one array.
      Keys have tokens as the innermost dimension, which suits matmuls on a CPU.
    - "cudnn": one block, which is read without a branch.
    - "splash": one block; keys have the head size as the innermost dimension.
    """
    if implementation == "splash":
        block = (kernels.cache_length(tokens), head_size)
        return 1, block, block
    count = 1 if implementation == "cudnn" else min(4, -(-tokens // BLOCK_PLACES))
    width = -(-tokens // (8 * count)) * 8
    return count, (head_size, width), (width, head_size)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply the rotary embedding to the two halves of each head, in Hugging Face's convention.

    If the tables are shorter than half a head, only the first dimensions of the head are rotated.
    """
    num_rotated = 2 * cos.shape[-1]
    if num_rotated < x_BTNH.shape[-1]:
        rotated = rotate(x_BTNH[..., :num_rotated], cos, sin)
        return jnp.concatenate([rotated, x_BTNH[..., num_rotated:]], axis=-1)
    x32 = x_BTNH.astype(jnp.float32)
    halves = x32.reshape(*x_BTNH.shape[:-1], 2, -1)
    cos = cos[:, :, None, None, :]
    sin = jnp.stack([-sin, sin], axis=2)[:, :, None]
    # Swap the halves by reversing their axis. If they were split, a TPU would pad each half.
    rotated = halves * cos + halves[..., ::-1, :] * sin
    return rotated.reshape(x_BTNH.shape).astype(x_BTNH.dtype)
