"""A control of E2 of the replay study: more and smaller on-policy steps, without replay.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_small_batches.py --workdir=runs/e2_small_batches --workers=2

With four uses of a rollout the budget pays for 541 steps, and on-policy training has 200 steps. This control tests
whether the number of steps explains the difference. On-policy batches of 64 and 32 rollouts have 400 and 800 steps at
the same cost. Every arm is reported at the best of four learning rates. studies/replay_study.md has the results.
"""

import dataclasses
import runpy

from studies.design import SUMS, sweep_of

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]


def arm(batch):
    """Return the settings of on-policy training with ``batch`` rollouts a step, at the study's budget."""
    design = dataclasses.replace(SUMS, batch=batch, on_policy_steps=SUMS.on_policy_steps * SUMS.batch // batch)
    return design.arm(1, 1, **{"update.batch_size": batch, "update.micro_batch_size": batch})


def get_sweep():
    label = lambda settings: f"on-policy, steps of {settings['update.batch_size']}"
    return sweep_of([arm(64), arm(32)], label, (1e-4, 2e-4, 4e-4, 8e-4))
