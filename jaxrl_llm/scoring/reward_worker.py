"""The process that runs reward functions, and how a function is found by name.

    parent (rewards.py)                        this process
    -------------------                        ------------
    start with the specs             ---->     import every function
    send calls, one at a time        <----     READY
    start the clock; mark and call   ---->     reader thread --queue--> main thread runs the function
                                     <----     the same mark, and the answer: plain numbers and text

Calls are pickled. An answer is one line of JSON. The parent draws a random mark for each call, and rejects an answer
with another mark.

When the parent ends, for any reason, its socket closes. The reader thread then kills this process and its child
processes, even if a function hangs. Functions run in the main thread, because Python handles signals only there.

Owns: import and call of a function, which values are scores, the reset of process state between calls. Does not know:
deadlines, weights, jax. (A worker must start fast and stay small, so it imports only the standard library.)
"""

from __future__ import annotations

import builtins
import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Set
from copy import deepcopy
from itertools import islice
from json import dumps
from math import nan
from numbers import Complex, Integral, Real
from operator import length_hint
from pathlib import Path
from pickle import load
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.settings.functions import awaited, resolve

__builtins__ = dict(vars(builtins))  # own copy: a user function that replaces `builtins.float` must not change scores

READY = "ready"
MAX_SCORE = 1e12  # gradients grow with scores, and the sum of their squares is a float32
MAX_MESSAGE_CHARS = 300
TEXTS = (str, bytes, bytearray, memoryview)


def call(
    function: Callable, prompt: Any, columns: dict[str, Any], completions: list[str], **by_completion: list[Any]
) -> tuple[list[float | list[float] | None], list[str], list[dict[str, Any]]]:
    """Call a reward function on the completions of one prompt, with the arguments that TRL and Tunix use.

    Args:
        by_completion: further arguments with one value per completion: ``messages`` and ``environments``.

    Returns:
        (scores, error messages, columns). A score is a number, or None if the function returned no valid score. With
        ``messages``, a score may be a list with a number for each turn of the policy. The columns of each completion
        are the further values that the function returned for it, by name.
    """
    num = len(completions)
    if "environments" in by_completion:
        by_completion["environments"] = [x and SimpleNamespace(**x) for x in by_completion["environments"]]
    try:
        returned = function(
            prompts=[deepcopy(prompt) for _ in completions],  # a function may modify its arguments
            completions=completions,
            **{key: [deepcopy(value) for _ in completions] for key, value in columns.items()} | by_completion,
        )
        returned = awaited(returned)
        if isinstance(returned, (*TEXTS, Mapping, Set)):
            raise TypeError(f"returned {type(returned).__name__}, not a list of scores")
        values = list(islice(returned, num + 1))  # a generator may never end
        if len(values) != num:
            raise ValueError(f"returned {length_hint(returned, len(values))} scores for {num} completions")
    except BaseException as error:  # SystemExit too: a function must not end this process
        return [None] * num, [message(error)], [{}] * num
    scores, reasons, columns_of = [], [], []
    for value, said in zip(values, by_completion.get("messages", [None] * num), strict=True):
        value, named = unpacked(value)
        columns_of.append(named)
        own = [value]
        if said is not None and isinstance(value, (list, tuple)):
            own, turns = list(value), sum(message["role"] == "assistant" for message in said)
            if len(own) != turns:
                reasons.append(f"returned {len(own)} scores for {turns} turns")
                own = []
        numbers = [number(x, reasons) for x in own]
        scores.append(None if None in numbers or not own else numbers if len(own) > 1 else numbers[0])
    return scores, reasons, columns_of


def unpacked(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the score and the columns of one value that a reward function returned.

    A value with columns is ``{"reward": score, NAME: value, ...}``. Any other value is returned as the score, without
    columns. The caller must check whether the score is a number.
    """
    with contextlib.suppress(BaseException):  # a user's function can return any object
        if isinstance(value, Mapping) and "reward" in value and len(value) > 1:
            columns = {name: column for name, column in value.items() if name != "reward"}
            if all(isinstance(name, str) for name in columns):
                return value["reward"], {name: _plain(column) for name, column in columns.items()}
    return value, {}


def _plain(value: Any) -> Any:
    """Return a number, or a sequence of numbers or sequences, as plain JSON."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (*TEXTS, Mapping, Set)):
        raise TypeError("not a number")
    return [_plain(x) for x in value]


def number(value: Any, reasons: list[str]) -> float | None:
    """Convert a value that a user's function returned to a score. If it is invalid, append a reason and return None."""
    score, given = nan, type(value).__name__
    with contextlib.suppress(BaseException):
        # float() also accepts values that are not numbers: "1", an array of one element, numpy's complex.
        if isinstance(value, Real) or not (isinstance(value, (*TEXTS, Complex)) or getattr(value, "ndim", 0)):
            score = given = float(value)
    if abs(score) <= MAX_SCORE:  # false for NaN
        return score
    reasons.append(_line(f"returned {given} for a score"))
    return None


def main(descriptor: int, specs: list[str], call: Callable = call) -> None:
    """Serve calls ``(mark, (spec, *given, more))`` with ``call(function, *given, **more)`` until the socket closes.

    Args:
        descriptor: file descriptor of the socket to the parent.
        specs: functions to import at the start.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent ends its workers itself
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # Linux only: if memory runs out, the kernel kills this worker before the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.set_inheritable(descriptor, False)  # a child of a function must not keep the connection open
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))
    calls: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(descriptor, calls), daemon=True).start()
    process, folder, depth, kept = os.getpid(), os.getcwd(), sys.getrecursionlimit(), [os.dup(i) for i in range(3)]
    answers = os.fdopen(descriptor, "w", closefd=False)
    try:
        functions = {spec: resolve(spec) for spec in specs}
    except BaseException as error:
        return print(dumps(message(error)), file=answers, flush=True)
    print(dumps(READY), file=answers, flush=True)
    while True:
        mark, (spec, *given, more) = calls.get()
        os.chdir(folder)
        answer = call(functions[spec], *given, **more)
        if os.getpid() != process:
            os._exit(0)  # a process that the function forked, and that returned from the function
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(depth)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(kept[number], number)
            if getattr(getattr(sys, name), "closed", False):  # a function may have replaced it by any object
                setattr(sys, name, os.fdopen(number, "rww"[number], buffering=1, closefd=False))
        print(dumps([mark, answer]), file=answers, flush=True)


def _read(descriptor: int, calls: queue.SimpleQueue) -> None:
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as reader:
            while True:
                calls.put(load(reader))
    except BaseException as error:
        if not isinstance(error, (EOFError, OSError)):  # the parent is alive, but its call cannot be unpickled
            traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)  # this process and its child processes


def message(error: BaseException) -> str:
    """Return an exception as one line: its type, its text, and the file and line that raised it."""
    text = "its text cannot be had"
    with contextlib.suppress(BaseException):
        text = str(error)[:MAX_MESSAGE_CHARS]
    text = _line(f"{type(error).__name__}: {text}").removesuffix(":")
    own = ("<", __file__.removesuffix("_worker.py"))  # skip frames of frozen modules, this file and rewards.py
    frames = [frame for frame in traceback.extract_tb(error.__traceback__, -20) if not frame.filename.startswith(own)]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _line(text: str) -> str:
    """Return the beginning of a text as one line. Non-printable characters become spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:MAX_MESSAGE_CHARS]).split())
