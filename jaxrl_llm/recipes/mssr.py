"""Single rollouts with a running baseline.

    python -m jaxrl_llm.train --config=recipe:mssr --workdir=runs/mssr

One answer a prompt against the question's running mean, which forgets faster while the policy moves, whitened over the
batch, with a bonus for tokens that were drawn from uncertain distributions, by their entropy. The mean says something
from a question's second visit on, with 1024 questions from iteration 17; a run has 10 unless num_iterations says more.
Each rollout is trained on once, in one of four minibatches, and the clip can act from the second on: update.batch_size
is a quarter of an iteration's rollouts.
Source: arXiv:2512.18215. Differs: how the decay follows the KL is ours, as is that a question starts with one answer of
each kind (in released code it rises with a KL to the starting model up to 0.01, and is 0.875 beyond; counts begin at 8
of one answer's rate); one clip of 0.2, where released code has 0.2 and 0.3 and a dual clip of 3; the KL is measured
before each update, so that the first minibatch of fresh rollouts adds 0 to it; four minibatches instead of the 16 of
released code (2,048 rollouts in steps of 128).
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("mssr", decay=0.96, decay_moving=0.875)
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.reshaping = [use("entropy_bonus", coefficient=0.4, limit=2.0)]
    config.algorithm.divergence = use("reference", coefficient=0.01)
    config.rollout.prompts_per_iteration = 64
    config.rollout.group_size = 1
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
