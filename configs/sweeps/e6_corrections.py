"""E6 of the replay study: corrections of the replayed ratio, one at a time, at eight uses of a rollout.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e6_corrections.py --workdir=runs/e6 --workers=2

Runs of 2026-11-21, one seed: no correction beats the plain clipped ratio at the end (0.74) but REINFORCE with truncated
sequence weights and the step scaled by the effective sample size (0.76, and slower on the way). Masks end at 0.63 and
0.68, truncated token weights at 0.61, the moving average at 0.42 after 0.86; CISPO collapses to 0.
"""

import runpy

from jaxrl_llm.points import Sweep, product, seeds
from studies.design import SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

REINFORCE = {"objective.surrogate": "reinforce"}
CORRECTIONS = [
    {},
    {"objective.surrogate": "cispo", "objective.clip_low": 1.0, "objective.clip_high": 4.0},  # as the recipe has it
    {"objective.proximal": "ewma", "objective.correction": "importance"},
    {**REINFORCE, "objective.correction": "token_truncated"},
    {**REINFORCE, "objective.correction": "sequence_truncated", "objective.ess_learning_rate": True},
    {"objective.correction": "token_masked"},
    {"objective.correction": "second_moment"},
]
ARMS = [SUMS.arm(8, 8, **correction) for correction in CORRECTIONS]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        label=SUMS.label,
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
