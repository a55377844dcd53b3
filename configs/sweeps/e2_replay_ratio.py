"""E2 of the replay study: how often to use a rollout, and how many to keep, at equal compute.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_replay_ratio.py --workdir=runs/e2 --workers=2

FINDING
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
