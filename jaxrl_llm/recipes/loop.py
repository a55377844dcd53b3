"""LOOP.

    python -m jaxrl_llm.train --config=recipe:loop --workdir=runs/loop

Leave-one-out advantages under a narrow clip, a mean over rollouts of means over tokens, two passes over the data, small
gradients, no tied groups.
Source: Chen et al. 2025, arXiv:2502.01600. Differs: groups are left out where they are tied, advantages where they are
below 0.01 there: the same where rewards are 0 and 1, but that its divisor still counts them; two updates of the whole
batch, where it takes parts of it.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("leave_one_out")
    config.algorithm.surrogate.low = 0.1
    config.algorithm.surrogate.high = 0.1
    config.algorithm.aggregation = use("sequence_mean")
    config.replay.skip_tied = True
    config.update.updates_per_iteration = 2
    config.optimizer.max_grad_norm = 0.1
    return config
