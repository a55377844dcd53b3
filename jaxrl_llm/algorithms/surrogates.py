"""Surrogates: the objective of the policy's log-probabilities, one loss term per token.

A surrogate is a function of ``Tokens`` and its settings. It returns terms [B,T], or terms and a mask [B,T] bool of the
tokens whose gradient is 0 because of a bound. A sequence-level objective gives every token of a row the row's term, so
that the aggregation "sequence_mean" is the mean over sequences. Terms off the mask are finite and mean nothing; the
gradient of a token off the mask is exactly 0.

There are three policies. The behaviour policy drew the tokens. The old (proximal) policy is the denominator of ratios
and the centre of trust regions (old_policies). The current policy has the gradient.

A surrogate declares which policy's samples its term assumes. This decides which importance weight a correction must
supply: ``base="old"`` (old / behaviour), ``base="policy"`` (current / behaviour), or none (the term holds on any data).

A surrogate also declares which facts (``algorithms.facts``) the advantage and the aggregation must have:

- ``advantage="is_centred_reward"``: the term is a regression of log-ratios on the reward minus the group's mean. Any
  other scale or centre of the advantage has another optimum.
- ``aggregation="counts_rows_alike"``: the term of a token is the term of its whole row, so that a mean over tokens
  would weigh rows by their length.
- ``aggregation="sums_tokens"``: the loss of a row is the sum of its tokens' terms.

Owns: the terms, their table. Does not know: how terms are added up, corrections of the behaviour policy.
Letters: B rows, T row width, P groups, G rows of a group (neighbours).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxrl_llm.algorithms.baselines import gradient_square
from jaxrl_llm.algorithms.facts import SurrogateFacts, needs
from jaxrl_llm.algorithms.inputs import AnyArray, Tokens
from jaxrl_llm.settings.schema import ConfigError, NotNegative, OverOneOrZero, Positive, Share
from jaxrl_llm.settings.use import Chosen

# Limit of a log-ratio before its exponential if nothing else bounds it, in nats.
LOG_RATIO_LIMIT = 20.0
# Log-probability of success of "spo_cross_entropy" above which its loss continues as a straight line.
CROSS_ENTROPY_EDGE = -1e-2
# INPO's tau / eta.
INPO_REFERENCE_SHARE = 1 / 3

# Terms, and a mask of the tokens whose gradient is 0 because of a bound.
Terms = tuple[Float[AnyArray, "B T"], Bool[AnyArray, "B T"]]


@needs(base="old", of_token=True)
def clipped(
    x: Tokens,
    *,
    low: Share = 0.2,
    high: NotNegative = 0.2,
    dual: OverOneOrZero = 0.0,
) -> Terms:
    """Return the negated clipped surrogate objective of each token.

        u = exp(policy_logp - old_logp)
        loss = -min(u A, clip(u, 1 - low, 1 + high) A),   and where A < 0 at most -dual A (0 = off)

    The gradient is exactly 0 if a bound is active, else the gradient of -u A. At equality the bound is not active.
    ``is_clipped``: tokens whose gradient is 0 because of the bounds. A sampled token has a behaviour_logp above about
    -17 (float32 uniforms), so u against the behaviour is finite; policy_logp may be -inf.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; separate bounds, Yu et al. 2025, arXiv:2503.14476;
        dual clip, Ye et al. 2020, arXiv:1912.09729.
    """
    log_ratio = x.policy_logp - x.old_logp
    return _clip(log_ratio, x.advantage, 1 - low, 1 + high, dual)


@needs(base="old", aggregation="counts_rows_alike")
def sequence_clipped(
    x: Tokens,
    *,
    low: Share = 0.2,
    high: NotNegative = 0.2,
    dual: OverOneOrZero = 0.0,
) -> Terms:
    """Return the clipped surrogate of the row's ratio, u = exp(sum_t(policy_logp - old_logp)), in the form of ``gspo``.

    The log-ratio is cut to 20 nats from above, as in every clipped surrogate.

    Source: the loss of Arnal et al. 2026, arXiv:2604.08706.
    """
    return _of_row_ratio(x, _length(x), low, high, dual)


@needs(base="old", aggregation="counts_rows_alike")
def gspo(
    x: Tokens,
    *,
    low: Share = 3e-4,
    high: NotNegative = 4e-4,
    dual: OverOneOrZero = 0.0,
) -> Terms:
    """Return the clipped surrogate of the row's length-normalised ratio, in the form with an advantage per token.

        u_t = exp(sg(mean_t(policy_logp - old_logp)) + policy_logp_t - sg(policy_logp_t))

    The value of u_t is the row's ratio at every token, but each token has its own gradient. With one advantage per row
    and "sequence_mean" the gradient is that of -min(u A, clip(u) A) of the row's ratio.

    Source: Zheng et al. 2025, arXiv:2507.18071, sections 4.1 and 4.3.
    """
    return _of_row_ratio(x, 1.0, low, high, dual)


def _of_row_ratio(
    x: Tokens,
    power: Float[AnyArray, " B"] | float,
    low: float,
    high: float,
    dual: float,
) -> Terms:
    """Return the term of ``gspo`` with its ratio raised to a power, [B] f32 or a number."""
    mean = _row_sum(x.policy_logp - x.old_logp, x) / _length(x)
    constant_mean = jax.lax.stop_gradient(mean)[:, None]
    zero_with_gradient = x.policy_logp - jax.lax.stop_gradient(x.policy_logp)
    mean_log_ratio = zero_with_gradient + constant_mean
    log_ratio = mean_log_ratio * jnp.reshape(power, (-1, 1))
    log_ratio = jnp.where(x.mask, log_ratio, 0.0)
    return _clip(log_ratio, x.advantage, 1 - low, 1 + high, dual)


@needs(base="old", of_token=True)
def cispo(x: Tokens, *, low: NotNegative = 0.0, high: Positive = 5.0) -> Terms:
    """Return the REINFORCE term with a clipped weight: every token keeps a gradient.

        loss = -sg(clip(u, low, high)) A policy_logp,   u = exp(policy_logp - old_logp)

    The log-ratio is cut to +-20 nats first. ``is_clipped``: tokens whose weight is cut.

    Source: MiniMax 2025, arXiv:2506.13585; the cut, ScaleRL, Khatri et al. 2025, arXiv:2510.13786.
    """
    log_ratio = jnp.clip(x.policy_logp - x.old_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    loss = -weight * x.advantage * x.policy_logp
    is_clipped = weight != ratio
    return loss, is_clipped


@needs(base="policy")
def reinforce(x: Tokens) -> Float[AnyArray, "B T"]:
    """Return loss = -A policy_logp, without ratio or clip. AsymRE is this term with its own advantage.

    Source: Williams 1992; off-policy with a lowered baseline, Arnal et al. 2025, arXiv:2506.20520.
    """
    return -x.advantage * x.policy_logp


@needs(base="policy")
def opmd(x: Tokens, *, tau: NotNegative = 0.1) -> Float[AnyArray, "B T"]:
    """Return loss = -A policy_logp / (1 + tau): mirror descent that stays near the old policy by smaller steps.

    The pairwise form of the same method, the mean of (R_i - R_j)^2 over a group, is ``agro``.

    Source: R3L 2026, arXiv:2601.03715 (released code); the family, Tomar et al. 2020, arXiv:2005.09814. The second part
        of R3L is not implemented: retries from a step after a reflection, with the shared prefix masked.
    """
    return -x.advantage * x.policy_logp / (1 + tau)


def _old_policy_moves(path: str, settings: Mapping[str, Any], config: Any) -> str:
    """Return an error message if the old policy is the behaviour policy, whose ratio is always 1."""
    if config.algorithm.old_policy.facts.is_behaviour:
        return f"[algorithm.old_policy] must be another policy for [{path}]: with it, the ratio is always 1"
    return ""


@needs(reads_old=True, rule=_old_policy_moves)
def remix_centred(x: Tokens, *, low: Share = 0.2, high: NotNegative = 0.2) -> Terms:
    """Return the clipped surrogate against the behaviour policy, with its window around the old policy's ratio.

        u = exp(policy_logp - behaviour_logp),   c = exp(old_logp - behaviour_logp)
        loss = -min(u A, clip(u, c - low, c + high) A)

    If the current policy equals the old policy, the window has no effect, even on very old data.

    Source: Liang et al. 2025, arXiv:2507.06892 (which has one width; here low and high can differ).
    """
    old_log_ratio = jnp.clip(x.old_logp - x.behaviour_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    centre = jnp.exp(old_log_ratio)
    log_ratio = x.policy_logp - x.behaviour_logp
    return _clip(log_ratio, x.advantage, centre - low, centre + high, 0.0)


@needs(
    "ref_logp",
    siblings=True,
    advantage="is_centred_reward",
    aggregation="counts_rows_alike",
)
def agro(x: Tokens, *, beta: Positive = 0.1) -> Float[Array, "B T"]:
    """Return half the variance over the group of R = r - beta log(policy / reference), divided by beta.

    It is ``_regression`` against the reference, centred, and has the same optimum on any data. At the optimum of
    E[r] - beta KL(policy || reference), R is the same for every completion of a prompt. The advantage is r - mean of
    the group ("dr_grpo").

    Source: Tang et al. 2025, arXiv:2503.19612 (theorem 1). Differs: the paper's loss was not found; this loss is
        derived from its theorem.
    """
    return _regression(x, x.ref_logp, beta, centred=True)


@needs(
    siblings=True,
    reads_old=True,
    advantage="is_centred_reward",
    aggregation="counts_rows_alike",
)
def gvpo(x: Tokens, *, beta: Positive = 0.1) -> Float[Array, "B T"]:
    """Return ``_regression`` against the old policy, centred.

        weight of a row = (r - mean r) - beta (log-ratio - its mean)

    Source: Zhang et al. 2025, arXiv:2504.19599. Differs: divided by beta.
    """
    return _regression(x, x.old_logp, beta, centred=True)


@needs(reads_old=True, advantage="is_centred_reward", aggregation="counts_rows_alike")
def kimi_k15(x: Tokens, *, tau: Positive = 0.1) -> Float[Array, "B T"]:
    """Return ``_regression`` against the old policy, not centred.

        weight of a row = (r - mean r) - tau log-ratio

    Source: Kimi team 2025, arXiv:2501.12599.
    """
    return _regression(x, x.old_logp, tau, centred=False)


def _regression(
    x: Tokens,
    other_logp: Float[AnyArray, "B T"],
    beta: float,
    *,
    centred: bool,
) -> Float[Array, "B T"]:
    """Return the term of each row whose gradient is that of a regression of log-ratios on rewards, valid on any data.

        l = sum_t(policy_logp - other_logp),   m = sg(mean of l over the group), or 0 if not centred
        loss = -sum_t A (policy_logp - other_logp) + beta / 2 (l - m)^2
        d loss / d policy_logp_t = -(A_t - beta (l - m))

    With one advantage per row the term is ((A - beta (l - m))^2 - A^2) / (2 beta), a least-squares error. The mean is a
    constant, so that a row's gradient does not depend on how rows are weighted; with equal weights the gradient through
    it is 0.
    """
    token_log_ratio = x.policy_logp - other_logp
    log_ratio = _row_sum(token_log_ratio, x)
    mean = 0.0
    if centred:
        mean = _group_mean(jax.lax.stop_gradient(log_ratio), x)
    penalty = 0.5 * beta * jnp.square(log_ratio - mean)
    gain = _row_sum(x.advantage * token_log_ratio, x)
    return _on_tokens(penalty - gain, x)


@needs("ref_logp", siblings=True, aggregation="counts_rows_alike")
def spo(x: Tokens, *, beta: Positive = 1.0) -> Float[Array, "B T"]:
    """Return the squared error of the last soft value of a row against its reward.

        loss = (Q - r)^2,   Q = Q0 + beta sum_t(policy_logp - ref_logp)

    With the exact Q0 its optimum on any data is that of E[r] - beta KL(policy || reference), reference * e^(r / beta).
    With rewards of 0 and 1 the odds of a correct answer rise at most by the factor e^(1 / beta). With a beta of 1, a
    rate of 0.25 rises to 0.475. A beta of 1 suits rewards that are log-probabilities. With the estimate of
    ``soft_value`` the optimum on the policy's own samples is the same, because the estimate's error is independent of
    the row. On other data the estimate is too low on average. Larger groups have a smaller error: groups of 8 reference
    samples settle at 0.471, groups of 4 at 0.465.

    Source: Cohen et al. 2025, arXiv:2503.05453. Q0 as in ``soft_value``.
    """
    start_value, is_known = soft_value(x, beta)
    log_ratio = _row_sum(x.policy_logp - x.ref_logp, x)
    value = start_value + beta * log_ratio
    loss = jnp.square(value - x.reward)
    return _on_tokens(jnp.where(is_known, loss, 0.0), x)


@needs("ref_logp", siblings=True, aggregation="counts_rows_alike")
def spo_cross_entropy(x: Tokens, *, beta: Positive = 1.0) -> Float[Array, "B T"]:
    """Return the cross-entropy of the Q of ``spo``. The reward is a log-probability, at most 0.

        loss = -(e^r Q + (1 - e^r) log(1 - e^Q))

    The loss is not quadratic. An error of the estimated Q0 therefore moves the optimum also on the policy's own
    samples: with rewards of -2 and -1, a beta of 1 and groups of 8, the better answer settles at a rate of 0.459
    instead of 0.475.

    Source: as ``spo``. Differs: e^r is cut at 1. Above Q = -0.01 the second logarithm is replaced by its tangent, so
        that the gradient stays finite and pulls a Q above 0 back.
    """
    start_value, is_known = soft_value(x, beta)
    log_ratio = _row_sum(x.policy_logp - x.ref_logp, x)
    value = start_value + beta * log_ratio
    success = jnp.exp(jnp.minimum(x.reward, 0.0))
    inside = jnp.minimum(value, CROSS_ENTROPY_EDGE)
    slope = jax.lax.stop_gradient(1 / jnp.expm1(-inside))  # minus the derivative of log(1 - e^Q)
    log_failure = jnp.log(-jnp.expm1(inside)) - slope * (value - inside)
    loss = -(success * value + (1 - success) * log_failure)
    return _on_tokens(jnp.where(is_known, loss, 0.0), x)


def soft_value(x: Tokens, beta: float) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Return Q0 = beta log E_reference[e^(r / beta)] of each row's prompt, and which rows have an estimate of it.

        Q0 of row i = beta log(sum_j w_j e^(r_j / beta) / sum_j w_j),   j: the other rows of its group
        w = reference / behaviour probability of the completion

    A row is not part of its own estimate. Otherwise the estimate would depend on the row's own reward, and the optimum
    of groups of 8 would fall from 0.475 to 0.447. A row that is alone in its group has no estimate.

    Differs: the source takes one estimate per prompt from the reference's own samples. Here importance weights correct
    for the policy that sampled the group. On samples of the reference all weights are 1.
    """
    log_weight = _row_sum(x.ref_logp - x.behaviour_logp, x)
    is_row_PG = _by_group(_is_row(x), x)
    is_itself_GG = jnp.eye(x.group_size, dtype=bool)

    def log_sum_of_others(exponent: Float[AnyArray, " B"]) -> Float[Array, "P G"]:
        exponent_PG = jnp.where(is_row_PG, _by_group(exponent, x), -jnp.inf)
        of_others_PGG = jnp.where(is_itself_GG, -jnp.inf, exponent_PG[:, None, :])
        return jax.nn.logsumexp(of_others_PGG, axis=2)

    log_numerator_PG = log_sum_of_others(log_weight + x.reward / beta)
    log_denominator_PG = log_sum_of_others(log_weight)
    value_PG = beta * (log_numerator_PG - log_denominator_PG)
    num_rows_P1 = jnp.sum(is_row_PG, axis=1, keepdims=True)
    is_known_PG = is_row_PG & (num_rows_P1 > 1)
    value = jnp.where(is_known_PG, value_PG, 0.0).reshape(-1)
    return value, is_known_PG.reshape(-1)


@needs("ref_logp", siblings=True, reads_old=True, aggregation="counts_rows_alike")
def inpo(x: Tokens, *, eta: Positive = 0.0075) -> Float[Array, "B T"]:
    """Return the pairwise regression to the Nash policy of a preference.

    The row of higher reward wins. Rows of equal reward do not form a pair.

        h = D log policy - (tau / eta) D log reference - (1 - tau / eta) D log old,   D = winner - loser
        loss of a pair = (h - 1 / (2 eta))^2,   tau = eta / 3

    A row's term is the sum over its pairs over the number of other rows, so the mean over a group's rows is the mean
    over all its pairs; a tied pair counts as 0.

    Source: Zhang et al. 2024, arXiv:2407.00617; the source has one pair per prompt, here every pair of a group counts.
    """
    share = INPO_REFERENCE_SHARE
    token_score = x.policy_logp - share * x.ref_logp - (1 - share) * x.old_logp
    score_PG = _by_group(_row_sum(token_score, x), x)
    reward_PG = _by_group(x.reward, x)
    is_row_PG = _by_group(_is_row(x), x)
    is_better_PGG = reward_PG[:, :, None] > reward_PG[:, None, :]
    wins_PGG = is_better_PGG & is_row_PG[:, :, None] & is_row_PG[:, None, :]
    h_PGG = score_PG[:, :, None] - score_PG[:, None, :]
    loss_PGG = jnp.where(wins_PGG, jnp.square(h_PGG - 1 / (2 * eta)), 0.0)
    num_others_P1 = jnp.sum(is_row_PG, axis=1, keepdims=True) - 1
    divisor_P1 = jnp.maximum(num_others_P1, 1).astype(jnp.float32)
    loss_PG = jnp.sum(loss_PGG, axis=1) + jnp.sum(loss_PGG, axis=2)
    row = loss_PG / divisor_P1
    return _on_tokens(row.reshape(-1), x)


@needs(siblings=True, aggregation="sums_tokens")
def vcpo(x: Tokens, *, cap: Positive = 8.0) -> Terms:
    """Return REINFORCE of whole sequences with truncated weights and the group's baseline of least variance.

        W = min(exp(sum_t(policy_logp - behaviour_logp)), cap)
        b = sum W^2 q r / sum W^2 q,   q = ``gradient_square``, for |grad log policy|^2 of the row
        loss = -W (r - b) policy_logp

    The loss of a row is a sum over tokens, so use the aggregation "constant_length". The loss of a tied group is
    exactly 0. ``is_clipped``: tokens of rows whose weight is cut.

    Source: VCPO 2026, arXiv:2602.17616, with weights of at most 8. Differs: q approximates the squared norm of a row's
        gradient, see ``gradient_square``. The W in b is truncated as in the loss, which gives the gradient the least
        variance. The released code does not truncate W in b.
    """
    log_ratio = jax.lax.stop_gradient(_row_sum(x.policy_logp - x.behaviour_logp, x))
    weight = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, math.log(cap)))
    baseline_P1 = _least_variance_baseline(weight, x)
    reward_PG = _by_group(x.reward, x)
    is_row_PG = _by_group(_is_row(x), x)
    highest_P1 = jnp.max(jnp.where(is_row_PG, reward_PG, -jnp.inf), axis=1, keepdims=True)
    lowest_P1 = jnp.min(jnp.where(is_row_PG, reward_PG, jnp.inf), axis=1, keepdims=True)
    is_untied_P1 = highest_P1 > lowest_P1
    gain = jnp.where(is_untied_P1, reward_PG - baseline_P1, 0.0).reshape(-1)
    loss = -(weight * gain)[:, None] * x.policy_logp
    is_cut = log_ratio > math.log(cap)
    return loss, is_cut[:, None] & x.mask


def _least_variance_baseline(weight: Float[AnyArray, " B"], x: Tokens) -> Float[Array, "P 1"]:
    """Return the baseline b of ``vcpo`` of each group, from the rows' weights W."""
    tiny = jnp.finfo(jnp.float32).tiny
    is_row_PG = _by_group(_is_row(x), x)
    weight_PG = jnp.where(is_row_PG, _by_group(weight, x), 0.0)
    # Divide by the group's largest weight: squares of small weights would be 0 in float32.
    largest_P1 = jnp.max(weight_PG, axis=1, keepdims=True)
    relative_PG = weight_PG / jnp.maximum(largest_P1, tiny)
    q = gradient_square(jax.lax.stop_gradient(x.policy_logp), x.mask)
    share_PG = jnp.square(relative_PG) * _by_group(q, x)
    total_P1 = jnp.sum(share_PG, axis=1, keepdims=True)
    weighted_reward_P1 = jnp.sum(share_PG * _by_group(x.reward, x), axis=1, keepdims=True)
    return weighted_reward_P1 / jnp.maximum(total_P1, tiny)


SURROGATES = {
    "clipped": clipped,
    "sequence_clipped": sequence_clipped,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "opmd": opmd,
    "remix_centred": remix_centred,
    "agro": agro,
    "gvpo": gvpo,
    "kimi_k15": kimi_k15,
    "spo": spo,
    "spo_cross_entropy": spo_cross_entropy,
    "inpo": inpo,
    "vcpo": vcpo,
}


def surrogate_terms(surrogate: Chosen[SurrogateFacts], x: Tokens) -> Terms:
    """Return the terms of a surrogate, and a mask of the tokens whose gradient a bound removes (default: no token).

    Raises:
        ConfigError: a user's function returns something else.
    """
    value = surrogate(x)
    if isinstance(value, tuple) and len(value) == 2:
        terms, is_clipped = value
    else:
        terms = value
        is_clipped = jnp.zeros_like(x.mask)
    for array in (terms, is_clipped):
        if getattr(array, "shape", None) != x.mask.shape:
            returned = getattr(array, "shape", array)
            raise ConfigError(
                f"algorithm.surrogate={surrogate.name!r} must return a number for each token, [B, T]: "
                f"not {returned!r:.200}. Change the function, or choose another algorithm.surrogate"
            )
    return terms, is_clipped


def _clip(
    log_ratio: Float[AnyArray, "B T"],
    advantage: Float[AnyArray, "B T"],
    low: Float[AnyArray, "B T"] | float,
    high: Float[AnyArray, "B T"] | float,
    dual_clip: float,
) -> Terms:
    """Return -min(u A, clip(u, low, high) A) of log-ratios log u, with an optional dual clip, and which are clipped."""
    # The log-ratio may be a sum over a row. For a long row exp would be inf, and inf times an advantage of 0 is NaN.
    # Cutting the value does not change the gradient.
    excess = jnp.maximum(log_ratio - LOG_RATIO_LIMIT, 0.0)
    log_ratio = log_ratio - jax.lax.stop_gradient(excess)
    ratio = jnp.exp(log_ratio)
    is_too_high = (advantage > 0) & (ratio > high)
    is_too_low = (advantage < 0) & (ratio < low)
    is_clipped = is_too_high | is_too_low
    bound = jnp.where(advantage > 0, high, low)
    if dual_clip:
        is_far = (advantage < 0) & (ratio > dual_clip)
        is_clipped = is_clipped | is_far
        bound = jnp.where(is_far, dual_clip, bound)
    # Select before exp, not after: a clipped ratio may be as large as float32 allows and has no gradient.
    free_ratio = jnp.exp(jnp.where(is_clipped, 0.0, log_ratio))
    clipped_ratio = jnp.where(is_clipped, bound, free_ratio)
    return -clipped_ratio * advantage, is_clipped


def _row_sum(value_BT: Float[AnyArray, "B T"], x: Tokens) -> Float[Array, " B"]:
    """Return the sum over each row's tokens, [B]."""
    return jnp.sum(jnp.where(x.mask, value_BT, 0.0), axis=1)


def _length(x: Tokens) -> Float[Array, " B"]:
    """Return the number of tokens of each row, at least 1, [B] f32."""
    return jnp.maximum(jnp.sum(x.mask, axis=1), 1).astype(jnp.float32)


def _is_row(x: Tokens) -> Bool[Array, " B"]:
    """Return whether a row has a token, [B]."""
    return jnp.any(x.mask, axis=1)


def _group_mean(value_B: Float[AnyArray, " B"], x: Tokens) -> Float[Array, " B"]:
    """Return the mean over the group's rows that have a token, at each of its rows, [B]."""
    is_row_PG = _by_group(_is_row(x), x)
    value_PG = jnp.where(is_row_PG, _by_group(value_B, x), 0.0)
    total_P1 = jnp.sum(value_PG, axis=1, keepdims=True)
    num_rows_P1 = jnp.sum(is_row_PG, axis=1, keepdims=True)
    mean_P1 = total_P1 / jnp.maximum(num_rows_P1, 1).astype(jnp.float32)
    return jnp.broadcast_to(mean_P1, is_row_PG.shape).reshape(-1)


def _by_group(value_B: Shaped[AnyArray, " B"], x: Tokens) -> Shaped[Array, "P G"]:
    """Return values of rows by group, [P, G]."""
    return value_B.reshape(-1, x.group_size)


def _on_tokens(row_B: Float[AnyArray, " B"], x: Tokens) -> Float[Array, "B T"]:
    """Return the row's term at each of its tokens, [B, T]."""
    return jnp.where(x.mask, row_B[:, None], 0.0)
