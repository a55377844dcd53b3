"""Attention kernels for the learner and the prefill, most of them from libraries.

The kernels are Splash on TPU and cuDNN on NVIDIA GPUs. These kernels never store attention scores in memory. They
support three cases:

    new tokens alone
    new tokens after their group's prompt    the prompt's keys are copied before each row's keys, and the gradients are
                                             summed over the group
    packed lines                             by a mask [B,T,T]. Splash skips blocks in which nothing is visible. For
                                             cuDNN the mask is a bias, which has a gradient.

The reference path merges pieces by their softmax sums. With these kernels a merge would need the gradient of the
log-sum-exp, which Splash does not support and cuDNN ignores.

Decode steps on TPU use this package's kernel (tpu_decode), which reads only the live part of each row's cache. Decode
steps on GPUs use plain matmuls, which read the whole cache. There are two reasons. Pallas' lowering by Triton is
deprecated. To read only the longest row's part, XLA would synchronise with the host in every layer.

Shape letters: as in ``attention``; S = L + T keys of a row.
Owns: which kernel serves which device, and how rows are laid out for it. Does not know: parameters, slots.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.ops import packing
from jaxrl_llm.runtime import sharding

LANES = 128
# The largest size that divides a row is used, because it needs the fewest passes over the keys. The sizes were compiled
# for TPUs, but not timed on one.
BLOCKS = (512, 256, 128)

# Fields of a Splash kernel, for the forward pass and the two backward passes.
MASK_INFOS = ("fwd_mask_info", "dq_mask_info", "dkv_mask_info")


class Units(NamedTuple):
    """Visibility rule of packed lines without shared prompts: a token attends to its own unit, causally."""

    unit: jax.Array  # [B,T] i32 1, 2, ... from left to right, 0 for padding (``ops.packing.Line``)


class PromptKeys(Protocol):
    """The fields of ``attention.Prompt`` that the kernels read."""

    keys: jax.Array
    values: jax.Array
    visible: jax.Array
    member: jax.Array | None


class CacheBlocks(Protocol):
    """The fields of ``attention.Cache`` that the kernels read."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    end: jax.Array


def choose(setting: str, device: Any, compute_dtype: str, arch: Architecture) -> str:
    """Return the implementation of attention for a device: "xla", "splash" (TPU) or "cudnn" (NVIDIA GPU).

    Args:
        setting: ``model.attention``.
        device: any device of the mesh; it may be compile-only.
        compute_dtype, arch: cuDNN requires bfloat16 and certain head sizes. Models with sinks always use "xla",
            because the kernels do not support sinks.
    """
    if setting == "xla" or arch.sinks:
        return "xla"
    if device.platform == "tpu":
        return "splash"
    # NVIDIA's compute capability is a number. AMD's has the form gfx90a.
    generation = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if device.platform != "gpu" or not generation.isdigit():
        return "xla"
    is_ampere_or_newer = int(generation) >= 8
    head_size_fits = arch.head_size % 8 == 0 and arch.head_size <= 128  # limits of cuDNN's kernels
    if is_ampere_or_newer and head_size_fits and compute_dtype == "bfloat16":
        return "cudnn"
    return "xla"


def cache_length(tokens: int) -> int:
    """Return the number of cache positions for ``tokens``: whole lanes, as kernels and memory layouts require."""
    step = LANES if tokens > LANES else 16
    return -(-tokens // step) * step


def by_window(visible: Any, windows: set[int], positions: jax.Array, implementation: str) -> dict[int, Any]:
    """Return the argument ``visible`` of ``attend`` for each window.

    A mask of packed lines includes the window. A rule does not, and ``attend`` applies the window.

    Args:
        visible: as in ``Model.forward``.
        windows: the windows of the layers.
        positions: [B,T] i32 in the row.
    """
    if isinstance(visible, packing.Line):
        visible = packing.visible(visible)

    def within(window: int) -> Any:
        rule = visible
        if not isinstance(rule, jax.Array):
            rule = of_lines(rule, implementation)
        if isinstance(rule, jax.Array) and 0 < window < positions.shape[1]:
            age = positions[:, :, None] - positions[:, None, :]
            rule &= age < window
        return of_lines(rule, implementation)

    return {window: within(window) for window in windows}


def of_lines(visible: Any, implementation: str) -> Any:
    """Return the mask of packed lines in the kernel's form, computed once for all layers.

    Other rules are returned unchanged. Splash computes the mask of ``Units`` block by block, because a mask [T,T] of
    32k tokens would take a GiB in each pass.

    Args:
        visible: [B,T,T] bool of packed lines, or a rule. In a mask, each token attends to itself and to no later
            token.
    """
    if isinstance(visible, Units) and implementation != "splash":
        unit = visible.unit
        T = unit.shape[1]
        is_same_unit = unit[:, :, None] == unit[:, None, :]
        is_causal = jnp.tril(jnp.ones((T, T), bool))
        return is_same_unit & is_causal[None]
    if implementation != "splash" or not isinstance(visible, jax.Array):
        return visible
    fill = -visible.shape[1] % LANES
    mask = jnp.pad(visible, ((0, 0), (0, fill), (0, fill)))
    mask = mask[:, None]
    kernel = sharding.by_device(jax.vmap(_splash_of), mask, axes=(("batch",),))
    # The barrier prevents XLA from computing the mask again in every layer. The kernel takes 4-byte words, but one byte
    # per element is kept in memory.
    return jax.lax.optimization_barrier(jax.tree.map(_bool_to_bytes, kernel))


def _bool_to_bytes(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint8) if x.dtype == bool else x


def _bytes_to_bool(x: jax.Array) -> jax.Array:
    return x.astype(bool) if x.dtype == jnp.uint8 else x


def attend(
    q_BTNH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    prompt: PromptKeys | None,
    visible: Any,
    implementation: str,
    window: int | None = None,
) -> jax.Array:
    """Return the attention of ``attention.attend``, computed by a kernel.

    Args:
        q_BTNH, k_BKTH, v_BKTH: queries, keys and values of new tokens; queries and keys are rotated.
        prompt: prompts of groups of consecutive rows; None = no prompts.
        visible: ``Units``, [B,T,T] bool of packed lines, or the result of ``of_lines``. Masks include the window
            (``by_window``). None = causal.
        window: a token attends to itself and the ``window - 1`` tokens before it; None = to all tokens before it.

    Returns:
        [B,T,N,H] in the dtype of the queries.
    """
    is_rule = visible is None or isinstance(visible, Units)
    assert is_rule or window is None, "a mask of packed lines includes the window"
    visible = of_lines(visible, implementation)
    k_BKSH = k_BKTH
    v_BKSH = v_BKTH
    visible_BL = None
    if prompt is not None:
        assert prompt.member is None, "rows of a group are neighbours"
        group_size = q_BTNH.shape[0] // prompt.keys.shape[0]
        is_prompt_token = prompt.visible[:, None, :, None]
        k_BKSH = _after_prompt(prompt.keys, k_BKTH, is_prompt_token, group_size)
        v_BKSH = _after_prompt(prompt.values, v_BKTH, is_prompt_token, group_size)
        visible_BL = jnp.repeat(prompt.visible, group_size, axis=0)
    kernel = {"splash": _splash, "cudnn": _cudnn}[implementation]
    key_axes = ("batch", "attended")
    axes = (("batch", None, "attended"), key_axes, key_axes, ("batch",), ("batch",))
    kernel = functools.partial(kernel, window=window)
    return sharding.by_device(
        kernel,
        q_BTNH,
        k_BKSH,
        v_BKSH,
        visible_BL,
        visible,
        axes=axes,
        shared=3,
    )


def _after_prompt(x_PKLH: jax.Array, x_BKTH: jax.Array, is_prompt_token: jax.Array, group_size: int) -> jax.Array:
    """Return keys or values [B,K,L+T,H]: first of each row's prompt, then of the row's new tokens."""
    x_PKLH = jnp.where(is_prompt_token, x_PKLH, 0)  # zeros, because 0 * nan is nan
    x_BKLH = jnp.repeat(x_PKLH, group_size, axis=0)
    return jnp.concatenate([x_BKLH, x_BKTH], axis=2)


def decode(
    q_BKRH: jax.Array,
    k_BK1H: jax.Array,
    v_BK1H: jax.Array,
    prompt_piece: tuple[jax.Array, ...],
    cache: CacheBlocks,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a decode step's attention on TPU to prompt, cache and new token, and write the new token to the cache.

    Args:
        q_BKRH: rotated and scaled queries of one token per row.
        prompt_piece: attention to the prompts, an ``attention.Piece``.
        cache: an ``attention.Cache``. Only its live part is read.

    Returns:
        [B,K,R,H] in the dtype of the queries, and the caches' keys and values with the token at ``cache.end``.
    """
    # Imported here because the import takes half a second on CPUs, as for Splash below.
    from jaxrl_llm.models.kernels import tpu_decode

    out, total, peak = prompt_piece
    args = (
        q_BKRH,
        k_BK1H,
        v_BK1H,
        out,
        total[..., None],
        peak[..., None],
        cache.keys[0],
        cache.values[0],
    )
    arg_axes = [("batch", "kv_heads")] * len(args)
    return sharding.by_device(
        tpu_decode.attend,
        *args,
        cache.length,
        cache.end,
        axes=(*arg_axes, ("batch",), ()),
        shared=2,
    )


def _lanes(size: int) -> int:
    """Return the size rounded up to whole lanes."""
    return -(-size // LANES) * LANES


def _largest_block(size: int) -> int:
    """Return the largest of BLOCKS that divides a size, which is whole lanes."""
    return next(block for block in BLOCKS if size % block == 0)


def _splash_of(mask: Any) -> Any:
    """Return the Splash kernel of one row. The mask of its heads is [1,Q,S] bool, padded to whole lanes, or a rule."""
    # Imported here because the import takes half a second on CPUs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, num_queries, num_keys = mask.shape
    block_q = _largest_block(num_queries)
    block_kv = _largest_block(num_keys)
    block_sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=block_sizes)
    for name in MASK_INFOS:
        # For a traced mask this field is a traced True, which jax 0.10 would use in the name of a scope. Set a plain
        # value.
        info = getattr(kernel, name)._replace(is_dynamic_mask=None)
        setattr(kernel, name, info)
    return kernel


def _splash(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    visible_BL: jax.Array | None,
    lines: Any,
    *,
    window: int | None,
) -> jax.Array:
    """Return attention by Splash. Queries and keys are padded to whole lanes."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, T, N, H = q_BTNH.shape
    S = k_BKSH.shape[2]
    num_queries = _lanes(T)
    num_keys = _lanes(S)
    q = _fill((q_BTNH * H**-0.5).swapaxes(1, 2), num_queries)
    if window is not None and visible_BL is not None:
        k_BKSH, v_BKSH, visible_BL = _pad_before_prompt(k_BKSH, v_BKSH, visible_BL)
    units = lines if isinstance(lines, Units) else None

    def attend_row(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, kernel: Any) -> jax.Array:
        if kernel is None or units:
            # Query t is token S - T + t of its row. Padding of the keys comes after every real query.
            window_before = None if window is None else window - 1
            mask = splash.LocalMask((num_queries, num_keys), (window_before, 0), offset=S - T)
            kernel = _splash_of(splash.MultiHeadMask([mask] * N))
            if units:
                kernel = _skip_other_units(kernel, segments.q)
        else:
            kernel = jax.tree.map(_bytes_to_bool, kernel)
        return kernel(q, k, v, segments)

    segments = None
    if visible_BL is not None:
        segments = _prompt_segments(visible_BL, num_queries, num_keys)
    if units:
        unit_BS = jnp.pad(units.unit, ((0, 0), (0, num_keys - S)))
        segments = splash.SegmentIds(unit_BS, unit_BS)
    elif lines is not None:
        # Makes XLA convert to 4-byte words only when they are needed.
        lines, q = jax.lax.optimization_barrier((lines, q))
    k = _fill(k_BKSH, num_keys)
    v = _fill(v_BKSH, num_keys)
    out = jax.vmap(attend_row)(q, k, v, segments, lines)
    return out[:, :, :T].swapaxes(1, 2)


def _fill(x_BKSH: jax.Array, size: int) -> jax.Array:
    """Return queries, keys or values [B,K,S,H] with zeros after the last token, [B,K,size,H]."""
    padding = (0, size - x_BKSH.shape[2])
    return jnp.pad(x_BKSH, ((0, 0), (0, 0), padding, (0, 0)))


def _pad_before_prompt(
    k_BKSH: jax.Array, v_BKSH: jax.Array, visible_BL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys, values and the visible prompt tokens with each prompt's padding moved before the prompt.

    A window counts back from the row's tokens to the prompt's end, so no padding may come between them.
    """
    S = k_BKSH.shape[2]
    L = visible_BL.shape[1]
    place = jnp.arange(L)[None, :]
    length_B1 = jnp.sum(visible_BL, axis=1, keepdims=True)
    prompt_order = (place + length_B1) % L
    new_order = 0 * length_B1 + jnp.arange(L, S)[None, :]
    order_BS = jnp.concatenate([prompt_order, new_order], axis=1)
    k_BKSH = jnp.take_along_axis(k_BKSH, order_BS[:, None, :, None], axis=2)
    v_BKSH = jnp.take_along_axis(v_BKSH, order_BS[:, None, :, None], axis=2)
    return k_BKSH, v_BKSH, place >= L - length_B1


def _prompt_segments(visible_BL: jax.Array, num_queries: int, num_keys: int) -> Any:
    """Return Splash's segments of rows with prompts: all tokens except the padding of the prompts have segment 1.

    A query attends to the keys of its segment.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, L = visible_BL.shape
    padding = ((0, 0), (0, num_keys - L))
    key_segments = jnp.pad(visible_BL.astype(jnp.int32), padding, constant_values=1)
    query_segments = jnp.ones_like(key_segments, shape=(B, num_queries))
    return splash.SegmentIds(q=query_segments, kv=key_segments)


def _skip_other_units(kernel: Any, unit_S: jax.Array) -> Any:
    """Return a Splash kernel that skips blocks in which no query has a key of its own unit.

    Units must be in ascending order.
    """
    order = jnp.where(unit_S > 0, unit_S, unit_S.shape[0] + 1)
    sizes = kernel.kwargs["block_sizes"]
    query_blocks = order.reshape(-1, sizes.block_q)
    key_blocks = order.reshape(-1, sizes.block_kv)
    low_q = jnp.min(query_blocks, axis=1)
    high_q = jnp.max(query_blocks, axis=1)
    low_k = jnp.min(key_blocks, axis=1)
    high_k = jnp.max(key_blocks, axis=1)
    starts_before_keys_end = low_q[:, None] <= high_k[None, :]
    ends_after_keys_start = low_k[None, :] <= high_q[:, None]
    have_common_unit = starts_before_keys_end & ends_after_keys_start
    for name in MASK_INFOS:
        info = getattr(kernel, name)
        if info.data_next is None:
            continue
        # For each query block and step, compute the index of the key block. The dkv kernel needs the reverse.
        steps = info.data_next.astype(jnp.int32)
        rows = jax.lax.broadcasted_iota(jnp.int32, steps.shape, 1)
        columns = jax.lax.broadcasted_iota(jnp.int32, steps.shape, 2)
        pair = (steps, columns) if name == "dkv_mask_info" else (rows, steps)
        block_mask = jnp.where(have_common_unit[pair], info.block_mask, 0)
        block_mask = block_mask.astype(info.block_mask.dtype)
        setattr(kernel, name, info._replace(block_mask=block_mask))
    return kernel


def _cudnn(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    visible_BL: jax.Array | None,
    visible_BTT: jax.Array | None,
    *,
    window: int | None,
) -> jax.Array:
    """Return attention by cuDNN.

    With a prompt, a row's own tokens are moved to the end of its prompt. The attention is then plain causal attention,
    which cuDNN computes fastest. Queries at the prompt's positions are padding, and their outputs are dropped.
    """
    _, T, _, H = q_BTNH.shape
    S = k_BKSH.shape[2]
    q = q_BTNH * H**-0.5  # the same rounding as in a decode step
    k = k_BKSH.swapaxes(1, 2)
    v = v_BKSH.swapaxes(1, 2)

    length_B1 = None
    if visible_BL is not None:
        length_B1 = jnp.sum(visible_BL, axis=1, keepdims=True, dtype=jnp.int32)
        q, k, v = _move_to_prompt_end(q, k, v, length_B1)
    to_even = (0, S % 2)  # the backward kernel requires an even length
    q, k, v = (jnp.pad(x, ((0, 0), to_even, (0, 0), (0, 0))) for x in (q, k, v))
    mask = None
    if visible_BTT is not None:
        mask = jnp.pad(visible_BTT, ((0, 0), to_even, to_even))
        mask = mask[:, None]
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=1.0,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    if length_B1 is None:
        return out[:, :T]
    return _take_tokens(out, length_B1 + jnp.arange(T)[None, :])


def _move_to_prompt_end(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, length_B1: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values of S tokens, in which each row's own tokens follow its prompt directly.

    Args:
        length_B1: length of each row's prompt.
    """
    T = q_BTNH.shape[1]
    S = k_BSKH.shape[1]
    place = jnp.arange(S)[None, :]
    own_token = place - length_B1
    source = jnp.where(place < length_B1, place, own_token + S - T)
    source = jnp.minimum(source, S - 1)
    q_BSNH = _take_tokens(q_BTNH, jnp.clip(own_token, 0, T - 1))
    return q_BSNH, _take_tokens(k_BSKH, source), _take_tokens(v_BSKH, source)


def _take_tokens(x_BSNH: jax.Array, index_BT: jax.Array) -> jax.Array:
    """Return the tokens of each row at these places, [B,T,N,H]."""
    return jnp.take_along_axis(x_BSNH, index_BT[:, :, None, None], axis=1)
