"""LoGo-GRPO of Memory-R2: local groups within the group.

    python -m jaxrl_llm.train --config=recipe:logo --workdir=runs/logo

Four of sixteen rows share their first one or two turns and then continue separately from that state. The turns after
the shared ones are also compared among these four rows. The questions are a maze for small models. "Methods by turn" in
docs/how-to/choose_a_method.md lists the settings to change for your own questions.
Source: Yan et al. 2026, arXiv:2605.21768. Differs: the paper's equations were not found; the sum of the two advantages
is this recipe's choice. The rows that continue from a shared state are rows of the group. All episodes have the full
length from the start; the paper's horizon grows.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.rollout.prompts_per_iteration = 4
    config.rollout.group_size = 16
    config.algorithm.advantage = use("logo", branch_rows=4, branch_turns=2)
    config.algorithm.aggregation = use("token_mean")
    return config
