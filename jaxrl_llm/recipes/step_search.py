"""The step-wise PPO of StepSearch.

    python -m jaxrl_llm.train --config=recipe:step_search --workdir=runs/step_search

PPO whose rewards come at the end of each turn, as what a search found that was new, less what had been found before.
Each rollout is trained on once, in one of two minibatches as in released scripts, and the clip can act in the second:
update.batch_size is half of an iteration's rollouts. Here the questions are a maze for small models: "Methods by turn"
in docs/how-to/choose_a_method.md says what to set for your own.
Source: Wang et al. 2025, arXiv:2505.15107. Differs: what a turn is worth is the environment's or a reward function's to
say; no KL to the starting model, where it has 0.001.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("step_gae")
    config.algorithm.aggregation = use("token_mean")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 32
    config.update.updates_per_iteration = 2
    return config
