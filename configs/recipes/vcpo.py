"""VCPO.

    python -m jaxrl_llm.train --config=configs/recipes/vcpo.py --workdir=runs/vcpo

A baseline weighted by gradient size, a truncated sequence ratio, steps scaled by the effective sample size.
Source: arXiv:2602.17616.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.credit.advantage = "vcpo"
    config.objective.surrogate = "reinforce"
    config.objective.correction = "sequence_truncated"
    config.objective.correction_high = 8.0
    config.objective.ess_learning_rate = True
    config.objective.aggregation = "sequence_mean"
    config.replay.capacity = 512
    config.optimizer.weight_decay = 0.1
    return config
