"""PPO-EWMA.

    python -m jaxrl_llm.train --config=configs/recipes/ppo_ewma.py --workdir=runs/ppo_ewma

Clipped against averaged weights, so that the trust region does not depend on how old the data are.
Source: Hilton et al. 2021, arXiv:2110.00641. Differs: what is cut at 100 is the ratio of the averaged policy to
the behaviour policy, where it is that of the current one there; learning rate and decay do not scale with the batch.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.objective.proximal = "ewma"
    config.objective.correction = "token_truncated"
    config.objective.correction_high = 100.0
    config.replay.capacity = 512
    config.update.updates_per_iteration = 2
    return config
