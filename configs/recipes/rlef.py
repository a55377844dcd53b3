"""RLEF.

    python -m jaxrl_llm.train --config=configs/recipes/rlef.py --workdir=runs/rlef

PPO whose actions are whole turns: a critic's value before each, one advantage for its tokens, KL to the start. With
programs, prompts.source=code and environments.factory=jaxrl_llm.environments.code_tests:answer: public tests speak
between the turns, and all of them are the reward. Here the questions are a maze for small models.
Source: Gehring et al. 2024, arXiv:2410.02089. Differs: the critic learns a turn's return at all of its tokens; KL is in
the loss and not in the reward; its weight, rewards and penalties were not found.
"""

import runpy

from jaxrl_llm.algorithms.use import use


def get_config():
    config = runpy.run_path("configs/maze.py")["get_config"]()
    config.algorithm.advantage = use("turn_gae")
    config.algorithm.divergence = use("reference", coefficient=0.01)
    return config
