"""Replay with a positive bias.

    python -m jaxrl_llm.train --config=recipe:replay_positive_bias --workdir=runs/replay_positive_bias

GRPO with replay, as in the central paper of this package. The clipped ratio is the ratio of the whole sequence. The
ring holds 32 batches and keeps correct answers longer, and each rollout is used four times. The share for correct
answers begins to fill in iteration 26; a run has 10 iterations unless num_iterations is set.
Source: Arnal et al. 2026, arXiv:2604.08706.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.surrogate = use("sequence_clipped")
    config.algorithm.aggregation = use("sequence_mean")
    config.replay.unit = "rollout"
    config.replay.capacity = 2048
    config.replay.positive_fraction = 0.2
    config.update.updates_per_iteration = 4
    return config
