"""Dr. GRPO.

    python -m jaxrl_llm.train --config=configs/recipes/dr_grpo.py --workdir=runs/dr_grpo

No division by the group's standard deviation or by a sequence's own length.
Source: Liu et al. 2025, arXiv:2503.20783.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("dr_grpo")
    config.algorithm.aggregation = use("constant_length")
    return config
