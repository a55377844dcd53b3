"""Train SmolLM2-135M-Instruct to use a calculator for products that it cannot compute alone. An episode has two turns.

    bash launch/local.sh --config=configs/calculator_smollm2_135m.py --workdir=runs/calculator

The policy writes the product, the environment replies with its value, and the policy repeats the result: `926 * 988`,
`926 * 988 = 914888`, `914888`.

Seed 0 ran on 2026-11-25 on 2 cores in float32. It took 8 min, 14 to 50 s an iteration. The machine did other work
during the first minutes. Results:

    held-out pass rate 0.032 before, 1.000 after (64 questions, sampled at temperature 1)
    pass rate while training, iterations 1 to 16: 0.02 0.12 0.13 0.23 0.31 0.42 0.69 0.82 0.78 0.89 0.98 0.98 0.98 0.98
    0.96 0.92

A completion that uses the calculator scores 0.2 (``calculator:used``). The policy learns this first. Without this
reward only one rollout in thirty would have a reward at the start.
"""

from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.num_iterations = 16
    config.model.path = "smollm2-135m-instruct"
    config.model.remat = "dots"
    config.prompts.source = "reasoning_gym"
    config.prompts.name = "products"
    config.prompts.arguments = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}
    config.prompts.system_prompt = (
        "Write the product and wait for the calculator, then repeat its result. Example: the question is 12 * 34. You "
        "write 12 * 34 = and the calculator writes 12 * 34 = 408 and you write 408."
    )
    config.prompts.size = 2048
    config.prompts.max_tokens = 128
    config.sampling.max_completion_tokens = 64
    config.environments.factory = "jaxrl_llm.examples.calculator:plain"
    config.environments.max_turns = 2
    config.environments.max_answer_tokens = 32
    config.rewards.functions = ("task", "jaxrl_llm.examples.calculator:used")
    config.rewards.weights = (1.0, 0.2)
    config.rollout.prompts_per_iteration = 12
    config.rollout.group_size = 8
    config.rollout.chunk_steps = 4
    config.replay.capacity = 192
    config.replay.skip_tied = True
    config.update.batch_size = 64
    config.update.micro_batch_size = 16
    config.algorithm.surrogate.high = 0.28
    config.optimizer.learning_rate = 3e-5
    config.eval.num_prompts = 64
    return config
