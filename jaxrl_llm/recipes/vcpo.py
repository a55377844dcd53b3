"""VCPO.

    python -m jaxrl_llm.train --config=recipe:vcpo --workdir=runs/vcpo

REINFORCE of whole sequences with truncated importance weights. The baseline minimises the variance of the gradients.
Steps are scaled by the effective sample size.
Source: arXiv:2602.17616. Differs: the squared norm of a row's gradient is replaced by the sum over its tokens of (1 -
p)^2. This leaves out the logits of other tokens, the Jacobian below the logits and the products of different positions.
The log-probability of a row is the sum over its tokens, divided by sampling.max_completion_tokens. The weights in the
baseline are truncated as in the loss. The released code does not truncate these weights, divides advantages by the
standard deviation of the group and takes a mean over each sequence.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.algorithm.surrogate = use("vcpo", cap=8.0)
    config.algorithm.step_size = use("effective_sample_size")
    config.algorithm.aggregation = use("constant_length")
    config.replay.capacity = 512
    config.optimizer.weight_decay = 0.1
    return config
