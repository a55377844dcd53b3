"""RLOO.

    python -m jaxrl_llm.train --config=recipe:rloo --workdir=runs/rloo

Each sample against the mean of the others, plain REINFORCE, a sum over the sequence.
Source: Ahmadian et al. 2024, arXiv:2402.14740. Differs: a row's log-probability is its sum over
sampling.max_completion_tokens, which scales the gradient that is clipped; no KL in the reward.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("leave_one_out")
    config.algorithm.surrogate = use("reinforce")
    config.algorithm.aggregation = use("constant_length")
    return config
