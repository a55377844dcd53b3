"""User functions: their import by name, and the event loop for asynchronous functions.

Owns: the import of a file or of a module of a package, the digest of that file, the event loop. Does not know: the
purpose of a function, jax. This module imports only the standard library, because processes that score rewards must
start fast and stay small.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


def resolve(spec: str) -> Callable:
    """Return the function named by "package.module:function" or "path/to/file.py:function".

    Raises:
        ValueError: the text has neither form.
        FileNotFoundError: the file does not exist.
        TypeError: the object is not callable.
        BaseException: any exception of the import.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError("must be 'package.module:function' or 'path/to/file.py:function'")
    path = Path(place).expanduser().resolve()
    if place.endswith(".py") and not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    # The import may change the working folder: restore it. The import may print, and its output must not mix with the
    # command's output.
    with contextlib.chdir("."), contextlib.redirect_stdout(sys.stderr):
        module = _import_file(path) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__}")
    return function


def named(function: Callable, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that are parameters of ``function``.

    If a decorator accepts ``**kwargs``, the parameters of the decorated function count too.
    """
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
        decorated_parameters = inspect.signature(function, follow_wrapped=True).parameters
    except ValueError:  # a C function may have no signature
        return ()
    accepted = {*parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        accepted |= {*decorated_parameters}
    return tuple(name for name in names if name in accepted)


def awaited(value: Any) -> Any:
    """Return ``value``, or its result if ``value`` is awaitable.

    All calls in the main thread share one event loop, because a connection that a function keeps open belongs to its
    loop. The loop does not run between calls. A call in another thread, such as an agent's, uses a new loop.
    """
    if not hasattr(value, "__await__"):
        return value
    if threading.current_thread() is threading.main_thread():
        return _event_loop().run(value)
    return importlib.import_module("asyncio").run(value)


@functools.cache
def _event_loop() -> Any:
    """Return the runner of the event loop of the main thread."""
    asyncio = importlib.import_module("asyncio")  # imported here, because few functions need it
    return asyncio.Runner(loop_factory=asyncio.new_event_loop)  # a function may close the loop of the thread


def digest(path: str | Path) -> str:
    """Return a short digest of the bytes of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def digests(specs: Iterable[str]) -> dict[str, str]:
    """Return ``{spec: digest of its file}`` for names as in ``resolve``.

    Functions of this package, other texts and names whose file is not found have no entry.
    """
    by_spec = {}
    for spec in specs:
        place = spec.rpartition(":")[0]
        # Ignore the error here: a later call of the missing function reports it.
        with contextlib.suppress(Exception, SystemExit):
            path = _file_of(place)
            if path is not None:
                by_spec[spec] = digest(path)
    return by_spec


def _file_of(place: str) -> Path | None:
    """Return the file of a module, named by its path or its dotted name; None for a module of this package."""
    if place.endswith(".py"):
        return Path(place).expanduser()
    if not place or place.startswith("jaxrl_llm."):
        return None
    spec = importlib.util.find_spec(place)
    return Path(spec.origin) if spec is not None and spec.origin else None


def _import_file(path: Path) -> ModuleType:
    """Return the module of a file that is not on the import path. The file is run once for all its functions."""
    name = f"user_file:{path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the module runs, because dataclasses look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
