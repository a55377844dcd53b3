"""The replay study with SmolLM2-135M-Instruct on one GPU: are seconds saved where generating is what takes them?

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2_gpu.py --workdir=runs/smollm2_gpu --workers=4

Sums of two numbers of one or two digits, of which the model answers 0.02 at the start; 96 on-policy steps of 128
rollouts, and two and four uses from a ring of eight batches at the same declared cost. Workers share the GPU: set
XLA_PYTHON_CLIENT_PREALLOCATE=false.
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
