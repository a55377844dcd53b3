"""POISE.

    python -m jaxrl_llm.train --config=recipe:poise --workdir=runs/poise

A prompt has two answers. Each reward is compared with a prediction from the features of the other answer: its length,
the surprise and the entropies of its tokens, and its mean hidden state.
Source: arXiv:2605.07579. Differs: the ridge regression uses the hidden state itself; the paper's uses its principal
components. There is one regression for all questions; the paper has one for each domain. Its sums decay; the paper
keeps a window of recent rollouts. This recipe chose the statistics of the entropies, and length and surprise as
features. Only the last hidden state of the prompt is used.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.advantage = use("poise")
    config.algorithm.aggregation = use("token_mean")
    config.rollout.prompts_per_iteration = 32
    config.rollout.group_size = 2
    return config
