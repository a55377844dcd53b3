"""GSPO.

    python -m jaxrl_llm.train --config=recipe:gspo --workdir=runs/gspo

The ratio is the length-normalised ratio of the whole sequence, with a narrow clip. The old log-probs are the learner's
own. The sampler's log-probs would not do: in bfloat16 sampler and learner differ by as much as the clip is wide. Each
rollout is trained on once, in one of four minibatches. The first minibatch has ratios of 1, and the clip can act in the
others. update.batch_size is a quarter of the rollouts of an iteration.
Source: Zheng et al. 2025, arXiv:2507.18071.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.surrogate = use("gspo", low=0.0003, high=0.0004)
    config.algorithm.old_policy = use("generation")
    config.algorithm.aggregation = use("sequence_mean")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
