"""What a run of the SmolLM2 study got, on its own task and on one that it never trained on; then its checkpoint goes.

The other task is greatest common divisors of two numbers up to 12, with the same 32 questions for every run, whatever
its task and its seed. A checkpoint is 1.6 GB, so a sweep of hundreds of runs has room for one only until this has been
measured.

Owns: the other task. Does not know: the run's own.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

from jaxrl_llm.config import Config
from jaxrl_llm.evaluate import command
from studies.design import is_reported

TASK = "gcd"
ARGUMENTS = {"min_numbers": 2, "max_numbers": 2, "max_value": 12}
MAX_TOKENS = 96  # of a question
SAMPLES = 32


def config_of(config: Config) -> Config:
    """The config of a run with the other task in place of its own."""
    prompts = dataclasses.replace(config.prompts, name=TASK, arguments=ARGUMENTS, max_tokens=MAX_TOKENS)
    return dataclasses.replace(config, prompts=prompts, seed=0)


def measure(config: Config, workdir: pathlib.Path) -> dict[str, float]:
    """``after`` of a sweep: pass@k of the last checkpoint on both tasks; then the checkpoint is thrown away.

    Of runs that only choose a learning rate nothing is asked.

    Returns:
        {"held-out/pass@k": rate, "gcd/pass@k": rate} for k of 1, 2, 4 to 32.
    """
    found = {}
    if is_reported(config.seed):
        for name, asked in (("held-out", config), (TASK, config_of(config))):
            rates = command(asked, "", str(workdir), SAMPLES)["pass_at_k"]
            found |= {f"{name}/pass@{k}": rate for k, rate in rates.items()}
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
    return found
