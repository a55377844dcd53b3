"""Decoupled PPO, as in AReaL.

    python -m jaxrl_llm.train --config=configs/recipes/decoupled_ppo.py --workdir=runs/decoupled_ppo

Clipped against the weights before the iteration's updates; what they would not have drawn is weighed, truncated.
Two batches of prompts are sampled ahead, and none stays open for more than four iterations.
Source: Fu et al. 2025, arXiv:2505.24298.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.objective.proximal = "start"
    config.objective.correction = "token_truncated"
    config.objective.correction_high = 5.0
    config.replay.capacity = 512
    config.rollout.lookahead_prompts = 16
    config.rollout.max_lag_iterations = 4
    config.update.updates_per_iteration = 2
    return config
