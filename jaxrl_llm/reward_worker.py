"""The process that runs reward functions, and how a function is found by name.

    parent (rewards.py)                        this process
    -------------------                        ------------
    start with the specs             ---->     import every function
    hand out calls, one at a time    <----     READY
    start the clock; the call        ---->     reader thread --queue--> main thread runs the function
                                     <----     the answer: scores and reasons, plain numbers and text

The reader thread sees the pipe close when the parent is gone, however it went, and ends the process, even
one that hangs in a function. Functions run in the main thread, where those that use signals work.

Owns: import and call of a function, and what counts as a score. Does not know: deadlines, weights, jax
(the standard library is all that it imports: a worker must start fast and stay small).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

READY = "ready"
MAX_SCORE = 3.4e38  # scores are stored as float32
MAX_MESSAGE_CHARS = 300


def resolve(spec: str) -> Callable:
    """The function named by "package.module:function" or "path/to/file.py:function".

    Raises:
        ValueError: neither form. TypeError: not callable.
        Exception: whatever the import raises.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError("must be 'task', 'math', 'package.module:function' or 'path/to/file.py:function'")
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
    name = f"reward_file:{path}"
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


def call(
    function: Callable, prompt: Any, columns: dict[str, Any], completions: list[str]
) -> tuple[list[float], list[str]]:
    """``function`` on the completions of one prompt, as TRL and Tunix call it.

    Returns:
        One score per completion, NaN where there is none, and a message for each reason.
    """
    num = len(completions)
    try:
        returned = function(
            prompts=[prompt] * num,
            completions=completions,
            **{key: [value] * num for key, value in columns.items()},
        )
        values = list(returned)
    except BaseException as error:  # SystemExit too: a function that exits must not take the process along
        return [math.nan] * num, [_message(error)]
    if len(values) != num:
        return [math.nan] * num, [f"returned {len(values)} scores for {num} completions"]
    scores, reasons = [], []
    for value in values:
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            score = float(value)
        except BaseException:
            score, reason = math.nan, f"returned {type(value).__name__} for a score"
        else:
            reason = f"returned {score} for a score"
        if abs(score) <= MAX_SCORE:  # false for NaN
            scores.append(score)
        else:
            scores.append(math.nan)
            reasons.append(reason)
    return scores, reasons


def main(descriptor: int, specs: list[str]) -> None:
    """Serve calls ``(spec, prompt, columns, completions)`` from the connection until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    os.set_inheritable(descriptor, False)  # a child of a reward function must not keep the connection open
    connection = Connection(descriptor)
    calls: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls), daemon=True).start()
    try:
        functions = {spec: resolve(spec) for spec in specs}
    except BaseException as error:
        connection.send(_message(error))
        os._exit(1)
    connection.send(READY)
    while True:
        spec, prompt, columns, completions = calls.get()
        answer = call(functions[spec], prompt, columns, completions)
        try:
            connection.send(answer)
        except OSError:  # the parent is gone
            os._exit(0)


def _read(connection: Connection, calls: queue.SimpleQueue) -> None:
    try:
        while True:
            calls.put(connection.recv())
    except (EOFError, OSError):  # the parent is gone
        os._exit(0)
    except BaseException:  # a call that cannot be read: without this thread the process would be deaf
        traceback.print_exc()
        os._exit(1)


def _message(error: BaseException) -> str:
    """One line: type, text, and where it was raised."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())[:MAX_MESSAGE_CHARS]
    files = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<")]
    return f"{text} ({Path(files[-1].filename).name}:{files[-1].lineno})" if files else text
