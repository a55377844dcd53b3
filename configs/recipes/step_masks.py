"""The partial masks of STeP.

    python -m jaxrl_llm.train --config=configs/recipes/step_masks.py --workdir=runs/step_masks

Turns that were given less than nothing are seen and not learned: what followed on them is. The questions are a maze for
small models: set prompts, environments and rewards to your own.
Source: STeP, arXiv:2505.20023. Differs: there a teacher marks the wrong steps of trajectories that are imitated; here a
turn's reward does, and the rest is the policy gradient of rewards to go.
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
    config.algorithm.advantage = use("turn_returns")
    config.algorithm.reshaping = [use("without_wrong_turns", below=0.0)]
    return config
