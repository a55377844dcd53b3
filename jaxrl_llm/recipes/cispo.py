"""CISPO, as in ScaleRL.

    python -m jaxrl_llm.train --config=recipe:cispo --workdir=runs/cispo

Weights with an upper bound instead of clipped gradients, a mean over prompts, the batch's standard deviation, no tied
groups, solved questions asked no more; answers are begun ahead, go on under newer weights with the keys and values of
the older ones, and lag eight iterations at most. The bound of 5 is what TRL recommends for this paper's epsilon_max.
Source: Khatri et al. 2025, arXiv:2510.13786. Differs: logits are in float32 from bfloat16 hidden states and weights
where model.compute_dtype is bfloat16; long answers are cut off, not interrupted to answer; the standard deviation is
over tied groups too; generation waits for the update, where theirs goes on beside it; the rate and its warm-up are
left to you (theirs: a constant 5e-7 after 100 steps); rewards are 0 and 1 (theirs: -1 and 1), which the standard
deviation makes the same.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.algorithm.advantage = use("brorl")
    config.algorithm.surrogate = use("cispo", low=0.0, high=5.0)
    config.algorithm.aggregation = use("prompt_mean")
    config.prompts.retire_pass_rate = 0.9
    config.replay.skip_tied = True
    config.rollout.lookahead_prompts = 16
    config.rollout.stale_cache = "keep"
    config.rollout.max_lag_iterations = 8
    config.optimizer.eps = 1e-15
    config.optimizer.weight_decay = 0.01
    return config
