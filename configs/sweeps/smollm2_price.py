"""The price of a rollout by the room it has: what SmolLM2-135M's cost to generate over what they cost to train on.

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2_price.py --workdir=runs/price --workers=1

On-policy, the study's batch of 32 on the study's sums, six iterations, a prompt with each completion. The page shows
time/cost_ratio of each iteration; the medians are in studies/replay_study.md. Eight minutes on 2 cores.
"""

import runpy

from jaxrl_llm.sweeps.points import Sweep, grid

ROOM = (24, 96, 384)  # tokens


def get_config():
    config = runpy.run_path("configs/study_smollm2.py")["get_config"]()
    config.num_iterations = 6
    config.replay.unit = "rollout"
    config.update.pack_width = config.update.micro_batch_tokens = config.prompts.max_tokens + max(ROOM)
    config.eval.num_prompts = 0
    config.eval.every_iterations = 0
    return config


def get_sweep():
    points = grid({"sampling.max_completion_tokens": ROOM, "rollout.slots": (0,)})
    points += grid({"sampling.max_completion_tokens": ROOM[-1:], "rollout.slots": (8,)})  # refilled as rollouts end
    shown = ("time/cost_ratio", "time/generate_s", "time/update_s", "rollout/completion_length_tokens")
    return Sweep(points, metrics=shown)
