"""Further arms of the replay study with SmolLM2-135M-Instruct, in addition to smollm2.py and smollm2_products.py.

    python -m jaxrl_llm.sweep --config=configs/sweeps/smollm2_arms.py --workdir=runs/smollm2_arms --workers=2

Methods with four uses have a ring of two batches, because smollm2.py found it better than a ring of eight. The
correction is the best correction of E6 on the seeds that choose learning rates. The sweep takes some eight hours on 2
cores.
"""

import runpy

from studies.design import SMOLLM2, smollm2_sweep

get_config = runpy.run_path("configs/study_smollm2.py")["get_config"]

ASYMRE = {
    "algorithm.advantage": "asymre",
    "algorithm.surrogate": "reinforce",
    "algorithm.aggregation": "constant_length",
}
ARMS = {
    "ring of 2 B, no reuse": SMOLLM2.arm(1, 2),
    "y 2, ring of 8 B": SMOLLM2.arm(2, 8),
    "y 4, ring of 2 B, AsymRE": SMOLLM2.arm(4, 2, **ASYMRE),
    "y 4, ring of 2 B, a fifth for correct ones": SMOLLM2.arm(
        4, 2, **{"replay.unit": "rollout", "replay.positive_fraction": 0.2}
    ),
    "y 4, ring of 2 B, sequence mask, 0.5 to 2": SMOLLM2.arm(4, 2, **{"algorithm.correction": "sequence_masked"}),
}


def get_sweep():
    return smollm2_sweep({"sums": ARMS, "products": ARMS})
