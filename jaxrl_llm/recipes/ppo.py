"""PPO with a critic.

    python -m jaxrl_llm.train --config=recipe:ppo --workdir=runs/ppo

The advantage is generalised advantage estimation with a value head on the policy's own hidden states, whitened over all
tokens of an iteration. Each rollout is trained on once, in one of four minibatches. Both clips can act from the second
minibatch on. update.batch_size is a quarter of the rollouts of an iteration. Without discount and at lambda 1, the
advantage of a token is the reward minus the critic's prediction. There is no penalty to the starting model. The classic
lambda is 0.95. With --config.algorithm.critic.bins=51 and --config.algorithm.critic.clip=0, values are learned as
distributions over 51 bins from algorithm.critic.low=0 to algorithm.critic.high=1. This range should contain all
returns.
Source: Hu et al. 2025, arXiv:2503.24290; Schulman et al. 2017, arXiv:1707.06347; bins, Farebrother et al. 2024,
arXiv:2403.03950. Differs: the critic is a head on the policy and is updated together with the policy, four times in an
iteration. The paper's critic is a second model with 12 updates to 1 of the policy.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("gae")
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.critic.clip = 0.2
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
