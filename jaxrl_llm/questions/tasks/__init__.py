"""Where questions come from: one module per family of tasks, which has

    SCORER: str                                  # "package.module:function", or "" when the task has no scorer
    load(config: PromptsConfig, *, seed: int) -> Loaded

and its scorer has the signature of every reward function, ``reward(prompts, completions, **columns)
-> list[float]``, where each column of ``Example.columns`` arrives as a list beside the completions.

Reward workers import the scorer's module in a process of their own: nothing here, nor in a task module
outside ``load``, may import jax.

Owns: which module serves which ``prompts.source``, what it gives. Does not know: what is in them. A module is imported
when it is asked for, so that a task's dependencies are needed by its users alone.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig
    from jaxrl_llm.types import Example

# Modules of sources that have another name.
MODULES = {"reasoning_gym": "reasoning_gym_task", "jsonl": "files", "parquet": "files"}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The questions of a task, in its own order.

    Attributes:
        examples: at least one.
        bad_rows: one message ("file:line: why") for each row skipped under ``prompts.bad_row="skip"``.
        laddered: training questions -> each behind its easier versions (``Example.ladder``).
    """

    examples: tuple[Example, ...]
    bad_rows: tuple[str, ...] = ()
    laddered: Callable = tuple


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """The questions of ``config.source``.

    Raises:
        ConfigError: missing file, unreadable row, unknown dataset, missing extra, no question at all.
    """
    return _module(config).load(config, seed=seed)


def scorer(config: PromptsConfig) -> str:
    """``"package.module:function"`` of the task's own scorer; "" when it has none."""
    return _module(config).SCORER


def _module(config: PromptsConfig) -> ModuleType:
    return importlib.import_module(f"{__name__}.{MODULES.get(config.source, config.source)}")
