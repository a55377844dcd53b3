"""The replay study with SmolLM2-135M-Instruct on one GPU, on the tasks of smollm2.py and smollm2_products.py.

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2_gpu_tasks.py --workdir=runs/smollm2_gpu_tasks --workers=12

The question is whether reuse saves seconds if generation is expensive. The rings have at most two batches. The tasks
are sums and products of two one-digit numbers. The pass rates at the start are 0.16 and 0.17.

On-policy training has 40 steps of 128 rollouts. The other arms take several steps after one generation at the same
declared cost, as in smollm2_gpu.py. The learning rates are lower, because every arm of smollm2_gpu.py chose the lowest.
Workers share the GPU, so set XLA_PYTHON_CLIENT_PREALLOCATE=false.
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
