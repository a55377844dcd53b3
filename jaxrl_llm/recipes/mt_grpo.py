"""MT-GRPO.

    python -m jaxrl_llm.train --config=recipe:mt_grpo --workdir=runs/mt_grpo

Every turn has the advantage of the outcome. Every turn but the last also has the advantage of its own reward. As in the
released scripts, there are two updates of the whole batch, and the clip can act in the second. The questions are a maze
for small models. "Methods by turn" in docs/how-to/choose_a_method.md lists the settings to change for your own
questions.
Source: Zeng et al. 2025, arXiv:2505.11821. Differs: the paper has two turns. This recipe treats all turns before the
last one alike.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("mt_grpo", coefficient=1.0)
    config.algorithm.aggregation = use("token_mean")
    config.update.updates_per_iteration = 2
    return config
