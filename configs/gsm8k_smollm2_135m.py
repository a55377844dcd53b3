"""GSM8K scored by math-verify, for SmolLM2-135M-Instruct or any other model. Questions and solutions are in two files.

    python -m jaxrl_llm.train --config=configs/gsm8k_smollm2_135m.py --workdir=runs/gsm8k

The files are GSM8K's JSON lines with ``question`` and ``answer``. The last line of an answer is such as "#### 72".
Download train.jsonl and test.jsonl from https://github.com/openai/grade-school-math, and name them gsm8k_train.jsonl
and gsm8k_test.jsonl. The rows of MATH have ``problem`` and ``solution`` with a box. For MATH add:

    --config.prompts.arguments='{"prompt": "problem", "answer": "solution"}'

The sizes are for a machine with an accelerator. No full run has been measured, so there is no result here.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.num_iterations = 200
    config.model.path = "smollm2-135m-instruct"
    config.prompts.source = "jsonl"
    config.prompts.name = "gsm8k_train.jsonl"
    config.prompts.arguments = {"prompt": "question"}
    config.prompts.size = 0
    config.prompts.system_prompt = "Think step by step. Put the final answer in \\boxed{}."
    config.prompts.max_tokens = 320
    config.prompts.long_prompt = "skip"
    config.sampling.max_completion_tokens = 320
    config.rewards.functions = ("math",)
    config.rollout.prompts_per_iteration = 32
    config.rollout.group_size = 8
    config.rollout.chunk_steps = 16
    config.replay.capacity = 512
    config.replay.skip_tied = True
    config.update.batch_size = 128
    config.update.micro_batch_size = 16
    config.update.updates_per_iteration = 2
    config.algorithm.surrogate.high = 0.28
    config.optimizer.learning_rate = 1e-5
    config.eval.name = "gsm8k_test.jsonl"
    config.eval.num_prompts = 256
    return config
