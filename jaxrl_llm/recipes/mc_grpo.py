"""MC-GRPO.

    python -m jaxrl_llm.train --config=recipe:mc_grpo --workdir=runs/mc_grpo

Rewards against the group's median, for small groups: four answers and one more, so that the median is an answer's own.
Two updates of the whole batch, as in released configs: the clip can act in the second.
Source: arXiv:2601.22582. Differs: nothing divides by the median absolute deviation, which is 0 for two-valued rewards
in an odd group; the median's own answer stays in the batch, with an advantage of 0, where it is dropped there, so that
the mean is over a quarter more.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("mc_grpo")
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.divergence = use("reference", coefficient=0.04)
    config.rollout.prompts_per_iteration = 16
    config.rollout.group_size = 5
    config.update.batch_size = 80
    config.update.micro_batch_size = 16
    config.update.updates_per_iteration = 2
    return config
