"""REINFORCE++.

    python -m jaxrl_llm.train --config=recipe:reinforce_pp --workdir=runs/reinforce_pp

Advantages are whitened over the whole batch. The ratio is clipped, with a small KL penalty to the starting model. Each
rollout is trained on once, in one of four minibatches. The clip can act from the second minibatch on. update.batch_size
is a quarter of the rollouts of an iteration.
Source: Hu 2025, arXiv:2501.03262. Differs: the KL penalty is a term of the loss; the paper's is a term of the reward.
Therefore the penalty of a token depends on its own divergence only, not on the divergence of later tokens. There are
four minibatches instead of the eight of OpenRLHF's script train_reinforce_llama_ray.sh (1,024 prompts with one rollout
each, in steps of 128).
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


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
