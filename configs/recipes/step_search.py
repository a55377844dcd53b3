"""The step-wise PPO of StepSearch.

    python -m jaxrl_llm.train --config=configs/recipes/step_search.py --workdir=runs/step_search

PPO whose rewards come at the end of each turn, as what a search found that was new, less what had been found before.
Here the questions are a maze for small models.
Source: Wang et al. 2025, arXiv:2505.15107. Differs: what a turn is worth is the environment's or a reward function's to
say.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.prompts.source = "maze"
    config.prompts.arguments = {"width": 3, "height": 2, "plain": True}
    config.prompts.chat_template = False
    config.sampling.max_completion_tokens = 48
    config.sampling.stop_tokens = ("n", "e", "s", "w")
    config.environments.factory = "jaxrl_llm.environments.maze:plain"
    config.environments.max_answer_tokens = 8
    config.environments.max_turns = 6
    config.rewards.functions = ("jaxrl_llm.environments.maze:steps",)
    config.algorithm.advantage = use("step_gae")
    return config
