"""The critic: its predictions, their targets, and its losses.

The value V_t of token t is the expected discounted reward of the row before token t is drawn. It is computed from the
hidden state that also predicts token t.

Owns: returns, the value head and its two losses. Does not know: the model, rewards, how losses are aggregated.
Letters: B rows, T row width, D model width, m outputs of the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxrl_llm.algorithms.inputs import AnyArray

# Standard deviation of a target's Gaussian in bin widths.
SIGMA_BINS = 0.75

# A number, or an array [] f32.
Number = float | Float[AnyArray, ""]


class Bins(NamedTuple):
    """The conversion of a head's outputs to a value; Python constants.

    Attributes:
        count: m; 0 = one output, which is the value. Otherwise the outputs are logits of equal bins between ``low`` and
            ``high``.
    """

    count: int
    low: float
    high: float

    @property
    def edges(self) -> Float32[Array, " {self.count+1}"]:
        """Edges of the bins, [m + 1] f32."""
        return jnp.linspace(self.low, self.high, self.count + 1, dtype=jnp.float32)

    @property
    def centres(self) -> Float32[Array, " {self.count}"]:
        """Centres of the bins, [m] f32."""
        return 0.5 * (self.edges[1:] + self.edges[:-1])


def lambda_returns(
    value: Float[AnyArray, "B T"],
    reward: Float[AnyArray, "B ..."],
    mask: Bool[AnyArray, "B T"],
    *,
    discount: Number,
    gae_lambda: Number,
) -> Float[Array, "B T"]:
    """Return the lambda-return of each token: the target of its value.

        G_t = r_t + discount ((1 - lambda) V_{t+1} + lambda G_{t+1}),   V = G = 0 after the last token

    ``G - V`` is generalised advantage estimation, sum_l (discount lambda)^l delta_{t+l} with delta_t = r_t +
    discount V_{t+1} - V_t. With discount = lambda = 1, G is exactly the reward. Values are never bootstrapped at the
    end of a row: the return of a truncated row is the reward that it received.

    Args:
        value: [B, T] f32 in units of reward; ignored off the mask.
        reward: [B] f32 of the row's last token, finite if the row has one; or [B, T] of each token.
        mask: [B, T] bool, the row's tokens. An environment's answer is a gap in the mask: the next token is the first
            token after the gap.
        discount, gae_lambda: in [0, 1].

    Returns:
        [B, T] f32 in units of reward, 0.0 off the mask.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16, in the form of Sutton & Barto's lambda-return; reward at
        the last token, no bootstrap: Open-Reasoner-Zero, Hu et al. 2025, arXiv:2503.24290.
    """
    value = jnp.where(mask, value, 0.0)
    has_token_rewards = reward.ndim == 2

    def step(later, token):
        later_value, later_return, has_later = later
        value_B, mask_B, *reward_B = token
        mixture = (1 - gae_lambda) * later_value + gae_lambda * later_return
        discounted = discount * mixture
        if has_token_rewards:
            return_B = reward_B[0] + jnp.where(has_later, discounted, 0.0)
        else:
            return_B = jnp.where(has_later, discounted, reward)
        here = (value_B, return_B, jnp.ones_like(mask_B))
        carried = jax.tree.map(lambda new, old: jnp.where(mask_B, new, old), here, later)
        return carried, jnp.where(mask_B, return_B, 0.0)

    zero_B = jnp.zeros_like(value[:, 0])
    has_later_B = jnp.zeros_like(mask[:, 0])
    tokens = [value.T, mask.T]
    if has_token_rewards:
        tokens.append(reward.T)
    _, returns_TB = jax.lax.scan(step, (zero_B, zero_B, has_later_B), tokens, reverse=True)
    return returns_TB.T


def new_head(width: int, bins: Bins) -> dict[str, Float32[Array, "..."]]:
    """Return a head of zeros, "kernel" [D, m] and "bias" [m] f32. It predicts 0, or the middle of its bins."""
    outputs = max(bins.count, 1)
    return {
        "kernel": jnp.zeros((width, outputs), jnp.float32),
        "bias": jnp.zeros(outputs, jnp.float32),
    }


def head_outputs(
    head: Mapping[str, Float[AnyArray, "..."]],
    hidden: Float[AnyArray, "*rows D"],
    *,
    gradient_share: Number = 1.0,
) -> Float32[Array, "*rows m"]:
    """Return hidden W + b in float32, [..., m] f32.

    Args:
        head: "kernel" [D, m] and "bias" [m].
        hidden: [..., D].
        gradient_share: share of the gradient that passes into ``hidden``. The head itself receives all of it.
    """
    hidden = hidden.astype(jnp.float32)
    constant = jax.lax.stop_gradient(hidden)
    hidden = constant + gradient_share * (hidden - constant)
    product = _matmul(hidden, head["kernel"])
    return product + _as_last_dimension(head["bias"], hidden.ndim)


def expected_value(
    outputs: Float[AnyArray, "*rows m"],
    bins: Bins,
) -> Float[AnyArray, "*rows"]:
    """Return the value [...] f32 of a head's outputs [..., m]: the output itself, or the mean of the bins.

    V = sum_i softmax(outputs)_i centre_i
    """
    if not bins.count:
        return outputs[..., 0]
    return _matmul(jax.nn.softmax(outputs), bins.centres)


def hl_gauss_target(
    target: Float[AnyArray, "*rows"],
    bins: Bins,
) -> Float[Array, "*rows {bins.count}"]:
    """Return the mass of a Gaussian around each target in each bin, [..., m] f32. The masses sum to 1.

        p_i = (F(edge_{i+1}) - F(edge_i)) / (F(high) - F(low)),   F = CDF of N(target, (0.75 bin widths)^2)

    A target outside the bins counts as the nearer end. The mean of p differs from the target by less than a bin width.
    The difference is tiny for targets two bins or more from an end. At an end the mean is 0.6 bin widths further
    inside, because half of the Gaussian is cut off.

    Source: Farebrother et al. 2024, arXiv:2403.03950, section 3.1 (0.75 as recalled).
    """
    sigma = SIGMA_BINS * (bins.high - bins.low) / bins.count
    target = jnp.clip(target, bins.low, bins.high)
    edges = _as_last_dimension(bins.edges, target.ndim + 1)
    distance = (edges - target[..., None]) / sigma
    cdf = jax.scipy.special.ndtr(distance)
    mass_of_bin = cdf[..., 1:] - cdf[..., :-1]
    mass_of_all_bins = cdf[..., -1:] - cdf[..., :1]
    return mass_of_bin / mass_of_all_bins


def value_loss(
    outputs: Float[AnyArray, "B T m"],
    target: Float[AnyArray, "B T"],
    bins: Bins,
    *,
    old_value: Float[AnyArray, "B T"] | None = None,
    clip: float = 0.0,
) -> Float[Array, "B T"]:
    """Return the loss of each token's prediction against its return.

        without bins   (V - G)^2 / 2, and with a clip the larger of that and (V_old + clip(V - V_old, +-clip) - G)^2 / 2
        with bins      cross-entropy -sum_i p_i log softmax(outputs)_i, p = ``hl_gauss_target`` of G

    The cross-entropy is smallest if the prediction for a state is the mean of its targets' distributions.

    Args:
        outputs: [B, T, m] f32 of the head, finite.
        target: [B, T] f32 returns G, finite; a constant.
        bins: of the outputs.
        old_value: [B, T] f32, the predictions that the returns were computed with; needed if ``clip`` is above 0.
        clip: distance from the old value up to which a prediction improves the loss, in units of reward; 0 = no limit.

    Returns:
        [B, T] f32.

    Source: the clip, Schulman et al. 2017's code (openai/baselines, ppo2); cross-entropy, arXiv:2403.03950.
    """
    if bins.count:
        p = hl_gauss_target(target, bins)
        log_softmax = jax.nn.log_softmax(outputs)
        return -jnp.sum(p * log_softmax, axis=-1)
    value = expected_value(outputs, bins)
    error = jnp.square(value - target)
    if clip:
        assert old_value is not None
        near_value = old_value + jnp.clip(value - old_value, -clip, clip)
        near_error = jnp.square(near_value - target)
        error = jnp.maximum(error, near_error)
    return 0.5 * error


def value_terms(
    outputs: Float[AnyArray, "B T m"],
    returns: Float[AnyArray, "B T"],
    old_value: Float[AnyArray, "B T"] | None,
    mask: Bool[AnyArray, "B T"],
    bins: Bins,
    *,
    clip: float,
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """Return ``value_loss`` of tokens, 0.0 off the mask, and sums [] f32 for the explained variance."""

    def keep(values: AnyArray) -> jax.Array:
        return jnp.where(mask, values, 0.0)

    returns = keep(returns)
    old_value = None if old_value is None else keep(old_value)
    loss = keep(value_loss(outputs, returns, bins, old_value=old_value, clip=clip))
    error = keep(returns - expected_value(outputs, bins))
    return loss, {
        "value_loss_sum": jnp.sum(loss),
        "return_sum": jnp.sum(returns),
        "return_square_sum": jnp.sum(jnp.square(returns)),
        "value_error_sum": jnp.sum(error),
        "value_error_square_sum": jnp.sum(jnp.square(error)),
    }


def _matmul(x: AnyArray, y: AnyArray) -> jax.Array:
    # The head is small, and its values are compared with rewards. Compute it in full float32, without a TPU's bfloat16
    # passes.
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _as_last_dimension(x: AnyArray, ndim: int) -> AnyArray:
    """Return [m] as the last of ``ndim`` dimensions."""
    return x.reshape((1,) * (ndim - 1) + (-1,))
