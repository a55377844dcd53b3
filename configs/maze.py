"""A maze in a few turns, for a model of any size: what the recipes of methods by turn are tried on.

    python -m jaxrl_llm.train --config=configs/maze.py --workdir=runs/maze

A turn ends with a letter, the way that it goes; the answer is the field it came to and its exits. Plain GRPO: which
turn was a good one is for a recipe to say (jaxrl_llm/recipes/gigpo.py and others).
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.prompts.source = "maze"
    config.prompts.arguments = {"width": 3, "height": 2, "plain": True}
    config.prompts.chat_template = False
    config.sampling.max_completion_tokens = 48
    config.sampling.stop_tokens = ("n", "e", "s", "w")
    config.environments.factory = "jaxrl_llm.examples.maze:plain"
    config.environments.max_answer_tokens = 8
    config.environments.max_turns = 6
    config.rewards.functions = ("jaxrl_llm.examples.maze:steps",)
    return config
