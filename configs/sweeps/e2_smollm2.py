"""E2 of the replay study with SmolLM2-135M-Instruct: does a rollout used twice or four times save compute there too?

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_smollm2.py --workdir=runs/e2_smollm2

Not run: about an hour for each of its nine runs on 2 CPU cores.
"""

import runpy

from jaxrl_llm.sweep.points import Sweep, product, seeds
from studies.design import SMOLLM2

get_config = runpy.run_path("configs/study_smollm2.py")["get_config"]


def get_sweep():
    return Sweep(
        product(seeds(3), [SMOLLM2.arm(1, 1), SMOLLM2.arm(2, 2), SMOLLM2.arm(4, 4)]),
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.5},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
