"""RLEF.

    python -m jaxrl_llm.train --config=recipe:rlef --workdir=runs/rlef

PPO whose actions are whole turns. The critic has one value before each turn and is clipped, all tokens of a turn have
one advantage, and there is a KL penalty to the starting model. Each rollout is trained on once, in one of four
minibatches. Both clips can act from the second minibatch on. update.batch_size is a quarter of the rollouts of an
iteration. The questions are a maze for small models. "Methods by turn" in docs/how-to/choose_a_method.md has the
command for programs with public tests as replies between the turns. With it, jaxrl_llm.scoring.code_tests:by_turn gives
the rewards of RLEF: 1 at the end if all tests pass, else -1, and -0.2 for an earlier turn without code.
Source: Gehring et al. 2024, arXiv:2410.02089. Differs: the critic is a head on the policy and learns the return of a
turn at all its tokens; the paper's is a separate model. The KL penalty is in the loss, token by token; the paper's is
in the reward, by the geometric mean over a turn. Only the ratio is clipped; the paper also truncates at 1 the ratio to
the policy that drew the tokens.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


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
