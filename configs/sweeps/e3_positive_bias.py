"""E3 of the replay study: keep correct rollouts longer, under GRPO and under AsymRE.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e3_positive_bias.py --workdir=runs/e3 --workers=2

Runs of 2026-11-21 and 22, medians of 4 seeds: with shares of 0, 0.2 and 0.5 AsymRE ends at 0.09, 0.37 and 0.64 with
delta_V = 0, which collapses without, and at 0.61, 0.71 and 0.78 with delta_V = -0.1; GRPO at 0.79, 0.78 and 0.65, where
half a ring parts the seeds.
"""

import runpy

from jaxrl_llm.points import Sweep, product, seeds
from studies.design import SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

ASYMRE = {"credit.advantage": "asymre", "objective.surrogate": "reinforce", "objective.aggregation": "constant_length"}
OBJECTIVES = [{}, *({**ASYMRE, "credit.delta_v": delta} for delta in (0.0, -0.1))]
ARMS = [
    SUMS.arm(4, 8, **{"replay.positive_fraction": share}, **objective)
    for share in (0.0, 0.2, 0.5)
    for objective in OBJECTIVES
]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        label=SUMS.label,
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
