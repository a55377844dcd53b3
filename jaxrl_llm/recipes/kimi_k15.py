"""Kimi k1.5 mirror descent.

    python -m jaxrl_llm.train --config=recipe:kimi_k15 --workdir=runs/kimi_k15

The advantage is the reward minus the group mean. The penalty is the squared log-ratio to the weights before the updates
of the iteration. The shorter answers of a group get a higher reward. The optimizer starts anew in every iteration.
Source: Kimi team 2025, arXiv:2501.12599. Differs: questions are drawn uniformly, without a curriculum and without a
preference for questions that fail. The length reward applies from the start. Its weight of 0.1 and the weight of the
log-ratio are not from the paper. Questions that can be guessed without reasoning are kept. Long answers are not
continued in a later iteration.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("dr_grpo")
    config.algorithm.reward_terms = [use("length_reward", weight=0.1)]
    config.algorithm.surrogate = use("kimi_k15")
    config.algorithm.old_policy = use("start")
    config.algorithm.aggregation = use("sequence_mean")
    config.update.updates_per_iteration = 2
    config.optimizer.reset_every_steps = 2
    return config
