"""AsymRE with replay.

    python -m jaxrl_llm.train --config=configs/recipes/asymre.py --workdir=runs/asymre

REINFORCE of whole sequences without ratio or clip on replayed data, its baseline lowered so that successes weigh more
than failures.
Source: Arnal et al. 2025, arXiv:2506.20520. Differs: a row's log-probability is its sum over
sampling.max_completion_tokens, which scales the gradient that is clipped.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.credit.advantage = "asymre"
    config.credit.delta_v = -0.1
    config.objective.surrogate = "reinforce"
    config.objective.aggregation = "constant_length"
    config.replay.capacity = 512
    config.update.updates_per_iteration = 2
    return config
