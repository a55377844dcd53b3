"""GRPO with a replay ring on sums of three digits, with a model of 0.15 M parameters: what the replay study varies.

    python -m jaxrl_llm.sft --config=configs/study_arithmetic_sft.py --out=runs/study_model --until=0.25
    python -m jaxrl_llm.train --config=configs/study_arithmetic.py --workdir=runs/study

The sums of three digits are 1000 questions, of which one in eight is never trained on (prompts.name). Measured with seed
0 on 64 of those, 32 answers each: pass rate 0.277 before and 0.477 after 300 iterations, pass@32 1.00 and 0.92. Without
other work on the 2 cores an iteration takes 0.1 s.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.num_iterations = 300
    config.model.path = "runs/study_model"
    config.prompts.source = "arithmetic"
    config.prompts.name = "train"
    config.prompts.arguments = {"terms": 3, "largest": 9}
    config.prompts.size = 4096
    config.prompts.max_tokens = 6
    config.prompts.chat_template = False
    config.sampling.max_completion_tokens = 4
    config.rollout.prompts_per_iteration = 16
    config.rollout.group_size = 8
    config.rollout.chunk_steps = 4
    config.rewards.num_workers = 1
    config.update.batch_size = 128
    config.update.micro_batch_size = 128
    config.update.logp_chunk_tokens = 512
    config.optimizer.learning_rate = 4e-4
    config.eval.name = "test"
    config.eval.num_prompts = 64
    config.eval.num_samples = 32
    config.eval.every_iterations = 30
    config.checkpoint.export = False
    config.metrics.tensorboard = False
    config.metrics.samples_per_iteration = 0
    return config
