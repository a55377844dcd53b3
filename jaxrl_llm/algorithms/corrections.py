"""Corrections for tokens that another policy drew: the old policy, importance weights, the step size they allow.

Weights are constants to differentiation and multiply a token's loss term; a weight of 0 never changes a
denominator. Owns: those formulas. Does not know: surrogates, models, which policies are compared.
Letters: B rows, T row width. Ratios are of probabilities, log-ratios in nats.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Real

# A log-ratio is cut here before its exponential: e^40 squared is still a float32.
LOG_RATIO_LIMIT = 40.0


def interpolated_logp(
    policy_logp: Float[ArrayLike, "B T"],
    behaviour_logp: Float[ArrayLike, "B T"],
    behaviour_version: Int[ArrayLike, "B T"],
    old_version: Int[ArrayLike, ""],
    version: Int[ArrayLike, ""],
) -> Float[Array, "B T"]:
    """Log-prob of a policy of version ``old_version`` between behaviour and current one, without a forward pass.

        behaviour_logp + alpha (sg(policy_logp) - behaviour_logp),
        alpha = (old_version - behaviour_version) / (version - behaviour_version), 0 where that is 0 / 0

    Args:
        policy_logp, behaviour_logp: [B, T] f32.
        behaviour_version: [B, T] i32, optimizer steps behind the weights that drew the token; at most the others.
        old_version, version: [] i32 of the old and of the current weights, old <= current.

    Source: A-3PO as in Fu et al. 2025, arXiv:2505.24298 (released code).
    """
    whole = (version - behaviour_version).astype(jnp.float32)
    alpha = jnp.where(whole > 0, (old_version - behaviour_version) / jnp.maximum(whole, 1.0), 0.0)
    return behaviour_logp + alpha * (jax.lax.stop_gradient(policy_logp) - behaviour_logp)


def correction_weight(
    log_ratio: Float[ArrayLike, "B T"],
    mask: Bool[ArrayLike, "B T"],
    *,
    kind: str,
    low: float,
    high: float,
    threshold: Float[ArrayLike, ""] | None = None,
    policy_log_ratio: Float[ArrayLike, "B T"] | None = None,
    is_carried: bool = False,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Importance weight of each token and which tokens stay, from w = exp(log_ratio).

        "importance"          w
        "token_truncated"     min(w, high)
        "policy_truncated"    min(w, high w / v),   v = exp(policy_log_ratio): the whole ratio, a term's own times w, is
                              at most high
        "token_masked"        w where low <= w <= high, else 0
        "sequence_truncated"  min(W, high),   W = exp of the row's sum of log-ratios, for every token of the row
        "sequence_masked"     W where low <= W <= high, else 0
        "second_moment"       w where log_ratio^2 <= threshold (see ``second_moment_threshold``), else 0

    Args:
        log_ratio: [B, T] f32, finite at the mask.
        mask: [B, T] bool, tokens with a loss.
        kind: one of the above.
        low, high: bounds of a ratio.
        threshold: [] f32 nats^2, for "second_moment".
        policy_log_ratio: [B, T] f32 of the current policy to the behaviour policy, for "policy_truncated".
        is_carried: the term it multiplies carries the ratio already (or needs none): the weight of a token that
            stays is then 1. For the kinds that mask.

    Returns:
        weight: [B, T] f32, 0.0 where not kept.
        is_kept: [B, T] bool.

    Source: truncated, Ionides 2008, by the current policy Hilton et al. 2021, arXiv:2110.00641 (lp_adj of the released
        code), and per sequence VCPO 2026, arXiv:2602.17616; masked, Fu et al. 2025,
        arXiv:2505.24298; second moment, Zheng et al. 2025, arXiv:2510.01161.
    """
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, log_ratio, 0.0))
    if kind.startswith("sequence_"):
        log_ratio = jnp.broadcast_to(jnp.sum(log_ratio, axis=1, keepdims=True), mask.shape)
    is_kept, highest = mask, LOG_RATIO_LIMIT
    if kind.endswith("_masked"):
        is_kept = mask & (log_ratio >= (math.log(low) if low else -math.inf)) & (log_ratio <= math.log(high))
    elif kind == "policy_truncated":
        surplus = jax.lax.stop_gradient(jnp.where(mask, policy_log_ratio, 0.0)) - math.log(high)
        log_ratio = log_ratio - jnp.maximum(surplus, 0.0)
    elif kind.endswith("_truncated"):
        highest = math.log(high)
    elif kind == "second_moment":
        is_kept = mask & (jnp.square(log_ratio) <= threshold)
    elif kind != "importance":
        raise ValueError(f"kind={kind!r} is not a kind of correction")
    weight = jnp.ones_like(log_ratio) if is_carried else jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, highest))
    return jnp.where(is_kept, weight, 0.0), is_kept


def second_moment_threshold(
    log_ratio: Float[ArrayLike, "B T"], mask: Bool[ArrayLike, "B T"], limit: float
) -> Float[Array, ""]:
    """Threshold [] f32 such that the tokens with log_ratio^2 up to it are as many as have a mean of at most ``limit``.

    Tokens leave from the largest on; equal ones leave together. It lies halfway to the smallest that leaves, so that
    a rounding of the log-ratios does not move a token over it; -1 where even the smallest is too large.

    Args:
        log_ratio: [B, T] f32 of the whole batch.
        mask: [B, T] bool.
        limit: nats^2.

    Source: M2PO, Zheng et al. 2025, arXiv:2510.01161.
    """
    square = jnp.sort(jnp.where(mask, jnp.square(log_ratio), jnp.inf).reshape(-1))
    num_kept = jnp.arange(1, square.size + 1)
    is_token = jnp.isfinite(square)
    mean = jnp.cumsum(jnp.where(is_token, square, 0.0)) / num_kept
    following = jnp.concatenate([square[1:], jnp.full(1, jnp.inf)])
    fits = is_token & (mean <= limit) & (following > square)
    last = jnp.max(jnp.where(fits, num_kept, 0)) - 1
    smallest_out = jnp.where(jnp.isfinite(following[last]), following[last], square[last])
    return jnp.where(last >= 0, 0.5 * (square[last] + smallest_out), -1.0)


def sequence_ratio(log_ratio: Float[ArrayLike, "B T"], mask: Bool[ArrayLike, "B T"]) -> Float[Array, " B"]:
    """exp of each row's sum of log-ratios [B,T], cut to +-40 nats: [B] f32, 0.0 for a row without a token."""
    total = jnp.clip(jnp.sum(jnp.where(mask, log_ratio, 0.0), axis=1), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.where(jnp.any(mask, axis=1), jnp.exp(total), 0.0)


def step_scale(
    ratio_sum: Float[ArrayLike, "*any"], ratio_square_sum: Float[ArrayLike, "*any"], num_rows: Real[ArrayLike, "*any"]
) -> Float[Array, "*any"]:
    """Factor [] f32 of the learning rate: the square root of the effective share of the batch's sequences.

        scale = sqrt((sum W)^2 / (n sum W^2))

    1 on-policy, 1/sqrt(n) where one row has all the weight, 1 for an empty batch.

    Source: VCPO 2026, arXiv:2602.17616; their base is 1.
    """
    divisor = num_rows * ratio_square_sum
    return jnp.where(divisor > 0, ratio_sum / jnp.sqrt(jnp.maximum(divisor, jnp.finfo(jnp.float32).tiny)), 1.0)


def effective_share(
    total: Float[ArrayLike, "*any"], square_total: Float[ArrayLike, "*any"], count: Real[ArrayLike, "*any"]
) -> Float[Array, "*any"]:
    """Effective sample size of weights over their number n.

        share = (sum w)^2 / (n sum w^2)

    1 where all weights are equal, 1/n where one has everything; f32 of the arguments' shape, 1 where there is none.

    Source: Kong 1992, the effective sample size of importance weights.
    """
    return jnp.square(step_scale(total, square_total, count))


def moving_average_share(decay: float, step: Int[ArrayLike, ""]) -> Float[ArrayLike, ""]:
    """Share [] f32 of the new weights in their moving average after optimizer step number ``step`` (1, 2, ...).

        average <- (1 - share) average + share params,   share = 1 / sum_{k=0}^{step} decay^k

    So the average is over params_0 .. params_step with weights decay^age.

    Source: Hilton et al. 2021, arXiv:2110.00641: w <- beta w + 1, average <- (beta w average + params) / (beta w + 1).
    """
    return (1 - decay) / (1 - decay ** (step.astype(jnp.float32) + 1))
