"""Forwarding of the output of users' functions to stderr, with a size limit per call.

Users' functions run in worker processes. They print into a pipe, and a thread copies the pipe to stderr.

Owns: the pipe, its reader, the removal of control characters. Does not know: who prints.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

MAX_PRINTER_S = 0.5  # longest time that a call waits for the output of earlier calls to be copied
MAX_PRINTED_BYTES = 2**16  # most output shown between the starts of two calls
SHOWN = bytes(x if x in b"\t\n" or x >= 32 else ord("?") for x in range(256))  # "?" for control bytes


class Printer:
    """Copier of the workers' output to stderr, at most MAX_PRINTED_BYTES per call."""

    def __init__(self):
        self._room, self._is_printing = -1, False  # -1: drop the output of imports, which the run's own process shows
        self._printed, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def make_room(self) -> None:
        """Wait until the output of earlier calls is copied, then allow MAX_PRINTED_BYTES for the next call."""
        until = time.monotonic() + MAX_PRINTER_S
        while (self._is_printing or _is_readable(self._printed, 0)) and time.monotonic() < until:
            time.sleep(1e-3)
        self._room = MAX_PRINTED_BYTES

    def close(self) -> None:
        os.close(self.descriptor)
        self._thread.join(1.0)

    def _show(self) -> None:
        """Copy the pipe to stderr. Also read the output beyond the limit, because a full pipe blocks the functions."""
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
    """Write the text to stderr within a second at most, because a full pipe without a reader must not block the run."""
    writer = threading.Thread(target=_write, args=(text.encode(errors="replace"),), daemon=True)
    writer.start()
    writer.join(1.0)


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, text)


def _is_readable(pipe: int, wait_ms: int | None) -> bool:
    """Return whether the pipe has data to read or is at its end."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(wait_ms))
