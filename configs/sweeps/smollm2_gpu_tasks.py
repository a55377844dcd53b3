"""The replay study with SmolLM2-135M-Instruct on one GPU, on the tasks of smollm2.py and with rings no larger than two
batches: are seconds saved where generating is dear?

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2_gpu_tasks.py --workdir=runs/smollm2_gpu_tasks --workers=12

Sums and products of two one-digit numbers, of which the model answers 0.16 and 0.17 at the start; 40 on-policy steps of
128 rollouts, and as smollm2_gpu.py several steps after one generation at the same declared cost. Rates reach lower, for
there every arm took the lowest. Workers share the GPU: set XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import runpy

from studies.design import SMOLLM2_GPU_SHORT as DESIGN
from studies.design import smollm2_sweep

get_config = runpy.run_path("configs/study_smollm2_gpu.py")["get_config"]

RATES = (5e-6, 1e-5, 2e-5)
ARMS = {
    "on-policy": DESIGN.arm(1, 1),
    "y 2, ring of 2 B": DESIGN.arm(2, 2, at_once=True),
    "y 4, ring of 2 B": DESIGN.arm(4, 2, at_once=True),
    "y 4, ring of 1 B": DESIGN.arm(4, 1, at_once=True),
    "y 4, ring of 2 B, a fifth for correct ones": DESIGN.arm(
        4, 2, at_once=True, **{"replay.unit": "rollout", "replay.positive_fraction": 0.2}
    ),
}


def get_sweep():
    return smollm2_sweep({"sums": ARMS, "products": ARMS}, DESIGN.budget, RATES)
