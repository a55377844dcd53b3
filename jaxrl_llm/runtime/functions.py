"""Functions of the user's own, found by name, and waited for where they are asynchronous.

Owns: import of a file or of a package's module, which file it is, the event loop. Does not know: what a function is
for, jax (the standard library is all that it imports: processes that score rewards must start fast and stay small).
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
    """The function named by "package.module:function" or "path/to/file.py:function".

    Raises:
        ValueError: neither form. TypeError: not callable.
        BaseException: whatever the import raises.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError("must be 'package.module:function' or 'path/to/file.py:function'")
    path = Path(place).expanduser().resolve()
    if place.endswith(".py") and not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    # What it does to the working folder is undone, and what it prints is no result of the command's.
    with contextlib.chdir("."), contextlib.redirect_stdout(sys.stderr):
        module = _import_file(path) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__}")
    return function


def named(function: Callable, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the names that are arguments of a function, or of the one that a decorator passes them on to."""
    with contextlib.suppress(ValueError):  # a function in C that does not say what it takes
        own, decorated = (inspect.signature(function, follow_wrapped=x).parameters for x in (False, True))
        passes_on = any(argument.kind is argument.VAR_KEYWORD for argument in own.values())
        return tuple(x for x in names if x in own or (passes_on and x in decorated))
    return ()


def awaited(value: Any) -> Any:
    """What a user's function returned, or in the end returns where it is asynchronous.

    All calls in the main thread have one event loop, which rests between them: a connection that a function keeps
    belongs to a loop. Another thread, an agent's, has one call and a loop of its own.
    """
    if not hasattr(value, "__await__"):
        return value
    if threading.current_thread() is threading.main_thread():
        return _event_loop().run(value)
    return importlib.import_module("asyncio").run(value)


@functools.cache
def _event_loop() -> Any:
    asyncio = importlib.import_module("asyncio")  # here, for few functions need it
    return asyncio.Runner(loop_factory=asyncio.new_event_loop)  # not the thread's own, which a function may close


def digest(path: str | Path) -> str:
    """Of a file's bytes, short."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def digests(specs: Iterable[str]) -> dict[str, str]:
    """``{spec: digest of its file}`` of specs as for ``resolve``; nothing of this package's own and of other texts."""
    found = {}
    for spec in specs:
        place = spec.rpartition(":")[0]
        with contextlib.suppress(Exception, SystemExit):  # of one that is not there; whoever calls it says so
            own = place.endswith(".py") or (place and not place.startswith("jaxrl_llm."))
            path = Path(place).expanduser() if place.endswith(".py") else own and importlib.util.find_spec(place).origin
            found |= {spec: digest(path)} if own and path else {}
    return found


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
