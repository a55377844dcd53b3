"""GRPO with active partial rollouts (APRIL).

    python -m jaxrl_llm.train --config=recipe:april --workdir=runs/april

The sampler opens twice as many questions as an iteration trains on, and writes all their answers side by side. When the
answers to half of the questions are complete, the iteration trains on them. The other answers keep their tokens, with
the log-probs of the weights that drew them, and continue under the new weights. The oldest answers continue first.
Source: Zhou et al. 2025, arXiv:2509.18521. Differs: the old log-prob of a token is the log-prob at which the token was
drawn. The released scripts compute it with the learner's weights at the time of the update. The learning rate (theirs:
a constant 1e-6) and the temperature (theirs: 0.8) are left to you.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.surrogate = use("clipped", low=0.2, high=0.28)
    config.algorithm.aggregation = use("sequence_mean")
    config.rollout.lookahead_prompts = config.rollout.prompts_per_iteration
    config.rollout.slots = 2 * config.rollout.prompts_per_iteration * config.rollout.group_size
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.1
    return config
