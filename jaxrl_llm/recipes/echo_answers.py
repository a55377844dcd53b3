"""ECHO, a model of the environment's answers.

    python -m jaxrl_llm.train --config=recipe:echo_answers --workdir=runs/echo_answers

GRPO's loss of what the policy wrote, and in the same forward pass a little cross-entropy of what the environment
answered, both a mean over each row's. So a group that all failed still teaches something. The questions are a maze for
small models: "Methods by turn" in docs/how-to/choose_a_method.md says what to set for your own.
Source: arXiv:2605.24517. Differs: warnings of the harness are not left out, nor what a chat template writes around an
answer.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.cross_entropies = [use("answers", coefficient=0.05)]
    return config
