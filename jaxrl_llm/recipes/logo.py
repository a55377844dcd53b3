"""LoGo-GRPO of Memory-R2: local groups within the group.

    python -m jaxrl_llm.train --config=recipe:logo --workdir=runs/logo

Four rows of sixteen share their first turns, one or two of them, and go on from that state each by itself: what follows
is compared among the four too. The questions are a maze for small models: "Methods by turn" in
docs/how-to/choose_a_method.md says what to set for your own.
Source: Yan et al. 2026, arXiv:2605.21768. Differs: its equations were not found, and how both advantages are added is
ours; rows that start again are rows of the group; episodes are as long from the start, where its horizon grows.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.rollout.prompts_per_iteration = 4
    config.rollout.group_size = 16
    config.algorithm.advantage = use("logo", branch_rows=4, branch_turns=2)
    config.algorithm.aggregation = use("token_mean")
    return config
