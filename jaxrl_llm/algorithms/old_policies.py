"""Old policies: what ratios and trust regions are against, by their log-probabilities of the taken tokens.

An old policy is a function of ``Tokens`` and of its settings to log-probs [B,T] nats.

Owns: those functions, the table of them, the share of new weights in a moving average. Does not know: surrogates,
models, who keeps which weights.
Letters: B rows, T row width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import Tokens
from jaxrl_llm.settings.schema import Decay


@needs(is_behaviour=True)
def behaviour(x: Tokens) -> Float[Array, "B T"]:
    """The policy that drew the token, as the sampler computes it."""
    return x.behaviour_logp


@needs("generation_logp")
def generation(x: Tokens) -> Float[Array, "B T"]:
    """The same weights as the learner computes them, when the rollout goes into the ring.

    What sampler and learner differ by, and what was learned since, are then two ratios.

    Source: Missing Old Logits, arXiv:2605.12070 (exact, by version).
    """
    return x.generation_logp


@needs("start_logp")
def start(x: Tokens) -> Float[Array, "B T"]:
    """The weights before the iteration's updates.

    Source: decoupled PPO, Fu et al. 2025, arXiv:2505.24298.
    """
    return x.start_logp


def interpolated(x: Tokens) -> Float[Array, "B T"]:
    """The weights of the iteration before, about, without a forward pass: between behaviour and current policy.

        behaviour_logp + alpha (sg(policy_logp) - behaviour_logp),
        alpha = (age - 1) / age, age = iterations since the token was drawn; 0 at age 0

    Source: A-3PO as in AReaL, Fu et al. 2025, arXiv:2505.24298 (released code: alpha = (v_prox - v) / (v_now - v) with
        v_prox = v_now - 1, where a version is a training step).
    """
    age = jnp.maximum(x.age, 1).astype(jnp.float32)
    alpha = (age - 1) / age
    return x.behaviour_logp + alpha * (jax.lax.stop_gradient(x.policy_logp) - x.behaviour_logp)


@needs("average_logp")
def ewma(x: Tokens, *, decay: Decay = 0.9) -> Float[Array, "B T"]:
    """The moving average of the weights, which fade by ``decay`` an optimizer step.

    Source: Hilton et al. 2021, arXiv:2110.00641.
    """
    return x.average_logp


def moving_average_share(decay: float, step: Int[ArrayLike, ""]) -> Float[Array, ""]:
    """Share [] f32 of the new weights in their moving average after optimizer step number ``step`` (1, 2, ...).

        average <- (1 - share) average + share params,   share = 1 / sum_{k=0}^{step} decay^k

    So the average is over params_0 .. params_step with weights decay^age.

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
