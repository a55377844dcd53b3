"""Corrections for tokens that another policy drew: importance weights, and the step size they allow.

A correction is a function of ``Ratios`` and of its settings to the logarithm of each token's weight and which tokens
stay, both [B,T]. Weights are constants to differentiation and multiply a token's loss term; a weight of 0 never changes
a denominator. Where the term carries the ratio itself, the weight of a token that stays is 1: there only those help
that leave tokens out (``masks=True``).

Owns: those functions, the tables of them. Does not know: surrogates, models, which policies are compared.
Letters: B rows, T row width. Ratios are of probabilities, log-ratios in nats.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import Ratios
from jaxrl_llm.settings.schema import AtLeastOne, Positive, Share

# A log-weight is cut here before its exponential: the squares of ten million e^36 still add up to a float32.
LOG_WEIGHT_LIMIT = 36.0

Weighed = tuple[Float[Array, "B T"], Bool[Array, "B T"]]


def importance(x: Ratios) -> Weighed:
    """w = exp(log_ratio)."""
    return x.log_ratio, x.mask


def token_truncated(x: Ratios, *, high: AtLeastOne = 2.0) -> Weighed:
    """min(w, high).

    Source: Ionides 2008.
    """
    return jnp.minimum(x.log_ratio, math.log(high)), x.mask


@needs(of_token=True)
def policy_truncated(x: Ratios, *, high: AtLeastOne = 100.0) -> Weighed:
    """min(w, high w / v), v the ratio of current to behaviour policy: a term's own ratio times w is at most high.

    Source: Hilton et al. 2021, arXiv:2110.00641 (lp_adj of the released code).
    """
    return x.log_ratio - jnp.maximum(x.policy_log_ratio - math.log(high), 0.0), x.mask


@needs(masks=True)
def token_masked(x: Ratios, *, low: Share = 0.5, high: AtLeastOne = 2.0) -> Weighed:
    """w where low <= w <= high, else 0.

    Source: Fu et al. 2025, arXiv:2505.24298.
    """
    return x.log_ratio, x.mask & _is_within(x.log_ratio, low, high)


def sequence_truncated(x: Ratios, *, high: AtLeastOne = 2.0) -> Weighed:
    """min(W, high) for every token of the row, W = exp of the row's sum of log-ratios.

    Source: VCPO 2026, arXiv:2602.17616.
    """
    return jnp.minimum(_of_row(x), math.log(high)), x.mask


@needs(masks=True)
def sequence_masked(x: Ratios, *, low: Share = 0.5, high: AtLeastOne = 2.0) -> Weighed:
    """W where low <= W <= high, else 0, W as in ``sequence_truncated``."""
    return _of_row(x), x.mask & _is_within(_of_row(x), low, high)


def second_moment_threshold(x: Ratios, *, limit: Positive) -> Float[Array, ""]:
    """Threshold [] f32 such that the tokens with log_ratio^2 up to it are as many as have a mean of at most ``limit``.

    Tokens of the whole batch leave from the largest on; equal ones leave together. It lies halfway to the smallest that
    leaves, so that a rounding of the log-ratios does not move a token over it; -1 where even the smallest is too large.
    """
    square = jnp.sort(jnp.where(x.mask, jnp.square(x.log_ratio), jnp.inf).reshape(-1))
    num_kept = jnp.arange(1, square.size + 1)
    is_token = jnp.isfinite(square)
    mean = jnp.cumsum(jnp.where(is_token, square, 0.0)) / num_kept
    following = jnp.concatenate([square[1:], jnp.full(1, jnp.inf)])
    fits = is_token & (mean <= limit) & (following > square)
    last = jnp.max(jnp.where(fits, num_kept, 0)) - 1
    smallest_out = jnp.where(jnp.isfinite(following[last]), following[last], square[last])
    return jnp.where(last >= 0, 0.5 * (square[last] + smallest_out), -1.0)


@needs(masks=True, over_batch=second_moment_threshold)
def second_moment(x: Ratios, *, limit: Positive = 0.04) -> Weighed:
    """w where log_ratio^2 is at most what leaves the batch a mean of ``limit`` nats^2, else 0.

    Source: M2PO, Zheng et al. 2025, arXiv:2510.01161, as in AReaL. Differs: the authors' own code masks tokens alone
        that move away where their advantage sends them (A > 0 and w > 1, A < 0 and w < 1), by bounds of a clip that are
        never narrower than 0.7 and 1.5; a batch may lose all of its tokens.
    """
    return x.log_ratio, x.mask & (jnp.square(x.log_ratio) <= x.over_batch)


def _of_row(x: Ratios) -> Float[Array, "B T"]:
    return jnp.broadcast_to(jnp.sum(x.log_ratio, axis=1, keepdims=True), x.mask.shape)


def _is_within(log_ratio: Float[ArrayLike, "B T"], low: float, high: float) -> Bool[Array, "B T"]:
    return (log_ratio >= (math.log(low) if low else -math.inf)) & (log_ratio <= math.log(high))


def weight(
    log_weight: Float[ArrayLike, "B T"], is_kept: Bool[ArrayLike, "B T"], *, is_carried: bool
) -> Float[Array, "B T"]:
    """Weight [B,T] f32 of each token of what a correction says, 0.0 where not kept.

    Args:
        is_carried: the term it multiplies carries the ratio already, or needs none.
    """
    if is_carried:
        return is_kept.astype(jnp.float32)
    return jnp.where(is_kept, jnp.exp(jnp.clip(log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)), 0.0)


def sequence_ratio(log_ratio: Float[ArrayLike, "B T"], mask: Bool[ArrayLike, "B T"]) -> Float[Array, " B"]:
    """exp of each row's sum of log-ratios [B,T], cut to +-36 nats: [B] f32, 0.0 for a row without a token."""
    total = jnp.clip(jnp.sum(jnp.where(mask, log_ratio, 0.0), axis=1), -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    return jnp.where(jnp.any(mask, axis=1), jnp.exp(total), 0.0)


def effective_sample_size(
    ratio_sum: Float[ArrayLike, "*any"], ratio_square_sum: Float[ArrayLike, "*any"], num_rows: Real[ArrayLike, "*any"]
) -> Float[Array, "*any"]:
    """Factor [] f32 of the learning rate: the square root of the effective share of the batch's sequences.

        scale = sqrt((sum W)^2 / (n sum W^2))

    1 on-policy, 1/sqrt(n) where one row has all the weight, 1 for an empty batch.

    Source: VCPO 2026, arXiv:2602.17616; their base is 1.
    """
    return jnp.sqrt(effective_share(ratio_sum, ratio_square_sum, num_rows))


def effective_share(
    total: Float[ArrayLike, "*any"], square_total: Float[ArrayLike, "*any"], count: Real[ArrayLike, "*any"]
) -> Float[Array, "*any"]:
    """Effective sample size of weights over their number n.

        share = (sum w)^2 / (n sum w^2)

    1 where all weights are equal, 1/n where one has everything; f32 of the arguments' shape, 1 where there is none.

    Source: Kong 1992, the effective sample size of importance weights.
    """
    is_some = (square_total > 0) & (count > 0)
    square_total, count = (jnp.where(is_some, x, 1.0) for x in (square_total, count))
    # Not over the product of both, which for large weights is no float32.
    return jnp.where(is_some, (total / square_total) * (total / count), 1.0)


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
