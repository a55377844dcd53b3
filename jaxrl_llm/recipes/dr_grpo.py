"""Dr. GRPO.

    python -m jaxrl_llm.train --config=recipe:dr_grpo --workdir=runs/dr_grpo

The advantage is not divided by the standard deviation of the group, and the loss of a sequence is not divided by its
own length. Each rollout is trained on once, in one of four minibatches. The clip can act from the second minibatch on.
update.batch_size is a quarter of the rollouts of an iteration.
Source: Liu et al. 2025, arXiv:2503.20783. Differs: four minibatches instead of the eight of the released scripts (1,024
rollouts in steps of 128).
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("dr_grpo")
    config.algorithm.aggregation = use("constant_length")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
