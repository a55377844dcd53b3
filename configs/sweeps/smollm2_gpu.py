"""The replay study with SmolLM2-135M-Instruct on one GPU: does reuse save seconds if generation takes most of the time?

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2_gpu.py --workdir=runs/smollm2_gpu --workers=4

The task is sums of two numbers of one or two digits. The pass rate at the start is 0.02. On-policy training has 96
steps of 128 rollouts. The other arms use a rollout two and four times, from a ring of eight batches, at the same
declared cost. Workers share the GPU, so set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import dataclasses
import runpy

from studies.design import SMOLLM2_GPU, smollm2_sweep

get_config = runpy.run_path("configs/study_smollm2_gpu.py")["get_config"]

ARMS = {
    "on-policy": SMOLLM2_GPU.arm(1, 1),
    "y 2, ring of 8 B": SMOLLM2_GPU.arm(2, 8, at_once=True),
    "y 4, ring of 8 B": SMOLLM2_GPU.arm(4, 8, at_once=True),
}


def get_sweep():
    return dataclasses.replace(smollm2_sweep({"longer sums": ARMS}, SMOLLM2_GPU.budget), after="")
