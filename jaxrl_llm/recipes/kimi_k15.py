"""Kimi k1.5 mirror descent.

    python -m jaxrl_llm.train --config=recipe:kimi_k15 --workdir=runs/kimi_k15

Reward minus group mean, a squared log-ratio to the weights before the iteration's updates, a reward for shorter
answers among the group's, an optimizer that starts anew in every iteration.
Source: Kimi team 2025, arXiv:2501.12599. Differs: questions are drawn alike, without a curriculum or a preference for
those that fail; the length reward is there from the start, its weight of 0.1 and that of the log-ratio are ours;
questions that can be guessed without reasoning are not sorted out; long answers are not continued in a later iteration.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


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
