"""The single-step rewards of muCode.

    python -m jaxrl_llm.train --config=recipe:mu_code --workdir=runs/mu_code

The return of a turn is only its own reward, as if no other turn followed. The idea is that a single turn can succeed
from any state. The questions are a maze for small models. "Methods by turn" in docs/how-to/choose_a_method.md lists the
settings to change for your own questions.
Source: Jain et al. 2025, arXiv:2502.20380. Differs: the paper learns a verifier and imitates the best of several turns.
Here the reward of a turn comes from the environment, and the gradient is GRPO's.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("turn_returns", discount=0.0)
    config.algorithm.aggregation = use("token_mean")
    return config
