"""Dr. GRPO.

    python -m jaxrl_llm.train --config=recipe:dr_grpo --workdir=runs/dr_grpo

No division by the group's standard deviation or by a sequence's own length. Each rollout is trained on once, in one of
four minibatches, and the clip can act from the second on: update.batch_size is a quarter of an iteration's rollouts.
Source: Liu et al. 2025, arXiv:2503.20783. Differs: four minibatches instead of the eight of released scripts (1,024
rollouts in steps of 128).
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("dr_grpo")
    config.algorithm.aggregation = use("constant_length")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
