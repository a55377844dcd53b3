"""DAPO.

    python -m jaxrl_llm.train --config=configs/recipes/dapo.py --workdir=runs/dapo

A higher upper clip, a mean over tokens, a soft penalty for overlong answers, no tied groups: batches are drawn from
the mixed groups of the last four iterations, where the paper samples until a batch is full of them.
Source: Yu et al. 2025, arXiv:2503.14476.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.objective.clip_high = 0.28
    config.credit.overlong_buffer_tokens = 4
    config.replay.capacity = 256
    config.replay.skip_tied = True
    return config
