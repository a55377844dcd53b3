"""MC-GRPO.

    python -m jaxrl_llm.train --config=recipe:mc_grpo --workdir=runs/mc_grpo

The reward is compared with the group's median, for small groups. A group has four answers and one more, so that the
median is one of the rewards. As in the released configs, there are two updates of the whole batch, and the clip can act
in the second.
Source: arXiv:2601.22582. Differs: the advantage is not divided by the median absolute deviation, which is 0 for
two-valued rewards in an odd group. The median answer stays in the batch with an advantage of 0; the paper drops it.
Therefore the mean is over a quarter more answers.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


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
