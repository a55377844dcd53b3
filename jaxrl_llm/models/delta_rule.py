"""The gated delta rule: a layer that stores a state of fixed size in place of the keys and values of earlier tokens.

Each head has a state matrix S. Each token decays S, corrects the value that S predicts for the token's key, and
reads S:

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}' k_t)',    o_t = S_t' q_t,    a_t = e^{g_t}

Keys and queries have unit length; queries are also divided by the square root of the head size. g_t < 0 and b_t is in
(0, 1). As in Qwen3-Next, a causal convolution of each channel comes before the rule, and a norm and a gate after it.
Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", equation 10.

A decode step applies the rule directly. Whole rows are computed in chunks. Inside a chunk, the tokens' mutual
corrections are the solution of a triangular system (the paper's section 3.3). States pass from chunk to chunk.

As in attention, a visibility rule defines the past of each token. In packed lines, the past is the token's own row and
the prompt of its group. Therefore a second state is carried: the state at the end of the prompt. Every further row of
the group starts from this state.

Letters: B rows, T tokens, D width, N value heads, K key heads, H and V their sizes, C channels of the convolution,
n chunks of W tokens, G rows of a group, L prompt width.
Owns: the parameters of the rule, its computation, its states. Does not know: attention, when slots start rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import Architecture, Delta, Layer
from jaxrl_llm.models.attention import Groups
from jaxrl_llm.models.blocks import CacheSizes, LayerParameters, MixerInputs, Parameter, States
from jaxrl_llm.models.kernels import context
from jaxrl_llm.models.kernels.learner import Units
from jaxrl_llm.ops.packing import Line
from jaxrl_llm.runtime import sharding

CHUNK = 64  # tokens: the smallest size that fills a matrix unit, and small enough to solve the system in float32
# All sums of the rule are float32 with the highest precision, because errors in a state persist.
einsum = functools.partial(jnp.einsum, precision="highest")

Channels = tuple[jax.Array, jax.Array, jax.Array]  # channels [B,T,C], g and b [B,T,N]


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """Yield the parameters of the rule; none if the architecture has no such rule."""
    if arch.delta is None:
        return
    d, width = arch.delta, arch.width
    share = d.value_heads // d.key_heads
    if d.is_grouped:  # rows of a key head: query, key, values and output gates; then b and a
        head_size = 2 * d.key_size + 2 * share * d.value_size
        yield Parameter("delta_in", (d.key_heads, head_size, width), ("kv_heads", "head_size", "embed"))
        yield Parameter("delta_gates", (d.key_heads, 2 * share, width), ("kv_heads", "head_size", "embed"))
    else:
        yield Parameter("delta_qkv", (d.channels, width), ("head_size", "embed"))
        yield Parameter("delta_z", (d.value_heads, d.value_size, width), ("heads", "head_size", "embed"))
        yield Parameter("delta_b", (d.value_heads, width), ("heads", "embed"))
        yield Parameter("delta_a", (d.value_heads, width), ("heads", "embed"))
    yield Parameter("delta_conv", (d.channels, 1, d.taps), ("head_size",) * 3, 0.5)
    yield Parameter("delta_rate", (d.value_heads,), ("heads",), 0.0)  # with this bias, a state's half-life is 14 tokens
    yield Parameter("delta_bias", (d.value_heads,), ("heads",), -3.0)
    yield Parameter("delta_norm", (d.value_size,), ("head_size",), 1.0)
    yield Parameter("delta_out", (width, d.value_heads, d.value_size), ("embed", "heads", "head_size"))


def empty_states(d: Delta, rows: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return the states before a row's first token.

    These are the rule's state [rows,N,H,V] float32, and the convolution's last inputs [rows,taps-1,C] in ``dtype``.
    """
    state = jnp.zeros((rows, d.value_heads, d.key_size, d.value_size), jnp.float32)
    return state, jnp.zeros((rows, d.taps - 1, d.channels), dtype)


def empty_cache(arch: Architecture, layer: Layer, sizes: CacheSizes) -> States:
    """Return the states of all decode slots, each in a tuple of one, as a cache has blocks."""
    state, inputs = empty_states(_sizes_of(arch), sizes.slots, sizes.dtype)
    return (state,), (inputs,)


def empty_prompts(arch: Architecture, layer: Layer, sizes: CacheSizes) -> States:
    """Return the states of all prompts."""
    return empty_states(_sizes_of(arch), sizes.prompts, sizes.dtype)


def begin(cache: tuple[jax.Array], prompts: jax.Array, entry_MZ: jax.Array, takes_MZ: jax.Array) -> tuple[jax.Array]:
    """Copy the prompts' states to the slots that start a new row (``mixers.begin``)."""
    num_shards, _ = entry_MZ.shape
    (slots,) = cache
    by_shard = prompts.reshape(num_shards, -1, *prompts.shape[1:])
    new = jax.vmap(lambda x, entry: x[entry])(by_shard, entry_MZ)
    takes = takes_MZ.reshape(-1, *(1,) * (slots.ndim - 1))
    return (jnp.where(takes, new.reshape(slots.shape), slots),)


def apply(x_BTD: jax.Array, parameters: LayerParameters, inputs: MixerInputs) -> tuple[jax.Array, States]:
    """Apply the rule to whole rows or prompts.

    The states before the first token are those of ``inputs.prompt``, or empty states.

    Returns:
        [B,T,D], and the two states after ``inputs.length`` tokens. For whole groups, (None, None).
    """
    d = _sizes_of(parameters.arch)
    channels, z_BTNV = _inputs(x_BTD, parameters, d)
    weight = parameters.weight("delta_conv")[:, 0]
    if isinstance(inputs.visible, Groups):
        out_BTNV = _groups(*channels, inputs.visible, weight=weight, d=d)
        return _output(out_BTNV, z_BTNV, parameters), (None, None)
    prompt = inputs.prompt
    out_BTNV, state, last_inputs = _rows(
        *channels,
        weight=weight,
        d=d,
        before=None if prompt is None else (prompt.keys, prompt.values),
        line=inputs.visible,
        positions=inputs.positions,
        length=inputs.length,
    )
    return _output(out_BTNV, z_BTNV, parameters), (state, last_inputs)


def apply_next(x_B1D: jax.Array, parameters: LayerParameters, inputs: MixerInputs) -> tuple[jax.Array, States]:
    """Apply the rule to one new token per row. Return [B,1,D], and the new states, each in a tuple of one."""
    assert inputs.cache is not None, "a decode step has a cache"
    d = _sizes_of(parameters.arch)
    channels, z_B1NV = _inputs(x_B1D, parameters, d)
    weight = parameters.weight("delta_conv")[:, 0]
    (state,) = inputs.cache.keys
    (last_inputs,) = inputs.cache.values
    out_B1NV, state, last_inputs = _step(*channels, state, last_inputs, weight=weight, d=d)
    return _output(out_B1NV, z_B1NV, parameters), ((state,), (last_inputs,))


def _sizes_of(arch: Architecture) -> Delta:
    assert arch.delta is not None, "only models with sizes of the rule have layers with it"
    return arch.delta


def _inputs(x_BTD: jax.Array, parameters: LayerParameters, d: Delta) -> tuple[Channels, jax.Array]:
    """Return the inputs of the rule: channels [B,T,C], and g and b [B,T,N] float32; and the output gates [B,T,N,V]."""
    mixed_BTC, z_BTNV, b_BTN, a_BTN = _projections(x_BTD, parameters, d)
    rate = -jnp.exp(parameters.weight("delta_rate").astype(jnp.float32))
    bias = parameters.weight("delta_bias").astype(jnp.float32)
    g_BTN = rate[None, None] * jax.nn.softplus(a_BTN + bias[None, None])
    b_BTN = jax.nn.sigmoid(b_BTN)
    if context.is_split():  # whole rows of fewer channels and heads, as in attention
        mixed_BTC, g_BTN, b_BTN = (sharding.constrain(x, "batch", None, "attended") for x in (mixed_BTC, g_BTN, b_BTN))
    return (mixed_BTC, g_BTN, b_BTN), z_BTNV


def _output(out_BTNV: jax.Array, z_BTNV: jax.Array, parameters: LayerParameters) -> jax.Array:
    """Return the projection of the rule's outputs after a norm and the output gates, [B,T,D]."""
    dtype = z_BTNV.dtype
    B, T = z_BTNV.shape[:2]
    out_BTNV = context.to_tokens(out_BTNV)
    mean_square = jnp.mean(jnp.square(out_BTNV), axis=-1, keepdims=True)
    out = out_BTNV * jax.lax.rsqrt(mean_square + parameters.arch.norm_eps)
    out = parameters.weight("delta_norm").astype(dtype)[None, None, None] * out.astype(dtype)
    out = (out * jax.nn.silu(z_BTNV.astype(jnp.float32))).astype(dtype)
    return parameters.project(out.reshape(B, T, -1), "delta_out")


def _projections(x_BTD: jax.Array, parameters: LayerParameters, d: Delta) -> tuple[jax.Array, ...]:
    """Return channels [B,T,C], output gates [B,T,N,V], and b and a [B,T,N] float32, before activations."""
    B, T, _ = x_BTD.shape
    key_size = d.key_size
    value_size = d.value_heads // d.key_heads * d.value_size  # values of one key head

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(B, T, d.key_heads, -1)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(B, T, -1)

    if d.is_grouped:
        x_BTKX = by_head(parameters.project(x_BTD, "delta_in"))
        q, k, v, z = jnp.split(x_BTKX, (key_size, 2 * key_size, 2 * key_size + value_size), axis=-1)
        b, a = jnp.split(by_head(parameters.project(x_BTD, "delta_gates")), 2, axis=-1)
        mixed_BTC = jnp.concatenate([flat(q), flat(k), flat(v)], axis=-1)
    else:
        mixed_BTC, z, b, a = (parameters.project(x_BTD, f"delta_{name}") for name in ("qkv", "z", "b", "a"))
    z_BTNV = flat(z).reshape(B, T, d.value_heads, d.value_size)
    return mixed_BTC, z_BTNV, flat(b).astype(jnp.float32), flat(a).astype(jnp.float32)


def _heads(past, weight, d: Delta):
    """Return queries and keys [B,T,N,H] and values [B,T,N,V] after the convolution, all float32.

    Keys have unit length; queries have length 1 / sqrt(H). Both are repeated to the number of value heads.

    Args:
        past: channels [B,T,C] of each token, then of the token before it, and so on.
        weight: [C,taps] weights of the convolution.
    """
    sizes = d.key_heads * d.key_size
    summed = sum(x.astype(jnp.float32) * weight[None, None, :, d.taps - 1 - ago] for ago, x in enumerate(past))
    q, k, v = jnp.split(jax.nn.silu(summed), (sizes, 2 * sizes), axis=-1)
    by_head = lambda x, count: x.reshape(*x.shape[:2], count, -1)

    def unit(x):
        x = by_head(x, d.key_heads)
        x = x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, d.value_heads // d.key_heads, axis=2)

    return unit(q) * d.key_size**-0.5, unit(k), by_head(v, d.value_heads)


def _step(mixed_B1C, g_B1N, b_B1N, state_BNHV, inputs_BXC, *, weight, d: Delta):
    """Apply the rule to one new token per row, and return the output and the new states."""
    window_BXC = jnp.concatenate([inputs_BXC.astype(mixed_B1C.dtype), mixed_B1C], axis=1)
    past = jnp.split(window_BXC, d.taps, axis=1)[::-1]
    q, k, v = (x[:, 0] for x in _heads(past, weight, d))
    state = jnp.exp(g_B1N[:, 0, :, None, None]) * state_BNHV
    error_BNV = b_B1N[:, 0, :, None] * (v - jnp.sum(state * k[..., None], axis=2))
    state += k[..., None] * error_BNV[:, :, None]
    return jnp.sum(state * q[..., None], axis=2)[:, None], state, window_BXC[:, 1:].astype(inputs_BXC.dtype)


def _groups(mixed_BTC, g_BTN, b_BTN, groups: Groups, **how):
    """Apply the rule to rows of whole groups. Each completion starts from the states after its prompt."""
    L, G = groups.prompt_width, groups.size
    of_tokens = (mixed_BTC, g_BTN, b_BTN)
    of_prompt, *before = _rows(*(x[:, :L] for x in of_tokens), length=groups.prompt_length, **how)
    by_row = lambda x: x[:, L:].reshape(x.shape[0] * G, -1, *x.shape[2:])
    before = (jnp.repeat(x, G, axis=0) for x in before)
    of_rows, *_ = _rows(*(by_row(x) for x in of_tokens), before=tuple(before), **how)
    return jnp.concatenate([of_prompt, of_rows.reshape(of_prompt.shape[0], -1, *of_rows.shape[2:])], axis=1)


def _rows(mixed_BTC, g_BTN, b_BTN, *, weight, d: Delta, before=None, line=None, positions=None, length=None):
    """Return the outputs [B,T,N,V] and the states after ``length`` tokens.

    Args:
        before: states before the first token; None = empty states.
    """
    (B, T, C), taps = mixed_BTC.shape, d.taps
    if before is None:
        state = jnp.zeros((B, d.value_heads, d.key_size, d.value_size), jnp.float32)
        before = (state, jnp.zeros((B, taps - 1, C), mixed_BTC.dtype))
    if length is not None:  # later tokens do not change the state
        is_in = (jnp.arange(T)[None] < length[:, None])[..., None]
        g_BTN, b_BTN = jnp.where(is_in, g_BTN, 0.0), jnp.where(is_in, b_BTN, 0.0)
    every = jnp.concatenate([before[1].astype(mixed_BTC.dtype), mixed_BTC], axis=1)
    past = [_earlier(every, mixed_BTC, ago, line, positions) for ago in range(taps)]
    ends = jnp.full(B, T) if length is None else length
    inputs = jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, taps - 1))(every, ends)
    q, k, v = _heads(past, weight, d)
    of_heads, of_rows = ("batch", None, "attended"), ("batch",)
    ids = getattr(line, "unit", None), getattr(line, "row", None)
    axes = (*(of_heads,) * 5, ("batch", "attended"), of_rows, of_rows)
    # Each device computes its own heads, because XLA cannot split the triangular systems and would gather them.
    args = (q, k, v, g_BTN, b_BTN, before[0], *ids)
    out_BTNV, state_B1NHV = sharding.by_device(chunked, *args, axes=axes, shared=3)
    return out_BTNV, state_B1NHV[:, 0], inputs


def _earlier(every_BSC, mixed_BTC, ago: int, line: Units | Line | None, positions):
    """Return the channels of the token ``ago`` positions earlier in the same row, [B,T,C]; zero if there is none."""
    T, taps = mixed_BTC.shape[1], every_BSC.shape[1] - mixed_BTC.shape[1] + 1
    shifted = every_BSC[:, taps - 1 - ago : taps - 1 - ago + T]
    if line is None or ago == 0:
        return shifted
    place = jnp.arange(T)[None]
    back = lambda x: jnp.roll(x, ago, axis=1)
    is_own = (line.unit == back(line.unit)) & (place >= ago)
    if isinstance(line, Units):
        return jnp.where(is_own[..., None], shifted, 0)
    is_own &= line.row == back(line.row)
    starts = line.unit != jnp.roll(line.unit, 1, axis=1)
    first = jax.lax.cummax(jnp.where(starts | (place == 0), place, 0), axis=1)  # start of the token's unit
    of_prompt = jnp.take_along_axis(mixed_BTC, jnp.maximum(first + positions - ago, 0)[..., None], axis=1)
    return jnp.where((positions >= ago)[..., None], jnp.where(is_own[..., None], shifted, of_prompt), 0)


def chunked(q_BTNH, k_BTNH, v_BTNV, g_BTN, b_BTN, state_BNHV, unit_BT=None, row_BT=None):
    """Apply the rule to whole rows, chunk by chunk.

    Args:
        q_BTNH, k_BTNH, v_BTNV: float32 results of ``_heads``.
        g_BTN, b_BTN: float32, the logarithm of the decay, and the fraction of the error that is corrected.
        state_BNHV: the state before the first token.
        unit_BT, row_BT: unit and row ids of packed lines (``Units``, ``Line``); None = no lines. Units start with an
            empty state.

    Returns:
        [B,T,N,V], and the state after the last token, [B,1,N,H,V].
    """
    B, T, N, _ = q_BTNH.shape
    W = min(CHUNK, 1 << (T - 1).bit_length())
    n = -(-T // W)

    def split(x_BTX):  # [n,B,...,W,X]; padding does not change the state and belongs to the last token's row
        if jnp.issubdtype(x_BTX.dtype, jnp.integer):
            return jnp.pad(x_BTX, ((0, 0), (0, n * W - T)), mode="edge").reshape(B, n, W).swapaxes(0, 1)
        x = jnp.pad(x_BTX, ((0, 0), (0, n * W - T), *((0, 0),) * (x_BTX.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, n, W, N, -1), (1, 3), (0, 2))

    q, k, v, g, b = (split(x) for x in (q_BTNH, k_BTNH, v_BTNV, g_BTN, b_BTN))
    lower = jnp.tril(jnp.ones((W, W), bool))[None, None, None]
    if unit_BT is None:
        seen, starts, ends = lower, (jnp.ones((1, 1, 1, W, 1), bool),), (W - 1,)
    else:
        seen, starts, ends = _pasts(split(unit_BT), None if row_BT is None else split(row_BT), lower)
    # Sum g only over the tokens between two tokens. Differences of cumulative sums over a row would lose precision.
    of_past = jnp.where(seen, jnp.swapaxes(g, -1, -2), 0.0)
    strictly = jnp.tril(jnp.ones((W, W)), -1)[None, None, None]
    decay = jnp.where(seen, jnp.exp(einsum("nBNWS,nBNSX->nBNWX", of_past, strictly)), 0.0)
    since = jnp.exp(jnp.sum(of_past, axis=-1, keepdims=True))  # decay from the start of the chunk to each token
    right = jnp.concatenate([v * b, *(jnp.where(x, k * b * since, 0.0) for x in starts)], axis=-1)
    system = einsum("nBNWH,nBNSH->nBNWS", k, k) * decay * b
    solved = einsum("nBNWS,nBNSX->nBNWX", _inverse(system), right)
    (V, H), count = (v.shape[-1], k.shape[-1]), len(starts)
    value, *keys = jnp.split(solved, [V + i * H for i in range(count)], axis=-1)
    reads = einsum("nBNWH,nBNSH->nBNWS", q, k) * decay
    queries = [jnp.where(x, q * since, 0.0) for x in starts]

    def at_end(end):
        """Return how the state after token ``end`` depends on the chunk's inputs.

        The result is the decay of each state before the chunk, [n,B,N], and of each token's key, [n,B,N,W].
        """
        if isinstance(end, int):
            take = lambda x: x[..., end, :]
            return [jnp.where(take(x)[..., 0], take(since)[..., 0], 0.0) for x in starts], take(decay)
        is_there, at = end  # [n,B]
        take = lambda x: jnp.take_along_axis(x, at[:, :, None, None, None], axis=3)[..., 0, :]
        shares = [jnp.where(is_there[..., None] & take(x)[..., 0], take(since)[..., 0], 0.0) for x in starts]
        shares[-1] = jnp.where(is_there[..., None], shares[-1], 1.0)  # no prompt token here: keep the state
        return shares, jnp.where(is_there[..., None, None], take(decay), 0.0)

    def step(states, chunk):
        value, keys, queries, reads, k, made_of = chunk
        value -= sum(einsum("BNWH,BNHV->BNWV", key, state) for key, state in zip(keys, states, strict=True))
        out = einsum("BNWS,BNSV->BNWV", reads, value)
        out += sum(einsum("BNWH,BNHV->BNWV", x, state) for x, state in zip(queries, states, strict=True))
        new = (
            sum(share[..., None, None] * state for share, state in zip(shares, states, strict=True))
            + einsum("BNWH,BNWV->BNHV", k * of_key[..., None], value)
            for shares, of_key in made_of
        )
        return tuple(new), out

    chunks = (value, keys, queries, reads, k, [at_end(end) for end in ends])
    states, out = jax.lax.scan(step, (state_BNHV,) * count, chunks)
    return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, n * W, N, -1)[:, :T], states[0][:, None]


def _inverse(system: jax.Array) -> jax.Array:
    """Return (1 + L)^-1, L the part of ``system`` [...,W,W] below its diagonal. W must be a power of 2.

    The inverses of blocks double in size at each step: [[A,0],[C,B]]^-1 = [[A',0],[-B'CA',B']]. Only matmuls are used,
    for two reasons. They can be split over heads and devices. And XLA's triangular solve on CPU hangs in a program with
    few threads.
    """
    lead, W = system.shape[:-2], system.shape[-1]
    inverse, size = jnp.ones((*lead, W, 1, 1), system.dtype), 1
    while size < W:
        count = W // (2 * size)
        blocks = system.reshape(*lead, count, 2 * size, count, 2 * size)
        corner = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        pairs = inverse.reshape(*lead, count, 2, size, size)
        upper, lower = pairs[..., 0, :, :], pairs[..., 1, :, :]
        corner = -einsum("...ij,...jk,...kl->...il", lower, corner, upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _pasts(unit_nBW, row_nBW, lower):
    """Return the past of each token in the chunks of packed lines.

    Returns:
        - [n,B,1,W,W]: whether a token of the chunk is in each token's past.
        - [n,B,1,W,1] for each carried state: whether the state is in each token's past.
        - For each carried state, the token after which it is taken: the chunk's last token, and the last token of the
          prompt of the last token's unit. The second exists only if ``row_nBW`` is given.
    """
    rows = jnp.zeros_like(unit_nBW) if row_nBW is None else row_nBW
    # No token comes before the first chunk. Its id is -1, which no unit has.
    last = lambda x: jnp.concatenate([jnp.full_like(x[:1, :, :1], -1), x[:-1, :, -1:]], axis=0)
    seen = lower & (unit_nBW[..., :, None] == unit_nBW[..., None, :])[:, :, None]
    goes_on, is_row = unit_nBW == last(unit_nBW), rows == last(rows)
    by_token = lambda x: x[:, :, None, :, None]
    if row_nBW is None:
        return seen, (by_token(goes_on),), (unit_nBW.shape[2] - 1,)
    own = (rows[..., None, :] == 0) | (rows[..., :, None] == rows[..., None, :])
    of_prompt = (rows == 0) & (unit_nBW == unit_nBW[:, :, -1:])
    W = rows.shape[2]
    at = W - 1 - jnp.argmax(of_prompt[:, :, ::-1], axis=2)
    ends = (W - 1, (jnp.any(of_prompt, axis=2), at))
    return seen & own[:, :, None], (by_token(goes_on & is_row), by_token(goes_on & ~is_row)), ends
