"""Where questions come from: one module per family of tasks, each as ``protocol`` says.

Owns: which module serves which ``prompts.source``. Does not know: what is in them. A module is imported when
it is asked for, so that a task's dependencies are needed by its users alone.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.questions.tasks.protocol import Loaded

TASKS = {
    "letters": "jaxrl_llm.questions.tasks.letters",
    "arithmetic": "jaxrl_llm.questions.tasks.arithmetic",
    "reasoning_gym": "jaxrl_llm.questions.tasks.reasoning_gym_task",
    "jsonl": "jaxrl_llm.questions.tasks.files",
    "parquet": "jaxrl_llm.questions.tasks.files",
}


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
    return importlib.import_module(TASKS[config.source])
