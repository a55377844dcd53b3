"""StepGRPO of R1-VL: partial credit by key steps.

    python -m jaxrl_llm.train --config=recipe:step_grpo --workdir=runs/step_grpo

GRPO with two rewards. The first reward ranks wrong answers by the key steps that they contain (column key_steps). The
second rewards a completion that reasons before its answer. The questions are sums of four digits, whose key steps are
the partial sums; set prompts to your own questions. Key steps weigh 0.1, as in the released code. The released code
leaves the weight of the KL to TRL, whose default was 0.04.
Source: Zhang et al. 2025, arXiv:2503.12937. Differs: only text is supported. A key step counts if the answer contains
its words in order, without others between them. An answer without key steps scores like any wrong answer. The reward
for validity (StepRVR) checks only that the tags are in the right order.
"""

from jaxrl_llm.config import defaults
from jaxrl_llm.settings.use import use


def get_config():
    config = defaults()
    config.prompts.source = "arithmetic"
    config.prompts.arguments = {"terms": 4, "largest": 9}
    config.sampling.max_completion_tokens = 64
    config.rewards.functions = ("jaxrl_llm.scoring.scores:key_steps", "jaxrl_llm.scoring.scores:format")
    config.rewards.weights = (1.0, 1.0)
    config.algorithm.aggregation = use("sequence_mean")
    config.algorithm.divergence = use("reference", coefficient=0.04)
    return config
