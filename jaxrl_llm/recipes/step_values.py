"""The step values of IPR.

    python -m jaxrl_llm.train --config=recipe:step_values --workdir=runs/step_values

Four rows of sixteen share their first turns, one or two of them, and go on each by itself: what these come to is the
value of the state where they part. Shared turns have that value less the group's mean, later ones what they add to it.
The questions are a maze for small models: "Methods by turn" in docs/how-to/choose_a_method.md says what to set for your
own.
Source: Xiong et al. 2024, arXiv:2406.11176. Differs: it rolls out from each step of an expert, and imitates and prefers
steps by the values; here they are the policy's own steps, one of each episode, and the values its advantage.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.rollout.prompts_per_iteration = 4
    config.rollout.group_size = 16
    config.algorithm.advantage = use("step_values", branch_rows=4, branch_turns=2)
    config.algorithm.aggregation = use("token_mean")
    return config
