"""The process that runs reward functions, and how a function is found by name.

    parent (rewards.py)                        this process
    -------------------                        ------------
    start with the specs             ---->     import every function
    hand out calls, one at a time    <----     READY
    start the clock; mark and call   ---->     reader thread --queue--> main thread runs the function
                                     <----     the same mark, and the answer: plain numbers and text

Calls are pickled, what comes back is a line of JSON. The parent draws a mark for each call, and takes no line with
another mark for the answer. The reader thread sees the socket close when the parent is
gone, however it went, and ends the process, even one that hangs in a function, and what it has started. Functions
run in the main thread, where those that use signals work.

Owns: import and call of a function, what counts as a score, what one call leaves to the next. Does not know:
deadlines, weights, jax (the standard library is all that it imports: a worker must start fast and stay small).
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
from numbers import Complex, Real
from operator import length_hint
from pathlib import Path
from pickle import load
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.actor.text_spans import unpacked
from jaxrl_llm.runtime.functions import awaited, resolve

__builtins__ = dict(vars(builtins))  # our own: a function that takes `float` for itself must not change a score

READY = "ready"
MAX_SCORE = 1e12  # gradients grow with scores, and the sum of their squares is a float32
MAX_MESSAGE_CHARS = 300
TEXTS = (str, bytes, bytearray, memoryview)


def call(
    function: Callable, prompt: Any, columns: dict[str, Any], completions: list[str], **by_completion: list[Any]
) -> tuple[list[float | list[float] | None], list[str], list[list[list[int]]]]:
    """``function`` on the completions of one prompt, as TRL and Tunix call it.

    Returns:
        One score per completion, or of one whose ``messages`` it was given one for each turn of the policy's; None
        where there is none; a message for each reason; and the spans of each completion that the function masks.
    """
    num = len(completions)
    if "environments" in by_completion:
        by_completion["environments"] = [x and SimpleNamespace(**x) for x in by_completion["environments"]]
    try:
        returned = function(
            prompts=[deepcopy(prompt) for _ in completions],  # what is done to one is not done to others
            completions=completions,
            **{key: [deepcopy(value) for _ in completions] for key, value in columns.items()} | by_completion,
        )
        returned = awaited(returned)
        if isinstance(returned, (*TEXTS, Mapping, Set)):
            raise TypeError(f"returned {type(returned).__name__}, not a list of scores")
        values = list(islice(returned, num + 1))  # of a generator that may not end
        if len(values) != num:
            raise ValueError(f"returned {length_hint(returned, len(values))} scores for {num} completions")
    except BaseException as error:  # SystemExit too: a function that exits must not take the process along
        return [None] * num, [message(error)], [[]] * num
    scores, reasons, spans = [], [], []
    for value, said in zip(values, by_completion.get("messages", [None] * num), strict=True):
        value, masked = unpacked(value)
        spans.append(masked)
        own = [value]
        if said is not None and isinstance(value, (list, tuple)):
            own, turns = list(value), sum(message["role"] == "assistant" for message in said)
            if len(own) != turns:
                reasons.append(f"returned {len(own)} scores for {turns} turns")
                own = []
        numbers = [number(x, reasons) for x in own]
        scores.append(None if None in numbers or not own else numbers if len(own) > 1 else numbers[0])
    return scores, reasons, spans


def number(value: Any, reasons: list[str]) -> float | None:
    """What a user's function gave for a score; None, and one reason more, where it is none."""
    score, given = nan, type(value).__name__
    with contextlib.suppress(BaseException):
        # float() takes some of what is no number: "1", an array of one, numpy's complex.
        if isinstance(value, Real) or not (isinstance(value, (*TEXTS, Complex)) or getattr(value, "ndim", 0)):
            score = given = float(value)
    if abs(score) <= MAX_SCORE:  # false for NaN
        return score
    reasons.append(_line(f"returned {given} for a score"))
    return None


def main(descriptor: int, specs: list[str], call: Callable = call) -> None:
    """Serve calls ``(mark, (spec, *given, more))`` until the socket closes, by ``call(function, *given, **more)``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles signals to the whole group
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # Linux alone has it: out of memory, it kills us and not the run
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
            os._exit(0)  # a copy that the function forked and that came back from it
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(depth)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(kept[number], number)
            if getattr(getattr(sys, name), "closed", False):  # a function may have put there what has no such
                setattr(sys, name, os.fdopen(number, "rww"[number], buffering=1, closefd=False))
        print(dumps([mark, answer]), file=answers, flush=True)


def _read(descriptor: int, calls: queue.SimpleQueue) -> None:
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as reader:
            while True:
                calls.put(load(reader))
    except BaseException as error:
        if not isinstance(error, (EOFError, OSError)):  # not that the parent is gone, but a call that cannot be read
            traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)  # this process, and what it has started


def message(error: BaseException) -> str:
    """One line: type, text, and where it was raised."""
    text = "its text cannot be had"
    with contextlib.suppress(BaseException):
        text = str(error)[:MAX_MESSAGE_CHARS]
    text = _line(f"{type(error).__name__}: {text}").removesuffix(":")
    own = ("<", __file__.removesuffix("_worker.py"))  # what is frozen, this file, rewards.py
    frames = [frame for frame in traceback.extract_tb(error.__traceback__, -20) if not frame.filename.startswith(own)]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _line(text: str) -> str:
    """The beginning of a text, as one line without what a terminal obeys."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:MAX_MESSAGE_CHARS]).split())
