"""REINFORCE++.

    python -m jaxrl_llm.train --config=recipe:reinforce_pp --workdir=runs/reinforce_pp

Advantages whitened over the whole batch, a clipped ratio, a small pull to the starting model. Each rollout is trained
on once, in one of four minibatches, and the clip can act from the second on: update.batch_size is a quarter of an
iteration's rollouts.
Source: Hu 2025, arXiv:2501.03262. Differs: the pull is a term of the loss, where it is one of the reward: a token is
held for its own divergence, not for that of the tokens after it; four minibatches instead of the eight of OpenRLHF's
script train_reinforce_llama_ray.sh (1,024 prompts with one rollout each, in steps of 128).
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("reinforce_pp")
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.divergence = use("reference", coefficient=0.01, estimator="k2")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
