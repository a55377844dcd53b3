"""What users' functions print in their processes: passed on to stderr, so much of each call and no more.

Owns: the pipe, its reader, what a terminal obeys and is not shown. Does not know: who prints.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

MAX_PRINTER_S = 0.5  # that a call waits for what earlier ones have printed to be passed on
MAX_PRINTED_BYTES = 2**16  # shown of what functions print from the start of one call to that of the next
SHOWN = bytes(x if x in b"\t\n" or x >= 32 else ord("?") for x in range(256))  # what no terminal obeys


class Printer:
    """Passes on what workers print, to stderr, MAX_PRINTED_BYTES of a call."""

    def __init__(self):
        self._room, self._is_printing = -1, False  # what a file prints when it is imported, the run's own process shows
        self._printed, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def make_room(self) -> None:
        """Before a call: what earlier ones have printed has their room, and this one room of its own."""
        until = time.monotonic() + MAX_PRINTER_S
        while (self._is_printing or _is_readable(self._printed, 0)) and time.monotonic() < until:
            time.sleep(1e-3)
        self._room = MAX_PRINTED_BYTES

    def close(self) -> None:
        os.close(self.descriptor)
        self._thread.join(1.0)

    def _show(self) -> None:
        """Pass on what functions print; what is too much is read as well, for a full pipe would block them."""
        with open(self._printed, "rb", buffering=0) as pipe:
            while _is_readable(self._printed, None):
                self._is_printing = True
                if not (text := pipe.read(2**16)):
                    break
                room, is_cut = max(0, self._room), 0 <= self._room < len(text)
                _write(text[:room].translate(SHOWN) + b"...\n" * is_cut)
                self._room = -1 if is_cut else self._room - (self._room >= 0) * len(text)
                self._is_printing = False
        self._is_printing = False


def say(text: str) -> None:
    """To stderr, for a second at most: a pipe that is full and that nobody reads must not hold up the run."""
    writer = threading.Thread(target=_write, args=(text.encode(errors="replace"),), daemon=True)
    writer.start()
    writer.join(1.0)


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, text)


def _is_readable(pipe: int, wait_ms: int | None) -> bool:
    """Whether there is something to read, or its end has come."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(wait_ms))
