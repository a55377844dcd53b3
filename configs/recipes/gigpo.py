"""GiGPO.

    python -m jaxrl_llm.train --config=configs/recipes/gigpo.py --workdir=runs/gigpo

The row's advantage, and that of a turn among all turns of the group that answer the same state. The questions are a
maze for small models: set prompts, environments and rewards to your own.
Source: Feng et al. 2025, arXiv:2505.10978. Differs: the state is what the environment said last; the population
standard deviation; no KL.
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
    config.algorithm.advantage = use("gigpo", discount=0.95, weight=1.0)
    return config
