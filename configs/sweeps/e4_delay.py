"""E4 of the replay study: old data without reuse. This experiment separates staleness from replay.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e4_delay.py --workdir=runs/e4 --workers=2

An on-policy batch is trained on once, a fixed number of steps after its generation. studies/replay_study.md has the
results.
"""

import runpy

from studies.design import RATES, SUMS, sweep_of

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

DELAYS = (0, 3, 13, 28, 98)
ARMS = [SUMS.arm(1, delay + 1, **{"replay.delay_iterations": delay}) for delay in DELAYS]


def label(settings):
    return f"used {settings['replay.delay_iterations']} steps late"


def get_sweep():
    return sweep_of(ARMS, label, (1e-4, *RATES))
