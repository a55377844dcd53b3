"""E2 of the replay study: how often to use a rollout, and how many rollouts to keep, at equal compute.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_replay_ratio.py --workdir=runs/e2 --workers=2

The replay ratio y is 1 to 16, and a ring has N = 1 to 128 batches. The surrogate clips the ratio of each token. Every
arm is reported at the best of three learning rates. studies/replay_study.md has the results.
"""

import runpy

from studies.design import SUMS, sweep_of

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

ARMS = [SUMS.arm(ratio, batches) for ratio in (1, 2, 4, 8, 16) for batches in (1, 2, 4, 8, 32, 128)]


def get_sweep():
    return sweep_of(ARMS, SUMS.label)
