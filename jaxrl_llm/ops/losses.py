"""Per-token loss terms, and the weights that add them up.

Owns: the clipped surrogate, estimators of the divergence to a reference, aggregation. Does not know: models,
algorithms, micro-batches. Letters: B rows, T row width.

A loss is ``sum(weight * term)`` with the weights of ``aggregation_weights``, made once for the whole batch:
the division has happened, so micro-batches and devices only add. At positions of weight zero the caller
replaces the inputs by finite constants (``jnp.where``) before calling: ``0 * nan`` is ``nan``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def clipped_surrogate(
    policy_logp: jax.Array, behaviour_logp: jax.Array, advantage: jax.Array, *, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """Negated clipped surrogate objective of each token.

        u = exp(policy_logp - behaviour_logp)
        loss = -min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)

    The gradient is exactly 0 where the second term is the smaller and that of -u A elsewhere, also where the
    two are equal.

    Args:
        policy_logp, behaviour_logp: [B, T] f32 nats of the taken tokens. A sampled token has a behaviour_logp
            above about -17 (float32 uniforms), so u is finite; policy_logp may be -inf.
        advantage: [B, T] f32.
        clip_low, clip_high: distances of the bounds from 1.

    Returns:
        loss: [B, T] f32, in units of advantage.
        is_clipped: [B, T] bool, tokens without gradient because of the bounds.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; separate bounds, Yu et al. 2025, arXiv:2503.14476.
    """
    log_ratio = policy_logp - behaviour_logp
    ratio = jnp.exp(log_ratio)
    is_clipped = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    bound = jnp.where(advantage > 0, 1 + clip_high, 1 - clip_low)
    # where before exp, not after: a clipped ratio may be as large as float32 allows and has no gradient.
    ratio = jnp.where(is_clipped, bound, jnp.exp(jnp.where(is_clipped, 0.0, log_ratio)))
    return -ratio * advantage, is_clipped


def kl_estimate(policy_logp: jax.Array, ref_logp: jax.Array, *, kind: str) -> jax.Array:
    """Estimate of KL(policy || reference) from each token drawn from the policy.

        d = policy_logp - ref_logp
        "k1" = d                 unbiased, may be negative; its gradient has mean 0 on fresh tokens
        "k2" = d^2 / 2           biased in value; its gradient is that of the KL on fresh tokens
        "k3" = exp(-d) - 1 + d   unbiased, never negative; its gradient is that of KL(reference || policy)

    Args:
        policy_logp, ref_logp: [B, T] f32 nats of the taken tokens, finite.
        kind: "k1", "k2" or "k3".

    Returns:
        [B, T] f32 nats.

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


def aggregation_weights(mask: jax.Array, trainable: jax.Array, *, kind: str, max_completion_tokens: int) -> jax.Array:
    """Weights w with ``loss = sum(w * term)``: one denominator for the whole batch.

        "token_mean"       w = 1 / tokens of the batch
        "sequence_mean"    w = 1 / (rows of the batch * tokens of the row)
        "constant_length"  w = 1 / (rows of the batch * max_completion_tokens)

    Tokens are those of the mask in trainable rows; rows are those with at least one. Without any, all
    weights are 0.

    Args:
        mask: [B, T] bool, tokens with a loss.
        trainable: [B] bool.
        kind: one of the three above.
        max_completion_tokens: for "constant_length".

    Returns:
        [B, T] f32, 0.0 off the mask and in rows that are not trainable.

    Source: token mean, Yu et al. 2025, arXiv:2503.14476, eq. 8; sequence mean, Shao et al. 2024,
        arXiv:2402.03300, eq. 3; constant length, Liu et al. 2025, arXiv:2503.20783, section 3.2.
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
    else:
        raise ValueError(f"kind={kind!r} is not one of 'token_mean', 'sequence_mean', 'constant_length'")
    return active_BT.astype(jnp.float32) / jnp.maximum(denominator, 1).astype(jnp.float32)
