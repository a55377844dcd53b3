"""Worker processes that run users' functions, on the side of the run's own process.

    caller                                worker (worker_program.py)
    ------                                --------------------------
    ask: send a call            --->      run the function
    check the answer            <---      answer
    deadline passed or socket closed: kill the worker and its child processes, start another
    Printer: copy to stderr     <---      output of the function

Workers are plain subprocesses. Workers of multiprocessing would import the caller's main module, and jax with it.
Every wait for a worker has a deadline, so that a user's function cannot block the run.

Each call carries a random mark, and its answer must carry the same mark. If other code writes a line to the socket, at
most one call fails. Such a line is never used as the answer to another call.

Owns: the start and the end of a process, deadlines, the form of a message, the limit on printed output. Does not know:
what the functions compute (rewards, environment, external_sources).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from jaxrl_llm.scoring import worker_program
from jaxrl_llm.settings.functions import resolve
from jaxrl_llm.settings.schema import ConfigError
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_TIMEOUT

MAX_START_S = 300.0
MAX_ANSWER_BYTES = 2**26
MARK = "JAXRL_REWARD_WORKER"  # environment variable that identifies a worker; its child processes inherit it
MAX_PRINTER_S = 0.5  # longest time that a call waits for the output of earlier calls to be copied
MAX_PRINTED_BYTES = 2**16  # most output shown between the starts of two calls
SHOWN = bytes(x if x in b"\t\n" or x >= 32 else ord("?") for x in range(256))  # replaces control bytes by "?"


class StrayLine(Exception):
    """A worker wrote a line that is not the answer to its call."""


class NoWorker(OSError):
    """No worker process could be started."""


class Worker:
    """A worker process with its socket. A failed process is replaced. One thread at a time may use a worker.

    Args:
        specs: functions that the process imports.
        printer: receives the output of the process.
        call: "package.module:function": the function that runs the users' functions in the process (see
            ``worker_program.main``).
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    mark: str

    def __init__(self, specs: Sequence[str], printer: Printer, call: str):
        self._specs = list(specs)
        self._printer = printer
        self._call = call
        self._is_ready = False
        self._start()

    def _start(self) -> None:
        self._is_ready = False
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self.connection, worker_socket = socket.socketpair()
        with worker_socket:
            descriptor = worker_socket.fileno()
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; from {worker_program.__name__} import main; "
                f"main({descriptor}, {self._specs!r}, {self._call!r})"
            )
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._printer.descriptor,  # users' functions must not write to the run's stdout
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C in the terminal must not signal the worker
                # A function that uses jax must not take the accelerator from the run.
                env={**os.environ, "JAX_PLATFORMS": "cpu", MARK: self.mark},
            )

    def _restart(self) -> None:
        kill_workers([self])
        self.connection.close()
        self._start()

    def _replace(self) -> None:
        with contextlib.suppress(OSError):  # the next call raises NoWorker
            self._restart()

    def ready(self) -> None:
        """Wait until the process can take a call.

        A process that has died or written to the socket since the last call is replaced first.

        Raises:
            NoWorker: no process could be started.
        """
        try:
            has_died = self.process.poll() is not None
            if has_died or (self._is_ready and self._has_written()):
                self._restart()
            if not self._is_ready:
                line = self._exchange(MAX_START_S)
                if line != worker_program.READY:
                    raise NoWorker(f"no process starts: {line!s:.300}")
            self._is_ready = True
        except NoWorker:
            self._replace()
            raise
        except Exception as error:
            self._replace()
            raise NoWorker(f"no process starts: {failure_of(error)[1]}") from error

    def _has_written(self) -> bool:
        """Return whether the process has written to the socket or closed the socket."""
        self.connection.setblocking(False)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def ask(self, call: tuple[Any, ...], timeout_s: float, is_answer: Callable[[Any], bool]) -> Any:
        """Return the process's answer to a call. If the call fails, another process is started.

        Raises:
            TimeoutError: no answer within ``timeout_s``.
            StrayLine: the process wrote a line without the call's mark, or ``is_answer`` rejects the answer.
            EOFError, OSError: the process died.
        """
        mark = secrets.token_hex(16)
        payload = pickle.dumps((mark, call))
        self._printer.make_room()
        self.ready()
        try:
            line = self._exchange(timeout_s, payload)
            has_mark = isinstance(line, list) and len(line) == 2 and line[0] == mark
            if not has_mark or not is_answer(line[1]):
                raise StrayLine("its process wrote a line that does not answer the call")
            return line[1]
        except Exception:
            self._replace()
            raise

    def _exchange(self, timeout_s: float, payload: bytes = b"") -> Any:
        """Send the payload, and return the parsed line of JSON that the process writes."""
        line = bytearray()
        deadline = time.monotonic() + timeout_s
        try:
            self.connection.settimeout(timeout_s)
            self.connection.sendall(payload)
            while not line.endswith(b"\n"):
                self.connection.settimeout(max(1e-3, deadline - time.monotonic()))
                received = self.connection.recv(2**20)
                if not received:
                    raise EOFError
                line += received
                if len(line) > MAX_ANSWER_BYTES:
                    raise StrayLine(f"its process wrote more than {MAX_ANSWER_BYTES} bytes")
        except TimeoutError:
            raise TimeoutError(f"no answer after {timeout_s:.3g} s") from None
        try:
            return json.loads(line)
        except (ValueError, RecursionError):  # the text is not JSON, has two lines, or nests brackets too deep
            raise StrayLine("its process wrote a line that is not one line of JSON") from None


def failure_of(error: Exception) -> tuple[int, str]:
    """Return the outcome (OUTCOME_*) and the reason of a call that raised ``error``."""
    if isinstance(error, TimeoutError):
        return OUTCOME_TIMEOUT, str(error)
    if isinstance(error, StrayLine):
        return OUTCOME_ERROR, str(error)
    if isinstance(error, (EOFError, ConnectionError)):
        return OUTCOME_ERROR, "its process died"
    return OUTCOME_ERROR, worker_program.message(error)


def is_number(value: Any) -> bool:
    """Return whether a value of an answer is a number within the limits of a score."""
    return type(value) in (int, float) and abs(value) <= worker_program.MAX_SCORE  # this comparison is false for NaN


def kill_workers(workers: Sequence[Worker]) -> None:
    """Kill the workers' processes and all of their child processes."""
    processes = [worker.process for worker in workers]
    marks = {worker.mark for worker in workers}
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    # Child processes outside the process group. Repeat until none is left, because they may start others meanwhile.
    for _ in range(100):
        children = [child for child in psutil.process_iter(["environ"]) if _mark_of(child) in marks]
        if not children:
            break
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.01)
    for process in processes:
        process.wait()


def _mark_of(process: psutil.Process) -> str | None:
    """Return the mark of the worker that a process descends from; None if it descends from no worker."""
    environment = process.info["environ"] or {}
    return environment.get(MARK)


def close_workers(workers: Sequence[Worker], printer: Printer) -> None:
    """Kill the workers' processes, and close their sockets and their printer."""
    kill_workers(workers)
    for worker in workers:
        worker.connection.close()
    printer.close()


def import_function(spec: str, setting: str) -> Callable:
    """Import the function or class that a user's spec names.

    Args:
        setting: field and value of the setting with the spec, for the error message.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return resolve(spec)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"{setting} cannot be used: {worker_program.message(error)}") from error


# ---- output of the functions -------------------------------------------------------------------------------------


class Printer:
    """Copier of the workers' output to stderr, at most MAX_PRINTED_BYTES per call.

    Attributes:
        descriptor: file descriptor of the pipe that the workers write to.
    """

    def __init__(self) -> None:
        self._room = -1  # bytes that may still be shown; -1 drops the output of imports, which the run's process shows
        self._is_printing = False
        self._reader, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def make_room(self) -> None:
        """Wait until the output of earlier calls is copied, then allow MAX_PRINTED_BYTES for the next call."""
        deadline = time.monotonic() + MAX_PRINTER_S
        while time.monotonic() < deadline and (self._is_printing or _is_readable(self._reader, 0)):
            time.sleep(1e-3)
        self._room = MAX_PRINTED_BYTES

    def close(self) -> None:
        os.close(self.descriptor)
        self._thread.join(1.0)

    def _copy(self) -> None:
        """Copy the pipe to stderr. Also read the output beyond the limit, because a full pipe blocks the functions."""
        with open(self._reader, "rb", buffering=0) as pipe:
            while _is_readable(self._reader, None):
                self._is_printing = True
                text = pipe.read(2**16)
                if not text:
                    break
                self._show(text)
                self._is_printing = False
        self._is_printing = False

    def _show(self, text: bytes) -> None:
        if self._room < 0:
            return
        if len(text) > self._room:
            _write(text[: self._room].translate(SHOWN) + b"...\n")
            self._room = -1
        else:
            _write(text.translate(SHOWN))
            self._room -= len(text)


def print_to_stderr(text: str) -> None:
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
