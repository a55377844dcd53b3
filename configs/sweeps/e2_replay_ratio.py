"""E2 of the replay study: how often to use a rollout, and how many to keep, at equal compute.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_replay_ratio.py --workdir=runs/e2 --workers=2

FINDING
"""

import runpy

from jaxrl_llm.points import Sweep, product, seeds

STUDY = runpy.run_path("configs/study_arithmetic.py")
COST_RATIO = 5.28  # mu of the paper's 7B runs: generating a rollout costs so many times training on it
BATCH, GROUP = 128, 8
BUDGET = 300 * BATCH * (1 + COST_RATIO)  # what 300 on-policy steps cost, in trained rollouts


def get_config():
    config = STUDY["get_config"]()
    config.replay.cost_ratio = COST_RATIO
    return config


def arm(ratio, batches, **settings):
    """A batch of 128 a step, 128 / ratio of them new, drawn from the last ``batches`` batches; as long as the budget."""
    generated = BATCH // ratio
    steps = round(BUDGET / (BATCH + COST_RATIO * generated))
    return {
        "rollout.prompts_per_iteration": generated // GROUP,
        "replay.capacity": BATCH * batches,
        "num_iterations": steps,
        "eval.every_iterations": steps // 10,
        **settings,
    }


ARMS = [arm(1, 1), *(arm(ratio, batches) for ratio in (2, 4, 8, 16) for batches in (2, 8))]


def get_sweep():
    return Sweep(
        product(seeds(4), ARMS),
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps"),
        x_axis="time/compute_rollouts",
        thresholds={"eval/pass_rate": 0.45},
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
