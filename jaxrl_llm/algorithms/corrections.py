"""Corrections for tokens that another policy drew: importance weights, and the step size that they allow.

A correction is a function of ``Ratios`` and its settings. It returns the logarithm of each token's weight, and a mask
of the tokens that stay in the loss, both [B,T]. Weights are constants to differentiation and multiply a token's loss
term. A weight of 0 never changes a denominator. If the term already contains the ratio, the weight of a token that
stays is 1. In that case only corrections that leave tokens out (``masks=True``) have an effect.

Owns: these functions, their tables. Does not know: surrogates, models, which policies are compared.
Letters: B rows, T row width. Ratios are of probabilities, log-ratios in nats.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import AnyArray, Ratios
from jaxrl_llm.settings.schema import AtLeastOne, Positive, Share

# Log-weights are cut at this value before the exponential: the squares of ten million weights e^36 still sum to a
# finite float32.
LOG_WEIGHT_LIMIT = 36.0

# Logarithm of each token's weight, and the mask of the tokens that stay.
LogWeights = tuple[Float[AnyArray, "B T"], Bool[AnyArray, "B T"]]


def importance(x: Ratios) -> LogWeights:
    """Return w = exp(log_ratio)."""
    return x.log_ratio, x.mask


def token_truncated(x: Ratios, *, high: AtLeastOne = 2.0) -> LogWeights:
    """Return min(w, high).

    Source: Ionides 2008.
    """
    return jnp.minimum(x.log_ratio, math.log(high)), x.mask


@needs(of_token=True)
def policy_truncated(x: Ratios, *, high: AtLeastOne = 100.0) -> LogWeights:
    """Return min(w, high w / v), where v is the ratio of current to behaviour policy.

    The product of a term's own ratio and w is at most high.

    Source: Hilton et al. 2021, arXiv:2110.00641 (lp_adj of the released code).
    """
    excess = jnp.maximum(x.policy_log_ratio - math.log(high), 0.0)
    return x.log_ratio - excess, x.mask


@needs(masks=True)
def token_masked(x: Ratios, *, low: Share = 0.5, high: AtLeastOne = 2.0) -> LogWeights:
    """Return w if low <= w <= high, else 0.

    Source: Fu et al. 2025, arXiv:2505.24298.
    """
    is_kept = x.mask & _is_within(x.log_ratio, low, high)
    return x.log_ratio, is_kept


def sequence_truncated(x: Ratios, *, high: AtLeastOne = 2.0) -> LogWeights:
    """Return min(W, high) for every token of the row, W = exp of the row's sum of log-ratios.

    Source: VCPO 2026, arXiv:2602.17616.
    """
    log_weight = jnp.minimum(_sum_of_row(x), math.log(high))
    return log_weight, x.mask


@needs(masks=True)
def sequence_masked(
    x: Ratios,
    *,
    low: Share = 0.5,
    high: AtLeastOne = 2.0,
) -> LogWeights:
    """Return W if low <= W <= high, else 0, with W of ``sequence_truncated``."""
    log_weight = _sum_of_row(x)
    is_kept = x.mask & _is_within(log_weight, low, high)
    return log_weight, is_kept


def second_moment_threshold(x: Ratios, *, limit: Positive) -> Float[Array, ""]:
    """Return the threshold [] f32 of log_ratio^2 that keeps the most tokens whose mean is at most ``limit``.

    The tokens of the whole batch with the largest log_ratio^2 are removed first; equal values are removed together. The
    threshold lies halfway between the largest kept and the smallest removed value. Rounding of the log-ratios therefore
    moves no token across the threshold. The threshold is -1 if even the smallest value is too large.
    """
    square_or_inf = jnp.where(x.mask, jnp.square(x.log_ratio), jnp.inf)
    square = jnp.sort(square_or_inf.reshape(-1))
    num_kept = jnp.arange(1, square.size + 1)
    is_token = jnp.isfinite(square)
    running_sum = jnp.cumsum(jnp.where(is_token, square, 0.0))
    mean = running_sum / num_kept
    following = jnp.concatenate([square[1:], jnp.full(1, jnp.inf)])
    fits = is_token & (mean <= limit) & (following > square)
    last = jnp.max(jnp.where(fits, num_kept, 0)) - 1
    largest_kept = square[last]
    has_removed = jnp.isfinite(following[last])
    smallest_removed = jnp.where(has_removed, following[last], largest_kept)
    threshold = 0.5 * (largest_kept + smallest_removed)
    return jnp.where(last >= 0, threshold, -1.0)


@needs(masks=True, over_batch=second_moment_threshold)
def second_moment(x: Ratios, *, limit: Positive = 0.04) -> LogWeights:
    """Return w for tokens up to the ``second_moment_threshold`` of the batch, with a mean of ``limit`` nats^2, else 0.

    Source: M2PO, Zheng et al. 2025, arXiv:2510.01161, as in AReaL. Differs: the authors' own code masks only tokens
        that move away in the direction of their advantage (A > 0 and w > 1, A < 0 and w < 1), by clip bounds that are
        never narrower than 0.7 and 1.5. Here all tokens of a batch may be masked.
    """
    assert x.over_batch is not None
    is_small = jnp.square(x.log_ratio) <= x.over_batch
    return x.log_ratio, x.mask & is_small


def _sum_of_row(x: Ratios) -> Float[Array, "B T"]:
    """Return the sum of log-ratios of each row, at each of its tokens."""
    total = jnp.sum(x.log_ratio, axis=1, keepdims=True)
    return jnp.broadcast_to(total, x.mask.shape)


def _is_within(
    log_ratio: Float[AnyArray, "B T"],
    low: float,
    high: float,
) -> Bool[AnyArray, "B T"]:
    """Return whether low <= exp(log_ratio) <= high."""
    log_low = math.log(low) if low else -math.inf
    log_high = math.log(high)
    return (log_ratio >= log_low) & (log_ratio <= log_high)


def weight(
    log_weight: Float[AnyArray, "B T"],
    is_kept: Bool[AnyArray, "B T"],
    *,
    is_carried: bool,
) -> Float[AnyArray, "B T"]:
    """Return the weight [B,T] f32 of each token from the result of a correction, 0.0 if the token is not kept.

    Args:
        is_carried: the term that the weight multiplies contains the ratio already, or needs none.
    """
    if is_carried:
        return is_kept.astype(jnp.float32)
    limited = jnp.clip(log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    return jnp.where(is_kept, jnp.exp(limited), 0.0)


def sequence_ratio(
    log_ratio: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
) -> Float[Array, " B"]:
    """Return exp of each row's sum of log-ratios [B,T], cut to +-36 nats: [B] f32, 0.0 for a row without a token."""
    total = jnp.sum(jnp.where(mask, log_ratio, 0.0), axis=1)
    limited = jnp.clip(total, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    has_token = jnp.any(mask, axis=1)
    return jnp.where(has_token, jnp.exp(limited), 0.0)


def effective_sample_size(
    ratio_sum: Float[AnyArray, "*any"],
    ratio_square_sum: Float[AnyArray, "*any"],
    num_rows: Real[AnyArray, "*any"],
) -> Float[Array, "*any"]:
    """Return a factor [] f32 of the learning rate: the square root of the effective share of the batch's sequences.

        scale = sqrt((sum W)^2 / (n sum W^2))

    The factor is 1 on-policy, 1/sqrt(n) if one row has all the weight, and 1 for an empty batch.

    Source: VCPO 2026, arXiv:2602.17616, with base 1.
    """
    return jnp.sqrt(effective_share(ratio_sum, ratio_square_sum, num_rows))


def effective_share(
    total: Float[AnyArray, "*any"],
    square_total: Float[AnyArray, "*any"],
    count: Real[AnyArray, "*any"],
) -> Float[Array, "*any"]:
    """Return the effective sample size of weights, divided by their number n.

        share = (sum w)^2 / (n sum w^2)

    The share is 1 if all weights are equal, 1/n if only one weight is not 0, and 1 without weights. The result is f32
    in the shape of the arguments.

    Source: Kong 1992, the effective sample size of importance weights.
    """
    has_weights = (square_total > 0) & (count > 0)
    square_total = jnp.where(has_weights, square_total, 1.0)
    count = jnp.where(has_weights, count, 1.0)
    # Divide in two steps: the product of both denominators overflows float32 for large weights.
    share = (total / square_total) * (total / count)
    return jnp.where(has_weights, share, 1.0)


CORRECTIONS = {
    "importance": importance,
    "token_truncated": token_truncated,
    "policy_truncated": policy_truncated,
    "token_masked": token_masked,
    "sequence_truncated": sequence_truncated,
    "sequence_masked": sequence_masked,
    "second_moment": second_moment,
}

STEP_SIZES = {"effective_sample_size": effective_sample_size}
