"""ECHO, a model of the environment.

    python -m jaxrl_llm.train --config=recipe:echo --workdir=runs/echo

GRPO's loss of what the policy wrote, and in the same forward pass a little cross-entropy of what the environment wrote:
here the prompts; both a mean over each row's tokens. So a group that all failed still teaches something.
Source: arXiv:2605.24517. Differs: one turn, so the environment's tokens are the prompt's; warnings of the harness are
not left out.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.cross_entropies = [use("environment", coefficient=0.05)]
    return config
