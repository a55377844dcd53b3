"""LOOP.

    python -m jaxrl_llm.train --config=recipe:loop --workdir=runs/loop

The advantages are leave-one-out, and the clip is narrow. The loss is a mean over rollouts of means over tokens. The
data is used twice, the gradient's norm is clipped at a low bound, and tied groups are left out.
Source: Chen et al. 2025, arXiv:2502.01600. Differs: tied groups are left out; the paper leaves out advantages below
0.01. With rewards of 0 and 1 both leave out the same rows, but the paper's divisor still counts them. Each of the two
updates takes the whole batch; the paper's take parts of it.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


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
