"""Soft policy optimisation with replay.

    python -m jaxrl_llm.train --config=configs/recipes/spo.py --workdir=runs/spo

The sum of log-ratios and a prompt's soft value must be the reward: no ratio, no value network, any data. The square of
what is left; their cross-entropy ("spo_cross_entropy") wants rewards that are log-probabilities.
Source: Cohen et al. 2025, arXiv:2503.05453.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.credit.advantage = "dr_grpo"
    config.objective.surrogate = "spo"
    config.objective.regression_beta = 1.0
    config.objective.aggregation = "sequence_mean"
    config.replay.unit = "group"
    config.replay.capacity = 512
    config.update.updates_per_iteration = 2
    return config
