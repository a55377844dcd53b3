"""DAPO.

    python -m jaxrl_llm.train --config=recipe:dapo --workdir=runs/dapo

The upper clip is higher, the loss is a mean over tokens, and overlong answers get a soft penalty. An iteration
resamples until it is full of groups with mixed rewards, or until it has asked ten times as many questions as it needs.
Groups whose rewards are still tied are not drawn, whatever their lengths. The penalty's buffer of 4 tokens fits
completions of 16 tokens. Set --config.algorithm.reward_terms.overlong_penalty.buffer to about a fifth of
sampling.max_completion_tokens (DAPO has 4,096 of 20,480). Each rollout is trained on once, in one of four minibatches.
The clip can act from the second minibatch on. update.batch_size is a quarter of the rollouts of an iteration.
Source: Yu et al. 2025, arXiv:2503.14476. Differs: an iteration has four minibatches; the paper has 16. With rewards of
0 and 1 the penalty weighs twice as much as with the paper's rewards of -1 and 1.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


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
