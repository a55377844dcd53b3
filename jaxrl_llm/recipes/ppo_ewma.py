"""PPO-EWMA.

    python -m jaxrl_llm.train --config=recipe:ppo_ewma --workdir=runs/ppo_ewma

The ratio is clipped against averaged weights, so that the trust region does not depend on the age of the data. Rewards
are normalised by the mean and the standard deviation of several iterations. The learning rate and the decays are those
for a batch of 64, scaled to update.batch_size.
Source: Hilton et al. 2021, arXiv:2110.00641. Differs: there is no critic. Adam's decays are not scaled.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("reinforce_pp", norm_decay=0.9)
    config.algorithm.old_policy = use("ewma")
    config.algorithm.correction = use("policy_truncated", high=100.0)
    config.algorithm.aggregation = use("token_mean")
    config.replay.unit = "rollout"
    config.replay.capacity = 512
    config.update.updates_per_iteration = 2
    config.update.scaled_from_batch_size = 64
    return config
