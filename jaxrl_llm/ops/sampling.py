"""The distribution tokens are drawn from, one draw from it, and its log-probabilities.

Sampler and learner pass their logits through the same ``filter_logits``, or where a filter leaves tokens out the
learner takes what the sampler kept (``support_of``), so that a log-probability is always of the distribution that was
sampled. Owns: temperature, top-k, top-p, min-p, what they leave of the vocabulary, the inverse-CDF draw,
log-probability and entropy. Does not know: models, keys (a draw takes a uniform number), greedy decoding.
Letters: S rows, V vocabulary, N blocks, K tokens per block. Log-probabilities and entropies are in nats, float32.

Where devices hold parts of the vocabulary, a function that takes ``axis`` is run by each on its part [S, V/devices]
(``jax.shard_map``), with the names of the mesh axes that split it: sums and candidates move between them, no logits,
and each gets the whole result. () = the vocabulary is whole.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Float32, Int

# Tokens per block of the two-level search: about the square root of a vocabulary of 50-250 thousand.
BLOCK_TOKENS = 256
# Among the ids of a support: nothing, in a vocabulary of any size.
NO_TOKEN = jnp.iinfo(jnp.int32).max


class Filter(NamedTuple):
    """Settings of the distribution that tokens are drawn from."""

    temperature: float  # above 0
    top_k: int  # 0 = all
    top_p: float  # in (0, 1]; 1.0 = all
    min_p: float  # in [0, 1]; 0.0 = all

    @classmethod
    def of(cls, sampling: Any) -> Filter:
        """Those of a config that calls them so."""
        return cls(*(getattr(sampling, name) for name in cls._fields))

    def leaves_out(self, vocab_size: int) -> bool:
        """Whether any token may be impossible."""
        return 0 < self.top_k < vocab_size or self.top_p < 1 or self.min_p > 0


def filter_logits(
    logits: Float[ArrayLike, "*rows V"], settings: Filter, *, keep_token: Int[ArrayLike, "*rows"] | None = None
) -> Float32[ArrayLike, "*rows V"]:
    """Tempered logits with the tokens that may not be sampled at ``-inf``.

    In this order: divide by the temperature; keep the ``top_k`` largest; of what is left, renormalised, keep the
    smallest set with mass of at least ``top_p``; keep ``p >= min_p * max p``. Tokens equal to the last one kept are
    kept too (here: ``support_of`` cuts them), so the result does not depend on the order of the vocabulary. The most
    likely token always stays. The settings are Python numbers: one that is off (0, 1.0, 0.0) adds nothing to the
    program. Which tokens stay is a constant to differentiation.

    Args:
        logits: [..., V]; computed in float32.
        keep_token: [...] i32, a token of each row that stays whatever the filters say. For the learner: as the policy
            moves, or by rounding at the threshold, a token sampled earlier can leave the support, and its
            log-probability would be -inf. (Of a run's rollouts the support itself is kept: ``support_of``.)

    Returns:
        [..., V] f32.

    Source: top-p, Holtzman et al. 2020, arXiv:1904.09751, section 3.1; min-p, Nguyen et al. 2024,
        arXiv:2407.01082, section 3. Differs: ties at a threshold are kept.
    """
    temperature, top_k, top_p, min_p = settings
    assert temperature > 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1
    tempered = logits.astype(jnp.float32)
    if temperature != 1:
        tempered = tempered / temperature
    constant = jax.lax.stop_gradient(tempered)
    kept = constant
    if 0 < top_k < logits.shape[-1]:
        kept = _keep_largest(kept, jnp.ones_like(kept), top_k)
    if top_p < 1:
        kept = _keep_largest(kept, jax.nn.softmax(kept, axis=-1), top_p)
    if min_p > 0:
        threshold = jnp.max(kept, axis=-1, keepdims=True) + math.log(min_p)
        kept = jnp.where(kept >= threshold, kept, -jnp.inf)
    if kept is constant:
        return tempered
    is_kept = kept > -jnp.inf
    if keep_token is not None:
        token_ids = jnp.arange(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
        is_kept = is_kept | (token_ids == keep_token[..., None])
    return jnp.where(is_kept, tempered, -jnp.inf)


def support_of(logits: Float[ArrayLike, "S V"], size: int, axis: tuple[str, ...] = ()) -> Int[Array, "S {size}"]:
    """The tokens that may be sampled, ``size`` of them at most: of more that are tied at the end, the first ones.

    Args:
        logits: [S, V], already filtered; -inf = impossible.

    Returns:
        [S, size] i32 ascending ids, ``NO_TOKEN`` past the last.
    """
    value, token = jax.lax.top_k(logits, min(size, logits.shape[-1]))
    if axis:  # of each device's candidates; equal ones stay in the order of the vocabulary
        token += jax.lax.axis_index(axis) * logits.shape[-1]
        value, token = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (value, token))
        value, place = jax.lax.top_k(value, size)
        token = jnp.take_along_axis(token, place, axis=1)
    return jnp.sort(jnp.where(value > -jnp.inf, token, NO_TOKEN).astype(jnp.int32), axis=-1)


def keep_support(
    logits: Float[ArrayLike, "S V"], support: Int[ArrayLike, "S K"], axis: tuple[str, ...] = ()
) -> Float[Array, "S V"]:
    """``logits`` [S, V] at the ids ``support`` [S, K] i32, -inf elsewhere."""
    if axis:  # ids of this device's part; a negative one would count from its end
        support = support - jax.lax.axis_index(axis) * logits.shape[1]
        support = jnp.where(support < 0, NO_TOKEN, support)
    # Row by row: with the rows in the index, a mesh would gather it.
    is_kept = jax.vmap(lambda ids: jnp.zeros(logits.shape[1], bool).at[ids].set(True, mode="drop"))(support)
    return jnp.where(is_kept, logits, -jnp.inf)


def _keep_largest(
    values: Float[ArrayLike, "*rows V"], weight: Float[ArrayLike, "*rows V"], target: float
) -> Float[Array, "*rows V"]:
    """``values`` [..., V] down to the largest t with ``sum(weight where values >= t) >= target``, -inf below it.

    t is built bit by bit, on integers in the order of the floats: 32 sums over the vocabulary. Exact, and on a CPU
    several times faster than sorting it.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)  # -0.0 equals 0.0
    # Floats compare as their bits when positive and in reverse when negative.
    rank = jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31))), jnp.uint32)

    def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(2**31) >> i.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(rank >= candidate, weight, 0.0), axis=-1, keepdims=True)
        return jnp.where(mass >= target, candidate, threshold)

    lowest = jnp.zeros((*values.shape[:-1], 1), jnp.uint32)
    return jnp.where(rank >= jax.lax.fori_loop(0, 32, set_bit, lowest), values, -jnp.inf)


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
