"""Pool of interpreters that run untrusted programs in isolation, within limits, and end all their processes.

    with Sandbox(Limits(seconds=1.0), num_workers=2) as sandbox:
        result = sandbox.run("print(6 * 7)")        # result.stdout == "42\n"

Each worker is a small interpreter with the standard library (worker.py). It forks for each program, so that an
execution takes a millisecond or two. Threads may share a pool.

Owns: workers, their replacement, the limits over all processes of a program. Does not know: the purpose of programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, ClassVar

import psutil

from jaxrl_llm.sandbox import walls

MAX_START_S = 60.0
GRACE_S = 5.0  # time after the program's limit for a worker to end the program and reply
FIRST_CHECK_S = 0.1  # delay of the first check of all processes of a program
CHECK_S = 0.05  # interval of the checks
ROOT = str(pathlib.Path(__file__).parents[2])
MARK = "JAXRL_REWARD_WORKER"  # scoring/worker_processes.py finds the processes of its workers by this variable
# A fixed hash seed gives sets the same order in every worker. Threads share one malloc arena.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",
}
ISOLATIONS = ("namespaces", "bubblewrap", "rlimits")
NOT_ENFORCED = {
    "namespaces": (),
    "bubblewrap": ("disk_mb over all files together, but of each file",),
    "rlimits": (
        "secrecy of the existence, size and times of files outside the program's folder",
        "disk_mb over all files together, but of each file",
        "processes and memory over all processes together, except by 20 checks a second",
    ),
}
# Maps a protection that a worker reports as missing to a description of it, for the warning.
LACKING = {
    "files": "the protection of files outside the program's folder, and memory_mb for memory in /dev/zero and /dev/shm",
    "calls": "the filter of system calls, so that programs can open sockets and signal other processes",
}

LANDLOCK_ADVICE = ". Allow user namespaces, install bwrap, or set isolation='rlimits' to let programs reach files"


class SandboxError(Exception):
    """Error of the sandbox itself. Nothing is known about the program."""


class SandboxWarning(UserWarning):
    """Warning that a sandbox does not enforce everything. Filter this category to silence it."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resources that a program may use.

    Attributes:
        seconds: wall-clock time; processor time may be twice that, over all threads of a process.
        memory_mb: MiB of address space of each process, and of memory of all processes together.
        processes: processes and threads at once, including the program's first.
        output_kb: KiB of stdout, of stderr and of value, each.
        disk_mb: MiB of each file, and of all files together.
        open_files: file descriptors of a process.
    """

    seconds: float = 2.0
    memory_mb: int = 512
    processes: int = 16
    output_kb: int = 64
    disk_mb: int = 16
    open_files: int = 64

    MAX_PROCESSES: ClassVar[int] = 4096
    _BOUNDS = {  # noqa: RUF012
        "seconds": (0.01, 3600),
        "memory_mb": (64, 2**20),
        "processes": (1, MAX_PROCESSES),
        "output_kb": (1, 2**20),
        "disk_mb": (1, 2**20),
        "open_files": (16, 2**16),
    }

    def __post_init__(self):
        for name, (minimum, maximum) in self._BOUNDS.items():
            value = getattr(self, name)
            types = (int, float) if name == "seconds" else int
            is_number = isinstance(value, types) and not isinstance(value, bool)
            if not is_number or not minimum <= value <= maximum:
                description = "number" if name == "seconds" else "whole number"
                raise ValueError(
                    f"{name}={value!r} must be a {description} of at least {minimum} and at most {maximum}"
                )


@dataclasses.dataclass(frozen=True)
class Tests:
    """Tests of a program. They run in a process that the program cannot reach.

    Attributes:
        tests: pieces of code, run in sequence in one namespace, up to the first that raises.
        names: names under test, the only ones that the tests take from the program.
        program_setup: code that runs before the program, in its process; an exception in it is ignored.
        setup: pieces of code that run before the tests, in their process.
        has_classes: whether the question asks for classes. If True, operators of the program's objects receive their
            operand. If False, these operators fail.
        expression: code whose repr becomes ``Result.value`` after the tests, "" for none.
        traced: record which lines of the program run. A piece that raises then does not stop the others.
    """

    tests: tuple[str, ...]
    names: tuple[str, ...]
    program_setup: str = ""
    setup: tuple[str, ...] = ()
    has_classes: bool = False
    expression: str = ""
    traced: bool = False

    def of_program(self) -> dict[str, Any]:
        """Return the fields that the program's process may know."""
        return {
            "setup": self.program_setup,
            "has_classes": self.has_classes,
            "traced": self.traced,
        }


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of running a program.

    With ``Tests``, exception, value and finished belong to the tests.

    Attributes:
        stdout, stderr: printed text, cut at the limit; stderr includes a traceback.
        value: the repr of the last line, if the line is an expression and not None.
        exception: type and text of the exception, else "".
        exit_code: 0; 1 after an exception; the argument of sys.exit; -n if signal n ended it. With ``Tests`` it is -9
            if the program's process still ran when the tests ended.
        limit: "time", "cpu", "memory", "processes", "output", "disk" or "open_files" if the program reached this
            limit, else "".
        finished: whether the program ran to the end of its text, without an exception or a call of exit.
        seconds: time from the fork until all processes had ended.
        lines: numbers of the program's lines that ran, with ``Tests.traced``. The program's process reports them.
    """

    stdout: str
    stderr: str
    value: str | None
    exception: str
    exit_code: int
    limit: str
    finished: bool
    seconds: float
    lines: list[int] = dataclasses.field(default_factory=list)


class Sandbox(contextlib.AbstractContextManager):
    """Pool of ``num_workers`` interpreters that run programs.

    Args:
        isolation: the method of isolation; "" takes the first of ``ISOLATIONS`` that this machine allows.
        required: raise an error if namespaces and bubblewrap both fail. Otherwise a warning lists the limits that are
            not enforced.

    Raises:
        SandboxError: ``required`` and neither method works; ``isolation`` does not work here; no interpreter starts;
            without namespaces, a program could reach other processes, or files although ``isolation`` is "".
        ValueError: an unknown ``isolation``, fewer than one worker.
    """

    def __init__(
        self,
        limits: Limits = Limits(),
        *,
        num_workers: int = 1,
        isolation: str = "",
        required: bool = False,
    ):
        if isolation not in ("", *ISOLATIONS):
            raise ValueError(f"isolation={isolation!r} must be '' or one of {', '.join(ISOLATIONS)}")
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} must be at least 1")
        self.limits = limits
        self._closed = False
        self._workers: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        first, reasons = self._start_first_worker(isolation, required=required)
        self._workers.append(first)
        self.not_enforced = (
            *(LACKING[name] for name in first.lacks),
            *NOT_ENFORCED[self.isolation],
        )
        try:
            if self.isolation == "rlimits" or first.lacks:
                details = f" ({'; '.join(reasons)})" if reasons else ""
                message = f"The sandbox uses isolation={self.isolation!r}{details}. "
                message += f"It does not enforce: {'; '.join(self.not_enforced)}"
                warnings.warn(message, SandboxWarning, stacklevel=2)
            self._workers += [_Worker(self.isolation) for _ in range(num_workers - 1)]
        except (SandboxError, SandboxWarning):  # a filter can turn the warning into an error
            self.close()
            raise
        for worker in self._workers:
            self._free.put(worker)

    def _start_first_worker(self, isolation: str, *, required: bool) -> tuple[_Worker, list[str]]:
        """Start a worker with the first isolation that works, and set ``self.isolation``.

        Returns:
            The worker, and the reasons why earlier isolations do not work here.

        Raises:
            SandboxError: no isolation works.
        """
        reasons: list[str] = []
        for self.isolation in (isolation,) if isolation else ISOLATIONS:
            if required and self.isolation == "rlimits":
                raise _required_error(reasons or ["isolation='rlimits' excludes both"])
            try:
                worker = _Worker(self.isolation)
                is_refused = required or self._is_open(worker.lacks, is_chosen=bool(isolation))
                if not worker.lacks or not is_refused:
                    return worker, reasons
                worker.end()
                missing = "; ".join(LACKING[name] for name in worker.lacks)
                reasons.append(f"{self.isolation} does not enforce: {missing}")
            except SandboxError as error:
                reasons.append(f"{self.isolation}: {error}")
        if required:
            raise _required_error(reasons)
        advice = "" if isolation else LANDLOCK_ADVICE
        raise SandboxError("; ".join(reasons) + advice)

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        name: str = "__main__",
        limits: Limits | None = None,
        tests: Tests | None = None,
    ) -> Result:
        """Run a program in a free worker. Wait if no worker is free.

        Without ``tests`` the program's own process reports the result, so that a hostile program can report any value.
        With ``tests`` another process decides ``finished``, ``exception`` and ``value``.

        Args:
            name: the module's name (``__name__``) in the program.
            tests: tests of the program, which run in their own process.

        Raises:
            SandboxError: the sandbox failed, not the program. The next run uses a new worker.
        """
        if self._closed:
            raise SandboxError("the sandbox is closed")
        worker = self._free.get()
        try:
            return worker.run(limits or self.limits, {"code": code, "name": name}, stdin, tests)
        finally:
            self._free.put(worker)

    def _is_open(self, lacks: list[str], *, is_chosen: bool) -> bool:
        """Return whether a program could reach other processes or files, although the caller did not allow this.

        Without namespaces only the filter of system calls separates processes, so that the filter is always needed. A
        caller that chooses "rlimits" accepts that files can be read and written.
        """
        return self.isolation == "rlimits" and ("calls" in lacks or not is_chosen)

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of the workers and of their programs."""
        processes: list[psutil.Process] = []
        for worker in self._workers:
            processes += worker.processes()
        return processes

    def close(self) -> None:
        """End every worker and the programs in it."""
        self._closed = True
        for worker in self._workers:
            worker.end()

    def __exit__(self, *_) -> None:
        self.close()


def _required_error(reasons: list[str]) -> SandboxError:
    """Return the error for a caller that requires namespaces or bubblewrap, if both fail."""
    advice = "Allow user namespaces, install bwrap, or set sandbox.required=False"
    return SandboxError(f"sandbox.required=True needs namespaces or bubblewrap: {'; '.join(reasons)}. {advice}")


class _Worker:
    """Interpreter process and the socket to it. A failed process is replaced. Used by one thread at a time."""

    def __init__(self, isolation: str):
        self._isolation = isolation
        self.process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        prefix = _bubblewrap() if self._isolation == "bubblewrap" else []
        worker_isolation = "jail" if self._isolation == "bubblewrap" else self._isolation
        program = f"import sys; sys.path.append({ROOT!r}); from jaxrl_llm.sandbox.worker import main"
        python = [os.path.realpath(sys.executable), "-S", "-s", "-P", "-B", "-c"]
        environment = dict(ENVIRONMENT)
        if MARK in os.environ:
            environment[MARK] = os.environ[MARK]
        self.socket, worker_socket = socket.socketpair()
        with worker_socket:
            try:
                self.process = subprocess.Popen(
                    [
                        *prefix,
                        *python,
                        f"{program}; main({worker_socket.fileno()}, {worker_isolation!r})",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[worker_socket.fileno()],
                    start_new_session=True,
                    cwd="/",
                    env=environment,
                )
            except OSError as error:
                self.socket.close()
                raise SandboxError(f"the worker's process cannot start: {error}") from error
        try:
            self._buffer = bytearray()
            reply = self._next_message(time.monotonic() + MAX_START_S)
        except SandboxError as error:
            self.end()
            raise SandboxError(f"the worker's interpreter cannot start: {error}") from error
        if "error" in reply:
            self.end()
            raise SandboxError(reply["error"])
        self.lacks: list[str] = reply["lacks"]
        worker_pids = [process.pid for process in self.processes()]
        self._own_pids = frozenset(worker_pids)
        self.own_processes = len(worker_pids)
        self._own_memory = max((_resident(_proc_numbers(pid, "status")) for pid in worker_pids), default=0)

    def run(self, limits: Limits, program: dict[str, Any], stdin: str, tests: Tests | None) -> Result:
        if self.process is None or self.process.poll() is not None:
            self.end()
            self._start()
        max_value = {"max_value": int(limits.output_kb * 1024)}
        with contextlib.ExitStack() as stack:
            program_job = program | max_value
            if tests:
                program_job |= tests.of_program()
            texts = [json.dumps(program_job).encode(), stdin.encode(errors="replace")]
            if tests:
                num_processes = min(limits.processes + 1, Limits.MAX_PROCESSES)
                limits = dataclasses.replace(limits, processes=num_processes)
                texts.append(json.dumps(dataclasses.asdict(tests) | max_value).encode())
            files = [stack.enter_context(_file(text)) for text in texts]
            if tests:
                files.append(stack.enter_context(_file(None)))  # file for the report of the tests
            reply = self._ask(limits, [file.fileno() for file in files])
            if not tests:
                return Result(**reply)
            report = _report_of_tests(files[-1])
        if "failed" in report:
            raise SandboxError(report["failed"])
        if reply["limit"]:
            report |= {"limit": reply["limit"], "exception": "", "finished": False}
        return Result(**reply | report)

    def _ask(self, limits: Limits, descriptors: list[int]) -> dict[str, Any]:
        """Pass the descriptors to the worker and return its reply.

        Raises:
            SandboxError: the worker failed and was ended.
        """
        message = json.dumps({"limits": dataclasses.asdict(limits)}).encode() + b"\n"
        try:
            self.socket.settimeout(GRACE_S)
            socket.send_fds(self.socket, [message], descriptors)
            reply = self._next_message(time.monotonic() + limits.seconds + GRACE_S, limits)
            if "error" in reply:
                raise SandboxError(reply["error"])
            return reply
        except BaseException as error:
            self.end()
            if isinstance(error, (OSError, ValueError, TypeError)):
                raise SandboxError(f"{type(error).__name__}: {error}") from error
            raise

    def _next_message(self, deadline: float, limits: Limits | None = None) -> dict[str, Any]:
        """Return the worker's next message. With ``limits``, check the totals of the program's processes meanwhile."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        is_stopped = False
        wait_s = FIRST_CHECK_S
        while b"\n" not in self._buffer:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise SandboxError("the worker did not reply in time")
            if poll.poll(1e3 * min(seconds_left, wait_s)):
                received = self.socket.recv(2**20)
                if not received:
                    raise SandboxError("the worker's process died")
                self._buffer += received
            elif limits and not is_stopped:
                exceeded = self._exceeded_limit(limits)
                if exceeded:
                    self.socket.sendall(json.dumps({"stop": exceeded}).encode() + b"\n")
                    is_stopped = True
            wait_s = CHECK_S
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _exceeded_limit(self, limits: Limits) -> str:
        """Return the limit that the processes of the program exceed together, or "" for none."""
        pids = [process.pid for process in self.processes() if process.pid not in self._own_pids]
        statuses = {pid: _proc_numbers(pid, "status") for pid in pids}
        num_threads = sum(status.get("Threads", 1) for status in statuses.values())
        if num_threads > limits.processes:
            return "processes"
        max_memory = limits.memory_mb * 2**20
        # Read these numbers first: they are cheap, but count a shared page once per process.
        if sum(map(_resident, statuses.values())) <= max_memory:
            return ""
        # Sharing changes while the processes are read one after the other, so that the share of each process shrinks or
        # grows. The smaller of two readings never exceeds the memory that the process had between the two readings.
        first_round = {pid: _proportional(pid, status) for pid, status in statuses.items()}
        memory = 0
        for pid, first_reading in first_round.items():
            second_reading = _proportional(pid, statuses[pid])
            memory += min(first_reading, second_reading)
        # The forks of an interpreter still share its pages with the worker.
        return "memory" if memory - self._own_memory > max_memory else ""

    def processes(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        with contextlib.suppress(psutil.Error):
            worker = psutil.Process(self.process.pid)
            return [worker, *worker.children(recursive=True)]
        return []

    def end(self) -> None:
        """Kill the worker and everything that it runs."""
        if self.process is None:
            return
        processes = self.processes()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in processes:  # also kill descendants, because without namespaces a process can leave the group
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self.process = None
        self.socket.close()


@contextlib.contextmanager
def _file(content: bytes | None) -> Iterator[BinaryIO]:
    """Open a file in memory for another process to read or, if ``content`` is None, to write.

    A file with content is sealed against writing, because no memory limit counts the content of such a file.
    """
    with open(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b") as file:
        if content is not None:
            file.write(content)
            file.seek(0)
            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        yield file


def _report_of_tests(file: BinaryIO) -> dict[str, Any]:
    """Return the report of the tests' process. An empty report means that the tests did not finish."""
    file.seek(0)
    text = file.read()
    report = json.loads(text) if text else {}
    if "failed" in report:
        return report
    return {"finished": False, "exception": "", "value": None, "lines": []} | report


def _proc_numbers(pid: int, name: str) -> dict[str, int]:
    """Return the numbers in a process's file in /proc, or {} if the process has ended.

    If the first thread of a process has ended and others run, only the files of the other threads contain the memory.
    """
    numbers: dict[str, int] = {}
    for folder in itertools.chain([f"/proc/{pid}"], _threads(pid)):
        with contextlib.suppress(OSError), open(f"{folder}/{name}") as file:
            numbers = _numbers_of_lines(file)
        if "VmRSS" in numbers or "Rss" in numbers:
            break
    return numbers


def _numbers_of_lines(lines: Iterable[str]) -> dict[str, int]:
    """Return the first number of each line, by the line's first word. Lines without a number are left out."""
    numbers: dict[str, int] = {}
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[1].isdigit():
            numbers[words[0].rstrip(":")] = int(words[1])
    return numbers


def _threads(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task"))


def _resident(status: dict[str, int]) -> int:
    """Return the bytes of a process's memory that belong to no file on a disk. A shared page counts in full.

    Shared pages belong to files in memory, because a program cannot map shared memory without a file.
    """
    return 1024 * sum(status.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))


def _proportional(pid: int, status: dict[str, int]) -> int:
    """Return the same memory as ``_resident`` in bytes, but count a page that n processes share as 1/n.

    If the kernel does not report shares, each page counts in full.
    """
    rollup = _proc_numbers(pid, "smaps_rollup")
    if "Pss_Anon" not in rollup:
        return _resident(status)
    return 1024 * (rollup["Pss_Anon"] + rollup.get("Pss_Shmem", 0) + rollup.get("SwapPss", 0))


def _bubblewrap() -> list[str]:
    """Return the command line that isolates the command after it.

    Raises:
        SandboxError: bubblewrap is not installed.
    """
    executable = shutil.which("bwrap")
    if executable is None:
        raise SandboxError("bwrap is not installed")
    command = [executable, "--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += ["--tmpfs", "/dev", "--symlink", "/tmp", "/dev/shm", "--tmpfs", "/tmp"]
    package = pathlib.Path(ROOT, "jaxrl_llm")
    for path in (
        *walls.bound_paths(),
        str(package / "__init__.py"),
        str(package / "sandbox"),
    ):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            bind = "--dev-bind" if path.startswith("/dev/") else "--ro-bind"
            command += [bind, path, path]
    return [*command, "--chdir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
