"""MT-GRPO.

    python -m jaxrl_llm.train --config=recipe:mt_grpo --workdir=runs/mt_grpo

The outcome's advantage for every turn, and that of a turn's own reward besides for all but the last. Two updates of the
whole batch, as in released scripts: the clip can act in the second. The questions are a maze for small models: "Methods
by turn" in docs/how-to/choose_a_method.md says what to set for your own.
Source: Zeng et al. 2025, arXiv:2505.11821. Differs: it has two turns; the same for each turn before the last is ours.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("mt_grpo", coefficient=1.0)
    config.algorithm.aggregation = use("token_mean")
    config.update.updates_per_iteration = 2
    return config
