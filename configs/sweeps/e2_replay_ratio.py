"""E2 of the replay study: how often to use a rollout, and how many to keep, at equal compute.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_replay_ratio.py --workdir=runs/e2 --workers=2

Runs of 2026-11-21 and 22, 4 seeds an arm: median of the held-out pass rate at the end, and compute to 0.48, where the
on-policy arm ends, in batches (docs/replay_study.md has ranges, entropy and pass@32):

    N           1 B          2 B          8 B          32 B         128 B
    y = 1       0.48 942     0.60 754     0.67 659     0.63 848     0.59 848
    y = 2       0.65 743     0.75 557     0.73 464     0.67 557     0.70 557
    y = 4       0.57 564     0.69 470     0.76 376     0.68 376     0.73 470
    y = 8       0.51 750     0.69 375     0.75 375     0.64 375     0.64 375
    y = 16      0.45 938     0.52 563     0.72 563     0.69 563     0.70 563     seeds far apart
"""

import runpy

from jaxrl_llm.sweep.points import Sweep, product, seeds
from studies.design import SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

ARMS = [SUMS.arm(ratio, batches) for ratio in (1, 2, 4, 8, 16) for batches in (1, 2, 8, 32, 128)]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        label=SUMS.label,
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
