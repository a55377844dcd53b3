"""GSPO.

    python -m jaxrl_llm.train --config=recipe:gspo --workdir=runs/gspo

The ratio of the whole sequence, length-normalised, and its narrow clip; the old log-probs are the learner's own, for
what sampler and learner differ by in bfloat16 is as wide as the clip. Each rollout is trained on once, in one of four
minibatches: the first has ratios of 1, and the clip acts in the others. update.batch_size is a quarter of an
iteration's rollouts.
Source: Zheng et al. 2025, arXiv:2507.18071.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


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
