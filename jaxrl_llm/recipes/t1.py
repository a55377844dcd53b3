"""T1.

    python -m jaxrl_llm.train --config=recipe:t1 --workdir=runs/t1

Many answers to each question are sampled at a high temperature. The loss has an entropy bonus and a KL penalty to the
moving average of the policy instead of the starting model.
Source: Hou et al. 2025, arXiv:2501.11651. Differs: the paper's coefficients were not found; this recipe has its own.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.sampling.temperature = 1.2
    config.rollout.prompts_per_iteration = 4
    config.rollout.group_size = 16
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.divergence = use("ewma", coefficient=0.01, decay=0.99)
    config.algorithm.entropy_bonus = use("constant", coefficient=0.005)
    return config
