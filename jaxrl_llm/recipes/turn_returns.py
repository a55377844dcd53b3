"""Rewards to go, by turn.

    python -m jaxrl_llm.train --config=recipe:turn_returns --workdir=runs/turn_returns

The rewards of a turn and of the turns after it are summed. This sum is compared with the sums of the group's turns with
the same number, as GRPO compares rewards. The questions are a maze for small models. "Methods by turn" in
docs/how-to/choose_a_method.md lists the settings to change for your own questions.
Source: the reward that follows an action minus a baseline, Schulman et al. 2015, arXiv:1506.02438, section 2. Differs:
this recipe chose the baseline of a turn: the mean over the group's turns with the same number.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("turn_returns", discount=1.0)
    config.algorithm.aggregation = use("token_mean")
    return config
