"""MC-GRPO.

    python -m jaxrl_llm.train --config=configs/recipes/mc_grpo.py --workdir=runs/mc_grpo

Rewards against the group's median, for small groups: four answers and one more, so that the median is an answer's own.
Source: arXiv:2601.22582.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.credit.advantage = "mc_grpo"
    config.rollout.prompts_per_iteration = 16
    config.rollout.group_size = 5
    config.update.batch_size = 80
    config.update.micro_batch_size = 16
    return config
