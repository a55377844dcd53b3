"""The step-wise PPO of StepSearch.

    python -m jaxrl_llm.train --config=recipe:step_search --workdir=runs/step_search

PPO whose rewards come at the end of each turn. In StepSearch such a reward is the new information that a search found,
minus the information found before. Each rollout is trained on once, in one of two minibatches, as in the released
scripts. The clip can act in the second minibatch. update.batch_size is half of the rollouts of an iteration. The
questions are a maze for small models. "Methods by turn" in docs/how-to/choose_a_method.md lists the settings to change
for your own questions.
Source: Wang et al. 2025, arXiv:2505.15107. Differs: the environment or a reward function decides the reward of a turn.
There is no KL penalty to the starting model; the paper's weight is 0.001.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("step_gae")
    config.algorithm.aggregation = use("token_mean")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 32
    config.update.updates_per_iteration = 2
    return config
