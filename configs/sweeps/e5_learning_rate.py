"""E5 of the replay study: does the choice of the learning rate explain the saving?

    python -m jaxrl_llm.sweep --config=configs/sweeps/e5_learning_rate.py --workdir=runs/e5 --workers=2

The arms are on-policy training and four uses from a ring of two batches, each at six learning rates.
studies/replay_study.md has the results.
"""

import runpy

from jaxrl_llm.sweeps.points import grid, product
from studies.design import RATE, REPORTED, SUMS, shown_as

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

RATES = [6e-4 * 1.5**i for i in range(-3, 3)]
ARMS = [SUMS.arm(1, 1), SUMS.arm(4, 2)]


def get_sweep():
    return shown_as(SUMS.label, product(REPORTED, ARMS, grid({RATE: RATES})))
