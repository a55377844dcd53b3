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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import Architecture, Delta, Layer
from jaxrl_llm.models.attention import Groups
from jaxrl_llm.models.blocks import CacheSizes, LayerParameters, MixerInputs, Parameter, States
from jaxrl_llm.models.kernels import context
from jaxrl_llm.models.kernels.learner import Units
from jaxrl_llm.ops.packing import Line
from jaxrl_llm.runtime import sharding

# Tokens of a chunk: the smallest size that fills a matrix unit; larger systems would lose accuracy in float32.
CHUNK = 64
# All sums of the rule are float32 with the highest precision, because errors in a state persist.
einsum = functools.partial(jnp.einsum, precision="highest")

Channels = tuple[jax.Array, jax.Array, jax.Array]  # channels [B,T,C], g and b [B,T,N]


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """Yield the parameters of the rule; none if the architecture has no such rule."""
    if arch.delta is None:
        return
    d = arch.delta
    width = arch.width
    values_per_key = d.value_heads // d.key_heads
    if d.is_grouped:  # rows of a key head: query, key, values and output gates; then b and a
        head_size = 2 * d.key_size + 2 * values_per_key * d.value_size
        axes = ("kv_heads", "head_size", "embed")
        yield Parameter("delta_in", (d.key_heads, head_size, width), axes)
        yield Parameter("delta_gates", (d.key_heads, 2 * values_per_key, width), axes)
    else:
        axes = ("heads", "head_size", "embed")
        yield Parameter("delta_qkv", (d.channels, width), ("head_size", "embed"))
        yield Parameter("delta_z", (d.value_heads, d.value_size, width), axes)
        yield Parameter("delta_b", (d.value_heads, width), ("heads", "embed"))
        yield Parameter("delta_a", (d.value_heads, width), ("heads", "embed"))
    yield Parameter("delta_conv", (d.channels, 1, d.taps), ("head_size",) * 3, 0.5)
    yield Parameter("delta_rate", (d.value_heads,), ("heads",), 0.0)  # with this bias, a state's half-life is 14 tokens
    yield Parameter("delta_bias", (d.value_heads,), ("heads",), -3.0)
    yield Parameter("delta_norm", (d.value_size,), ("head_size",), 1.0)
    out_axes = ("embed", "heads", "head_size")
    yield Parameter("delta_out", (width, d.value_heads, d.value_size), out_axes)


def empty_states(d: Delta, rows: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return the states before a row's first token.

    These are the rule's state [rows,N,H,V] float32, and the convolution's last inputs [rows,taps-1,C] in ``dtype``.
    """
    state_shape = (rows, d.value_heads, d.key_size, d.value_size)
    inputs_shape = (rows, d.taps - 1, d.channels)
    return jnp.zeros(state_shape, jnp.float32), jnp.zeros(inputs_shape, dtype)


def empty_cache(arch: Architecture, layer: Layer, sizes: CacheSizes) -> States:
    """Return the states of all decode slots. Each is in a tuple of one, the form of a cache with one block."""
    state, inputs = empty_states(_sizes_of(arch), sizes.slots, sizes.dtype)
    return (state,), (inputs,)


def empty_prompts(arch: Architecture, layer: Layer, sizes: CacheSizes) -> States:
    """Return the states of all prompts."""
    return empty_states(_sizes_of(arch), sizes.prompts, sizes.dtype)


def begin(
    cache: tuple[jax.Array],
    prompts: jax.Array,
    entry_MZ: jax.Array,
    takes_MZ: jax.Array,
) -> tuple[jax.Array]:
    """Copy the prompts' states to the slots that start a new row (``mixers.begin``)."""
    num_shards, _ = entry_MZ.shape
    (slots,) = cache

    @jax.vmap
    def states_of_prompts(states: jax.Array, entry: jax.Array) -> jax.Array:
        return states[entry]

    by_shard = prompts.reshape(num_shards, -1, *prompts.shape[1:])
    new = states_of_prompts(by_shard, entry_MZ)
    single_axes = (1,) * (slots.ndim - 1)
    takes = takes_MZ.reshape(-1, *single_axes)
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
    assert inputs.visible is None or isinstance(inputs.visible, Units | Line), "a mask defines no rows"
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
    softplus_BTN = jax.nn.softplus(a_BTN + bias[None, None])
    g_BTN = rate[None, None] * softplus_BTN
    b_BTN = jax.nn.sigmoid(b_BTN)
    if context.is_split():  # with split rows, each device gets whole rows of fewer channels and heads, as in attention
        mixed_BTC, g_BTN, b_BTN = (sharding.constrain(x, "batch", None, "attended") for x in (mixed_BTC, g_BTN, b_BTN))
    return (mixed_BTC, g_BTN, b_BTN), z_BTNV


def _output(out_BTNV: jax.Array, z_BTNV: jax.Array, parameters: LayerParameters) -> jax.Array:
    """Return the projection of the rule's outputs after a norm and the output gates, [B,T,D]."""
    dtype = z_BTNV.dtype
    B, T = z_BTNV.shape[:2]
    out_BTNV = context.to_tokens(out_BTNV)
    mean_square = jnp.mean(jnp.square(out_BTNV), axis=-1, keepdims=True)
    out = out_BTNV * jax.lax.rsqrt(mean_square + parameters.arch.norm_eps)
    norm_scale = parameters.weight("delta_norm").astype(dtype)
    out = norm_scale[None, None, None] * out.astype(dtype)
    gate = jax.nn.silu(z_BTNV.astype(jnp.float32))
    out = (out * gate).astype(dtype)
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
        first_value = 2 * key_size
        first_gate = first_value + value_size
        q, k, v, z = jnp.split(x_BTKX, (key_size, first_value, first_gate), axis=-1)
        gates_BTKX = by_head(parameters.project(x_BTD, "delta_gates"))
        b, a = jnp.split(gates_BTKX, 2, axis=-1)
        mixed_BTC = jnp.concatenate([flat(q), flat(k), flat(v)], axis=-1)
    else:
        mixed_BTC = parameters.project(x_BTD, "delta_qkv")
        z = parameters.project(x_BTD, "delta_z")
        b = parameters.project(x_BTD, "delta_b")
        a = parameters.project(x_BTD, "delta_a")
    z_BTNV = flat(z).reshape(B, T, d.value_heads, d.value_size)
    return mixed_BTC, z_BTNV, flat(b).astype(jnp.float32), flat(a).astype(jnp.float32)


def _heads(past: list[jax.Array], weight: jax.Array, d: Delta) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries and keys [B,T,N,H] and values [B,T,N,V] after the convolution, all float32.

    Keys have unit length; queries have length 1 / sqrt(H). Both are repeated to the number of value heads.

    Args:
        past: channels [B,T,C] of each token, then of the token before it, and so on.
        weight: [C,taps] weights of the convolution.
    """
    num_keys = d.key_heads * d.key_size
    terms = []
    for distance, x_BTC in enumerate(past):
        tap = weight[None, None, :, d.taps - 1 - distance]
        terms.append(x_BTC.astype(jnp.float32) * tap)
    mixed = jnp.asarray(sum(terms))
    q, k, v = jnp.split(jax.nn.silu(mixed), (num_keys, 2 * num_keys), axis=-1)

    def unit(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], d.key_heads, -1)
        square_length = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(square_length + 1e-6)
        return jnp.repeat(x, d.value_heads // d.key_heads, axis=2)

    q_BTNH = unit(q) * d.key_size**-0.5
    k_BTNH = unit(k)
    v_BTNV = v.reshape(*v.shape[:2], d.value_heads, -1)
    return q_BTNH, k_BTNH, v_BTNV


def _step(
    mixed_B1C: jax.Array,
    g_B1N: jax.Array,
    b_B1N: jax.Array,
    state_BNHV: jax.Array,
    inputs_BXC: jax.Array,
    *,
    weight: jax.Array,
    d: Delta,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply the rule to one new token per row, and return the output and the new states."""
    window_BXC = jnp.concatenate([inputs_BXC.astype(mixed_B1C.dtype), mixed_B1C], axis=1)
    past = jnp.split(window_BXC, d.taps, axis=1)[::-1]
    q, k, v = (x[:, 0] for x in _heads(past, weight, d))
    decay = jnp.exp(g_B1N[:, 0, :, None, None])
    state = decay * state_BNHV
    fraction = b_B1N[:, 0, :, None]
    predicted_BNV = jnp.sum(state * k[..., None], axis=2)
    error_BNV = fraction * (v - predicted_BNV)
    state += k[..., None] * error_BNV[:, :, None]
    out_BNV = jnp.sum(state * q[..., None], axis=2)
    new_inputs = window_BXC[:, 1:].astype(inputs_BXC.dtype)
    return out_BNV[:, None], state, new_inputs


def _groups(
    mixed_BTC: jax.Array,
    g_BTN: jax.Array,
    b_BTN: jax.Array,
    groups: Groups,
    *,
    weight: jax.Array,
    d: Delta,
) -> jax.Array:
    """Apply the rule to rows of whole groups. Each completion starts from the states after its prompt."""
    L = groups.prompt_width
    G = groups.size

    def completions(x: jax.Array) -> jax.Array:  # [B,L+G*C,...] -> [B*G,C,...]
        return x[:, L:].reshape(x.shape[0] * G, -1, *x.shape[2:])

    prompt_out, *prompt_states = _rows(
        mixed_BTC[:, :L],
        g_BTN[:, :L],
        b_BTN[:, :L],
        length=groups.prompt_length,
        weight=weight,
        d=d,
    )
    state, last_inputs = (jnp.repeat(x, G, axis=0) for x in prompt_states)
    completion_out, *_ = _rows(
        completions(mixed_BTC),
        completions(g_BTN),
        completions(b_BTN),
        before=(state, last_inputs),
        weight=weight,
        d=d,
    )
    completion_out = completion_out.reshape(prompt_out.shape[0], -1, *completion_out.shape[2:])
    return jnp.concatenate([prompt_out, completion_out], axis=1)


def _rows(
    mixed_BTC: jax.Array,
    g_BTN: jax.Array,
    b_BTN: jax.Array,
    *,
    weight: jax.Array,
    d: Delta,
    before: tuple[jax.Array, jax.Array] | None = None,
    line: Units | Line | None = None,
    positions: jax.Array | None = None,
    length: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the outputs [B,T,N,V] and the states after ``length`` tokens.

    Args:
        before: states before the first token; None = empty states.
    """
    B, T, _ = mixed_BTC.shape
    if before is None:
        before = empty_states(d, B, mixed_BTC.dtype)
    state, last_inputs = before
    if length is not None:  # later tokens do not change the state
        is_in = jnp.arange(T)[None] < length[:, None]
        is_in = is_in[..., None]
        g_BTN = jnp.where(is_in, g_BTN, 0.0)
        b_BTN = jnp.where(is_in, b_BTN, 0.0)
    extended_BSC = jnp.concatenate([last_inputs.astype(mixed_BTC.dtype), mixed_BTC], axis=1)
    past = [_earlier(extended_BSC, mixed_BTC, distance, line, positions) for distance in range(d.taps)]
    ends = jnp.full(B, T) if length is None else length

    @jax.vmap
    def inputs_before(x: jax.Array, end: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, end, d.taps - 1)

    new_inputs = inputs_before(extended_BSC, ends)
    q, k, v = _heads(past, weight, d)
    unit = getattr(line, "unit", None)
    row = getattr(line, "row", None)
    heads_axes = [("batch", None, "attended")] * 5
    # Each device computes its own heads, because XLA cannot split the triangular systems and would gather them.
    out_BTNV, state_B1NHV = sharding.by_device(
        chunked,
        q,
        k,
        v,
        g_BTN,
        b_BTN,
        state,
        unit,
        row,
        axes=(*heads_axes, ("batch", "attended"), ("batch",), ("batch",)),
        shared=3,
    )
    return out_BTNV, state_B1NHV[:, 0], new_inputs


def _earlier(
    extended_BSC: jax.Array,
    mixed_BTC: jax.Array,
    distance: int,
    line: Units | Line | None,
    positions: jax.Array | None,
) -> jax.Array:
    """Return the channels of the token ``distance`` positions earlier in the same row, [B,T,C]; zero if none exists.

    Args:
        extended_BSC: ``mixed_BTC`` after the taps - 1 tokens before it.
    """
    T = mixed_BTC.shape[1]
    taps = extended_BSC.shape[1] - T + 1
    start = taps - 1 - distance
    shifted = extended_BSC[:, start : start + T]
    if line is None or distance == 0:
        return shifted
    place = jnp.arange(T)[None]
    is_same_unit = line.unit == jnp.roll(line.unit, distance, axis=1)
    is_same_row = is_same_unit & (place >= distance)
    if isinstance(line, Units):
        return jnp.where(is_same_row[..., None], shifted, 0)
    assert positions is not None, "packed lines have positions"
    is_same_row &= line.row == jnp.roll(line.row, distance, axis=1)
    starts_unit = line.unit != jnp.roll(line.unit, 1, axis=1)
    start_place = jnp.where(starts_unit | (place == 0), place, 0)
    unit_start = jax.lax.cummax(start_place, axis=1)
    prompt_place = jnp.maximum(unit_start + positions - distance, 0)
    prompt_token = jnp.take_along_axis(mixed_BTC, prompt_place[..., None], axis=1)
    exists = positions >= distance
    earlier = jnp.where(is_same_row[..., None], shifted, prompt_token)
    return jnp.where(exists[..., None], earlier, 0)


class _CarriedState(NamedTuple):
    """The token of a chunk after which a carried state is taken: ``place``, if ``exists``."""

    place: jax.Array | int  # [n,B] or the same for all chunks
    exists: jax.Array | None = None  # [n,B]; None = always


def chunked(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTNV: jax.Array,
    g_BTN: jax.Array,
    b_BTN: jax.Array,
    state_BNHV: jax.Array,
    unit_BT: jax.Array | None = None,
    row_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
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
    B, T, N, H = q_BTNH.shape
    V = v_BTNV.shape[-1]
    W = min(CHUNK, 1 << (T - 1).bit_length())
    n = -(-T // W)
    q, k, v, g, b = (_chunks(x, n, W) for x in (q_BTNH, k_BTNH, v_BTNV, g_BTN, b_BTN))
    lower = jnp.tril(jnp.ones((W, W), bool))[None, None, None]
    if unit_BT is None:
        visible = lower
        starts = [jnp.ones((1, 1, 1, W, 1), bool)]
        ends = [_CarriedState(W - 1)]
    else:
        row_chunks = None if row_BT is None else _chunks(row_BT, n, W)
        visible, starts, ends = _pasts(_chunks(unit_BT, n, W), row_chunks, lower)
    decay, decay_from_start = _decays(g, visible)
    right_sides = [v * b]
    for reads_state in starts:
        right_sides.append(jnp.where(reads_state, k * b * decay_from_start, 0.0))
    right_side = jnp.concatenate(right_sides, axis=-1)
    system = einsum("nBNWH,nBNSH->nBNWS", k, k) * decay * b
    solution = einsum("nBNWS,nBNSX->nBNWX", _inverse(system), right_side)
    first_of_keys = [V + i * H for i in range(len(starts))]
    value, *keys = jnp.split(solution, first_of_keys, axis=-1)
    reads = einsum("nBNWH,nBNSH->nBNWS", q, k) * decay
    queries = [jnp.where(reads_state, q * decay_from_start, 0.0) for reads_state in starts]
    shares = [_shares(end, starts, decay, decay_from_start) for end in ends]
    chunks = (value, keys, queries, reads, k, shares)
    first_states = (state_BNHV,) * len(starts)
    states, out = jax.lax.scan(_next_chunk, first_states, chunks)
    out_BXNV = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, n * W, N, -1)
    return out_BXNV[:, :T], states[0][:, None]


def _decays(g: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the decay between each pair of a chunk's tokens [n,B,N,W,W], and from the chunk's start [n,B,N,W,1].

    For each pair of tokens, g is summed over the tokens between them. Differences of cumulative sums over a row would
    lose precision.
    """
    W = g.shape[-2]
    g_of_past = jnp.where(visible, jnp.swapaxes(g, -1, -2), 0.0)
    strictly_lower = jnp.tril(jnp.ones((W, W)), -1)[None, None, None]
    g_between = einsum("nBNWS,nBNSX->nBNWX", g_of_past, strictly_lower)
    decay = jnp.where(visible, jnp.exp(g_between), 0.0)
    g_from_start = jnp.sum(g_of_past, axis=-1, keepdims=True)
    return decay, jnp.exp(g_from_start)


def _chunks(x_BTX: jax.Array, n: int, W: int) -> jax.Array:
    """Return [n,B,N,W,X] of values [B,T,N,...], or [n,B,W] of integer ids [B,T].

    Padding does not change the state. Its ids are those of the last token.
    """
    B, T = x_BTX.shape[:2]
    padding = (0, n * W - T)
    if jnp.issubdtype(x_BTX.dtype, jnp.integer):
        ids = jnp.pad(x_BTX, ((0, 0), padding), mode="edge")
        return ids.reshape(B, n, W).swapaxes(0, 1)
    N = x_BTX.shape[2]
    no_padding = [(0, 0)] * (x_BTX.ndim - 2)
    x = jnp.pad(x_BTX, ((0, 0), padding, *no_padding))
    return jnp.moveaxis(x.reshape(B, n, W, N, -1), (1, 3), (0, 2))


def _shares(
    end: _CarriedState,
    starts: list[jax.Array],
    decay: jax.Array,
    decay_from_start: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """Return how a carried state after a chunk depends on the states before it and on the chunk's tokens.

    Returns:
        The decay of each state before the chunk, [n,B,N], and of each token's key, [n,B,N,W].
    """
    exists = end.exists
    place = end.place

    def take(x: jax.Array) -> jax.Array:
        """Return the values of the token after which the state is taken."""
        if exists is None:
            return x[..., place, :]
        index = jnp.asarray(place)[:, :, None, None, None]
        return jnp.take_along_axis(x, index, axis=3)[..., 0, :]

    shares = []
    for reads_state in starts:
        is_used = take(reads_state)[..., 0]
        if exists is not None:
            is_used = exists[..., None] & is_used
        shares.append(jnp.where(is_used, take(decay_from_start)[..., 0], 0.0))
    if exists is None:
        return shares, take(decay)
    shares[-1] = jnp.where(exists[..., None], shares[-1], 1.0)  # without a prompt token in this chunk, keep the state
    key_shares = jnp.where(exists[..., None, None], take(decay), 0.0)
    return shares, key_shares


def _next_chunk(states: tuple[jax.Array, ...], chunk: Any) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return the states after a chunk, and the chunk's outputs [B,N,W,V]."""
    value, keys, queries, reads, k, shares_of_ends = chunk
    predictions = [einsum("BNWH,BNHV->BNWV", key, state) for key, state in zip(keys, states, strict=True)]
    value -= sum(predictions)
    out = einsum("BNWS,BNSV->BNWV", reads, value)
    outputs = [einsum("BNWH,BNHV->BNWV", query, state) for query, state in zip(queries, states, strict=True)]
    out += sum(outputs)
    new_states = []
    for shares, key_share in shares_of_ends:
        kept = sum(share[..., None, None] * state for share, state in zip(shares, states, strict=True))
        added = einsum("BNWH,BNWV->BNHV", k * key_share[..., None], value)
        new_states.append(kept + added)
    return tuple(new_states), out


def _inverse(system: jax.Array) -> jax.Array:
    """Return (1 + L)^-1, L the part of ``system`` [...,W,W] below its diagonal. W must be a power of 2.

    The inverses of blocks double in size at each step: [[A,0],[C,B]]^-1 = [[A',0],[-B'CA',B']]. Only matmuls are used,
    for two reasons. They can be split over heads and devices. In addition, XLA's triangular solve on CPU hangs in a
    program with few threads.
    """
    *lead, W, _ = system.shape
    inverse = jnp.ones((*lead, W, 1, 1), system.dtype)
    size = 1
    while size < W:
        count = W // (2 * size)
        blocks = system.reshape(*lead, count, 2 * size, count, 2 * size)
        diagonal = jnp.diagonal(blocks, axis1=-4, axis2=-2)
        corner = jnp.moveaxis(diagonal, -1, -3)[..., size:, :size]
        pairs = inverse.reshape(*lead, count, 2, size, size)
        upper = pairs[..., 0, :, :]
        lower = pairs[..., 1, :, :]
        corner = -einsum("...ij,...jk,...kl->...il", lower, corner, upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        bottom = jnp.concatenate([corner, lower], axis=-1)
        inverse = jnp.concatenate([top, bottom], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _pasts(
    unit_nBW: jax.Array, row_nBW: jax.Array | None, lower: jax.Array
) -> tuple[jax.Array, list[jax.Array], list[_CarriedState]]:
    """Return the past of each token in the chunks of packed lines.

    Returns:
        - [n,B,1,W,W]: whether a token of the chunk is in each token's past.
        - [n,B,1,W,1] for each carried state: whether the state is in each token's past.
        - For each carried state, the token after which it is taken: the chunk's last token, and the last token of the
          prompt of the last token's unit. The second token exists only if ``row_nBW`` is given.
    """
    rows = jnp.zeros_like(unit_nBW) if row_nBW is None else row_nBW
    W = rows.shape[2]
    is_same_unit = unit_nBW[..., :, None] == unit_nBW[..., None, :]
    visible = lower & is_same_unit[:, :, None]
    continues_unit = unit_nBW == _last_of_previous(unit_nBW)
    continues_row = rows == _last_of_previous(rows)
    last_token = _CarriedState(W - 1)
    if row_nBW is None:
        return visible, [_by_token(continues_unit)], [last_token]
    is_of_prompt = rows[..., None, :] == 0
    is_in_past = is_of_prompt | (rows[..., :, None] == rows[..., None, :])
    is_of_last_unit = unit_nBW == unit_nBW[:, :, -1:]
    is_prompt = (rows == 0) & is_of_last_unit
    last_prompt_place = W - 1 - jnp.argmax(is_prompt[:, :, ::-1], axis=2)
    end_of_prompt = _CarriedState(last_prompt_place, jnp.any(is_prompt, axis=2))
    visible &= is_in_past[:, :, None]
    starts = [
        _by_token(continues_unit & continues_row),
        _by_token(continues_unit & ~continues_row),
    ]
    return visible, starts, [last_token, end_of_prompt]


def _last_of_previous(x_nBW: jax.Array) -> jax.Array:
    """Return the id of the last token of the previous chunk, [n,B,1].

    No token comes before the first chunk. Its id is -1, which no unit has.
    """
    before_first = jnp.full_like(x_nBW[:1, :, :1], -1)
    return jnp.concatenate([before_first, x_nBW[:-1, :, -1:]], axis=0)


def _by_token(x_nBW: jax.Array) -> jax.Array:
    return x_nBW[:, :, None, :, None]
