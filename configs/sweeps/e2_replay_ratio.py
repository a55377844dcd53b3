"""E2 of the replay study: how often to use a rollout, and how many to keep, at equal compute.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_replay_ratio.py --workdir=runs/e2 --workers=2

Runs of 2026-11-21, 4 seeds an arm: median of the held-out pass rate at the end, and compute to 0.48, where the
on-policy arm ends, in batches (docs/replay_study.md has ranges, entropy and pass@32):

    y = 1             0.48    942
    y = 2, N 2 B, 8 B 0.75    557     0.73    464
    y = 4             0.69    470     0.76    376
    y = 8             0.69    375     0.75    375
    y = 16            0.52    563     0.72    563, seeds far apart
"""

import runpy

from jaxrl_llm.points import Sweep, product, seeds
from studies.design import SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

ARMS = [SUMS.arm(1, 1), *(SUMS.arm(ratio, batches) for ratio in (2, 4, 8, 16) for batches in (2, 8))]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        label=SUMS.label,
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
