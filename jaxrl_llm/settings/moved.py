"""Old names of this package: modules that have moved, but that configs, users' files and recorded runs still name.

An old name works in every place that accepts the new name. It prints one note for each module and process:

- ``from jaxrl_llm.sweep.points import Sweep`` in a user's file, by an import hook.
- ``rewards.functions=("jaxrl_llm.environments.maze:steps",)`` in a config or on the command line.
- An old name in the record of a run. The run resumes with the new name, because every config is built from new names.

To move a module that users may name, add a row to ``MODULES``.

Owns: the old names. Does not know: the content of a module. This module imports only the standard library, because
importing the package imports it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

PACKAGE = "jaxrl_llm."

# Old name -> new name, both below the package.
MODULES = {
    "actor.agents": "conversations.agents",
    "actor.environment": "conversations.environment",
    "actor.tool_calls": "conversations.tool_calls",
    "algorithms.anchors": "algorithms.divergences",
    "algorithms.credit": "learner.credit",
    "algorithms.draws": "algorithms.draw_weights",
    "algorithms.views": "algorithms.inputs",
    "environments.calculator": "examples.calculator",
    "environments.chat": "runtime.chat_client",
    "environments.code_tests": "scoring.code_tests",
    "environments.dream": "examples.dream",
    "environments.experience": "examples.experience",
    "environments.maze": "examples.maze",
    "environments.retrieval": "examples.retrieval",
    "environments.sandbox": "sandbox.sandbox",
    "environments.textarena": "examples.textarena",
    "environments.wordle": "examples.wordle",
    "planning.presets": "models.presets",
    "questions.tasks.grids": "examples.grids",
    "questions.tasks.judges": "scoring.judges",
    "questions.tasks.kolmogorov": "examples.kolmogorov",
    "questions.tasks.likelihood": "scoring.likelihood",
    "questions.tasks.math_answers": "scoring.math_answers",
    "questions.tasks.maze": "examples.maze",
    "questions.tasks.scores": "scoring.scores",
    "questions.tasks.text": "examples.text",
    "runtime.functions": "settings.functions",
    "runtime.nested": "settings.schema",
    "sweep.fits": "sweeps.fits",
    "sweep.intervals": "sweeps.intervals",
    "sweep.points": "sweeps.points",
    "sweep.table": "sweeps.table",
}
# Packages that no longer exist. Their modules have moved.
PACKAGES = ("environments",)
# Data files that have moved into the package.
FILES = {"configs/programs.jsonl": "jaxrl_llm/recipes/programs.jsonl"}


@functools.cache
def _note(old: str, new: str) -> None:
    """Print that an old name is accepted, once for each name."""
    print(f"note: {old} is now {new}", file=sys.stderr)


def with_new_names(settings: Any) -> Any:
    """Return settings in which functions and files of the package have their new names.

    Args:
        settings: nested mappings and sequences of settings, or one value.
    """
    if isinstance(settings, Mapping):
        return {key: with_new_names(value) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return type(settings)(with_new_names(value) for value in settings)
    if not isinstance(settings, str):
        return settings
    if settings in FILES and not pathlib.Path(settings).exists():
        _note(settings, FILES[settings])
        return FILES[settings]
    renamed = re.sub(r"\bjaxrl_llm\.([\w.]+)(?=:\w)", _new_name, settings)
    # A text from the command line keeps the type ``Text``, which determines how it is read.
    return settings if renamed == settings else type(settings)(renamed)


def _new_name(match: re.Match[str]) -> str:
    """Return the new name of a module of the package in ``module:function``."""
    new = MODULES.get(match[1])
    if new is None:
        return match[0]
    _note(match[0], PACKAGE + new)
    return PACKAGE + new


class _OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook: the import of an old name returns the module with the new name."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        old = fullname.removeprefix(PACKAGE)
        if old == fullname or old not in (*MODULES, *PACKAGES):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=old in PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        new = MODULES.get(module.__name__.removeprefix(PACKAGE))
        if new is not None:
            _note(module.__name__, PACKAGE + new)
            # After this function, the import system returns the module from ``sys.modules``.
            sys.modules[module.__name__] = importlib.import_module(PACKAGE + new)


def accept_old_names() -> None:
    """Install the import hook as the last finder, so that the import system finds existing modules first."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
