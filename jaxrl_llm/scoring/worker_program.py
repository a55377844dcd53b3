"""The program of a worker process: it runs users' functions, one call at a time.

    parent (worker_processes.py)           this process
    ----------------------------           ------------
    start with the specs             ---->     import every function
    send calls, one at a time        <----     READY
    start the clock; mark and call   ---->     reader thread --queue--> main thread runs the function
                                     <----     the same mark, and the answer: plain numbers and text

Calls are pickled. An answer is one line of JSON. The parent draws a random mark for each call, and rejects an answer
with another mark.

When the parent ends, for any reason, its socket closes. The reader thread then kills this process and its child
processes, even if a function hangs. Functions run in the main thread, because Python handles signals only there.

Owns: the loop over calls, the reset of process state between calls, the text of an exception. Does not know: deadlines,
what a call computes, jax. (A worker must start fast and stay small, so it imports only the standard library.)
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
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from pickle import load
from typing import Any

from jaxrl_llm.settings.functions import resolve

# Keep a copy, because a user function that replaces `builtins.print` must not change answers.
__builtins__ = dict(vars(builtins))

READY = "ready"
MAX_SCORE = 1e12  # largest score, because gradients grow with scores and the sum of their squares is a float32
MAX_MESSAGE_CHARS = 300
# Standard streams by file descriptor, with the mode to reopen them.
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
# Places whose frames ``message`` leaves out: frozen modules ("<frozen runpy>"), and modules that call users' functions.
OWN_MODULES = ("rewards", "reward_worker", "worker_processes", "worker_program")
OWN_PLACES = (
    "<",
    *(str(Path(__file__).with_name(f"{name}.py")) for name in OWN_MODULES),
)


def main(descriptor: int, specs: Sequence[str], call: str) -> None:
    """Serve calls ``(mark, (spec, *arguments, keywords))`` until the socket closes.

    The answer is ``call(function, *arguments, **keywords)`` for the function that the spec names.

    Args:
        descriptor: file descriptor of the socket to the parent.
        specs: functions to import at the start.
        call: "package.module:function", the function of this package that calls users' functions.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent ends its workers
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # Linux only: if memory runs out, the kernel kills this worker before the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.set_inheritable(descriptor, False)  # a child process of a function must not inherit the connection
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(descriptor, calls), daemon=True).start()
    process = os.getpid()
    folder = os.getcwd()
    recursion_limit = sys.getrecursionlimit()
    stream_copies = [os.dup(number) for number in range(len(STREAMS))]
    answers = os.fdopen(descriptor, "w", closefd=False)
    try:
        answer_of = resolve(call)
        functions = {spec: resolve(spec) for spec in specs}
    except BaseException as error:
        print(dumps(message(error)), file=answers, flush=True)
        return
    print(dumps(READY), file=answers, flush=True)
    while True:
        mark, (spec, *arguments, keywords) = calls.get()
        os.chdir(folder)
        answer = answer_of(functions[spec], *arguments, **keywords)
        if os.getpid() != process:
            os._exit(0)  # this process was forked by the function and returned from it
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(recursion_limit)
        _restore_streams(stream_copies)
        print(dumps([mark, answer]), file=answers, flush=True)


def _restore_streams(copies: Sequence[int]) -> None:
    """Restore stdin, stdout and stderr, which a function may have closed or replaced."""
    for number, (name, mode) in enumerate(STREAMS):
        os.dup2(copies[number], number)
        if getattr(getattr(sys, name), "closed", False):  # a function may have replaced the stream by any object
            setattr(sys, name, os.fdopen(number, mode, buffering=1, closefd=False))


def _read_calls(descriptor: int, calls: queue.SimpleQueue[Any]) -> None:
    """Put the calls of the parent into the queue. When the parent ends, kill this process and its child processes."""
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as reader:
            while True:
                calls.put(load(reader))
    except BaseException as error:
        if not isinstance(error, (EOFError, OSError)):  # the parent is alive, but its call cannot be unpickled
            traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)


def message(error: BaseException) -> str:
    """Return an exception as one line: its type, its text, and the file and line that raised it."""
    text = "its text cannot be read"
    with contextlib.suppress(BaseException):
        text = str(error)[:MAX_MESSAGE_CHARS]
    line = one_line(f"{type(error).__name__}: {text}").removesuffix(":")
    frames = traceback.extract_tb(error.__traceback__, -20)
    user_frames = [frame for frame in frames if not frame.filename.startswith(OWN_PLACES)]
    if not user_frames:
        return line
    return f"{line} ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})"


def one_line(text: str) -> str:
    """Return the beginning of a text as one line. Non-printable characters become spaces."""
    characters = [c if c.isprintable() else " " for c in text[:MAX_MESSAGE_CHARS]]
    return " ".join("".join(characters).split())
