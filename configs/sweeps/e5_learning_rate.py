"""E5 of the replay study: is the saving one of the learning rate?

    python -m jaxrl_llm.sweep --config=configs/sweeps/e5_learning_rate.py --workdir=runs/e5 --workers=2

Runs of 2026-11-21, one seed: no. At its best rate (4e-4) the on-policy arm ends at 0.60, for which it takes the whole
budget of 1884 batches; four uses reach 0.60 with 750 at three of the six rates, 60 % less, and end at 0.73 to 0.78 from
1.8e-4 to 6e-4. Replay wants the lower rates: at 1.35e-3 it ends at 0.13, the on-policy arm at 0.38.
"""

import runpy

from jaxrl_llm.sweep.points import Sweep, product, seeds
from studies.design import SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

RATES = [6e-4 * 1.5**i for i in range(-3, 3)]
ARMS = [SUMS.arm(*how, **{"optimizer.learning_rate": rate}) for rate in RATES for how in ((1, 1), (4, 2))]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        label=SUMS.label,
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
