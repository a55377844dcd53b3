"""AGRO with replay.

    python -m jaxrl_llm.train --config=recipe:agro --workdir=runs/agro

The loss is the variance of reward minus log-ratio over a group. It is zero at the optimum on any data.
Source: Tang et al. 2025, arXiv:2503.19612. Differs: the paper's loss was not found. This loss follows from its theorem.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("dr_grpo")
    config.algorithm.surrogate = use("agro")
    config.algorithm.aggregation = use("sequence_mean")
    config.replay.capacity = 512
    config.update.updates_per_iteration = 2
    return config
