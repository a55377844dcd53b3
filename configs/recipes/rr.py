"""Rollout replay of mixed groups.

    python -m jaxrl_llm.train --config=configs/recipes/rr.py --workdir=runs/rr

Half of a batch is generated, and half comes from the latest mixed group of each question, among 512 groups; a group is
replayed once at most; no standard deviation.
Source: Sun et al. 2025, arXiv:2506.05316. Differs: its other half, DOTS, which predicts how hard questions are and asks
those of middling difficulty, is not there.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("dr_grpo")
    config.rollout.prompts_per_iteration = 4
    config.replay.capacity = 4096
    config.replay.skip_tied = True
    config.replay.latest_visit = True
    config.replay.fresh_fraction = 0.5
    config.replay.max_uses = 2
    config.update.micro_batch_size = 16
    return config
