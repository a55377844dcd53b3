"""Final pass rates of a run of the SmolLM2 study, on its own task and on a task it never trained on.

The other task is the greatest common divisor of two numbers up to 12. Every run gets the same 32 questions. A
checkpoint is 1.6 GB, so the checkpoint of a run is deleted after the measurement.

Owns: the other task. Does not know: the run's own task.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

from jaxrl_llm.commands.evaluate import evaluate
from jaxrl_llm.config import Config
from studies.design import is_reported

TASK = "gcd"
ARGUMENTS = {"min_numbers": 2, "max_numbers": 2, "max_value": 12}
MAX_TOKENS = 96  # of a question
SAMPLES = 32


def config_of(config: Config) -> Config:
    """Return the config of a run with the other task in place of the run's task."""
    prompts = dataclasses.replace(config.prompts, name=TASK, arguments=ARGUMENTS, max_tokens=MAX_TOKENS)
    return dataclasses.replace(config, prompts=prompts, seed=0)


def measure(config: Config, workdir: pathlib.Path) -> dict[str, float]:
    """Measure pass@k of the last checkpoint on both tasks, then delete the checkpoints (``after`` of a sweep).

    Runs that only choose a learning rate are not measured; the result is {}.

    Returns:
        {"held-out/pass@k": rate, "gcd/pass@k": rate} for k of 1, 2, 4 to 32.
    """
    pass_rates = {}
    if is_reported(config.seed):
        configs = {"held-out": config, TASK: config_of(config)}
        for name, task_config in configs.items():
            rates = evaluate(task_config, "", str(workdir), SAMPLES)["pass_at_k"]
            for k, rate in rates.items():
                pass_rates[f"{name}/pass@{k}"] = rate
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
    return pass_rates
