"""E3 of the replay study: keep correct rollouts longer, with GRPO and with AsymRE.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e3_positive_bias.py --workdir=runs/e3 --workers=2

A rollout is used four times, from a ring of 32 batches. A share of the ring keeps correct rollouts that the rest of the
ring has evicted. studies/replay_study.md has the results.
"""

import runpy

from studies.design import SUMS, sweep_of

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

ASYMRE = {
    "algorithm.advantage": "asymre",
    "algorithm.surrogate": "reinforce",
    "algorithm.aggregation": "constant_length",
}
METHODS = [{}, *({**ASYMRE, "algorithm.advantage.delta_v": delta} for delta in (0.0, -0.05, -0.1, -0.3))]
ARMS = [
    SUMS.arm(4, 32, **{"replay.positive_fraction": share}, **method) for share in (0.0, 0.2, 0.5) for method in METHODS
]


def label(settings):
    delta = settings.get("algorithm.advantage.delta_v")
    method = "GRPO" if delta is None else f"AsymRE, delta_V {delta:g}"
    return f"{method}, share {settings['replay.positive_fraction']:g}"


def get_sweep():
    return sweep_of(ARMS, label)
