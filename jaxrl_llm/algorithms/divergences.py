"""Divergences for the KL penalty, and the weight of the entropy bonus.

A divergence is a function of ``Tokens`` and its settings. It returns an estimate [B,T] in nats of
KL(policy || other policy) at each token, with its gradient.

Owns: these functions, estimators of a divergence, how the weight of an entropy bonus changes, the tables. Does not
know: surrogates, models.
Letters: B rows, T row width.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import AnyArray, Tokens
from jaxrl_llm.algorithms.surrogates import LOG_RATIO_LIMIT
from jaxrl_llm.settings.schema import Decay, NotNegative, Positive

Estimator = Literal["k1", "k2", "k3"]


@needs("ref_logp")
def reference(x: Tokens, *, estimator: Estimator = "k3") -> Float[AnyArray, "B T"]:
    """Return the divergence from the frozen reference: the starting model, or model.reference_path."""
    return _divergence_from(x.ref_logp, x, estimator)


@needs("ref_logp", "previous_logp")
def convex(x: Tokens, *, estimator: Estimator = "k3") -> Float[AnyArray, "B T"]:
    """Return a mixture of the divergences from the reference and from the policy that the last iteration began with.

        l KL(policy || reference) + (1 - l) KL(policy || previous),   l = ``reference_share`` of the iteration

    Source: ReMix, Liang et al. 2025, arXiv:2507.06892.
    """
    assert x.iteration is not None
    share = reference_share(x.iteration)
    from_reference = _divergence_from(x.ref_logp, x, estimator)
    from_previous = _divergence_from(x.previous_logp, x, estimator)
    return share * from_reference + (1 - share) * from_previous


@needs("average_logp")
def ewma(
    x: Tokens,
    *,
    decay: Decay = 0.9,
    estimator: Estimator = "k3",
) -> Float[AnyArray, "B T"]:
    """Return the divergence from the moving average of the weights, with ``decay`` per optimizer step.

    Source: T1, Hou et al. 2025, arXiv:2501.11651.
    """
    return _divergence_from(x.average_logp, x, estimator)


def _divergence_from(
    other_logp: Float[AnyArray, "B T"],
    x: Tokens,
    estimator: str,
) -> Float[AnyArray, "B T"]:
    """Return the estimate of the divergence of the current policy from another policy."""
    finite_logp = jnp.where(x.mask, other_logp, 0.0)
    return kl_estimate(x.policy_logp, finite_logp, kind=estimator)


def kl_estimate(
    policy_logp: Float[AnyArray, "*any"],
    ref_logp: Float[AnyArray, "*any"],
    *,
    kind: str,
) -> Float[AnyArray, "*any"]:
    """Return an estimate of KL(policy || reference) from each token drawn from the policy.

        d = policy_logp - ref_logp
        "k1" = d                 unbiased, may be negative; its gradient has mean 0 on fresh tokens
        "k2" = d^2 / 2           biased in value; its gradient is that of the KL on fresh tokens
        "k3" = exp(-d) - 1 + d   unbiased, never negative; its gradient is that of KL(reference || policy). Below -20
                                 nats exp(-d) and the slope keep their values at -20, because float32 overflows near 89.

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
        # Cut only the value and keep the slope. Without the slope of exp(-d), gradient descent would push the token
        # further away.
        excess = jnp.minimum(difference + LOG_RATIO_LIMIT, 0.0)
        limited = difference - jax.lax.stop_gradient(excess)
        return jnp.expm1(-limited) + difference
    raise ValueError(f"kind={kind!r} is not one of 'k1', 'k2', 'k3'")


def reference_share(iteration: int | Int[AnyArray, ""]) -> Float[Array, ""]:
    """Return the share [] f32 of the reference in the divergence ``convex``, by iteration.

        share = max(1 - 0.1 ceil(max(iteration - 50, 0) / 10), 0.5)

    Source: ReMix, Liang et al. 2025, arXiv:2507.06892.
    """
    num_later = jnp.maximum(iteration - 50, 0)
    num_steps = jnp.ceil(num_later / 10)
    return jnp.maximum(1.0 - 0.1 * num_steps, 0.5)


@needs(moves=False)
def constant(
    coefficient: Float[AnyArray, ""],
    entropy: Float[AnyArray, ""],
) -> Float[AnyArray, ""]:
    """Return the same weight [] f32 of the entropy bonus after every step."""
    return coefficient


def adaptive(
    coefficient: Float[AnyArray, ""],
    entropy: Float[AnyArray, ""],
    *,
    target: Positive = 0.2,
    rate: NotNegative = 1e-4,
) -> Float[Array, ""]:
    """Return the weight [] f32 of the entropy bonus after a step, by the mean entropy of the step's tokens.

        c' = max(c + rate * sign(target - entropy), 0)

    Args:
        coefficient: [] f32, the weight of that step.
        entropy: [] f32 nats per token.
        target: nats per token. The weight rises if the entropy is below the target, and falls if it is above.
        rate: change of the weight per step.

    Source: Skywork-OR1, He et al. 2025, arXiv:2505.22312, "adaptive entropy control". Differs: the source leaves the
        bonus out of a step whose rollouts have more entropy than the target, while c falls. Here the weight is always
        c, because the entropy of a step is known only after its forward pass. The released code also bounds c above, at
        0.005.

    Example:
        The target is 0.2 nats. A step with 0.5 nats lowers a weight of 0.005 by the rate; a step with 0.1 raises it.
    """
    direction = jnp.sign(target - entropy)
    return jnp.maximum(coefficient + rate * direction, 0.0)


DIVERGENCES = {"reference": reference, "convex": convex, "ewma": ewma}

ENTROPY_BONUSES = {"constant": constant, "adaptive": adaptive}
