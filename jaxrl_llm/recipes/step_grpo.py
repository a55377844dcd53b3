"""StepGRPO of R1-VL: partial credit by key steps.

    python -m jaxrl_llm.train --config=recipe:step_grpo --workdir=runs/step_grpo

GRPO whose reward tells two wrong answers apart by how far they came (column key_steps), and pays for the form of an
answer that thinks before it speaks. The questions are sums of four digits, whose key steps are the sums on the way; set
prompts to your own. Key steps weigh 0.1, as in released code, which leaves the weight of the KL to TRL: 0.04 then.
Source: Zhang et al. 2025, arXiv:2503.12937. Differs: text alone; a key step is there where its words follow each other,
and an answer that is none is wrong as any; the reward for validity (StepRVR) is for tags in their order.
"""

from jaxrl_llm.algorithms.use import use
from jaxrl_llm.config import defaults


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
