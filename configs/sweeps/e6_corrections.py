"""E6 of the replay study: corrections of the replayed ratio, one at a time, with eight uses of a rollout.

    python -m jaxrl_llm.sweep --config=configs/sweeps/e6_corrections.py --workdir=runs/e6 --workers=2

Every arm has a ring of 8 batches, and the batch and the advantage of the study. A correction has the surrogate, old
policy, weights and bounds of its paper (jaxrl_llm/recipes). There are two exceptions: VCPO has its own baseline, and
M2PO has the mask of AReaL. studies/replay_study.md has the results.
"""

import runpy

from studies.design import SUMS, sweep_of

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]

REINFORCE = {"algorithm.surrogate": "reinforce"}
SEQUENCES = {"algorithm.aggregation": "sequence_mean"}
BY_SIZE = {"algorithm.step_size": "effective_sample_size"}
CORRECTIONS = {
    "none: clipped ratio to the behaviour policy": {},
    "the same of whole sequences (Arnal et al.)": {"algorithm.surrogate": "sequence_clipped", **SEQUENCES},
    "GSPO": {"algorithm.surrogate": "gspo", **SEQUENCES},
    "CISPO, weights of at most 5": {"algorithm.surrogate": "cispo", "algorithm.surrogate.high": 5.0},
    "truncated token weights, at most 2 (TIS)": {**REINFORCE, "algorithm.correction": "token_truncated"},
    "truncated sequence weights, at most 2": {**REINFORCE, "algorithm.correction": "sequence_truncated"},
    "the same, step by effective sample size": {**REINFORCE, "algorithm.correction": "sequence_truncated", **BY_SIZE},
    "VCPO": {
        "algorithm.surrogate": "vcpo",
        "algorithm.aggregation": "constant_length",
        "replay.unit": "group",
        **BY_SIZE,
    },
    "PPO-EWMA": {
        "algorithm.old_policy": "ewma",
        "algorithm.correction": "policy_truncated",
        "algorithm.correction.high": 100.0,
    },
    "decoupled PPO": {
        "algorithm.old_policy": "start",
        "algorithm.correction": "token_masked",
        "algorithm.correction.low": 0.0,
        "algorithm.correction.high": 5.0,
    },
    "token mask, 0.5 to 2": {"algorithm.correction": "token_masked"},
    "sequence mask, 0.5 to 2": {"algorithm.correction": "sequence_masked"},
    "second-moment mask (M2PO)": {"algorithm.correction": "second_moment"},
}
ARMS = {name: SUMS.arm(8, 8, **correction) for name, correction in CORRECTIONS.items()}


def get_sweep():
    return sweep_of(list(ARMS.values()), lambda arm: next(name for name, its in ARMS.items() if its == arm))
