"""A control of E2: more and smaller on-policy steps, with nothing replayed.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_small_batches.py --workdir=runs/e2_small_batches --workers=2

Four uses of a rollout take 541 steps where on-policy training takes 200. Is it the steps? Batches of 64 and 32 new
rollouts cost as much and are trained in 400 and 800 steps; every arm at the best of four learning rates.
studies/replay_study.md has the results.
"""

import dataclasses
import runpy

from studies.design import SUMS, sweep_of

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]


def arm(batch):
    """On-policy steps of so many rollouts, at the study's budget."""
    design = dataclasses.replace(SUMS, batch=batch, on_policy_steps=SUMS.on_policy_steps * SUMS.batch // batch)
    return design.arm(1, 1, **{"update.batch_size": batch, "update.micro_batch_size": batch})


def get_sweep():
    label = lambda settings: f"on-policy, steps of {settings['update.batch_size']}"
    return sweep_of([arm(64), arm(32)], label, (1e-4, 2e-4, 4e-4, 8e-4))
