"""A run's folder without the run."""

import pathlib
from typing import Any

from jaxrl_llm.config import CheckpointConfig, freeze
from jaxrl_llm.runtime.checkpoint import Checkpointer


def save_run(
    path: pathlib.Path, model: str, *params: Any, pass_rates: tuple[float, ...] = (), **settings: Any
) -> pathlib.Path:
    """``path``, with a checkpoint of each of these parameters, from iteration 1 on, of a run with these settings."""
    checkpointer = Checkpointer(path, CheckpointConfig(keep_last=len(params)))
    config = freeze({"model": {"path": model}, **settings})
    rates = pass_rates or [None] * len(params)
    for iteration, (policy, rate) in enumerate(zip(params, rates, strict=True), 1):
        checkpointer.save(iteration, {"params": {"policy": policy}}, {}, config, pass_rate=rate)
    checkpointer.close()
    return path
