"""Stop requests: a signal asks, and the run stops at the next point where it can be saved.

Owns: which signals ask, at which check all hosts stop. Does not know: what is saved.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import stat
from typing import Any

from jax.experimental import multihost_utils

from jaxrl_llm.runtime import hosts


class Stopped(Exception):
    """The run stops here, and its state can be saved."""


class StopRequest:
    """A request to stop, made by SIGTERM, SIGINT or SIGHUP while this context is entered.

    The handler sets ``requested`` to the signal's name, and the run stops at its next ``check``. A SIGINT after a
    request raises KeyboardInterrupt at once, for a user who does not want to wait. A SIGHUP that the parent ignores, as
    ``nohup`` does, stays ignored.

    On several hosts jax handles SIGTERM, and all hosts stop at the same check, whichever of them was signalled.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._checks = itertools.count(1)

    def check(self) -> None:
        """Raise ``Stopped`` if the run is to stop. Every host calls it at the same points."""
        if not hosts.is_alone():
            if multihost_utils.reached_preemption_sync_point(next(self._checks)):
                self.requested = self.requested or signal.SIGTERM.name
                raise Stopped
        elif self.requested:
            raise Stopped

    def __enter__(self) -> StopRequest:
        numbers = [signal.SIGINT]
        if hosts.is_alone():
            numbers.append(signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        # Not print: a handler may interrupt one. The note shows that a signal arrived while a program still runs.
        note = f"\n{self.requested}: saving, then stopping (Ctrl-C again stops at once)\n"
        with contextlib.suppress(OSError):
            os.write(2, note.encode())  # standard error; in a notebook sys.stderr is no file
        if number == signal.SIGHUP:
            _leave_terminal()
        if not hosts.is_alone():
            os.kill(os.getpid(), signal.SIGTERM)  # jax handles it and informs the other hosts


def _leave_terminal() -> None:
    """Send standard output and error nowhere, unless they are files.

    After a SIGHUP the terminal is gone, and so is the reader of a pipe that was started from it. A write to either
    would raise and end the run before its checkpoint.
    """
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
