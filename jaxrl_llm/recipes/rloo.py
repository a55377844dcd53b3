"""RLOO.

    python -m jaxrl_llm.train --config=recipe:rloo --workdir=runs/rloo

Each sample is compared with the mean of the others. The loss is plain REINFORCE with the sum over the sequence.
Source: Ahmadian et al. 2024, arXiv:2402.14740. Differs: the log-probability of a row is the sum over its tokens,
divided by sampling.max_completion_tokens. The gradient shrinks by this factor before it is clipped. There is no KL in
the reward.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("leave_one_out")
    config.algorithm.surrogate = use("reinforce")
    config.algorithm.aggregation = use("constant_length")
    return config
