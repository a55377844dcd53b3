"""ReMix.

    python -m jaxrl_llm.train --config=recipe:remix --workdir=runs/remix

The clip window is centred on the ratio of the weights at the start of the iteration. There is a KL penalty to the
starting model and, by schedule, one to the weights at the start of the previous iteration. An iteration has two
updates. Each update uses, with probability 0.4, rollouts of the two previous iterations. The starting model is replaced
by the current policy after 50 iterations. From then on all rollouts are fresh, and the second KL penalty begins. A run
has 10 iterations unless num_iterations is set.
Source: Liang et al. 2025, arXiv:2507.06892 (50 or 100 iterations). Differs: a replayed batch mixes rollouts of the two
previous iterations; the paper takes a batch from one of them. There is no entropy bonus. The weight and the estimator
of the KL, and GRPO's advantage, are this recipe's choices.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.surrogate = use("remix_centred")
    config.algorithm.old_policy = use("start")
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.divergence = use("convex", coefficient=0.01)
    config.algorithm.reference_reset_iterations = (50,)
    config.replay.unit = "rollout"
    config.replay.capacity = 192
    config.replay.max_age_steps = 2
    config.replay.draw = use("fresh_or_older", fresh_share=0.6, fresh_from_iteration=50)
    config.update.updates_per_iteration = 2
    return config
