"""DAPO.

    python -m jaxrl_llm.train --config=recipe:dapo --workdir=runs/dapo

A higher upper clip, a mean over tokens, a soft penalty for overlong answers, no tied groups: an iteration samples until
it is full of mixed ones, or ten times as many as it needs have been asked; those left then whose rewards are tied are
not drawn, whatever their lengths. The penalty's 4 tokens are for completions of 16: set
--config.algorithm.reward_terms.overlong_penalty.buffer to about a fifth of sampling.max_completion_tokens (4,096 of
20,480 there). Each rollout is trained on once, in one of four minibatches, and the clip can act from the second on:
update.batch_size is a quarter of an iteration's rollouts.
Source: Yu et al. 2025, arXiv:2503.14476. Differs: four minibatches, where it has 16; rewards of 0 and 1 weigh the
penalty twice as much as its -1 and 1 do.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.rollout.max_resample_rounds = 9
    config.algorithm.reward_terms = [use("overlong_penalty", buffer=4)]
    config.algorithm.surrogate.high = 0.28
    config.algorithm.aggregation = use("token_mean")
    config.replay.skip_tied = True
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
