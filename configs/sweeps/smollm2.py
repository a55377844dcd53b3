"""The replay study with SmolLM2-135M-Instruct: does replay save compute on a pretrained model, on two tasks?

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2.py --workdir=runs/smollm2

Sums and products of two one-digit numbers, of which the model answers 0.16 and 0.14 at the start; every arm at the best
of three learning rates, and after each reported run 32 answers to each held-out question and to those of a task that no
run trains on (studies/transfer.py). A night on 2 cores; the same command goes on where it was stopped.
"""

import dataclasses
import runpy

from studies.design import SMOLLM2, sweep_of

get_config = runpy.run_path("configs/study_smollm2.py")["get_config"]

RATES = (1e-5, 2e-5, 4e-5)
TWO_NUMBERS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = {
    name: {"prompts.name": task, "prompts.arguments": TWO_NUMBERS}
    for name, task in (("sums", "chain_sum"), ("products", "products"))
}
ASYMRE = {
    "algorithm.advantage": "asymre",
    "algorithm.surrogate": "reinforce",
    "algorithm.aggregation": "constant_length",
}
ARMS = {
    "on-policy": SMOLLM2.arm(1, 1),
    "ring of 4 B, no reuse": SMOLLM2.arm(1, 4),
    **{f"y {y}, ring of {n} B": SMOLLM2.arm(y, n) for y in (2, 4) for n in (2, 8)},
    "y 4, ring of 8 B, a fifth for correct ones": SMOLLM2.arm(
        4, 8, **{"replay.unit": "rollout", "replay.positive_fraction": 0.2}
    ),
    "y 4, ring of 8 B, AsymRE": SMOLLM2.arm(4, 8, **ASYMRE),
    "y 4, ring of 8 B, truncated sequence weights": SMOLLM2.arm(
        4,
        8,
        **{
            "algorithm.surrogate": "reinforce",
            "algorithm.correction": "sequence_truncated",
            "algorithm.step_size": "effective_sample_size",
        },
    ),
}
POINTS = {f"{task}: {arm}": of_task | of_arm for task, of_task in TASKS.items() for arm, of_arm in ARMS.items()}


def get_sweep():
    label = lambda settings: next(name for name, its in POINTS.items() if its == settings)
    sweep = sweep_of(list(POINTS.values()), label, RATES, samples=2)
    return dataclasses.replace(sweep, after="studies.transfer:measure")
