"""ECHO, a model of the environment's answers.

    python -m jaxrl_llm.train --config=recipe:echo_answers --workdir=runs/echo_answers

The loss is GRPO's loss on the policy's tokens plus a small cross-entropy on the environment's replies, in the same
forward pass. Both terms are means over each row's tokens. Therefore a group in which all answers failed still has a
gradient. The questions are a maze for small models. "Methods by turn" in docs/how-to/choose_a_method.md lists the
settings to change for your own questions.
Source: arXiv:2605.24517. Differs: the loss includes warnings that a harness writes, and the tokens that a chat template
writes around a reply. The paper leaves both out.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.cross_entropies = [use("answers", coefficient=0.05)]
    return config
