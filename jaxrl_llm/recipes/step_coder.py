"""StepCoder.

    python -m jaxrl_llm.train --config=recipe:step_coder --workdir=runs/step_coder

PPO on programs, with most of a solution given at first and less of it as answers pass, and without the tokens of
statements that no test has run. A dozen questions of jaxrl_llm/recipes/programs.jsonl stand for data of your own, and
a model that knows no Python for one that does. Each rollout is trained on once, in one of four minibatches, and the
clip can act from the second on: update.batch_size is a quarter of an iteration's rollouts.
Source: Dou et al. 2024, arXiv:2402.01391. Differs: a start moves by a third of the lines, where it moves by conditional
statements, once 0.8 of the answers to a version have passed; no KL to the starting model, whose weight was not found;
masked tokens have no advantage, and are still seen by the critic; the number of minibatches was not found, and four are
ours.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


def get_config():
    config = defaults()
    config.prompts.source = "code"
    config.prompts.name = "jaxrl_llm/recipes/programs.jsonl"
    config.prompts.arguments = {"given_parts": 2}
    config.prompts.retire_pass_rate = 0.8
    config.prompts.max_tokens = 384
    config.sampling.max_completion_tokens = 64
    config.rewards.functions = ("jaxrl_llm.scoring.code_tests:covered",)
    config.algorithm.advantage = use("gae")
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.reshaping = [use("reward_mask")]
    config.eval.num_prompts = 2
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
