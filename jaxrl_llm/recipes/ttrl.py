"""TTRL: the most frequent answer is the label.

    python -m jaxrl_llm.train --config=recipe:ttrl --workdir=runs/ttrl

GRPO without labels. The most frequent of 64 answers to a question is taken as the right answer. Half of the answers are
trained on, with the released scripts' KL penalty to the starting model. There are as many minibatches as
questions, with 32 rollouts each, and the clip can act from the second minibatch on. If labels are known, add a reward
function of weight 0 that reads them. The metrics `rollout/label_accuracy` and `rollout/reward_accuracy` then show the
quality of the votes. The run's own held-out pass rate uses the votes too, and is always 1 with a single answer. Measure
with `evaluate --config.rewards.functions='("task",)' --config.rewards.weights='(1.0,)'`.
Source: Zuo et al. 2025, arXiv:2504.16084. Differs: the half that is trained on is drawn at random from the whole batch,
and so are the minibatches. In the paper a minibatch has 32 answers to one question. An advantage compares an answer
with all 64 answers; in the paper, with the 32. An answer matches the label if `scoring.answers` reads both as the same
number, choice, words or formula; the paper uses a grader of mathematics. Temperature and lengths are not set by this
recipe.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.rewards.functions = ("jaxrl_llm.scoring.scores:majority",)
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.divergence = use("reference", coefficient=0.001)
    config.rollout.prompts_per_iteration = 2
    config.rollout.group_size = 64
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 32
    config.update.updates_per_iteration = 2
    return config
