"""The advantage of UI-S1.

    python -m jaxrl_llm.train --config=configs/recipes/ui_s1.py --workdir=runs/ui_s1

The row's advantage, and that of a turn among the group's turns of its number by its discounted future rewards. The
questions are a maze for small models: set prompts, environments and rewards to your own.
Source: Lu et al. 2025, arXiv:2509.11543. Differs: its rollouts follow an expert's and are patched where they leave it,
which is not done here: they are the policy's own.
"""

import runpy

from jaxrl_llm.algorithms.use import use


def get_config():
    config = runpy.run_path("configs/maze.py")["get_config"]()
    config.algorithm.advantage = use("ui_s1", discount=0.5, weight=1.0)
    return config
