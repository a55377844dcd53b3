"""ReMix.

    python -m jaxrl_llm.train --config=recipe:remix --workdir=runs/remix

A clip window about the ratio of the weights that the iteration began with, a pull to the starting model and, by
schedule, to the weights that the iteration before began with; two updates, each of which has a chance of four tenths to
be of rollouts of the two iterations before; after 50 iterations the policy becomes the starting model, and goes on with
fresh rollouts alone. The pull to the weights before begins then too; a run has 10 iterations unless num_iterations says
more.
Source: Liang et al. 2025, arXiv:2507.06892 (50 or 100 iterations). Differs: a replayed batch mixes rollouts of the two
iterations before, where it is of one of them; no entropy bonus; the weight and the estimator of the KL, and GRPO's
advantage, are ours.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


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
    config.replay.fresh_fraction = 0.6
    config.replay.fresh_batches = True
    config.replay.fresh_from_iteration = 50
    config.update.updates_per_iteration = 2
    return config
