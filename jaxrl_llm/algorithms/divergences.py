"""Anchors: what holds a policy back, as an estimate of its divergence from another at each token; and its entropy.

An anchor is a function of ``Tokens`` and of its settings to an estimate [B,T] nats of KL(policy || anchor), with its
gradient.

Owns: those functions, estimators of a divergence, how the weight of an entropy bonus moves, the tables. Does not know:
surrogates, models.
Letters: B rows, T row width.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import Tokens
from jaxrl_llm.algorithms.surrogates import LOG_RATIO_LIMIT
from jaxrl_llm.settings.schema import Decay, NotNegative, Positive

Estimator = Literal["k1", "k2", "k3"]


@needs("ref_logp")
def reference(x: Tokens, *, estimator: Estimator = "k3") -> Float[Array, "B T"]:
    """The frozen reference: the starting model, or model.reference_path."""
    return _to(x.ref_logp, x, estimator)


@needs("ref_logp", "previous_logp")
def convex(x: Tokens, *, estimator: Estimator = "k3") -> Float[Array, "B T"]:
    """The reference and, by schedule, the weights that the iteration before began with.

        l KL(policy || reference) + (1 - l) KL(policy || previous),   l = ``reference_share`` of the iteration

    Source: ReMix, Liang et al. 2025, arXiv:2507.06892.
    """
    share = reference_share(x.iteration)
    return share * _to(x.ref_logp, x, estimator) + (1 - share) * _to(x.previous_logp, x, estimator)


@needs("average_logp")
def ewma(x: Tokens, *, decay: Decay = 0.9, estimator: Estimator = "k3") -> Float[Array, "B T"]:
    """The moving average of the weights, which fade by ``decay`` an optimizer step.

    Source: T1, Hou et al. 2025, arXiv:2501.11651.
    """
    return _to(x.average_logp, x, estimator)


def _to(anchor_logp: Float[ArrayLike, "B T"], x: Tokens, estimator: str) -> Float[Array, "B T"]:
    return kl_estimate(x.policy_logp, jnp.where(x.mask, anchor_logp, 0.0), kind=estimator)


def kl_estimate(
    policy_logp: Float[ArrayLike, "*any"], ref_logp: Float[ArrayLike, "*any"], *, kind: str
) -> Float[Array, "*any"]:
    """Estimate of KL(policy || reference) from each token drawn from the policy.

        d = policy_logp - ref_logp
        "k1" = d                 unbiased, may be negative; its gradient has mean 0 on fresh tokens
        "k2" = d^2 / 2           biased in value; its gradient is that of the KL on fresh tokens
        "k3" = exp(-d) - 1 + d   unbiased, never negative; its gradient is that of KL(reference || policy). Below -20
                                 nats exp(-d) and the slope are those at -20: of some 89 no float32 has it.

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
        # Cut in value alone: without the slope of exp(-d) descent would push the token further away.
        cut = difference - jax.lax.stop_gradient(jnp.minimum(difference + LOG_RATIO_LIMIT, 0.0))
        return jnp.expm1(-cut) + difference
    raise ValueError(f"kind={kind!r} is not one of 'k1', 'k2', 'k3'")


def reference_share(iteration: Int[ArrayLike, ""]) -> Float[Array, ""]:
    """Share [] f32 of the reference in a divergence to reference and previous policy, by iteration.

        share = max(1 - 0.1 ceil(max(iteration - 50, 0) / 10), 0.5)

    Source: ReMix, Liang et al. 2025, arXiv:2507.06892.
    """
    return jnp.maximum(1.0 - 0.1 * jnp.ceil(jnp.maximum(iteration - 50, 0) / 10), 0.5)


@needs(moves=False)
def constant(coefficient: Float[ArrayLike, ""], entropy: Float[ArrayLike, ""]) -> Float[Array, ""]:
    """Weight [] f32 of the entropy bonus after a step: what it was."""
    return coefficient


def adaptive(
    coefficient: Float[ArrayLike, ""],
    entropy: Float[ArrayLike, ""],
    *,
    target: Positive = 0.2,
    rate: NotNegative = 1e-4,
) -> Float[Array, ""]:
    """Weight [] f32 of the entropy bonus after a step whose tokens had this entropy on average.

        c' = max(c + rate * sign(target - entropy), 0)

    Args:
        coefficient: [] f32, the weight of that step.
        entropy: [] f32 nats per token.
        target: nats per token below which the weight rises, above which it falls.
        rate: how far the weight moves.

    Source: Skywork-OR1, He et al. 2025, arXiv:2505.22312, "adaptive entropy control". Differs: there the bonus is left
        out of a step whose rollouts have more entropy than the target, while c falls; here its weight is c always, for
        a step's own entropy is known only after its forward pass. The released code bounds c above too, at 0.005.

    Example:
        A step with 0.5 nats where the target is 0.2 lowers a weight of 0.005 by the rate, one with 0.1 raises it.
    """
    return jnp.maximum(coefficient + rate * jnp.sign(target - entropy), 0.0)


DIVERGENCES = {"reference": reference, "convex": convex, "ewma": ewma}

ENTROPY_BONUSES = {"constant": constant, "adaptive": adaptive}
