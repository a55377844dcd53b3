"""StepCoder.

    python -m jaxrl_llm.train --config=recipe:step_coder --workdir=runs/step_coder

PPO on programs. At first the prompt contains most of a solution. When enough answers pass, the given part becomes
shorter. Tokens of statements that no test has run are not trained on. Replace the dozen questions of
jaxrl_llm/recipes/programs.jsonl by your own data, and the model by one that knows Python. Each rollout is trained on
once, in one of four minibatches. The clip can act from the second minibatch on. update.batch_size is a quarter of the
rollouts of an iteration.
Source: Dou et al. 2024, arXiv:2402.01391. Differs: the given part becomes shorter by a third of the lines when 80 % of
the answers to a version have passed. The paper shortens it by one conditional statement at a time. There is no KL
penalty to the starting model, because its weight was not found. Masked tokens have no advantage, but the critic still
trains on them. The paper's number of minibatches was not found; this recipe has four.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


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
