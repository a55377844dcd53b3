"""What attention does otherwise on one kind of device: kernels, most of them kept by libraries.

The rows of the learner and of the prefill are attended by Splash on TPU and by cuDNN on NVIDIA GPUs, which hold no
scores in memory: new tokens alone, after their group's prompt, whose keys are laid before each row's own (the gradients
sum over the group again), or packed lines, by a mask of [B,T,T]. Splash passes over its blocks that show nothing; to
cuDNN it is a bias, with a gradient of its own.

Pieces merged by their softmax sums, as the reference path has them, would need the gradient of the log-sum-exp, which
these kernels refuse (Splash) or drop (cuDNN). In a decode step on TPU a kernel of our own (tpu_decode) attends to each
row's cache and reads what is live of it. On GPUs plain matmuls read all of it: Pallas' lowering by Triton is
deprecated, and to read the longest row's part alone XLA would ask the host which, in every layer.

Letters as in attention; S = L + T keys a row.
Owns: which kernel serves which device, and how rows are laid out for it. Does not know: parameters, slots.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.ops import packing
from jaxrl_llm.runtime import sharding

LANES = 128
# Of the block sizes that divide a row, the largest: fewer passes over the keys. Compiled for chips, not timed on one.
BLOCKS = (512, 256, 128)


class Units(NamedTuple):
    """The rule of packed lines whose rows share nothing: a token sees its own unit up to itself."""

    unit: jax.Array  # [B,T] i32 1.. from left to right, 0 where the line is empty (``ops.packing.Line``)


def choose(setting: str, device: Any, compute_dtype: str, arch: Architecture) -> str:
    """The implementation for a device: "xla", or with a kernel for caches beside it "splash" or "cudnn".

    Args:
        setting: ``model.attention``; a model whose softmax has sinks has "xla" always, the kernels know none.
        device: one of the mesh's; a compile-only one will do.
    """
    if setting == "xla" or arch.sinks:
        return "xla"
    if device.platform == "tpu":
        return "splash"
    # A number on NVIDIA; AMD's are called gfx90a and such.
    generation = str(getattr(device, "compute_capability", "")).partition(".")[0]
    ampere = device.platform == "gpu" and generation.isdigit() and int(generation) >= 8
    head_size = arch.head_size
    fits = compute_dtype == "bfloat16" and head_size % 8 == 0 and head_size <= 128  # what cuDNN's kernels take
    return "cudnn" if ampere and fits else "xla"


def cache_length(tokens: int) -> int:
    """Places of a cache for so many tokens: whole lanes, which kernels and layouts want."""
    step = LANES if tokens > LANES else 16
    return -(-tokens // step) * step


def by_window(visible: Any, windows: set[int], positions: jax.Array, implementation: str) -> dict[int, Any]:
    """What ``attend`` takes for ``visible`` by the layer's window: lines' mask has it, a rule of who is seen has not.

    Args:
        visible: as ``Model.forward`` has it.
        positions: [B,T] i32 in the row.
    """
    visible = packing.visible(visible) if isinstance(visible, packing.Line) else visible

    def within(window: int):
        lines = visible if isinstance(visible, jax.Array) else of_lines(visible, implementation)
        if isinstance(lines, jax.Array) and 0 < window < positions.shape[1]:
            lines &= positions[:, :, None] - positions[:, None, :] < window
        return of_lines(lines, implementation)

    return {window: within(window) for window in windows}


def of_lines(visible: Any, implementation: str) -> Any:
    """The mask of packed lines as the kernel takes it, made once for all layers; any other rule as it is.

    To Splash ``Units`` are a rule: it makes the mask block by block, where [T,T] of 32k tokens is a GiB for each pass.

    Args:
        visible: [B,T,T] bool of lines, which have no prompt: each token sees itself, and none sees a later one.
    """
    if isinstance(visible, Units) and implementation != "splash":
        T = visible.unit.shape[1]
        return (visible.unit[:, :, None] == visible.unit[:, None, :]) & jnp.tril(jnp.ones((T, T), bool))[None]
    if implementation != "splash" or not isinstance(visible, jax.Array):
        return visible
    fill = -visible.shape[1] % LANES
    mask = jnp.pad(visible, ((0, 0), (0, fill), (0, fill)))[:, None]
    kernel = sharding.by_device(jax.vmap(_splash_of), mask, axes=(("batch",),))
    # XLA would make the mask anew in every layer if it might. The kernel takes it in words: kept are bytes.
    as_bytes = jax.tree.map(lambda x: x.astype(jnp.uint8) if x.dtype == bool else x, kernel)
    return jax.lax.optimization_barrier(as_bytes)


def attend(q_BTNH, k_BKTH, v_BKTH, prompt, visible, implementation: str, window: int | None = None) -> jax.Array:
    """``attention.attend``: rotated queries and keys, and a prompt of groups of consecutive rows.

    Args:
        visible: of packed lines, ``Units``, or [B,T,T] bool or what ``of_lines`` made of it, a window in it
            (``by_window``).
        window: how many tokens of its row a token sees, itself the last; None = all before it.

    Returns:
        [B,T,N,H] in the dtype of the queries.
    """
    is_rule = visible is None or isinstance(visible, Units)
    assert is_rule or window is None, "the mask of packed lines says what a window shows"
    visible = of_lines(visible, implementation)
    k_BKSH, v_BKSH, visible_BL = k_BKTH, v_BKTH, None
    if prompt is not None:
        assert prompt.member is None, "rows of a group are neighbours"
        group = q_BTNH.shape[0] // prompt.keys.shape[0]
        shown = prompt.visible[:, None, :, None]

        def before(x_PKLH, x_BKTH):
            x_BKLH = jnp.repeat(jnp.where(shown, x_PKLH, 0), group, axis=0)  # 0 * nan is nan
            return jnp.concatenate([x_BKLH, x_BKTH], axis=2)

        k_BKSH, v_BKSH = before(prompt.keys, k_BKTH), before(prompt.values, v_BKTH)
        visible_BL = jnp.repeat(prompt.visible, group, axis=0)
    kernel = functools.partial({"splash": _splash, "cudnn": _cudnn}[implementation], window=window)
    of_keys, of_rows = ("batch", "attended"), ("batch",)
    axes = (("batch", None, "attended"), of_keys, of_keys, of_rows, of_rows)
    return sharding.by_device(kernel, q_BTNH, k_BKSH, v_BKSH, visible_BL, visible, axes=axes, shared=3)


def decode(q_BKRH, k_BK1H, v_BK1H, of_prompt, cache):
    """A decode step's attention on TPU: to a prompt attended before, the row's cache and its new token, kept there.

    Args:
        q_BKRH: rotated queries of one token a row, scaled.
        of_prompt: a piece, as ``attention._attend_prompt`` returns it.
        cache: an ``attention.Cache``; only as much of it is read as is to be seen.

    Returns:
        [B,K,R,H] in the dtype of the queries, and the caches' keys and values with the token at ``cache.end``.
    """
    from jaxrl_llm.models.kernels import tpu_decode  # as splash, below

    out, total, peak = of_prompt
    args = (q_BKRH, k_BK1H, v_BK1H, out, total[..., None], peak[..., None], cache.keys[0], cache.values[0])
    axes = (*(("batch", "kv_heads") for _ in args), ("batch",), ())
    return sharding.by_device(tpu_decode.attend, *args, cache.length, cache.end, axes=axes, shared=2)


def _splash_of(mask: Any) -> Any:
    """Splash of one row, by the mask of its heads: [1,Q,S] bool of whole lanes, or a rule of that shape."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # half a second that a CPU can spare

    bq, bk = (next(size for size in BLOCKS if n % size == 0) for n in mask.shape[1:])
    sizes = {f"block_{of}{way}": n for of, n in (("q", bq), ("kv", bk)) for way in ("", "_dkv", "_dq")}
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=splash.BlockSizes(**sizes))
    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
        # Of a traced mask it is a traced True, which jax 0.10 then asks for the name of a scope.
        setattr(kernel, name, getattr(kernel, name)._replace(is_dynamic_mask=None))
    return kernel


def _splash(q_BTNH, k_BKSH, v_BKSH, visible_BL, lines, *, window):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (_, T, N, H), S = q_BTNH.shape, k_BKSH.shape[2]
    queries, keys = (-(-n // LANES) * LANES for n in (T, S))
    fill = lambda x, width: jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]), (0, 0)))
    q = fill((q_BTNH * H**-0.5).swapaxes(1, 2), queries)
    if window is not None and visible_BL is not None:
        # A window counts back over the row's end to its prompt's: padding goes before the prompt.
        at, length_B1 = jnp.arange(S - T)[None, :], jnp.sum(visible_BL, axis=1, keepdims=True)
        order_BS = jnp.concatenate([(at + length_B1) % (S - T), 0 * length_B1 + jnp.arange(S - T, S)[None, :]], axis=1)
        k_BKSH, v_BKSH = (jnp.take_along_axis(x, order_BS[:, None, :, None], axis=2) for x in (k_BKSH, v_BKSH))
        visible_BL = at >= S - T - length_B1

    units = lines if isinstance(lines, Units) else None

    def of_row(q, k, v, shown, kernel):
        if kernel is None or units:
            # Query t is token S - T + t of its row. What fills up the keys comes after every real query.
            seen = splash.LocalMask((queries, keys), (None if window is None else window - 1, 0), offset=S - T)
            kernel = _splash_of(splash.MultiHeadMask([seen] * N))
            kernel = _where_units_meet(kernel, shown.q) if units else kernel
        else:
            kernel = jax.tree.map(lambda x: x.astype(bool) if x.dtype == jnp.uint8 else x, kernel)
        return kernel(q, k, v, shown)

    shown = None
    if visible_BL is not None:  # a query sees the keys of its segment
        own = ((0, 0), (0, keys - visible_BL.shape[1]))
        shown_BS = jnp.pad(visible_BL.astype(jnp.int32), own, constant_values=1)
        shown = splash.SegmentIds(q=jnp.ones_like(shown_BS, shape=(shown_BS.shape[0], queries)), kv=shown_BS)
    if units:
        unit_BS = jnp.pad(units.unit, ((0, 0), (0, keys - S)))
        shown = splash.SegmentIds(unit_BS, unit_BS)
    elif lines is not None:
        lines, q = jax.lax.optimization_barrier((lines, q))  # or the words would be there before the first layer
    out = jax.vmap(of_row)(q, fill(k_BKSH, keys), fill(v_BKSH, keys), shown, lines)
    return out[:, :, :T].swapaxes(1, 2)


def _where_units_meet(kernel: Any, unit_S: jax.Array) -> Any:
    """Splash that passes over blocks of which no query has a key of its unit; units stand in order."""
    order = jnp.where(unit_S > 0, unit_S, unit_S.shape[0] + 1)
    sizes = kernel.kwargs["block_sizes"]
    (low_q, high_q), (low_k, high_k) = (
        (jnp.min(blocks, axis=1), jnp.max(blocks, axis=1))
        for blocks in (order.reshape(-1, sizes.block_q), order.reshape(-1, sizes.block_kv))
    )
    meet = (low_q[:, None] <= high_k[None, :]) & (low_k[None, :] <= high_q[:, None])
    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
        info = getattr(kernel, name)
        if info.data_next is not None:  # of each step of a block of queries its block of keys; of dkv, the reverse
            steps = info.data_next.astype(jnp.int32)
            rows, columns = (jax.lax.broadcasted_iota(jnp.int32, steps.shape, axis) for axis in (1, 2))
            pair = (steps, columns) if name == "dkv_mask_info" else (rows, steps)
            block_mask = jnp.where(meet[pair], info.block_mask, 0).astype(info.block_mask.dtype)
            setattr(kernel, name, info._replace(block_mask=block_mask))
    return kernel


def _cudnn(q_BTNH, k_BKSH, v_BKSH, visible_BL, visible_BTT, *, window):
    """Plain causal attention, which cuDNN does best: a row's own tokens are moved to its prompt's end.

    Queries at the prompt's places are filled up and thrown away.
    """
    (_, T, _, H), S = q_BTNH.shape, k_BKSH.shape[2]
    q, k, v = q_BTNH * H**-0.5, k_BKSH.swapaxes(1, 2), v_BKSH.swapaxes(1, 2)  # rounded as a decode step's queries

    def take(x, index_BS):
        return jnp.take_along_axis(x, index_BS[:, :, None, None], axis=1)

    if visible_BL is not None:
        length_B1 = jnp.sum(visible_BL, axis=1, keepdims=True, dtype=jnp.int32)
        at = jnp.arange(S)[None, :]
        source = jnp.minimum(jnp.where(at < length_B1, at, at - length_B1 + S - T), S - 1)
        q, k, v = take(q, jnp.clip(at - length_B1, 0, T - 1)), take(k, source), take(v, source)
    even = ((0, 0), (0, S % 2), (0, 0), (0, 0))  # as the backward kernel wants it
    q, k, v = (jnp.pad(x, even) for x in (q, k, v))
    mask = None if visible_BTT is None else jnp.pad(visible_BTT, ((0, 0), *2 * ((0, S % 2),)))[:, None]
    how = {"scale": 1.0, "is_causal": True, "local_window_size": None if window is None else (window - 1, 0)}
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, **how, implementation="cudnn")
    return out[:, :T] if visible_BL is None else take(out, length_B1 + jnp.arange(T)[None, :])
