"""Functions of the user's own, found by name.

Owns: import of a file or of a package's module. Does not know: what a function is for, jax (the standard library is all
that it imports: processes that score rewards must start fast and stay small).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def resolve(spec: str) -> Callable:
    """The function named by "package.module:function" or "path/to/file.py:function".

    Raises:
        ValueError: neither form. TypeError: not callable.
        Exception: whatever the import raises.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError("must be 'package.module:function' or 'path/to/file.py:function'")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        module = _import_file(path)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__}")
    return function


def _import_file(path: Path) -> ModuleType:
    """The module of a file that is on no import path; run once for all its functions."""
    name = f"user_file:{path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: dataclasses look their own module up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
