"""draft"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.num_iterations = 30
    config.model.path = "smollm2-135m-instruct"
    config.prompts.source = "reasoning_gym"
    config.prompts.name = "chain_sum"
    config.prompts.arguments = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config.prompts.size = 2000
    config.prompts.max_tokens = 48
    config.sampling.max_completion_tokens = 24
    config.rollout.prompts_per_iteration = 8
    config.rollout.group_size = 8
    config.rollout.slots = 64
    config.rollout.chunk_steps = 8
    config.replay.capacity = 128
    config.update.batch_size = 64
    config.update.micro_batch_size = 16
    config.update.updates_per_iteration = 1
    config.update.clip_high = 0.28
    config.optimizer.learning_rate = 2e-5
    config.eval.num_prompts = 128
    return config
