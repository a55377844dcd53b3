"""E3 of the replay study: keep correct rollouts longer, under GRPO and under AsymRE.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e3_positive_bias.py --workdir=runs/e3 --workers=2

Runs of 2026-11-24, medians of 4 seeds: with shares of 0, 0.2 and 0.5 AsymRE of whole sequences ends at 0.04, 0.39 and
0.66 with delta_V = 0, which collapses without, and at 0.57, 0.77 and 0.78 with delta_V = -0.1; GRPO at 0.69, 0.72 and
0.72.
"""

import runpy

from jaxrl_llm.sweep.points import Sweep, product, seeds
from studies.design import SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

ASYMRE = {
    "algorithm.advantage": "asymre",
    "algorithm.surrogate": "reinforce",
    "algorithm.aggregation": "constant_length",
}
METHODS = [{}, *({**ASYMRE, "algorithm.advantage.delta_v": delta} for delta in (0.0, -0.1))]
ARMS = [
    SUMS.arm(4, 8, **{"replay.positive_fraction": share}, **method) for share in (0.0, 0.2, 0.5) for method in METHODS
]


def label(settings):
    delta = settings.get("algorithm.advantage.delta_v")
    method = "GRPO" if delta is None else f"AsymRE, delta_V {delta:g}"
    return f"{method}, share {settings['replay.positive_fraction']:g}"


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        label=label,
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
