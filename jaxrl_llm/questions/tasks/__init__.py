"""Tasks: the sources of questions. One module per family of tasks defines

    SCORER: str                                  # "package.module:function", or "" when the task has no scorer
    load(config: PromptsConfig, *, seed: int) -> Loaded

The scorer has the signature of every reward function: ``reward(prompts, completions, **columns) -> list[float]``. Each
column of ``Example.columns`` is passed to it as a list of the same length as the completions.

Reward workers import the scorer's module in their own process. This package must therefore not import jax. A task
module may import jax only inside ``load``.

Owns: the module for each ``prompts.source``, the form of loaded questions. Does not know: the content of the tasks. A
module is imported only when its source is used, so that other runs do not need its dependencies.
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

# source -> module, for sources whose module is elsewhere or has another name. Examples are found by name, when used.
EXAMPLES = "jaxrl_llm.examples"
MODULES = {
    "reasoning_gym": f"{__name__}.reasoning_gym_task",
    "jsonl": f"{__name__}.files",
    "parquet": f"{__name__}.files",
    "kolmogorov": f"{EXAMPLES}.kolmogorov",
    "grids": f"{EXAMPLES}.grids",
    "maze": f"{EXAMPLES}.maze",
    "text": f"{EXAMPLES}.text",
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Questions of a task, in the task's own order.

    Attributes:
        examples: the questions, at least one.
        bad_rows: one message ("file:line: why") for each row skipped under ``prompts.bad_row="skip"``.
        laddered: function from the training questions to the same questions, each after its easier versions
            (``Example.ladder``).
    """

    examples: tuple[Example, ...]
    bad_rows: tuple[str, ...] = ()
    laddered: Callable = tuple


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return the questions of ``config.source``.

    Raises:
        ConfigError: missing file, unreadable row, unknown dataset, missing extra, or no question at all.
    """
    return _module(config).load(config, seed=seed)


def scorer(config: PromptsConfig) -> str:
    """Return ``"package.module:function"`` of the task's own scorer, or "" if the task has no scorer."""
    return _module(config).SCORER


def _module(config: PromptsConfig) -> ModuleType:
    return importlib.import_module(MODULES.get(config.source, f"{__name__}.{config.source}"))
