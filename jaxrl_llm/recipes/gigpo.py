"""GiGPO.

    python -m jaxrl_llm.train --config=recipe:gigpo --workdir=runs/gigpo

The advantage of a token is the advantage of its row plus the advantage of its turn. A turn is compared with all turns
of the group that answer the same state. Each rollout is trained on once, in one of four minibatches. The clip can act
from the second minibatch on. update.batch_size is a quarter of the rollouts of an iteration. The questions are a maze
for small models. "Methods by turn" in docs/how-to/choose_a_method.md lists the settings to change for your own
questions.
Source: Feng et al. 2025, arXiv:2505.10978. Differs: the state is the environment's last message. The standard deviation
is that of the population. There is no KL penalty. There are four minibatches of whole episodes; the released scripts
have one minibatch for every 256 turns.
"""

from jaxrl_llm.examples import maze
from jaxrl_llm.settings.use import use


def get_config():
    config = maze.get_config()
    config.algorithm.advantage = use("gigpo", discount=0.95, weight=1.0)
    config.algorithm.aggregation = use("token_mean")
    config.replay.unit = "rollout"
    config.replay.max_uses = 1
    config.update.batch_size = 16
    config.update.updates_per_iteration = 4
    return config
