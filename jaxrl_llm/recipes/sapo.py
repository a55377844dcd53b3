"""SAPO: rollouts shared by a swarm.

    mkdir -p runs/sapo_a runs/sapo_b
    python -m jaxrl_llm.train --config=recipe:sapo --workdir=runs/sapo_a
    python -m jaxrl_llm.train --config=recipe:sapo --workdir=runs/sapo_b \\
        --config.seed=1 --config.external.paths='("runs/sapo_a",)'

Two or more runs side by side, each with half its groups its own and half those of others, under its own log-probs; no
tied groups, a higher upper clip, no KL. A run whose others have not written yet goes on with its own.
Source: arXiv:2509.08721. Differs: of the others' groups the newest are taken, where it draws among those whose rewards
differ.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


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
