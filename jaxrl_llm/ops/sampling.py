"""One draw from a distribution over tokens, and its log-probabilities.

Owns: the inverse-CDF draw, log-probability and entropy. Does not know: which tokens may be drawn (``ops.filters``),
models, random keys (a draw takes a uniform number), greedy decoding.
Letters: S rows, V vocabulary, N blocks, K tokens per block. Log-probabilities and entropies are in nats, float32.

The devices of a mesh can hold parts of the vocabulary. Each device then calls the function on its part [S, V/devices]
(``jax.shard_map``), and ``axis`` has the names of the mesh axes that split the vocabulary. Sums and candidates move
between the devices; logits do not. Every device gets the whole result. () = the vocabulary is not split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Tokens per block of the two-level search: about the square root of a vocabulary of 50 to 250 thousand tokens.
BLOCK_TOKENS = 256


def sample_inverse_cdf(
    logits: Float[Array, "S V"],
    uniform: Float[Array, " S"],
    axis: tuple[str, ...] = (),
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draw one token per row by inverse CDF, from one uniform number per row.

        token = min{v : F(v) > u},   F(v) = sum_{w <= v} softmax(logits)_w

    The search has two levels: the sums of blocks, then the tokens of one block. Noise for the whole vocabulary would
    cost more than the rest of the draw. The weights of the vocabulary are used once, so that XLA does not store them.
    The total is the last running sum, because XLA would compute a sum of the blocks' sums from all weights again.

    A token of probability zero is never returned, for any rounding and any ``u``. float32 resolves u to 2**-24, so
    probabilities are exact to about 1e-7 of the whole mass. A split of the vocabulary does not change the token, except
    if ``u`` is within the rounding of float32 sums (about 1e-6) of a step of F.

    Args:
        logits: [S, V] f32, already filtered; -inf = impossible. Each row has a finite entry.
        uniform: [S] f32 in [0, 1).

    Returns:
        token: [S] i32.
        logp: [S] f32, ``logit - max - log(sum(exp(logit - max)))`` of the token.
    """
    num_rows, num_tokens = logits.shape
    num_padding = -num_tokens % BLOCK_TOKENS
    top_S1 = _max_over(axis, jnp.max(logits, axis=-1, keepdims=True))
    weight_SV = jnp.exp(logits - top_S1)
    padded_SV = jnp.pad(weight_SV, ((0, 0), (0, num_padding)))
    blocks_SNK = padded_SV.reshape(num_rows, -1, BLOCK_TOKENS)
    weight_SN = jnp.sum(blocks_SNK, axis=-1)
    running_SN = jnp.cumsum(weight_SN, axis=-1)
    part_total = running_SN[:, -1]
    if not axis:
        token, shifted = _search(logits, top_S1, weight_SN, running_SN, uniform * part_total)
        return token, shifted - jnp.log(part_total)
    # With several devices the search has a third level above the blocks: the sums of the devices' parts.
    total_ST = jax.lax.all_gather(part_total, axis, axis=1)
    running_ST = jnp.cumsum(total_ST, axis=-1)
    total = running_ST[:, -1]
    target = uniform * total
    part, mass_before = _first_above(total_ST, running_ST, target)
    token_of_part, shifted_of_part = _search(logits, top_S1, weight_SN, running_SN, target - mass_before)
    # One device has the part with the token. The other devices add 0.
    is_own = part == jax.lax.axis_index(axis)
    token_id = part * num_tokens + token_of_part
    token = jax.lax.psum(jnp.where(is_own, token_id, 0), axis)
    shifted = jax.lax.psum(jnp.where(is_own, shifted_of_part, 0), axis)
    return token, shifted - jnp.log(total)


def _search(
    logits: Float[Array, "S V"],
    top_S1: Float[Array, "S 1"],
    weight_SN: Float[Array, "S N"],
    running_SN: Float[Array, "S N"],
    target: Float[Array, " S"],
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Find the token where the running sum of weights exceeds ``target``. Return its id and ``logit - max``.

    Args:
        top_S1: largest logit of each row.
        weight_SN: sum of the weights of each block.
        running_SN: running sums of ``weight_SN``.
    """
    num_tokens = logits.shape[1]
    offsets = jnp.arange(BLOCK_TOKENS, dtype=jnp.int32)
    block, mass_before = _first_above(weight_SN, running_SN, target)
    first_token = block * BLOCK_TOKENS
    token_SK = first_token[:, None] + offsets[None, :]
    logits_SK = jnp.take_along_axis(logits, jnp.minimum(token_SK, num_tokens - 1), axis=-1)
    shifted_SK = logits_SK - top_S1
    weight_SK = jnp.where(token_SK < num_tokens, jnp.exp(shifted_SK), 0.0)
    running_SK = jnp.cumsum(weight_SK, axis=-1)
    offset, _ = _first_above(weight_SK, running_SK, target - mass_before)
    shifted_S1 = jnp.take_along_axis(shifted_SK, offset[:, None], axis=-1)
    return first_token + offset, shifted_S1[:, 0]


def _max_over(axis: tuple[str, ...], x: Array) -> Array:
    """Return the largest ``x`` of all devices that split the vocabulary."""
    if not axis:
        return x
    return jax.lax.pmax(x, axis)


def _first_above(
    weight: Float[Array, "S N"],
    running: Float[Array, "S N"],
    target: Float[Array, " S"],
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Return per row the first index of positive weight whose running sum exceeds the target, and the sum before it.

    A float32 running sum is rounded. It may not even be monotone, because XLA adds in a tree, and ``target`` may round
    up to the total. Weights of zero are therefore excluded explicitly. If no sum exceeds the target, the result is the
    last positive index.
    """
    last_index = weight.shape[-1] - 1
    is_positive = weight > 0
    is_above = is_positive & (running > target[:, None])
    last_positive = last_index - jnp.argmax(is_positive[:, ::-1], axis=-1)
    first_above = jnp.argmax(is_above, axis=-1)
    index = jnp.where(jnp.any(is_above, axis=-1), first_above, last_positive)
    index = index.astype(jnp.int32)
    sum_before_SN = running - weight
    sum_before_S1 = jnp.take_along_axis(sum_before_SN, index[:, None], axis=-1)
    return index, sum_before_S1[:, 0]


def surprise_moments(
    logits: Float[Array, "*rows V"],
    axis: tuple[str, ...] = (),
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Return mean and variance of ``-log p`` of a token of the distribution, each [...] f32. The mean is the entropy.

        variance = sum_v p_v (log p_v)^2 - entropy^2

    Args:
        logits: [..., V] f32, already filtered; -inf = impossible. Each row has a finite entry.
    """
    maximum = _max_over(axis, jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - maximum
    weight = jnp.exp(shifted)
    surprise = jnp.where(shifted > -jnp.inf, -shifted, 0.0)  # without log Z, which the variance does not depend on

    def total_of(x: Array) -> Array:
        return jax.lax.psum(jnp.sum(x, axis=-1), axis)  # without an axis, psum returns the sum itself

    total = total_of(weight)
    mean = total_of(weight * surprise) / total
    mean_square = total_of(weight * jnp.square(surprise)) / total
    entropy = mean + jnp.log(total)
    variance = mean_square - jnp.square(mean)
    return entropy, jnp.maximum(variance, 0.0)


def token_logp(
    logits: Float[Array, "*rows V"],
    token: Int[Array, "*rows"],
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Return the log-probability of a token and the entropy of the distribution.

        logp = l_token - max - log Z,   entropy = log Z - sum_v p_v (l_v - max),   Z = sum_v exp(l_v - max)

    0 log 0 counts as 0. Entries of -inf do not make gradients nonfinite. A token with logit -inf has log-probability
    -inf.

    Args:
        logits: [..., V] f32, already filtered; -inf = impossible. Each row has a finite entry.
        token: [...] i32.

    Returns:
        logp, entropy: [...] f32 nats.
    """
    # The maximum cancels in both results, so no gradient needs to pass through it.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - maximum
    weight = jnp.exp(shifted)
    is_possible = shifted > -jnp.inf
    total = jnp.sum(weight, axis=-1)
    log_total = jnp.log(total)
    # Read the token's logit from ``logits``, because XLA's CPU backend would store ``shifted``. Sum a ``where`` of the
    # product, because that backend sums a plain product 8 times slower.
    token_logit = jnp.take_along_axis(logits, token[..., None], axis=-1)
    token_shifted = (token_logit - maximum)[..., 0]
    finite_shifted = jnp.where(is_possible, shifted, 0.0)
    summand = jnp.where(is_possible, weight * finite_shifted, 0.0)
    mean_shifted = jnp.sum(summand, axis=-1) / total
    logp = token_shifted - log_total
    entropy = log_total - mean_shifted
    return logp, entropy
