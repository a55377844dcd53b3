"""On-policy distillation.

    python -m jaxrl_llm.train --config=recipe:distillation --workdir=runs/distillation \\
        --config.model.path=STUDENT --config.model.reference_path=TEACHER

The student samples, and at each of its tokens is pulled towards a teacher, which may be larger and must read the same
token ids: reverse KL, a mean over each sequence, whose gradient on fresh tokens "k2" has. The reward is trained on
beside it; --config.rewards.weights="(0.0,)" leaves the teacher alone (and all pass rates 0). The random models stand
for yours.
Source: Agarwal et al. 2024, arXiv:2306.13649. Differs: there the divergence is of whole distributions, here an
estimate from the sampled token.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.model.reference_path = "random:debug_wide"
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.divergence = use("reference", coefficient=1.0, estimator="k2")
    return config
