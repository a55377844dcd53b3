"""Stop requests: a signal requests a stop, and the run stops at the next point where its state can be saved.

Owns: the signals that request a stop, the check at which all hosts stop. Does not know: the state that is saved.
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
    """Exception that stops a run at a point where its state can be saved."""


class StopRequest:
    """Context in which SIGTERM, SIGINT or SIGHUP requests a stop of the run.

    The handler sets ``requested`` to the name of the signal, and the run stops at its next ``check``. A SIGINT after a
    request raises KeyboardInterrupt at once, for a user who does not want to wait. If the process was started with
    SIGHUP ignored, as ``nohup`` does, SIGHUP stays ignored.

    On several hosts jax handles SIGTERM. All hosts stop at the same check, even if only one received the signal.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._checks = itertools.count(1)

    def check(self) -> None:
        """Raise ``Stopped`` if a stop was requested. Every host must call this method at the same points."""
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
        """Record the request of a signal, and raise KeyboardInterrupt at a SIGINT after an earlier request."""
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        # Do not use print, because this handler may interrupt a print. The note confirms the signal at once, while a
        # program may still run.
        note = f"\n{self.requested}: saving, then stopping (Ctrl-C again stops at once)\n"
        with contextlib.suppress(OSError):
            os.write(2, note.encode())  # standard error; in a notebook sys.stderr is not a file
        if number == signal.SIGHUP:
            _leave_terminal()
        if not hosts.is_alone():
            os.kill(os.getpid(), signal.SIGTERM)  # jax handles it and informs the other hosts


def _leave_terminal() -> None:
    """Redirect standard output and error to the null device, unless they are regular files.

    After a SIGHUP the terminal is gone. The reader of a pipe that was started from the terminal is gone too. A write to
    the terminal or the pipe would raise an error and end the run before its checkpoint.
    """
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
