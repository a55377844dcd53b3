"""The replay study's model: a random transformer of 0.15 M parameters learns sums of three digits, but not well.

    python -m jaxrl_llm.sft --config=configs/study_arithmetic_sft.py --out=runs/study_model --until=0.25

Half a minute on 2 cores, most of it compiling: 90 steps, after which the model gives 0.25 of its probability to the
right answers of questions it has not seen. `--until` stops there.
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
    config.rollout.prompts_per_iteration = 16  # 128 rollouts, none of them sampled here: a batch is never more
    config.update.batch_size = 128
    config.update.logp_chunk_tokens = 512
    config.optimizer.learning_rate = 3e-3
    config.eval.name = "test"
    config.eval.num_prompts = 128
    config.eval.every_iterations = 10
    return config
