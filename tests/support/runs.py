"""A run's folder without the run."""

import pathlib
from typing import Any

from jaxrl_llm.config import CheckpointConfig, freeze
from jaxrl_llm.runtime.checkpoint import Checkpointer


def save_run(path: pathlib.Path, model: str, *params: Any, **settings: Any) -> pathlib.Path:
    """``path``, with a checkpoint of each of these parameters, from iteration 1 on, of a run with these settings."""
    checkpointer = Checkpointer(path, CheckpointConfig(keep_last=len(params)))
    config = freeze({"model": {"path": model}, **settings})
    for iteration, policy in enumerate(params, 1):
        checkpointer.save(iteration, {"params": {"policy": policy}}, {}, config, pass_rate=None)
    checkpointer.close()
    return path
