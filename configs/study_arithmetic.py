"""GRPO with a replay ring on sums of three digits, with a model of 0.15 M parameters: the basis of the replay study.

    python -m jaxrl_llm.sft --config=configs/study_arithmetic_sft.py --out=runs/study_model --until=0.25
    python -m jaxrl_llm.train --config=configs/study_arithmetic.py --workdir=runs/study

The arms of the study vary these settings. There are 1000 sums of three digits. One in eight is held out (prompts.name).
"""

from jaxrl_llm.config import defaults
from studies.design import COST_RATIO, GROUP, SUMS


def get_config():
    config = defaults()
    config.num_iterations = SUMS.on_policy_steps
    config.model.path = "runs/study_model"
    config.prompts.source = "arithmetic"
    config.prompts.name = "train"
    config.prompts.arguments = {"terms": 3, "largest": 9}
    config.prompts.size = 4096
    config.prompts.max_tokens = 6
    config.prompts.chat_template = False
    config.sampling.max_completion_tokens = 4
    config.rollout.prompts_per_iteration = 16
    config.rollout.group_size = GROUP
    config.rollout.chunk_steps = 4
    config.rewards.num_workers = 1
    config.update.batch_size = SUMS.batch
    config.update.micro_batch_size = SUMS.batch
    config.update.logp_chunk_tokens = 512
    config.optimizer.learning_rate = 6e-4
    config.replay.unit = "rollout"
    config.replay.cost_ratio = COST_RATIO
    config.eval.name = "test"
    config.eval.num_prompts = 64
    config.eval.num_samples = 32
    config.eval.every_iterations = SUMS.on_policy_steps // SUMS.evaluations
    config.checkpoint.export = False
    config.metrics.tensorboard = False
    config.metrics.samples_per_iteration = 0
    return config
