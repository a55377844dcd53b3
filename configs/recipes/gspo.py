"""GSPO.

    python -m jaxrl_llm.train --config=configs/recipes/gspo.py --workdir=runs/gspo

The ratio of the whole sequence, length-normalised, and its narrow clip.
Source: Zheng et al. 2025, arXiv:2507.18071.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.surrogate = use("gspo", low=0.0003, high=0.0004)
    config.algorithm.aggregation = use("sequence_mean")
    return config
