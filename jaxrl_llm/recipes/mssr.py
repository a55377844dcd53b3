"""Single rollouts with a running baseline.

    python -m jaxrl_llm.train --config=recipe:mssr --workdir=runs/mssr

A prompt has one answer, which is compared with the running mean of the question's rewards. The mean forgets faster
while the policy moves. Advantages are whitened over the batch. Tokens that were drawn from distributions of high
entropy get a bonus. From a question's second visit on, the mean depends on earlier answers. With 1024 questions that is
from iteration 17; a run has 10 iterations unless num_iterations is set. Each rollout is trained on once, in one of four
minibatches. The clip can act from the second minibatch on. update.batch_size is a quarter of the rollouts of an
iteration.
Source: arXiv:2512.18215. Differs: this recipe chose how the decay depends on the KL. In the released code the decay
rises with a KL to the starting model up to 0.01, and is 0.875 beyond. A question starts with one answer of each kind;
in the released code counts begin at 8 answers at the rate of one. There is one clip of 0.2; the released code has 0.2
and 0.3 and a dual clip of 3. The KL is measured before each update, so that the first minibatch of fresh rollouts adds
0 to it. There are four minibatches instead of the 16 of the released code (2,048 rollouts in steps of 128).
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


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
