"""GiGPO.

    python -m jaxrl_llm.train --config=recipe:gigpo --workdir=runs/gigpo

The row's advantage, and that of a turn among all turns of the group that answer the same state. Each rollout is trained
on once, in one of four minibatches, and the clip can act from the second on: update.batch_size is a quarter of an
iteration's rollouts. The questions are a maze for small models: "Methods by turn" in docs/how-to/choose_a_method.md
says what to set for your own.
Source: Feng et al. 2025, arXiv:2505.10978. Differs: the state is what the environment said last; the population
standard deviation; no KL; four minibatches of whole episodes instead of one for every 256 turns (released scripts).
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("gigpo", discount=0.95, weight=1.0)
    config.algorithm.aggregation = use("token_mean")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
