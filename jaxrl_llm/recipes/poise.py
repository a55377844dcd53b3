"""POISE.

    python -m jaxrl_llm.train --config=recipe:poise --workdir=runs/poise

Two answers a prompt, each against what the other's features predict: its length, the surprise and the entropies of its
tokens, its mean hidden state.
Source: arXiv:2605.07579. Differs: ridge regression on the hidden state itself, where it is on principal components; one
regression for all questions, where it is by domain; its sums fade, where it keeps a window of recent rollouts; which
statistics of the entropies, and that length and surprise are beside them, is ours; of hidden states those of the prompt
are left out, but for the last.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("poise")
    config.algorithm.aggregation = use("token_mean")
    config.rollout.prompts_per_iteration = 32
    config.rollout.group_size = 2
    return config
