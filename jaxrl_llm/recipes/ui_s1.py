"""UI-S1, semi-online.

    python -m jaxrl_llm.train --config=recipe:ui_s1 --workdir=runs/ui_s1

The advantage of a token is the advantage of its row plus the advantage of its turn. The discounted future rewards of a
turn are compared with those of the group's turns with the same number. The turns follow an expert's path. If a turn
leaves the path, the expert's step replaces it, at most twice. Each rollout is trained on once, in one of four
minibatches, as in the released scripts. The clip can act from the second minibatch on. update.batch_size is a quarter
of the rollouts of an iteration. The questions are a maze for small models, and the expert takes a shortest path.
"Methods by turn" in docs/how-to/choose_a_method.md lists the settings to change for your own questions.
Source: Lu et al. 2025, arXiv:2509.11543. Differs: groups whose returns hardly differ are left out without a
replacement. The wrong step stays in the row, and the expert's step follows it. A turn scores 1 if it is the expert's
step, without partial scores for its form and the kind of its action.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.environments.factory = "jaxrl_llm.examples.maze:patched"
    config.rewards.functions = ("jaxrl_llm.examples.maze:matched",)
    config.algorithm.advantage = use("ui_s1", discount=0.5, weight=1.0)
    config.algorithm.aggregation = use("token_mean")
    config.algorithm.divergence = use("reference", coefficient=0.0001)
    config.replay.skip_tied = True
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
