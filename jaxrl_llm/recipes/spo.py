"""Soft policy optimisation with replay.

    python -m jaxrl_llm.train --config=recipe:spo --workdir=runs/spo

The sum of log-ratios and a prompt's soft value must be the reward: no ratio, no value network, any data. The square of
what is left; their cross-entropy ("spo_cross_entropy") wants rewards that are log-probabilities.
Source: Cohen et al. 2025, arXiv:2503.05453. Differs: beta is 0.1, for rewards of 0 and 1, where 1 would leave the odds
of a right answer at 2.7 times the starting model's (its rewards are log-probabilities, for which 1 suits); a prompt's
soft value is estimated for each answer from the other answers of its group, weighed by reference over behaviour policy,
instead of once from other samples of the reference: on replayed answers it is a little too low (at a beta of 1 groups
of 8 settle at 0.471 instead of 0.475); no half of the data is of others, and the behaviour policy is new in every
iteration instead of every 10 batches.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.surrogate = use("spo", beta=0.1)
    config.algorithm.aggregation = use("sequence_mean")
    config.replay.capacity = 512
    config.update.updates_per_iteration = 2
    return config
