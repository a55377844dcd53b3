"""The advantage of UI-S1.

    python -m jaxrl_llm.train --config=configs/recipes/ui_s1.py --workdir=runs/ui_s1

The row's advantage, and that of a turn among the group's turns of its number by its discounted future rewards. The
questions are a maze for small models: set prompts, environments and rewards to your own.
Source: Lu et al. 2025, arXiv:2509.11543. Differs: its rollouts follow an expert's and are patched where they leave it,
which is not done here: they are the policy's own.
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
    config.algorithm.advantage = use("ui_s1", discount=0.5, weight=1.0)
    return config
