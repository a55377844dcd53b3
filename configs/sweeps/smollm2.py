"""The replay study with SmolLM2-135M-Instruct: does reuse save compute on a pretrained model?

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2.py --workdir=runs/smollm2

The task is sums of two one-digit numbers. The pass rate at the start is 0.16. The arms are:

- on-policy training,
- four uses from a ring of eight batches,
- four uses from a ring of two batches,
- two uses from a ring of two batches.

Every arm is reported at the best of three learning rates, which one seed chooses. After each reported run the model
writes 32 answers to each held-out question, and to each question of a task that no run trains on (studies/transfer.py).

The sweep takes three hours on 2 cores. The same command continues a sweep that was stopped. smollm2_products.py has
these arms on products, and smollm2_arms.py has further arms.
"""

import runpy

from studies.design import SMOLLM2, smollm2_sweep

get_config = runpy.run_path("configs/study_smollm2.py")["get_config"]

ARMS = {
    "on-policy": SMOLLM2.arm(1, 1),
    "y 4, ring of 8 B": SMOLLM2.arm(4, 8),
    "y 4, ring of 2 B": SMOLLM2.arm(4, 2),
    "y 2, ring of 2 B": SMOLLM2.arm(2, 2),
}


def get_sweep():
    return smollm2_sweep({"sums": ARMS})
