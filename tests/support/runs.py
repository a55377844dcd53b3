"""The folder of a run that never ran."""

import pathlib
from typing import Any

from jaxrl_llm.config import CheckpointConfig, freeze
from jaxrl_llm.runtime.checkpoint import Checkpointer


def save_run(
    path: pathlib.Path, model: str, *params: Any, pass_rates: tuple[float, ...] = (), **settings: Any
) -> pathlib.Path:
    """Write the folder ``path`` of a run with these settings.

    It has a checkpoint for each of these parameters, from iteration 1 on.
    """
    checkpointer = Checkpointer(path, CheckpointConfig(keep_last=len(params)))
    config = freeze({"model": {"path": model}, **settings})
    rates = pass_rates or [None] * len(params)
    for iteration, (policy, rate) in enumerate(zip(params, rates, strict=True), 1):
        checkpointer.save(iteration, {"params": {"policy": policy}}, {}, config, pass_rate=rate)
    checkpointer.close()
    return path
