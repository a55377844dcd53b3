"""The partial masks of STeP.

    python -m jaxrl_llm.train --config=recipe:step_masks --workdir=runs/step_masks

Turns that were given less than nothing are seen and not learned: what followed on them is. The questions are a maze for
small models: "Methods by turn" in docs/how-to/choose_a_method.md says what to set for your own.
Source: STeP, arXiv:2505.20023. Differs: there a teacher marks the wrong steps of trajectories that are imitated; here a
turn's reward does, and the rest is the policy gradient of rewards to go.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("turn_returns")
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.reshaping = [use("without_wrong_turns", below=0.0)]
    return config
