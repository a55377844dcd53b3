"""RLEF.

    python -m jaxrl_llm.train --config=configs/recipes/rlef.py --workdir=runs/rlef

PPO whose actions are whole turns: a critic's value before each, one advantage for its tokens, KL to the start. With
programs, prompts.source=code and environments.factory=jaxrl_llm.environments.code_tests:answer: public tests speak
between the turns, and all of them are the reward. Here the questions are a maze for small models.
Source: Gehring et al. 2024, arXiv:2410.02089. Differs: the critic learns a turn's return at all of its tokens; KL is in
the loss and not in the reward; its weight, rewards and penalties were not found.
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
    config.algorithm.advantage = use("turn_gae")
    config.algorithm.divergence = use("reference", coefficient=0.01)
    return config
