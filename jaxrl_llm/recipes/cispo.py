"""CISPO, as in ScaleRL.

    python -m jaxrl_llm.train --config=recipe:cispo --workdir=runs/cispo

The importance weights have an upper bound; gradients are not clipped. The loss is a mean over prompts, the advantage is
divided by the standard deviation of the batch, tied groups are left out, and solved questions are retired. Answers are
begun ahead and continue under newer weights, with the keys and values of the older weights. An answer stays open for at
most eight iterations. The bound of 5 is the value that TRL recommends for the epsilon_max of ScaleRL.
Source: Khatri et al. 2025, arXiv:2510.13786. Differs: with model.compute_dtype=bfloat16 the logits are float32 products
of bfloat16 hidden states and weights. Long answers are cut off; the paper interrupts them and asks for the answer. The
standard deviation includes tied groups. Generation waits for the update; in the paper both run at the same time. The
learning rate and its warm-up are left to you (theirs: a constant 5e-7 after 100 steps). Rewards are 0 and 1 (theirs: -1
and 1); the division by the standard deviation removes this difference.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


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
