"""Old policies: the denominator of ratios and trust regions, by their log-probabilities of the taken tokens.

An old policy is a function of ``Tokens`` and its settings. It returns log-probabilities [B,T] in nats.

Owns: these functions, their table, the share of new weights in a moving average. Does not know: surrogates, models, who
keeps which weights.
Letters: B rows, T row width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import AnyArray, Tokens
from jaxrl_llm.settings.schema import Decay


@needs(is_behaviour=True)
def behaviour(x: Tokens) -> Float[AnyArray, "B T"]:
    """Return the log-probabilities of the policy that drew the token, with the sampler's numerics."""
    return x.behaviour_logp


@needs("generation_logp")
def generation(x: Tokens) -> Float[AnyArray, "B T"]:
    """Return the log-probabilities of the policy that drew the token, with the learner's numerics.

    The learner computes them when the rollout enters the ring. The difference between sampler and learner, and the
    change of the policy since then, are therefore two separate ratios.

    Source: Missing Old Logits, arXiv:2605.12070 (exact, by version).
    """
    return x.generation_logp


@needs("start_logp")
def start(x: Tokens) -> Float[AnyArray, "B T"]:
    """Return the log-probabilities of the weights before the iteration's updates.

    Source: decoupled PPO, Fu et al. 2025, arXiv:2505.24298.
    """
    return x.start_logp


def interpolated(x: Tokens) -> Float[AnyArray, "B T"]:
    """Return approximate log-probabilities of the previous iteration's weights, without a forward pass.

    The result interpolates between the behaviour policy and the current policy:

        behaviour_logp + alpha (sg(policy_logp) - behaviour_logp),
        alpha = (age - 1) / age, age = iterations since the token was drawn; 0 at age 0

    Source: A-3PO as in AReaL, Fu et al. 2025, arXiv:2505.24298 (released code: alpha = (v_prox - v) / (v_now - v) with
        v_prox = v_now - 1, where a version is a training step).
    """
    assert x.age is not None
    age = jnp.maximum(x.age, 1).astype(jnp.float32)
    alpha = (age - 1) / age
    return x.behaviour_logp + alpha * (jax.lax.stop_gradient(x.policy_logp) - x.behaviour_logp)


@needs("average_logp")
def ewma(x: Tokens, *, decay: Decay = 0.9) -> Float[AnyArray, "B T"]:
    """Return the log-probabilities of the moving average of the weights, with ``decay`` per optimizer step.

    Source: Hilton et al. 2021, arXiv:2110.00641.
    """
    return x.average_logp


def moving_average_share(decay: float, step: Int[AnyArray, ""]) -> Float[AnyArray, ""]:
    """Return the share [] f32 of the new weights in their moving average after optimizer step ``step`` (1, 2, ...).

        average <- (1 - share) average + share params,   share = 1 / sum_{k=0}^{step} decay^k

    After these updates the average is the mean of params_0 .. params_step with weights decay^age.

    Source: Hilton et al. 2021, arXiv:2110.00641: w <- beta w + 1, average <- (beta w average + params) / (beta w + 1).
    """
    return (1 - decay) / (1 - decay ** (step.astype(jnp.float32) + 1))


OLD_POLICIES = {
    "behaviour": behaviour,
    "generation": generation,
    "start": start,
    "interpolated": interpolated,
    "ewma": ewma,
}
