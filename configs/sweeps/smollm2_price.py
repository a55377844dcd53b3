"""The cost of generating a rollout of SmolLM2-135M over the cost of training on it, by the maximum completion length.

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2_price.py --workdir=runs/price --workers=1

Training is on-policy on the sums of the study. It has six iterations with the study's batch of 32, and each completion
is trained with its own prompt. The page of the sweep shows time/cost_ratio of each iteration. studies/replay_study.md
has the medians. The sweep takes eight minutes on 2 cores.
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
    # With fewer slots than rollouts, a slot is refilled when its rollout ends.
    points += grid({"sampling.max_completion_tokens": ROOM[-1:], "rollout.slots": (8,)})
    shown = ("time/cost_ratio", "time/generate_s", "time/update_s", "rollout/completion_length_tokens")
    return Sweep(points, metrics=shown)
