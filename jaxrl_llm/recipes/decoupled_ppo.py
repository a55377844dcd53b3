"""Decoupled PPO, as in AReaL.

    python -m jaxrl_llm.train --config=recipe:decoupled_ppo --workdir=runs/decoupled_ppo

The ratio is clipped against the weights before the updates of the iteration. A token is weighted by the ratio of these
weights to the policy that drew it. Tokens with a weight above five are left out. Two batches of prompts are sampled
ahead, and no answer stays open for more than four iterations. The keys and values of an open answer are computed again
with the new weights. Each rollout is trained on once, in one of two minibatches.
Source: Fu et al. 2025, arXiv:2505.24298. Differs: an iteration has two minibatches; the released configs have four.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.old_policy = use("start")
    config.algorithm.correction = use("token_masked", low=0.0, high=5.0)
    config.algorithm.aggregation = use("token_mean")
    config.rollout.lookahead_prompts = 16
    config.rollout.max_lag_iterations = 4
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 32
    config.update.updates_per_iteration = 2
    return config
