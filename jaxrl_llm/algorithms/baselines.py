"""Baselines that need more than the rewards of a group: gradient norms and predictions from a row's features.

Owns: features of a row, ridge regression from running sums, an approximation of gradient norms. Does not know: how a
baseline is used (advantages), who keeps the sums. Letters: B rows, T row width, D model width, F features.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.inputs import AnyArray

ROW_FEATURES = 6  # number of features without the D numbers of the hidden state
RIDGE = 1.0


def num_features(hidden_size: int) -> int:
    """Return the number F of features of a row, F = 6 + D; see ``row_features``."""
    return ROW_FEATURES + hidden_size


def gradient_square(
    logp: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
) -> Float[Array, " B"]:
    """Return an approximation of the squared norm of the gradient of each row's log-probability.

        sum over the completion of (1 - p)^2,   p = exp(logp)

    The gradient with respect to the logits of one token is onehot - probabilities. (1 - p)^2 is the share of the taken
    token in its squared norm, between a half and the whole of it. The approximation leaves out the share of the other
    tokens, the Jacobian below the logits, and the products of different positions. Exact norms would need a backward
    pass for every row. This form is not from a paper.

    Args:
        logp: [B, T] f32 nats of the taken tokens.
        mask: [B, T] bool, the completion.

    Returns:
        [B] f32, not negative.
    """
    completion_logp = jnp.where(mask, logp, 0.0)
    minus_rest = jnp.expm1(completion_logp)  # p - 1
    square = jnp.square(minus_rest)
    return jnp.sum(jnp.where(mask, square, 0.0), axis=1)


def row_features(
    logp: Float[AnyArray, "B T"],
    entropy: Float[AnyArray, "B T"],
    hidden: Float[AnyArray, "B D"],
    mask: Bool[AnyArray, "B T"],
    *,
    max_length: int,
) -> Float[Array, "B F"]:
    """Return features of rollouts that predict how difficult their questions are.

        1, length / max_length, mean and standard deviation of -logp and of the entropy over the completion,
        mean hidden state / sqrt(D)

    Args:
        logp: [B, T] f32 nats of the taken tokens under the policy that took them.
        entropy: [B, T] f32 nats of the distributions that the tokens were drawn from.
        hidden: [B, D] f32, the mean over the completion of the states that predict its tokens.
        mask: [B, T] bool, the completion.
        max_length: longest completion, tokens.

    Returns:
        [B, F] f32.

    Source: arXiv:2605.07579 (hidden states and statistics of token entropies). Differs: this package chose the
        statistics, and added the length and the mean of -logp. Hidden states are not reduced to principal components
        first, because ridge regression already shrinks directions with little variance.
    """
    length = jnp.sum(mask, axis=1).astype(jnp.float32)
    count = jnp.maximum(length, 1.0)

    def moments(
        value: Float[AnyArray, "B T"],
    ) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        """Return mean and standard deviation over the completion."""
        mean = jnp.sum(jnp.where(mask, value, 0.0), axis=1) / count
        square = jnp.square(value - mean[:, None])
        variance = jnp.sum(jnp.where(mask, square, 0.0), axis=1) / count
        return mean, jnp.sqrt(variance)

    columns = (
        jnp.ones_like(length),
        length / max_length,
        *moments(-logp),
        *moments(entropy),
    )
    scaled_hidden = hidden * hidden.shape[1] ** -0.5
    return jnp.concatenate([jnp.stack(columns, axis=1), scaled_hidden], axis=1)


def regression_sums(
    features: Float[AnyArray, "B F"],
    target: Float[AnyArray, " B"],
    valid: Bool[AnyArray, " B"],
) -> Float[Array, "F F+1"]:
    """Return ``sum_b x_b [x_b, y_b]`` over valid rows, [F, F + 1] f32: the sums that least squares needs.

    Sums of several batches add up, and older sums may be discounted.
    """
    features = jnp.where(valid[:, None], features, 0.0)
    target = jnp.where(valid, target, 0.0)
    columns = jnp.concatenate([features, target[:, None]], axis=1)
    products = features[:, :, None] * columns[:, None, :]
    return jnp.sum(products, axis=0)


def ridge_predict(
    features: Float[AnyArray, "B F"],
    sums: Float[AnyArray, "F F+1"],
    *,
    ridge: float = RIDGE,
) -> Float[Array, " B"]:
    """Return ``x (X'X + ridge I)^-1 X'y`` of each row, [B] f32; 0 without data.

    Args:
        sums: [F, F + 1] f32, X'X and X'y of ``regression_sums``.
    """
    F = sums.shape[0]
    matrix = sums[:, :-1] + ridge * jnp.eye(F)
    coefficients = jnp.linalg.solve(matrix, sums[:, -1])
    return jnp.sum(features * coefficients[None, :], axis=1)
