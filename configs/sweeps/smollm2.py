"""The replay study with SmolLM2-135M-Instruct: does reuse save compute on a pretrained model?

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2.py --workdir=runs/smollm2

Sums of two one-digit numbers, of which the model answers 0.16 at the start; on-policy training, four uses from rings of
eight and of two batches and two uses from one of two, each at the best of three learning rates on one seed. After each
reported run 32 answers to each held-out question and to those of a task that no run trains on (studies/transfer.py).
Three hours on 2 cores; the same command goes on where it was stopped. smollm2_products.py has these arms on products,
smollm2_arms.py others.
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
