"""On-policy distillation.

    python -m jaxrl_llm.train --config=recipe:distillation --workdir=runs/distillation \\
        --config.model.path=STUDENT --config.model.reference_path=TEACHER

The student samples. At each sampled token the loss pulls the student towards a teacher, which may be larger and must
use the same token ids. This loss is the reverse KL, averaged over each sequence. On fresh tokens the gradient of the
estimator "k2" is the gradient of the reverse KL. The reward is trained on too. --config.rewards.weights="(0.0,)" trains
on the teacher alone; the pass rates are then 0. Replace the random models by your own.
Source: Agarwal et al. 2024, arXiv:2306.13649. Differs: the paper's divergence is between whole distributions. Here it
is estimated from the sampled token.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.model.reference_path = "random:debug_wide"
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.divergence = use("reference", coefficient=1.0, estimator="k2")
    return config
