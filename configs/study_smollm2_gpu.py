"""The basis of the replay study with SmolLM2-135M-Instruct on one GPU: bfloat16 and batches of 128, generated at once.

    python -m jaxrl_llm.train --config=configs/study_smollm2_gpu.py --workdir=runs/study_smollm2_gpu

A decode step on a GPU spends most of its time on starting operations. It starts as many for 8 rollouts as for 128. So
arms that reuse rollouts take several steps after one generation (``Design.arm``, at_once). All questions of a batch are
one micro-batch.
"""

import runpy

from studies.design import GROUP, SMOLLM2_GPU


def get_config():
    config = runpy.run_path("configs/study_smollm2.py")["get_config"]()
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "auto"
    config.prompts.size = 8192
    config.rollout.prompts_per_iteration = SMOLLM2_GPU.batch // GROUP
    config.rollout.chunk_steps = 8
    config.update.batch_size = SMOLLM2_GPU.batch
    config.update.pack_width = 256  # a question with its 8 answers
    config.update.micro_batch_tokens = config.update.pack_width * SMOLLM2_GPU.batch // GROUP
    config.num_iterations = SMOLLM2_GPU.on_policy_steps
    config.eval.num_prompts = 64
    config.eval.slots = 256
    config.eval.every_iterations = SMOLLM2_GPU.on_policy_steps // SMOLLM2_GPU.evaluations
    config.metrics.samples_per_iteration = 1
    return config
