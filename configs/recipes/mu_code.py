"""The single-step rewards of muCode.

    python -m jaxrl_llm.train --config=configs/recipes/mu_code.py --workdir=runs/mu_code

A turn is judged by its own reward alone, as if no other followed: from any state one turn can set things right. The
questions are a maze for small models: set prompts, environments and rewards to your own.
Source: Jain et al. 2025, arXiv:2502.20380. Differs: it learns a verifier and imitates the best of several turns; here
the reward of a turn is the environment's, and the gradient GRPO's.
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
    config.algorithm.advantage = use("turn_returns", discount=0.0)
    return config
