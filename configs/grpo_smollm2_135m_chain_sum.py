"""GRPO with replay: SmolLM2-135M-Instruct learns sums of two one-digit numbers. The main job.

    bash launch/local.sh

    python -m jaxrl_llm.train --config=configs/grpo_smollm2_135m_chain_sum.py --workdir=runs/local

Run of 2026-11-21, seed 0, 2 CPU cores, float32: 10 min 20 s from start to report,
with tests on the same cores for the first three minutes.
held-out pass rate 0.164 before, 0.656 after (128 questions, sampled at temperature 1).

    iteration  pass rate  entropy, nats  length  seconds
            1      0.094          1.98    18.1       51
            2      0.167          1.70    17.1       45
            3      0.240          1.71    18.1       39
            4      0.375          1.37    16.4       39
            5      0.281          1.25    16.5       42
            6      0.427          1.37    15.9       38
            7      0.573          1.30    15.9       37
            8      0.583          0.84    13.5       38
            9      0.635          0.82    14.0       33
           10      0.656          0.64    13.2       37
           11      0.823          0.60    11.9       39
           12      0.635          0.62    11.0       81

At the same pass rate TRL's entropy (64 rollouts a step, learning rate 2e-5, the same task) is lower: 0.57 nats at
0.61 and 0.31 at 0.84. Groups that are all right or all wrong teach nothing, so batches are drawn from the others of
the last two iterations (replay.skip_tied); whole groups share one pass over their prompt (replay.unit).
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.num_iterations = 12
    config.model.path = "smollm2-135m-instruct"
    config.prompts.source = "reasoning_gym"
    config.prompts.name = "chain_sum"
    config.prompts.arguments = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config.prompts.size = 2048
    config.prompts.max_tokens = 48
    config.sampling.max_completion_tokens = 24
    config.rollout.prompts_per_iteration = 12
    config.rollout.group_size = 8
    config.rollout.chunk_steps = 4
    config.replay.capacity = 192
    config.replay.unit = "group"
    config.replay.skip_tied = True
    config.update.batch_size = 64
    config.update.micro_batch_size = 32
    config.update.clip_high = 0.28
    config.optimizer.learning_rate = 3e-5
    config.eval.num_prompts = 128
    return config
