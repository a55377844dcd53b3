"""Rollout replay of mixed groups.

    python -m jaxrl_llm.train --config=configs/recipes/rr.py --workdir=runs/rr

Half of a batch is generated, and half comes from the latest mixed group of each question, as long as it is in the ring.
A token's ratio to the policy that drew it is clipped about that of the weights before the iteration's updates.
Source: Sun et al. 2025, arXiv:2506.05316 (released code: clip, standard deviation, nothing leaves once it was
replayed). Differs: its other half, DOTS, which predicts how hard questions are and asks those of middling difficulty,
is not there; tied groups take places in the ring, and none in the batch.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.old_policy = use("start")
    config.algorithm.correction = use("importance")
    config.algorithm.aggregation = use("token_mean")
    config.rollout.prompts_per_iteration = 4
    config.replay.capacity = 256
    config.replay.skip_tied = True
    config.replay.latest_visit = True
    config.replay.fresh_fraction = 0.5
    config.update.micro_batch_size = 16
    return config
