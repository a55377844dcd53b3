"""Rewards to go, by turn.

    python -m jaxrl_llm.train --config=recipe:turn_returns --workdir=runs/turn_returns

Each turn against the group's turns of its number, by what it and those after it were given, in GRPO's form. The
questions are a maze for small models: "Methods by turn" in docs/how-to/choose_a_method.md says what to set for your
own.
Source: the reward that follows an action less a baseline, Schulman et al. 2015, arXiv:1506.02438, section 2. Differs:
the baseline of a turn is the group's turns of its number, which is ours.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("turn_returns", discount=1.0)
    config.algorithm.aggregation = use("token_mean")
    return config
