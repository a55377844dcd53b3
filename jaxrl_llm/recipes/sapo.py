"""SAPO: rollouts shared by a swarm.

    mkdir -p runs/sapo_a runs/sapo_b
    python -m jaxrl_llm.train --config=recipe:sapo --workdir=runs/sapo_a
    python -m jaxrl_llm.train --config=recipe:sapo --workdir=runs/sapo_b \\
        --config.seed=1 --config.external.paths='("runs/sapo_a",)'

Two or more runs train side by side. Half of the groups of a run are its own and half come from the other runs, with the
log-probs that the other runs recorded. Tied groups are left out, the upper clip is higher, and there is no KL penalty.
A run continues with its own groups until the others have written theirs.
Source: arXiv:2509.08721. Differs: a run takes the newest groups of the other runs. In the paper it draws among their
groups with different rewards.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.rollout.prompts_per_iteration = 4
    config.external.paths = ("runs/sapo_b",)
    config.external.groups_per_iteration = 4
    config.replay.skip_tied = True
    config.algorithm.surrogate.high = 0.28
    config.algorithm.aggregation = use("token_mean")
    config.metrics.share_rollouts = True
    return config
