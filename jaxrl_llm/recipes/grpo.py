"""GRPO.

    python -m jaxrl_llm.train --config=recipe:grpo --workdir=runs/grpo

The advantage uses the mean and the standard deviation of the group. The loss is a mean over each sequence, with a KL
penalty to the starting model.
Source: Shao et al. 2024, arXiv:2402.03300.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.divergence = use("reference", coefficient=0.04)
    return config
