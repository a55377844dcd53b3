"""VCPO.

    python -m jaxrl_llm.train --config=recipe:vcpo --workdir=runs/vcpo

REINFORCE of whole sequences under truncated weights, less the baseline that leaves their gradients the least variance;
steps scaled by the effective sample size.
Source: arXiv:2602.17616. Differs: for the squared norm of a row's gradient stands the sum over its tokens of (1 - p)^2:
the other tokens' logits, the Jacobian below them and the products of different positions are left out; a row's
log-probability is its sum over sampling.max_completion_tokens; weights in the baseline are truncated as in the loss
(not in released code, which also divides by the group's standard deviation and takes a mean over each sequence).
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.surrogate = use("vcpo", cap=8.0)
    config.algorithm.step_size = use("effective_sample_size")
    config.algorithm.aggregation = use("constant_length")
    config.replay.capacity = 512
    config.optimizer.weight_decay = 0.1
    return config
