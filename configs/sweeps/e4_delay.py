"""E4 of the replay study: old data without reuse. It separates staleness from replay.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e4_delay.py --workdir=runs/e4 --workers=2

Runs of 2026-11-21, one seed: a delay of 3 steps costs nothing (0.63 at the end, without delay 0.51), one of 13, 28 or
98 does (0.31, 0.33, 0.36; the last has but 202 steps, for the first 98 have no rollouts that old).
"""

import runpy

from jaxrl_llm.sweep.points import Sweep, product, seeds
from studies.design import SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

DELAYS = (0, 3, 13, 28, 98)
ARMS = [SUMS.arm(1, delay + 1, **{"replay.delay_iterations": delay}) for delay in DELAYS]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        label=SUMS.label,
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
