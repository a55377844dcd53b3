"""Stop requests: a signal asks, and the run stops where it can be saved.

Owns: which signals ask, at which check all hosts stop. Does not know: what is saved.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from jax.experimental import multihost_utils

from jaxrl_llm.runtime import hosts


class Stopped(Exception):
    """The run is to stop here; what it is made of can be saved."""


class StopRequest:
    """While entered, SIGTERM and SIGINT set ``requested`` to the signal's name; the run stops where it next ``check``s.

    A SIGINT after a request raises KeyboardInterrupt at once: for a user who does not want to wait. On several hosts
    jax hears SIGTERM, and all come to stop at the same check, whichever of them was told to.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._checks = itertools.count(1)

    def check(self) -> None:
        """Raise ``Stopped`` where the run is to stop. Every host calls it at the same points."""
        if not hosts.is_alone():
            if multihost_utils.reached_preemption_sync_point(next(self._checks)):
                self.requested = self.requested or signal.SIGTERM.name
                raise Stopped
        elif self.requested:
            raise Stopped

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT) if hosts.is_alone() else (signal.SIGINT,):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        # Not print: a handler may interrupt one. Says that Ctrl-C was heard while a program runs on.
        note = f"\n{self.requested}: saving, then stopping (Ctrl-C again stops at once)\n"
        os.write(2, note.encode())  # standard error; in a notebook sys.stderr is no file
        if not hosts.is_alone():
            os.kill(os.getpid(), signal.SIGTERM)  # what jax hears, and tells the other hosts
