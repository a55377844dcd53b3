"""MT-GRPO.

    python -m jaxrl_llm.train --config=configs/recipes/mt_grpo.py --workdir=runs/mt_grpo

The outcome's advantage for every turn, and that of a turn's own reward besides for all but the last. The questions are
a maze for small models: set prompts, environments and rewards to your own.
Source: Zeng et al. 2025, arXiv:2505.11821. Differs: it has two turns; the same for each turn before the last is ours.
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
    config.algorithm.advantage = use("mt_grpo", coefficient=1.0)
    return config
