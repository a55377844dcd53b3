"""The partial masks of STeP.

    python -m jaxrl_llm.train --config=recipe:step_masks --workdir=runs/step_masks

Turns with a negative reward stay in the context, but are not trained on. Later turns are trained on. The questions are
a maze for small models. "Methods by turn" in docs/how-to/choose_a_method.md lists the settings to change for your own
questions.
Source: STeP, arXiv:2505.20023. Differs: in the paper a teacher marks the wrong steps of trajectories that are imitated.
Here a negative reward marks a wrong turn, and the other turns have the policy gradient of rewards to go.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("turn_returns")
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.reshaping = [use("without_wrong_turns", below=0.0)]
    return config
