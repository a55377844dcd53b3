"""AsymRE with replay.

    python -m jaxrl_llm.train --config=recipe:asymre --workdir=runs/asymre

REINFORCE of whole sequences on replayed data, without ratio and without clip. The baseline is lowered, so that
successes weigh more than failures.
Source: Arnal et al. 2025, arXiv:2506.20520. Differs: the log-probability of a row is the sum over its tokens, divided
by sampling.max_completion_tokens. The gradient shrinks by this factor before it is clipped.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("asymre", delta_v=-0.1)
    config.algorithm.surrogate = use("reinforce")
    config.algorithm.aggregation = use("constant_length")
    config.replay.unit = "rollout"
    config.replay.capacity = 512
    config.update.updates_per_iteration = 2
    return config
