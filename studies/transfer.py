"""What a run of the SmolLM2 study can do of a task that it never trained on, and then its checkpoint goes.

Greatest common divisors of two numbers up to 12: the same 32 questions for every run, whatever its task and its seed.
A checkpoint is 1.6 GB, so a sweep of hundreds of runs has room for one only until this has been measured.

Owns: that task. Does not know: what the run trained on.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

from jaxrl_llm.config import Config
from jaxrl_llm.evaluate import command
from jaxrl_llm.sweep.points import SEED
from studies.design import REPORTED

TASK = "gcd"
ARGUMENTS = {"min_numbers": 2, "max_numbers": 2, "max_value": 12}
MAX_TOKENS = 96  # of a question
SAMPLES = 32


def config_of(config: Config) -> Config:
    """The config of a run with the other task in place of its own."""
    prompts = dataclasses.replace(config.prompts, name=TASK, arguments=ARGUMENTS, max_tokens=MAX_TOKENS)
    return dataclasses.replace(config, prompts=prompts, seed=0)


def gcd(config: Config, workdir: pathlib.Path) -> dict[str, float]:
    """``after`` of a sweep: {"gcd/pass@k": rate} of the last checkpoint, which is then thrown away.

    Of runs that only choose a learning rate nothing is asked.
    """
    rates = {}
    if config.seed in {point[SEED] for point in REPORTED}:
        rates = command(config_of(config), "", str(workdir), SAMPLES)["pass_at_k"]
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
    return {f"{TASK}/pass@{k}": rate for k, rate in rates.items()}
