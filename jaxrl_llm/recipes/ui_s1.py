"""UI-S1, semi-online.

    python -m jaxrl_llm.train --config=recipe:ui_s1 --workdir=runs/ui_s1

The row's advantage, and that of a turn among the group's turns of its number by its discounted future rewards. Turns go
along an expert's way, and one that leaves it is patched, twice at most. Each rollout is trained on once, in one of four
minibatches as in released scripts, and the clip can act from the second on: update.batch_size is a quarter of an
iteration's rollouts. The questions are a maze for small models, whose expert takes a shortest way: "Methods by turn" in
docs/how-to/choose_a_method.md says what to set for your own.
Source: Lu et al. 2025, arXiv:2509.11543. Differs: a group that is left out because its returns hardly differ is not
replaced by another; the step that was wrong stays in the row, and the patch follows it; a turn is worth 1 where it is
the expert's, without parts for its form and the kind of its action.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.examples import maze


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
