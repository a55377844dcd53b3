"""PPO-EWMA.

    python -m jaxrl_llm.train --config=configs/recipes/ppo_ewma.py --workdir=runs/ppo_ewma

Clipped against averaged weights, so that the trust region does not depend on how old the data are.
Source: Hilton et al. 2021, arXiv:2110.00641.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.objective.proximal = "ewma"
    config.objective.correction = "importance"
    config.replay.capacity = 512
    config.update.updates_per_iteration = 2
    return config
