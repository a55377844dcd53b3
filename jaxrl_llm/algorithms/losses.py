"""The weights that add per-token loss terms up, and terms that hold a policy back.

Owns: aggregation, estimators of the divergence to an anchor, how the weight of the entropy moves. Does not know:
surrogates, models, micro-batches.
Letters: B rows, T row width.

A loss is ``sum(weight * term)`` with the weights of ``aggregation_weights``, made once for the whole batch:
the division has happened, so micro-batches and devices only add. At positions of weight zero the caller
replaces the inputs by finite constants (``jnp.where``) before calling: ``0 * nan`` is ``nan``.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int


def kl_estimate(
    policy_logp: Float[ArrayLike, "*any"], ref_logp: Float[ArrayLike, "*any"], *, kind: str
) -> Float[ArrayLike, "*any"]:
    """Estimate of KL(policy || reference) from each token drawn from the policy.

        d = policy_logp - ref_logp
        "k1" = d                 unbiased, may be negative; its gradient has mean 0 on fresh tokens
        "k2" = d^2 / 2           biased in value; its gradient is that of the KL on fresh tokens
        "k3" = exp(-d) - 1 + d   unbiased, never negative; its gradient is that of KL(reference || policy)

    Args:
        policy_logp, ref_logp: f32 nats of the taken tokens, finite.
        kind: "k1", "k2" or "k3".

    Returns:
        f32 nats of each token.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    difference = policy_logp - ref_logp
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * jnp.square(difference)
    if kind == "k3":
        return jnp.expm1(-difference) + difference
    raise ValueError(f"kind={kind!r} is not one of 'k1', 'k2', 'k3'")


def cross_entropy(logp: Float[ArrayLike, "B T"], weight: Float[ArrayLike, "B T"]) -> Float[Array, ""]:
    """``-sum weight logp`` [] f32 nats of tokens [B, T]; where the weight is 0, ``logp`` may be anything."""
    return -jnp.sum(weight * jnp.where(weight > 0, logp, 0.0))


def reference_share(iteration: Int[ArrayLike, ""]) -> Float[Array, ""]:
    """Share [] f32 of the reference in a divergence to reference and previous policy, by iteration.

        share = max(1 - 0.1 ceil(max(iteration - 50, 0) / 10), 0.5)

    Source: ReMix, Liang et al. 2025, arXiv:2507.06892.
    """
    return jnp.maximum(1.0 - 0.1 * jnp.ceil(jnp.maximum(iteration - 50, 0) / 10), 0.5)


def adapted_entropy_coefficient(
    coefficient: Float[ArrayLike, ""], entropy: Float[ArrayLike, ""], *, target: float, rate: float
) -> Float[Array, ""]:
    """Weight [] f32 of the entropy bonus after a step whose tokens had this entropy on average.

        c' = max(c + rate * sign(target - entropy), 0)

    Args:
        coefficient: [] f32, the weight of that step.
        entropy: [] f32 nats per token.
        target: nats per token.
        rate: how far the weight moves.

    Source: Skywork-OR1, He et al. 2025, arXiv:2505.22312, "adaptive entropy control". Differs: there the bonus is left
        out of a step whose rollouts have more entropy than the target, while c falls; here its weight is c always, for
        a step's own entropy is known only after its forward pass. The released code bounds c above too, at 0.005.

    Example:
        A step with 0.5 nats where the target is 0.2 lowers a weight of 0.005 by the rate, one with 0.1 raises it.
    """
    return jnp.maximum(coefficient + rate * jnp.sign(target - entropy), 0.0)


def aggregation_weights(
    mask: Bool[ArrayLike, "B T"],
    trainable: Bool[ArrayLike, " B"],
    group_id: Int[ArrayLike, " B"],
    *,
    kind: str,
    max_completion_tokens: int,
) -> Float[Array, "B T"]:
    """Weights w with ``loss = sum(w * term)``: one denominator for the whole batch.

        "token_mean"       w = 1 / tokens of the batch
        "sequence_mean"    w = 1 / (rows of the batch * tokens of the row)
        "constant_length"  w = 1 / (rows of the batch * max_completion_tokens)
        "prompt_mean"      w = 1 / (prompts of the batch * tokens of the prompt's rows)

    Tokens are those of the mask in trainable rows; rows are those with at least one. Without any, all weights are 0.

    Args:
        mask: [B, T] bool, tokens with a loss.
        trainable: [B] bool.
        group_id: [B] i32, rows of one prompt share it; for "prompt_mean", which makes a [B, B] table.
        kind: one of the four above.
        max_completion_tokens: for "constant_length".

    Returns:
        [B, T] f32, 0.0 off the mask and in rows that are not trainable.

    Source: token mean, Yu et al. 2025, arXiv:2503.14476, eq. 8; sequence mean, Shao et al. 2024,
        arXiv:2402.03300, eq. 3; constant length, Liu et al. 2025, arXiv:2503.20783, section 3.2; prompt mean, ScaleRL,
        Khatri et al. 2025, arXiv:2510.13786.
    """
    active_BT = mask & trainable[:, None]
    length_B1 = jnp.sum(active_BT, axis=1, keepdims=True)
    num_rows = jnp.sum(length_B1 > 0)
    if kind == "token_mean":
        denominator = jnp.sum(length_B1).reshape(1, 1)
    elif kind == "sequence_mean":
        denominator = num_rows * length_B1
    elif kind == "constant_length":
        denominator = (num_rows * max_completion_tokens).reshape(1, 1)
    elif kind == "prompt_mean":
        same_BB = (group_id[:, None] == group_id[None, :]) & (length_B1[:, 0] > 0)[None, :]
        num_tokens_B1 = jnp.sum(jnp.where(same_BB, length_B1[:, 0][None, :], 0), axis=1, keepdims=True)
        is_first = (length_B1[:, 0] > 0) & (jnp.argmax(same_BB, axis=1) == jnp.arange(mask.shape[0]))
        denominator = jnp.sum(is_first) * num_tokens_B1
    else:
        kinds = "'token_mean', 'sequence_mean', 'constant_length', 'prompt_mean'"
        raise ValueError(f"kind={kind!r} is not one of {kinds}")
    return active_BT.astype(jnp.float32) / jnp.maximum(denominator, 1).astype(jnp.float32)
