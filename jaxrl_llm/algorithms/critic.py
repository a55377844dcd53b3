"""What a critic predicts, what it should have, and the advantages that follow.

The value V_t of token t is the discounted reward to be expected of the row before token t is drawn: it is read off
the hidden state that also predicts token t.

Owns: returns, the value head and its two losses. Does not know: the model, rewards, how losses are aggregated.
Letters: B rows, T row width, D model width, m outputs of the head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Float32

# Standard deviation of a target's Gaussian in bin widths.
SIGMA_BINS = 0.75


class Bins(NamedTuple):
    """How a head's outputs become a value; Python constants.

    Attributes:
        count: m; 0 = one output, which is the value. Otherwise logits of equal bins between ``low`` and ``high``.
    """

    count: int
    low: float
    high: float

    @property
    def edges(self) -> Float32[Array, " {self.count+1}"]:
        """[m + 1] f32."""
        return jnp.linspace(self.low, self.high, self.count + 1, dtype=jnp.float32)

    @property
    def centres(self) -> Float32[Array, " {self.count}"]:
        """[m] f32."""
        return 0.5 * (self.edges[1:] + self.edges[:-1])


def lambda_returns(
    value: Float[ArrayLike, "B T"],
    reward: Float[ArrayLike, "B ..."],
    mask: Bool[ArrayLike, "B T"],
    *,
    discount: Float[ArrayLike, ""],
    gae_lambda: Float[ArrayLike, ""],
) -> Float[Array, "B T"]:
    """What the value of each token is estimated to have been, from the reward at the row's last token, or at each.

        G_t = r_t + discount ((1 - lambda) V_{t+1} + lambda G_{t+1}),   V = G = 0 after the last token

    ``G - V`` is generalised advantage estimation, sum_l (discount lambda)^l delta_{t+l} with delta_t = r_t +
    discount V_{t+1} - V_t. With discount = lambda = 1, G is exactly the reward. A row's end is an end: one that was
    cut short is worth the reward it was given.

    Args:
        value: [B, T] f32 in units of reward; ignored off the mask.
        reward: [B] f32 of the row's last token, finite where it has one; or [B, T] of each.
        mask: [B, T] bool, the row's tokens; over a gap, an environment's answer, the next is that after it.
        discount, gae_lambda: in [0, 1].

    Returns:
        [B, T] f32 in units of reward, 0.0 off the mask.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16, in the form of Sutton & Barto's lambda-return; reward at
        the last token, no bootstrap: Open-Reasoner-Zero, Hu et al. 2025, arXiv:2503.24290.
    """
    value = jnp.where(mask, value, 0.0)
    own = (reward.T,) if reward.ndim == 2 else ()

    def step(later, now):
        later_value, later_return, has_later = later
        value_B, mask_B, *own_B = now
        ahead = discount * ((1 - gae_lambda) * later_value + gae_lambda * later_return)
        return_B = own_B[0] + jnp.where(has_later, ahead, 0.0) if own_B else jnp.where(has_later, ahead, reward)
        here = (value_B, return_B, jnp.ones_like(mask_B))
        return jax.tree.map(lambda new, old: jnp.where(mask_B, new, old), here, later), jnp.where(mask_B, return_B, 0.0)

    end = (jnp.zeros_like(value[:, 0]), jnp.zeros_like(value[:, 0]), jnp.zeros_like(mask[:, 0]))
    _, returns_TB = jax.lax.scan(step, end, (value.T, mask.T, *own), reverse=True)
    return returns_TB.T


def new_head(width: int, bins: Bins) -> dict[str, Float32[Array, "..."]]:
    """A head of zeros, "kernel" [D, m] and "bias" [m] f32: it predicts 0, or the middle of its bins."""
    outputs = max(bins.count, 1)
    return {"kernel": jnp.zeros((width, outputs), jnp.float32), "bias": jnp.zeros(outputs, jnp.float32)}


def head_outputs(
    head: dict[str, Float[ArrayLike, "..."]],
    hidden: Float[ArrayLike, "*rows D"],
    *,
    gradient_share: Float[ArrayLike, ""] = 1.0,
) -> Float32[Array, "*rows m"]:
    """hidden W + b in float32, [..., m] f32.

    Args:
        head: "kernel" [D, m] and "bias" [m].
        hidden: [..., D].
        gradient_share: what of the gradient goes on into ``hidden``; the head itself has all of it.
    """
    hidden = hidden.astype(jnp.float32)
    constant = jax.lax.stop_gradient(hidden)
    hidden = constant + gradient_share * (hidden - constant)
    return _matmul(hidden, head["kernel"]) + _last(head["bias"], hidden.ndim)


def expected_value(outputs: Float[ArrayLike, "*rows m"], bins: Bins) -> Float[ArrayLike, "*rows"]:
    """The value [...] f32 of a head's outputs [..., m]: the output itself, or the mean of the bins' distribution.

    V = sum_i softmax(outputs)_i centre_i
    """
    if not bins.count:
        return outputs[..., 0]
    return _matmul(jax.nn.softmax(outputs), bins.centres)


def hl_gauss_target(target: Float[ArrayLike, "*rows"], bins: Bins) -> Float[Array, "*rows {bins.count}"]:
    """Mass of a Gaussian about each target in each bin, [..., m] f32, which sums to 1.

        p_i = (F(edge_{i+1}) - F(edge_i)) / (F(high) - F(low)),   F = CDF of N(target, (0.75 bin widths)^2)

    A target outside of the bins counts as its nearer end. The mean of p is the target within a bin width: inside,
    two bins or more from an end, nearly exactly; at an end 0.6 bin widths within, for half of the Gaussian is cut off.

    Source: Farebrother et al. 2024, arXiv:2403.03950, section 3.1 (0.75 as recalled).
    """
    sigma = SIGMA_BINS * (bins.high - bins.low) / bins.count
    target = jnp.clip(target, bins.low, bins.high)
    cdf = jax.scipy.special.ndtr((_last(bins.edges, target.ndim + 1) - target[..., None]) / sigma)
    return (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])


def value_loss(
    outputs: Float[ArrayLike, "B T m"],
    target: Float[ArrayLike, "B T"],
    bins: Bins,
    *,
    old_value: Float[ArrayLike, "B T"] | None = None,
    clip: float = 0.0,
) -> Float[Array, "B T"]:
    """Loss of each token's prediction against its return.

        without bins   (V - G)^2 / 2, and with a clip the larger of that and (V_old + clip(V - V_old, +-clip) - G)^2 / 2
        with bins      cross-entropy -sum_i p_i log softmax(outputs)_i, p = ``hl_gauss_target`` of G

    Under the cross-entropy the best prediction for a state is the mean of its targets' distributions.

    Args:
        outputs: [B, T, m] f32 of the head, finite.
        target: [B, T] f32 returns G, finite; a constant.
        bins: of the outputs.
        old_value: [B, T] f32, the predictions that the returns were made with; for ``clip`` above 0.
        clip: how far from the old value a prediction gains from moving, in units of reward; 0 = any distance.

    Returns:
        [B, T] f32.

    Source: the clip, Schulman et al. 2017's code (openai/baselines, ppo2); cross-entropy, arXiv:2403.03950.
    """
    if bins.count:
        return -jnp.sum(hl_gauss_target(target, bins) * jax.nn.log_softmax(outputs), axis=-1)
    value = expected_value(outputs, bins)
    error = jnp.square(value - target)
    if clip:
        near = old_value + jnp.clip(value - old_value, -clip, clip)
        error = jnp.maximum(error, jnp.square(near - target))
    return 0.5 * error


def value_terms(
    outputs: Float[ArrayLike, "B T m"],
    returns: Float[ArrayLike, "B T"],
    old_value: Float[ArrayLike, "B T"] | None,
    mask: Bool[ArrayLike, "B T"],
    bins: Bins,
    *,
    clip: float,
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """``value_loss`` of tokens, 0.0 off the mask, and sums [] f32 of what the predictions explain."""
    keep = lambda x: None if x is None else jnp.where(mask, x, 0.0)
    returns = keep(returns)
    loss = keep(value_loss(outputs, returns, bins, old_value=keep(old_value), clip=clip))
    error = keep(returns - expected_value(outputs, bins))
    return loss, {
        "value_loss_sum": jnp.sum(loss),
        "return_sum": jnp.sum(returns),
        "return_square_sum": jnp.sum(jnp.square(returns)),
        "value_error_sum": jnp.sum(error),
        "value_error_square_sum": jnp.sum(jnp.square(error)),
    }


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    # The head is small and its values are differences of rewards: no bfloat16 passes on a TPU.
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _last(x: jax.Array, ndim: int) -> jax.Array:
    """[m] as the last of ``ndim`` dimensions."""
    return x.reshape((1,) * (ndim - 1) + (-1,))
