"""The single-step rewards of muCode.

    python -m jaxrl_llm.train --config=recipe:mu_code --workdir=runs/mu_code

A turn is judged by its own reward alone, as if no other followed: from any state one turn can set things right. The
questions are a maze for small models: "Methods by turn" in docs/how-to/choose_a_method.md says what to set for your
own.
Source: Jain et al. 2025, arXiv:2502.20380. Differs: it learns a verifier and imitates the best of several turns; here
the reward of a turn is the environment's, and the gradient GRPO's.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("turn_returns", discount=0.0)
    config.algorithm.aggregation = use("token_mean")
    return config
