"""CISPO, as in ScaleRL.

    python -m jaxrl_llm.train --config=configs/recipes/cispo.py --workdir=runs/cispo

Clipped weights instead of clipped gradients, a mean over prompts, the batch's standard deviation, no tied groups,
solved questions asked no more. The upper bound of the weight is ours.
Source: Khatri et al. 2025, arXiv:2510.13786.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.credit.advantage = "brorl"
    config.objective.surrogate = "cispo"
    config.objective.clip_low = 1.0
    config.objective.clip_high = 4.0
    config.objective.aggregation = "prompt_mean"
    config.prompts.retire_pass_rate = 0.9
    config.replay.skip_tied = True
    config.replay.capacity = 128
    return config
