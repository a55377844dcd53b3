"""The replay study's arms with real weights: SmolLM2-135M-Instruct on the main job's sums.

    python -m jaxrl_llm.train --config=configs/study_smollm2.py --workdir=runs/study_smollm2

The main job's settings, but a step is one batch of 64 rollouts drawn in groups from the ring, and nothing is left out
of the draw, so that a step's cost is the same in every arm. A step takes about half a minute on 2 CPU cores, an arm
about an hour; the study's findings are of the small model (docs/replay_study.md).
"""

import runpy

from studies.design import COST_RATIO, GROUP, SMOLLM2


def get_config():
    config = runpy.run_path("configs/grpo_smollm2_135m_chain_sum.py")["get_config"]()
    config.rollout.prompts_per_iteration = SMOLLM2.batch // GROUP
    config.replay.capacity = 0
    config.replay.skip_tied = False
    config.replay.cost_ratio = COST_RATIO
    config.num_iterations = 24
    config.eval.every_iterations = 4
    config.checkpoint.export = False
    return config
