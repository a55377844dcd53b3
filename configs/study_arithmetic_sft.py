"""The model of the replay study: a random transformer of 0.15 M parameters, partly trained on sums of three digits.

    python -m jaxrl_llm.sft --config=configs/study_arithmetic_sft.py --out=runs/study_model --until=0.25

Training takes half a minute on 2 cores. Most of this time is compilation. After 90 steps the model gives 0.25 of its
probability to the correct answers of held-out questions, and `--until` stops the training.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.num_iterations = 2000
    config.seed = 1000
    config.model.path = "random:study"
    config.prompts.source = "arithmetic"
    config.prompts.name = "train"
    config.prompts.arguments = {"terms": 3, "largest": 9}
    config.prompts.size = 4096
    config.prompts.max_tokens = 6
    config.prompts.chat_template = False
    config.sampling.max_completion_tokens = 4
    config.rollout.prompts_per_iteration = 16  # allows batches of 128; sft samples no rollouts
    config.update.batch_size = 128
    config.update.logp_chunk_tokens = 512
    config.optimizer.learning_rate = 3e-3
    config.eval.name = "test"
    config.eval.num_prompts = 128
    config.eval.every_iterations = 10
    return config
