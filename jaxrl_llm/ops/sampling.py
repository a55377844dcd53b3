"""One draw from a distribution over tokens, and its log-probabilities.

Owns: the inverse-CDF draw, log-probability and entropy. Does not know: which tokens may be drawn (``ops.filters``),
models, keys (a draw takes a uniform number), greedy decoding.
Letters: S rows, V vocabulary, N blocks, K tokens per block. Log-probabilities and entropies are in nats, float32.

Where devices hold parts of the vocabulary, a function that takes ``axis`` is run by each on its part [S, V/devices]
(``jax.shard_map``), with the names of the mesh axes that split it: sums and candidates move between them, no logits,
and each gets the whole result. () = the vocabulary is whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

# Tokens per block of the two-level search: about the square root of a vocabulary of 50-250 thousand.
BLOCK_TOKENS = 256


def sample_inverse_cdf(
    logits: Float[ArrayLike, "S V"], uniform: Float[ArrayLike, " S"], axis: tuple[str, ...] = ()
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draw one token per row by inverse CDF, from one uniform number per row.

        token = min{v : F(v) > u},   F(v) = sum_{w <= v} softmax(logits)_w

    The search has two levels, the sums of blocks and the tokens of one block: noise over the whole vocabulary would
    cost more than the rest of the draw. The vocabulary's weights have one use, so that none are kept, and the total is
    the last running sum, for of the blocks' sums XLA would make it of all weights again. A token of probability zero is
    never returned, whatever the rounding of sums and whatever ``u``. float32 resolves u to 2**-24, so probabilities are
    exact to about 1e-7 of the whole mass. However the vocabulary is split, the token is the same, but where ``u`` is
    within the rounding of float32 sums, about 1e-6, of a step of F.

    Args:
        logits: [S, V] f32, already filtered; -inf = impossible. Each row has a finite entry.
        uniform: [S] f32 in [0, 1).

    Returns:
        token: [S] i32.
        logp: [S] f32, ``logit - max - log(sum(exp(logit - max)))`` of the token.
    """
    num_rows, num_tokens = logits.shape
    top_S1 = _max_over(axis, jnp.max(logits, axis=-1, keepdims=True))
    weight_SV = jnp.pad(jnp.exp(logits - top_S1), ((0, 0), (0, -num_tokens % BLOCK_TOKENS)))
    weight_SN = jnp.sum(weight_SV.reshape(num_rows, -1, BLOCK_TOKENS), axis=-1)
    running_SN = jnp.cumsum(weight_SN, axis=-1)
    total = running_SN[:, -1]
    target = uniform * total
    if axis:  # a third level, above blocks: the sums of the devices' parts
        total_ST = jax.lax.all_gather(total, axis, axis=1)
        running_ST = jnp.cumsum(total_ST, axis=-1)
        total = running_ST[:, -1]
        part, before = _first_above(total_ST, running_ST, uniform * total)
        target = uniform * total - before
    block, before = _first_above(weight_SN, running_SN, target)
    token_SK = block[:, None] * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS, dtype=jnp.int32)[None, :]
    shifted_SK = jnp.take_along_axis(logits, jnp.minimum(token_SK, num_tokens - 1), axis=-1) - top_S1
    weight_SK = jnp.where(token_SK < num_tokens, jnp.exp(shifted_SK), 0.0)
    offset, _ = _first_above(weight_SK, jnp.cumsum(weight_SK, axis=-1), target - before)
    chosen = jnp.take_along_axis(shifted_SK, offset[:, None], axis=-1)[:, 0]
    token = block * BLOCK_TOKENS + offset
    if axis:
        is_own = part == jax.lax.axis_index(axis)
        token, chosen = (jax.lax.psum(jnp.where(is_own, x, 0), axis) for x in (token + part * num_tokens, chosen))
    return token, chosen - jnp.log(total)


def _max_over(axis: tuple[str, ...], x: jax.Array) -> jax.Array:
    return jax.lax.pmax(x, axis) if axis else x


def _first_above(
    weight: Float[Array, "S N"], running: Float[Array, "S N"], target: Float[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Per row the first index of positive weight whose ``running`` sum exceeds ``target``, and the sum before it.

    A float32 running sum is rounded, maybe not even monotone (XLA adds in a tree), and ``target`` may round up
    to the total: so weights of zero are excluded explicitly, and the last positive index is the fallback.
    """
    is_positive = weight > 0
    is_above = is_positive & (running > target[:, None])
    last = weight.shape[-1] - 1 - jnp.argmax(is_positive[:, ::-1], axis=-1)
    index = jnp.where(jnp.any(is_above, axis=-1), jnp.argmax(is_above, axis=-1), last).astype(jnp.int32)
    before = jnp.take_along_axis(running - weight, index[:, None], axis=-1)[:, 0]
    return index, before


def surprise_moments(
    logits: Float[ArrayLike, "*rows V"], axis: tuple[str, ...] = ()
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Mean and variance of ``-log p`` of a token of the distribution, each [...] f32 nats: its entropy, and

        variance = sum_v p_v (log p_v)^2 - entropy^2

    Args:
        logits: [..., V] f32, already filtered; -inf = impossible. Each row has a finite entry.
    """
    shifted = logits - _max_over(axis, jnp.max(logits, axis=-1, keepdims=True))
    weight, surprise = jnp.exp(shifted), jnp.where(shifted > -jnp.inf, -shifted, 0.0)
    total_of = lambda x: jax.lax.psum(jnp.sum(x, axis=-1), axis)  # nothing moves where no axis is
    total = total_of(weight)
    mean = total_of(weight * surprise) / total
    square = total_of(weight * jnp.square(surprise)) / total
    return mean + jnp.log(total), jnp.maximum(square - jnp.square(mean), 0.0)


def token_logp(
    logits: Float[ArrayLike, "*rows V"], token: Int[ArrayLike, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Log-probability of a token and entropy of the distribution.

        logp = l_token - max - log Z,   entropy = log Z - sum_v p_v (l_v - max),   Z = sum_v exp(l_v - max)

    0 log 0 counts as 0. Gradients are finite with -inf entries; a token at -inf has log-probability -inf.

    Args:
        logits: [..., V] f32, already filtered; -inf = impossible. Each row has a finite entry.
        token: [...] i32.

    Returns:
        logp, entropy: [...] f32 nats.
    """
    # The maximum cancels in both results: no gradient needs to pass through it.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - maximum
    weight, possible = jnp.exp(shifted), shifted > -jnp.inf
    total = jnp.sum(weight, axis=-1)
    log_total = jnp.log(total)
    # Of ``logits``, and the sum of a choice: XLA's CPU backend would keep ``shifted``, and sums a product 8 x slower.
    chosen = (jnp.take_along_axis(logits, token[..., None], axis=-1) - maximum)[..., 0]
    summand = jnp.where(possible, weight * jnp.where(possible, shifted, 0.0), 0.0)
    return chosen - log_total, log_total - jnp.sum(summand, axis=-1) / total
