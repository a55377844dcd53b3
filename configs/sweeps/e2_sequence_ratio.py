"""E2 of the replay study with the importance ratio of the central paper, which is the ratio of whole sequences.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e2_sequence_ratio.py --workdir=runs/e2_sequence --workers=2

The arms are the arms of e2_replay_ratio.py except the rings of 4 batches. With the ratio u of a sequence the surrogate
is min(u A, clip(u, 0.8, 1.2) A). studies/replay_study.md has the results.
"""

import runpy

from studies.design import SUMS, sweep_of

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

SEQUENCE = {"algorithm.surrogate": "sequence_clipped", "algorithm.aggregation": "sequence_mean"}
GRID = [(ratio, batches) for ratio in (1, 2, 4, 8, 16) for batches in (1, 2, 8, 32, 128)]
ARMS = [SUMS.arm(*how, **SEQUENCE) for how in GRID]


def get_sweep():
    return sweep_of(ARMS, lambda settings: SUMS.label({k: v for k, v in settings.items() if k not in SEQUENCE}))
