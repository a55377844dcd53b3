"""The replay study's arms with real weights: SmolLM2-135M-Instruct on the main job's sums.

    python -m jaxrl_llm.train --config=configs/study_smollm2.py --workdir=runs/study_smollm2

The main job's settings, but a step is one batch of 64 rollouts drawn in groups from the ring, and nothing is left out
of the draw, so that a step's cost is the same in every arm. A step takes about half a minute on 2 CPU cores, an arm
about an hour; the study's findings are of the small model (docs/replay_study.md).
"""

import runpy

COST_RATIO = 5.28  # mu of the paper's 7B runs: generating a rollout costs so many times training on it
BATCH, GROUP = 64, 8
BUDGET = 24 * BATCH * (1 + COST_RATIO)  # what 24 on-policy steps cost, in trained rollouts


def arm(ratio, batches, **settings):
    """Steps on 64 rollouts, 64 / ratio of them new, drawn from the last ``batches`` * 64; as many as the budget."""
    generated = BATCH // ratio
    steps = round(BUDGET / (BATCH + COST_RATIO * generated))
    return {
        "rollout.prompts_per_iteration": generated // GROUP,
        "replay.capacity": BATCH * batches,
        "num_iterations": steps,
        "eval.every_iterations": steps // 6,
        **settings,
    }


def get_config():
    config = runpy.run_path("configs/grpo_smollm2_135m_chain_sum.py")["get_config"]()
    config.rollout.prompts_per_iteration = BATCH // GROUP
    config.replay.capacity = 0
    config.replay.unit = "group"
    config.replay.skip_tied = False
    config.replay.cost_ratio = COST_RATIO
    config.num_iterations = 24
    config.eval.every_iterations = 4
    config.checkpoint.export = False
    return config
