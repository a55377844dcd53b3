"""Rollout replay of mixed groups.

    python -m jaxrl_llm.train --config=recipe:rr --workdir=runs/rr

Half of a batch is generated, and half comes from the latest mixed group of each question, as long as it is in the ring.
A token's ratio to the policy that drew it is clipped about that of the weights before the iteration's two updates,
which can act in the second. update.batch_size is the number of an iteration's rollouts.
Source: Sun et al. 2025, arXiv:2506.05316 (released code: clip, standard deviation, nothing leaves once it was replayed;
batches of 512 in steps of 64). Differs: its other half, DOTS, which predicts how hard questions are and asks those of
middling difficulty, is not there; tied groups take places in the ring, and none in the batch; two steps, where it has
eight, each with a draw of its own, rollout by rollout, so that some of the fresh ones come in both and others in none.
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
    config.replay.unit = "rollout"
    config.update.batch_size = 32
    config.update.updates_per_iteration = 2
    return config
