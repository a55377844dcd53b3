"""Rollout replay of mixed groups.

    python -m jaxrl_llm.train --config=recipe:rr --workdir=runs/rr

Half of a batch is generated. The other half is drawn from the latest mixed group of each question, as long as the group
is in the ring. The ratio of a token to the policy that drew it is clipped about the ratio of the weights before the two
updates of the iteration. The clip can act in the second update. update.batch_size is the number of rollouts of an
iteration.
Source: Sun et al. 2025, arXiv:2506.05316 (the clip, the standard deviation, the reuse of replayed rollouts and the
batches of 512 in steps of 64 follow the released code). Differs: the paper's second method is not included. It is DOTS,
which predicts the difficulty of questions and asks questions of medium difficulty. Tied groups take places in the ring,
but are not drawn. An iteration has two steps; the paper has eight. Each step draws its own rollouts, so some fresh
rollouts are used in both steps and others in none.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


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
