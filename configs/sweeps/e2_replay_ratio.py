"""E2 of the replay study: how often to use a rollout, and how many to keep, at equal compute.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_replay_ratio.py --workdir=runs/e2 --workers=2

Runs of 2026-11-21, 2 seeds an arm and 3 on-policy ones (of the 4 here), held-out pass rate at the end, and compute to
0.51, where the on-policy arm ends, in batches (docs/replay_study.md):

    y = 1             0.51    1319, never for 1 of 3
    y = 2, N 2 B, 8 B 0.80    650     0.79    557
    y = 4             0.74    470     0.76    376
    y = 8             0.77    563     0.75    375
    y = 16            0.51    844     0.53    563, seeds far apart
"""

import runpy

from jaxrl_llm.points import Sweep, product, seeds

STUDY = runpy.run_path("configs/study_arithmetic.py")
arm, get_config = STUDY["arm"], STUDY["get_config"]

ARMS = [arm(1, 1), *(arm(ratio, batches) for ratio in (2, 4, 8, 16) for batches in (2, 8))]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
