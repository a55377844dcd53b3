"""ECHO, a model of the environment.

    python -m jaxrl_llm.train --config=recipe:echo --workdir=runs/echo

The loss is GRPO's loss on the policy's tokens plus a small cross-entropy on the environment's tokens, in the same
forward pass. Here the environment's tokens are the prompts. Both terms are means over each row's tokens. Therefore a
group in which all answers failed still has a gradient.
Source: arXiv:2605.24517. Differs: there is one turn, so that the environment's tokens are the tokens of the prompt. The
loss includes warnings that a harness writes; the paper leaves them out.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.cross_entropies = [use("environment", coefficient=0.05)]
    return config
