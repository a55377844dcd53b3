"""RLEF.

    python -m jaxrl_llm.train --config=recipe:rlef --workdir=runs/rlef

PPO whose actions are whole turns: a critic's value before each, clipped, one advantage for its tokens, KL to the start.
Each rollout is trained on once, in one of four minibatches, and both clips can act from the second on:
update.batch_size is a quarter of an iteration's rollouts. Here the questions are a maze for small models. "Methods by
turn" in docs/how-to/choose_a_method.md has the command for programs, whose public tests speak between the turns: then
jaxrl_llm.scoring.code_tests:by_turn has the paper's rewards, 1 or -1 in the end, whether all tests pass, and -0.2 for
an earlier turn without code.
Source: Gehring et al. 2024, arXiv:2410.02089. Differs: the critic is a head on the policy, where it is a model of its
own, and learns a turn's return at all of its tokens; KL is in the loss, token by token, where it is in the reward, by
the geometric mean over a turn; the ratio to the policy that drew the tokens is not truncated at 1 beside the clipped
one.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("turn_gae")
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.divergence = use("reference", coefficient=0.05)
    config.algorithm.critic.clip = 0.2
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
