"""VCPO.

    python -m jaxrl_llm.train --config=configs/recipes/vcpo.py --workdir=runs/vcpo

REINFORCE of whole sequences against a baseline weighted by gradient size, a truncated sequence ratio, steps scaled by
the effective sample size.
Source: arXiv:2602.17616. Differs: a row's squared gradient norm is the sum over its tokens of (1 - p)^2, between a half
and the whole of what a token's logits have.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.credit.advantage = "vcpo"
    config.objective.surrogate = "reinforce"
    config.objective.correction = "sequence_truncated"
    config.objective.correction_high = 8.0
    config.objective.ess_learning_rate = True
    config.objective.aggregation = "constant_length"
    config.replay.capacity = 512
    config.optimizer.weight_decay = 0.1
    return config
