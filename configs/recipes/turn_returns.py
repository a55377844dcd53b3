"""Rewards to go, by turn.

    python -m jaxrl_llm.train --config=configs/recipes/turn_returns.py --workdir=runs/turn_returns

Each turn against the group's turns of its number, by what it and those after it were given, in GRPO's form. The
questions are a maze for small models: set prompts, environments and rewards to your own.
Source: the reward that follows an action less a baseline, Schulman et al. 2015, arXiv:1506.02438, section 2. Differs:
the baseline of a turn is the group's turns of its number, which is ours.
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
    config.algorithm.advantage = use("turn_returns", discount=1.0)
    return config
