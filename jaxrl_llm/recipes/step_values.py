"""The step values of IPR.

    python -m jaxrl_llm.train --config=recipe:step_values --workdir=runs/step_values

Four of sixteen rows share their first one or two turns and then continue separately. Their mean return is the value of
the state at which they separate. The advantage of the shared turns is this value minus the group's mean. The advantage
of later turns is their return minus this value. The questions are a maze for small models. "Methods by turn" in
docs/how-to/choose_a_method.md lists the settings to change for your own questions.
Source: Xiong et al. 2024, arXiv:2406.11176. Differs: the paper rolls out from each step of an expert, and uses the
values to imitate steps and to prefer steps. Here the policy rolls out from one step of its own episodes, and the values
form its advantage.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.rollout.prompts_per_iteration = 4
    config.rollout.group_size = 16
    config.algorithm.advantage = use("step_values", branch_rows=4, branch_turns=2)
    config.algorithm.aggregation = use("token_mean")
    return config
