"""GDPO.

    python -m jaxrl_llm.train --config=recipe:gdpo --workdir=runs/gdpo

The rewards of each function are normalised in the group separately. Their sum is then normalised over the batch. Set
rewards.functions and rewards.weights. Each rollout is trained on once, in one of four minibatches, as in the released
scripts (512 prompts in steps of 128). The clip can act from the second minibatch on. update.batch_size is a quarter of
the rollouts of an iteration.
Source: arXiv:2601.05242. Differs: each standard deviation has 1e-6 added to it; in the paper it is 1e-4.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("gdpo")
    config.algorithm.aggregation = use("token_mean")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
