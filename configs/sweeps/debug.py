"""Two learning rates with two seeds each for the tiny random model: an example of a sweep file.

    python -m jaxrl_llm.sweep --config=configs/sweeps/debug.py --workdir=runs/debug_sweep --workers=2

The sweep takes one to two minutes on 2 cores. Measured, seeds 0 / 1:

    learning rate   held-out pass rate at the end   iteration at which the mean reward is first 0.5
    0.003           0.69 / 0.66                     15 / 15
    0.01            1.00 / 1.00                     9 / 8
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.sweeps.points import Sweep, grid, product, seeds


def get_config():
    config = defaults()
    config.num_iterations = 20
    config.prompts.size = 64
    config.sampling.max_completion_tokens = 8
    config.rollout.slots = 32
    config.rollout.chunk_steps = 4
    config.update.micro_batch_size = 32
    config.update.updates_per_iteration = 2
    config.replay.capacity = 256
    config.replay.max_age_steps = 3
    config.rewards.pass_threshold = 0.75
    config.eval.num_prompts = 8
    config.eval.num_samples = 4
    config.eval.every_iterations = 5
    config.checkpoint.export = False
    return config


def get_sweep():
    return Sweep(
        product(grid({"optimizer.learning_rate": [3e-3, 1e-2]}), seeds(2)),
        metrics=("eval/pass_rate", "rollout/reward_mean", "update/entropy_nats"),
        thresholds={"rollout/reward_mean": 0.5},
        pareto=(("update/entropy_nats", "rollout/reward_mean"),),
    )
