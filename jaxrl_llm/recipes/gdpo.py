"""GDPO.

    python -m jaxrl_llm.train --config=recipe:gdpo --workdir=runs/gdpo

Each reward function normalised in the group by itself, then the batch: set rewards.functions and rewards.weights. Each
rollout is trained on once, in one of four minibatches as in released scripts (512 prompts in steps of 128), and the
clip can act from the second on: update.batch_size is a quarter of an iteration's rollouts.
Source: arXiv:2601.05242. Differs: 1e-6 beside each standard deviation, where it is 1e-4.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("gdpo")
    config.algorithm.aggregation = use("token_mean")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
