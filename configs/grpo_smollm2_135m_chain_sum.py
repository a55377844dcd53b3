"""draft"""

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
