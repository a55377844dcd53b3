"""Baselines that need more than the rewards of a group: gradient norms and predictions from a row's features.

Owns: features of a row, ridge regression from running sums, a stand-in for gradient norms. Does not know: how a
baseline is used (advantages), who keeps the sums. Letters: B rows, T row width, D model width, F features.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

ROW_FEATURES = 6  # and the hidden state's
RIDGE = 1.0


def num_features(hidden_size: int) -> int:
    """F of rows whose mean hidden state has so many numbers, as in ``row_features`` = 6 + D."""
    return ROW_FEATURES + hidden_size


def gradient_square(logp: Float[ArrayLike, "B T"], mask: Bool[ArrayLike, "B T"]) -> Float[Array, " B"]:
    """Stand-in for the squared norm of the gradient of a row's log-probability.

        sum over the completion of (1 - p)^2,   p = exp(logp)

    The gradient by the logits of one token is onehot - probabilities; (1 - p)^2 is the share of the taken token in
    its squared norm, between a half and the whole of it. The other tokens' share, the Jacobian below the logits and the
    products of different positions are left out: exact norms need a backward pass for every row. The form is ours.

    Args:
        logp: [B, T] f32 nats of the taken tokens.
        mask: [B, T] bool, the completion.

    Returns:
        [B] f32, not negative.
    """
    return jnp.sum(jnp.where(mask, jnp.square(jnp.expm1(jnp.where(mask, logp, 0.0))), 0.0), axis=1)


def row_features(
    logp: Float[ArrayLike, "B T"],
    entropy: Float[ArrayLike, "B T"],
    hidden: Float[ArrayLike, "B D"],
    mask: Bool[ArrayLike, "B T"],
    *,
    max_length: int,
) -> Float[Array, "B F"]:
    """What a rollout tells about how hard its question is.

        1, length / max_length, mean and standard deviation of -logp and of the entropy over the completion,
        mean hidden state / sqrt(D)

    Args:
        logp: [B, T] f32 nats of the taken tokens under the policy that took them.
        entropy: [B, T] f32 nats of what they were drawn from.
        hidden: [B, D] f32, the mean over the completion of the states that predict its tokens.
        mask: [B, T] bool, the completion.
        max_length: longest completion, tokens.

    Returns:
        [B, F] f32.

    Source: arXiv:2605.07579 (hidden states and statistics of token entropies). Differs: which statistics is ours, as
        are the length and the surprise beside them; hidden states are not reduced to principal components first, for
        ridge regression shrinks the directions that hardly vary by itself.
    """
    length = jnp.sum(mask, axis=1).astype(jnp.float32)
    count = jnp.maximum(length, 1.0)

    def moments(value: Float[ArrayLike, "B T"]) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        mean = jnp.sum(jnp.where(mask, value, 0.0), axis=1) / count
        square = jnp.sum(jnp.where(mask, jnp.square(value - mean[:, None]), 0.0), axis=1) / count
        return mean, jnp.sqrt(square)

    columns = (jnp.ones_like(length), length / max_length, *moments(-logp), *moments(entropy))
    return jnp.concatenate([jnp.stack(columns, axis=1), hidden * hidden.shape[1] ** -0.5], axis=1)


def regression_sums(
    features: Float[ArrayLike, "B F"], target: Float[ArrayLike, " B"], valid: Bool[ArrayLike, " B"]
) -> Float[Array, "F F+1"]:
    """``sum_b x_b [x_b, y_b]`` over valid rows: all that least squares needs to know, [F, F + 1] f32.

    Sums of several batches add up, and old ones may be discounted.
    """
    features = jnp.where(valid[:, None], features, 0.0)
    columns = jnp.concatenate([features, jnp.where(valid, target, 0.0)[:, None]], axis=1)
    return jnp.sum(features[:, :, None] * columns[:, None, :], axis=0)


def ridge_predict(
    features: Float[ArrayLike, "B F"], sums: Float[ArrayLike, "F F+1"], *, ridge: float = RIDGE
) -> Float[Array, " B"]:
    """``x (X'X + ridge I)^-1 X'y`` of each row, [B] f32, with X'X and X'y from ``sums`` [F, F + 1]; 0 without data."""
    coefficients = jnp.linalg.solve(sums[:, :-1] + ridge * jnp.eye(sums.shape[0]), sums[:, -1])
    return jnp.sum(features * coefficients[None, :], axis=1)
