"""E6 of the replay study: corrections of the replayed ratio, one at a time, at eight uses of a rollout.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e6_corrections.py --workdir=runs/e6 --workers=2

Runs of 2026-11-24, medians of 4 seeds: the plain clipped ratio ends at 0.67 (0.56-0.83); a moving average of the
weights as the old policy, and REINFORCE under truncated sequence weights with the step scaled by the effective sample
size, at 0.78; masks at 0.71 and 0.72, CISPO at 0.69, truncated token weights at 0.63.
"""

import runpy

from jaxrl_llm.sweep.points import Sweep, product, seeds
from studies.design import SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

REINFORCE = {"algorithm.surrogate": "reinforce"}
TRUNCATED = {**REINFORCE, "algorithm.correction": "sequence_truncated"}
CORRECTIONS = {
    "none: clipped ratio to the behaviour policy": {},
    "CISPO, weights of at most 5": {
        "algorithm.surrogate": "cispo",
        "algorithm.surrogate.high": 5.0,
    },
    "moving average as old policy, importance weights": {
        "algorithm.old_policy": "ewma",
        "algorithm.correction": "importance",
    },
    "REINFORCE, token weights truncated": {**REINFORCE, "algorithm.correction": "token_truncated"},
    "REINFORCE, sequence weights truncated, step by effective sample size": {
        **TRUNCATED,
        "algorithm.step_size": "effective_sample_size",
    },
    "token mask": {"algorithm.correction": "token_masked"},
    "second-moment mask (M2PO)": {"algorithm.correction": "second_moment"},
}
ARMS = {name: SUMS.arm(8, 8, **correction) for name, correction in CORRECTIONS.items()}


def get_sweep():
    return Sweep(
        product(seeds(4), list(ARMS.values())),
        label=lambda settings: next(name for name, its in ARMS.items() if its == settings),
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
