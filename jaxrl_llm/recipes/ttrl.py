"""TTRL: the label is the answer of most.

    python -m jaxrl_llm.train --config=recipe:ttrl --workdir=runs/ttrl

GRPO without labels: what most of 64 answers to a question say is taken for right, and half of them are trained on, with
the KL to the starting model that released scripts have. There are as many minibatches as questions, 32 rollouts each,
and the clip can act from the second on. If labels are known, add a reward function of weight 0 that reads them. The
metrics `rollout/label_accuracy` and `rollout/reward_accuracy` then say how good the votes are. The run's own held-out
pass rate is 1 of every single answer, for it goes by these rewards too: measure with
`evaluate --config.rewards.functions='("task",)' --config.rewards.weights='(1.0,)'`.
Source: Zuo et al. 2025, arXiv:2504.16084. Differs: which half is drawn at random over the batch, and in which
minibatch, where it is 32 of each question in one of its own; an advantage compares with all 64 answers, where it is
with the 32; an answer is the label if `scoring.answers` reads both as the same number, choice, words or formula, where
a grader of mathematics says so; its temperature and lengths are the run's.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


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
