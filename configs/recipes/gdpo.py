"""GDPO.

    python -m jaxrl_llm.train --config=configs/recipes/gdpo.py --workdir=runs/gdpo

Each reward function normalised in the group by itself, then the batch: set rewards.functions and rewards.weights.
Source: arXiv:2601.05242. Differs: 1e-6 beside each standard deviation, where it is 1e-4.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("gdpo")
    config.algorithm.aggregation = use("token_mean")
    return config
