"""GSPO.

    python -m jaxrl_llm.train --config=configs/recipes/gspo.py --workdir=runs/gspo

The ratio of the whole sequence, length-normalised, and its narrow clip.
Source: Zheng et al. 2025, arXiv:2507.18071.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.objective.surrogate = "gspo"
    config.objective.aggregation = "sequence_mean"
    config.objective.clip_low = 0.0003
    config.objective.clip_high = 0.0004
    return config
