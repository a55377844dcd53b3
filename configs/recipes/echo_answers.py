"""ECHO, a model of the environment's answers.

    python -m jaxrl_llm.train --config=configs/recipes/echo_answers.py --workdir=runs/echo_answers

GRPO's loss of what the policy wrote, and in the same forward pass a little cross-entropy of what the environment
answered, a mean over each row's. So a group that all failed still teaches something. The questions are a maze for small
models: set prompts, environments and rewards to your own.
Source: arXiv:2605.24517. Differs: warnings of the harness are not left out.
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
    config.algorithm.cross_entropies = [use("answers", coefficient=0.05)]
    return config
