"""The basis of the replay study with a pretrained model: SmolLM2-135M-Instruct on a task of reasoning-gym.

    python -m jaxrl_llm.train --config=configs/study_smollm2.py --workdir=runs/study_smollm2

This job differs from the main job in two ways, so that a step has the same cost in every arm:

- A step trains on one batch of 32 rollouts. The batch is drawn in groups from the ring.
- The draw includes groups whose answers are all right or all wrong.
"""

import runpy

from studies.design import COST_RATIO, GROUP, SMOLLM2


def get_config():
    config = runpy.run_path("configs/grpo_smollm2_135m_chain_sum.py")["get_config"]()
    config.rollout.prompts_per_iteration = SMOLLM2.batch // GROUP
    config.update.batch_size = SMOLLM2.batch
    config.replay.capacity = 0
    config.replay.skip_tied = False
    config.replay.cost_ratio = COST_RATIO
    config.num_iterations = SMOLLM2.on_policy_steps
    config.eval.num_prompts = 32
    config.eval.num_samples = 4
    config.eval.slots = 128
    config.eval.every_iterations = SMOLLM2.on_policy_steps // SMOLLM2.evaluations
    config.checkpoint.export = False
    config.metrics.tensorboard = False
    return config
