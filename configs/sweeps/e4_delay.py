"""E4 of the replay study: old data without reuse. It separates staleness from replay.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e4_delay.py --workdir=runs/e4 --workers=2

Not run yet: no finding.
"""

import runpy

from jaxrl_llm.points import Sweep, product, seeds

STUDY = runpy.run_path("configs/study_arithmetic.py")
arm, get_config = STUDY["arm"], STUDY["get_config"]

DELAYS = (0, 3, 13, 28, 98)
ARMS = [arm(1, delay + 1, **{"replay.delay_iterations": delay}) for delay in DELAYS]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        label=STUDY["label"],
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
