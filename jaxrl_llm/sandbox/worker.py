"""Sandbox worker: a small clean interpreter that forks for each program and reports how the program ended.

    parent (sandbox.py)                 this process                        the program
    -------------------                 ------------                        -----------
    start it, choose isolation  --->    isolate itself, import modules
                                <---    ready, and what is not enforced
    limits, descriptors         --->    fork                       --->     private /tmp, limits, no rights; run it
    stop: a total limit         --->    kill it and its processes
                                <---    printed text, how it ended, which limit

Each direction carries one line of JSON per message. When the connection closes, this process kills the running program
and ends.

The program's text, its input and its tests arrive as files in memory, whose descriptors come with the message. This
process passes the descriptors on and reads none of the files, because every later program starts as a copy of its
memory. Tests run in a separate process (program_tests.py), which is forked first. Only the process of the tests has the
file of the tests and the file of their report.

Owns: the life of one program. Does not know: the kinds of isolation (walls.py), pools, how tests are judged.
It imports the standard library only, because every program can reach the modules that this process has imported.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import functools
import gc
import importlib
import io
import itertools
import json
import linecache
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

from jaxrl_llm.sandbox import call_filter, calls, walls
from jaxrl_llm.sandbox import program_tests as tests

# Modules that programs import most often. They are imported once, before programs are forked.
MODULES = ("ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools")
MODULES += ("hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string")
MODULES += ("textwrap", "typing", "unittest", "cmath", "array", "enum", "abc", "asyncio", "subprocess", "pickle")
NAME = "<program>"
LIMITS_BY_SIGNAL: dict[int, str] = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "disk"}
REPORT_BYTES = 2**20  # size of a report beyond the limit of the program's output
MAX_DESCRIPTORS = 4  # program, input, tests, report
END_S = 4.0  # maximum time until all processes of a killed program have ended; less than the parent waits


def main(descriptor: int, isolation: str) -> None:
    """Serve programs from the socket until it closes.

    Args:
        isolation: "namespaces"; "jail", if another program has put this process into namespaces as process 1; or
            "rlimits".
    """
    # Ignore these signals, because the parent handles signals to the whole group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine's memory runs out, the kernel kills this process and not the run
    try:
        _isolate(isolation)
    except Exception as error:
        os.write(
            descriptor,
            json.dumps({"error": str(error) or type(error).__name__}).encode() + b"\n",
        )
        os._exit(1)
    # Leave out the virtual environment, because it is not visible inside the isolation.
    sys.executable = os.path.realpath(sys.executable)
    sys.path[:] = [path for path in sys.path if path.startswith(os.path.dirname(os.__file__))]
    for name in MODULES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxrl_llm"]:
        del sys.modules[name]  # hide these modules from programs; this module keeps its own references
    with contextlib.suppress(OSError):
        call_filter.filter_program(0)  # build the filter once, so that it is cached for every program
    gc.collect()
    gc.freeze()
    messages = _Messages(descriptor)
    lacks = _missing(isolation)
    os.write(descriptor, json.dumps({"ready": True, "lacks": lacks}).encode() + b"\n")
    while True:
        request = messages.next()
        if request is None:
            return
        if "limits" not in request:
            continue  # a stop message that arrived after the program's end
        reply = json.dumps(_run(request["limits"], isolation, lacks, messages)).encode() + b"\n"
        while reply:
            num_sent = os.write(descriptor, reply)
            reply = reply[num_sent:]


def _isolate(isolation: str) -> None:
    """Isolate this process before it forks programs.

    Raises:
        OSError: the system does not allow the isolation.
    """
    if isolation == "jail" and not (os.getpid() == 1 and os.path.ismount("/tmp")):
        raise OSError(
            errno.EINVAL,
            "jail: this is not process 1 of its namespace, or has no /tmp of its own",
        )
    if isolation == "namespaces":
        walls.enclose()
    if isolation == "rlimits":
        with contextlib.suppress(OSError):
            walls.become_subreaper()


class _Messages:
    """Messages from a socket, each one line of JSON, and the descriptors sent with them."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._buffer = bytearray()
        self._socket = socket.socket(fileno=descriptor)
        self._descriptors: list[int] = []

    def take_descriptors(self) -> list[int]:
        """Return the descriptors that arrived since the last call."""
        descriptors = self._descriptors
        self._descriptors = []
        return descriptors

    def next(self) -> dict[str, Any] | None:
        """Wait for the next message and return it, or None when the connection has closed."""
        while b"\n" not in self._buffer:
            try:
                received, descriptors, _, _ = socket.recv_fds(self._socket, 2**20, MAX_DESCRIPTORS)
                self._descriptors += descriptors
            except OSError:
                received = b""
            if not received:
                return None
            self._buffer += received
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        return json.loads(line)


def _run(limits: dict[str, Any], isolation: str, lacks: list[str], messages: _Messages) -> dict[str, Any]:
    """Fork, watch and end one program, with the process of its tests if any. Return the reply to the parent."""
    max_bytes = int(limits["output_kb"] * 1024)
    folder = _open_folder(isolation, limits)
    os.environ.update(HOME=folder, TMPDIR=folder)
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, report
    # Secret prefix of the reports, so that no program can write a report by chance or by guessing.
    mark = os.urandom(16).hex()
    program, stdin, *test_files = messages.take_descriptors()
    start_time = time.monotonic()
    isolate = functools.partial(_wall_in, limits, isolation, lacks, folder)
    pipe_ends = list(itertools.chain(*pipes))
    tester_pid = 0
    try:
        tester_pid, connection = _fork_tests(test_files, isolate, [messages.descriptor, program, stdin, *pipe_ends])
        _close(test_files)  # close these descriptors before the program's process begins as a copy of this process
        test_files = []
        pid = _fork_program(program, stdin, connection, isolate, pipes, mark, [messages.descriptor])
    except OSError as error:
        _close([program, stdin, *test_files, *pipe_ends])
        _kill_tests(tester_pid)
        return {"error": f"a program's process cannot start: {error}"}
    _close([program, stdin, *(write for _, write in pipes)])
    outputs = {read: bytearray() for read, _ in pipes}
    sizes = dict(zip(outputs, (max_bytes, max_bytes, max_bytes + REPORT_BYTES), strict=True))
    reached_limit = _watch(tester_pid or pid, start_time + limits["seconds"], outputs, sizes, messages)
    status = _end(pid, isolation)
    seconds = time.monotonic() - start_time
    _drain(outputs, sizes)
    for read in outputs:
        os.close(read)
    _clear_folder(isolation, folder)
    if reached_limit is None:
        os._exit(0)  # the parent has ended
    stdout, stderr, report_text = outputs.values()
    if not reached_limit and max(len(stdout), len(stderr)) > max_bytes:
        reached_limit = "output"  # the rest of the output was in the pipe when the program ended
    report = _read_report(bytes(report_text), mark, is_judged=bool(tester_pid))
    if report["failed"]:
        return {"error": report["failed"]}
    if not report["began"] and not reached_limit:
        return {"error": "a program's process ended before the program began"}
    return {
        "stdout": bytes(stdout[:max_bytes]).decode(errors="replace"),
        "stderr": bytes(stderr[:max_bytes]).decode(errors="replace"),
        "value": report["value"],
        "exception": "" if reached_limit else report["exception"],
        "exit_code": status,
        "limit": reached_limit or report["limit"] or LIMITS_BY_SIGNAL.get(-status, ""),
        "finished": not reached_limit and report["finished"],
        "seconds": seconds,
    }


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _fork_tests(
    test_files: list[int], isolate: Callable[[], None], inherited: list[int]
) -> tuple[int, socket.socket | None]:
    """Fork the process of the tests. Return its process id and the program's end of the connection, or 0 and None.

    Args:
        test_files: the descriptors of the file of the tests and of the file of their report; empty without tests.
        isolate: function that isolates the new process.
        inherited: further descriptors, which the new process closes.

    Raises:
        OSError: no process starts.
    """
    if not test_files:
        return 0, None
    tests_end, program_end = socket.socketpair()
    with tests_end:
        pid = os.fork()
        if not pid:
            program_end.close()
            file, report = test_files
            _be_the_tests(file, report, tests_end.detach(), isolate, inherited)
    return pid, program_end


def _kill_tests(pid: int) -> None:
    """Kill and reap the process of the tests. Do nothing if ``pid`` is 0, because then there is no process."""
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork_program(
    program: int,
    stdin: int,
    connection: socket.socket | None,
    isolate: Callable[[], None],
    pipes: list[tuple[int, int]],
    mark: str,
    inherited: list[int],
) -> int:
    """Fork the program's process and return its process id.

    Args:
        program, stdin: descriptors of the file of the program and of the file of its input.
        connection: connection to the process of the tests, if there is one.
        isolate: function that isolates the new process.
        pipes: pipes of stdout, stderr and the report.
        mark: prefix of the lines of the report.
        inherited: further descriptors, which the new process closes.

    Raises:
        OSError: no process starts.
    """
    with connection or contextlib.nullcontext():
        pid = os.fork()
        if not pid:
            os.dup2(stdin, 0)
            for i, (_, write) in enumerate(pipes[:2], 1):
                os.dup2(write, i)
            report = _Report(os.dup(pipes[2][1]), mark)
            to_tests = connection.detach() if connection else None
            _be_the_program(
                program,
                to_tests,
                isolate,
                report,
                [stdin, *inherited, *itertools.chain(*pipes)],
            )
    return pid


def _open_folder(isolation: str, limits: dict[str, Any]) -> str:
    """Return an empty folder for a program."""
    if isolation == "namespaces":
        walls.mount_tmp(limits["disk_mb"])
        return "/tmp"
    return tempfile.mkdtemp(prefix="jaxrl_sandbox_")


def _clear_folder(isolation: str, folder: str) -> None:
    if isolation == "namespaces":
        walls.unmount_tmp()
    elif isolation == "jail":  # programs can write only to /tmp
        with contextlib.suppress(OSError):
            os.chmod("/tmp", 0o700)  # reset the mode, because the program may have changed it
        for name in os.listdir("/tmp"):
            _remove(f"/tmp/{name}")
    else:
        _remove(folder)


def _remove(path: str) -> None:
    """Remove a file, or a folder of any depth and with any modes."""
    with contextlib.suppress(OSError):
        os.remove(path)
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)


def _watch(
    pid: int,
    deadline: float,
    outputs: dict[int, bytearray],
    sizes: dict[int, int],
    messages: _Messages,
) -> str | None:
    """Read the program's output until process ``pid`` ends or the program reaches a limit.

    Args:
        pid: the process of the tests, or of the program if there are no tests.
        outputs: bytes that the program has written, by the descriptor of the pipe. This function appends to them.
        sizes: largest number of bytes, by the descriptor of the pipe.

    Returns:
        The limit that the program reached; "" if it reached none; None if the parent has closed the connection.
    """
    process_end = os.pidfd_open(pid)  # readable when the process has ended
    poll = select.poll()
    for descriptor in (process_end, messages.descriptor, *outputs):
        poll.register(descriptor, select.POLLIN)
    try:
        while True:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return "time"
            ready = [descriptor for descriptor, _ in poll.poll(seconds_left * 1000)]
            for descriptor in ready:
                if descriptor not in outputs:
                    continue
                text = os.read(descriptor, 2**16)
                outputs[descriptor] += text
                if not text:
                    poll.unregister(descriptor)
                if len(outputs[descriptor]) > sizes[descriptor]:
                    return "output"
            if messages.descriptor in ready:
                message = messages.next()
                if message is None:
                    return None
                if "stop" in message:
                    return message["stop"]
            if process_end in ready:
                return ""
    finally:
        os.close(process_end)


def _end(pid: int, isolation: str) -> int:
    """Kill the program and all its processes. Return its exit status, or -n if signal n ended it."""
    status: int | None = None
    deadline = time.monotonic() + END_S
    if isolation == "rlimits":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # kill all processes by one call, because a fork bomb is faster than a loop
        _wait(pid, 0.05)  # this wait is cheaper than a search through all processes of the machine
    while time.monotonic() < deadline:
        try:  # orphans become children of this process, so everything has ended if it has no children
            ended_pid, wait_status = os.waitpid(-1, os.WNOHANG)
            while ended_pid:
                if ended_pid == pid:
                    status = os.waitstatus_to_exitcode(wait_status)
                ended_pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return -signal.SIGKILL if status is None else status
        if isolation == "rlimits":
            _kill_descendants(deadline)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # -1 means every process of the namespace except this one
        time.sleep(1e-4)
    os._exit(1)  # exit; the parent then starts a new worker


def _kill_descendants(deadline: float) -> None:
    """Stop the processes that left the program's group, so that they cannot fork, and then kill them."""
    stopped: set[int] = set()
    while True:
        running = set(_descendants()) - stopped
        if not running or time.monotonic() >= deadline:
            break
        _signal(running, signal.SIGSTOP)
        stopped |= running
    _signal(stopped, signal.SIGKILL)


def _wait(pid: int, seconds: float) -> None:
    """Wait until a child has ended, without reaping it, for at most ``seconds``."""
    with (
        contextlib.suppress(OSError),
        open(os.pidfd_open(pid), "rb", buffering=0) as process_end,
    ):
        select.select([process_end], [], [], seconds)


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def _descendants() -> list[int]:
    """Return all descendants of this process, which is a subreaper."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                parent = int(fields[1])
                children.setdefault(parent, []).append(int(name))
    descendants = list(children.get(os.getpid(), ()))
    for process in descendants:  # the list grows during the loop
        descendants += children.get(process, ())
    return descendants


def _drain(outputs: dict[int, bytearray], sizes: dict[int, int]) -> None:
    """Read the rest of the output from the pipes of a program that has ended."""
    for descriptor, text in outputs.items():
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while len(text) <= sizes[descriptor]:
                rest = os.read(descriptor, 2**16)
                if not rest:
                    break
                text += rest


def _walls(isolation: str, folder: str) -> dict[str, Callable[[], None]]:
    """Return the last isolation steps of a program's process, by the name of the thing that they block."""
    steps: dict[str, Callable[[], None]] = {}
    if isolation == "rlimits":
        steps["files"] = functools.partial(walls.keep_out_of_files, folder)
    steps["calls"] = functools.partial(walls.filter_calls, is_apart=isolation != "rlimits")
    return steps


def _missing(isolation: str) -> list[str]:
    """Return the names of ``_walls`` that do not work on this machine. Each is tried in its own process."""
    missing = []
    for name, wall in _walls(isolation, "/tmp").items():
        pid = os.fork()
        if not pid:
            try:
                walls.give_up_rights()
                wall()
            except OSError:
                os._exit(1)
            os._exit(0)
        _, wait_status = os.waitpid(pid, 0)
        if wait_status:
            missing.append(name)
    return missing


def _read_report(text: bytes, mark: str, *, is_judged: bool) -> dict[str, Any]:
    """Return the report of the program's process. If tests judge the program, only its start is read.

    The worker reports ``began`` before the program's text runs. Later lines may come from the program itself. Therefore
    lines that are not JSON objects are skipped, and a field of a wrong type keeps its default. Only a line before
    ``began`` can report that the sandbox has ``failed``.
    """
    report: dict[str, Any] = {
        "began": False,
        "failed": "",
        "finished": False,
        "exception": "",
        "limit": "",
        "value": None,
    }
    for line in text.splitlines():
        if is_judged and report["began"]:
            break
        if not line.startswith(mark.encode()):
            continue
        try:
            fields = json.loads(line[len(mark) :])
        except (ValueError, RecursionError):
            continue
        if not isinstance(fields, dict):
            continue
        if not report["began"]:
            report["failed"] = report["failed"] or str(fields.get("failed", ""))
        for name in (report.keys() & fields.keys()) - {"failed"}:
            has_type = type(fields[name]) is type(report[name])
            if has_type or (name == "value" and isinstance(fields[name], str)):
                report[name] = fields[name]
    if report["limit"] not in tests.LIMITS:
        report["limit"] = ""
    return report


# The code below runs in the process of the program, or of its tests.


class _Report:
    """Sender of reports to the watching process.

    The functions that it calls are bound at creation, so that a program which replaces ``os.write`` or ``json.dumps``
    does not replace them here. A program can still search for the mark and write to the descriptor. Reports from a
    program's process therefore cannot be trusted.
    """

    def __init__(self, descriptor: int, mark: str):
        self._descriptor = descriptor
        self._mark = mark
        self._write = os.write
        self._dumps = json.JSONEncoder().encode

    def __call__(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            self._write(self._descriptor, f"\n{self._mark}{self._dumps(fields)}\n".encode())


def _wall_in(limits: dict[str, Any], isolation: str, lacks: list[str], folder: str) -> None:
    """Limit this process and give up its rights. No step can be undone."""
    os.setsid()
    walls.end_with_parent()
    os.chdir(folder)
    walls.limit(limits, is_alone=isolation != "rlimits")
    walls.give_up_rights()
    for name, wall in _walls(isolation, folder).items():
        if name not in lacks:
            wall()


def _be_the_tests(
    file: int,
    report: int,
    connection: int,
    isolate: Callable[[], None],
    inherited: list[int],
) -> None:
    """Isolate this process, run the tests, write the report, and exit."""
    fields: dict[str, Any] = {}
    try:
        _close(inherited)
        os.dup2(1, 2)  # send stderr to stdout, which is /dev/null, because tests may print
        walls.hide()
        isolate()
        job = json.loads(_content(file))
    except BaseException as error:
        fields["failed"] = f"{type(error).__name__}: {error}"
    else:
        sys.argv = [""]
        peer = calls.Peer(connection, connection, guarded=True, has_classes=job["has_classes"])
        fields = tests.judge(job, peer)
        if fields["value"]:
            fields["value"] = fields["value"][: job["max_value"]]
    finally:
        with contextlib.suppress(OSError, MemoryError):
            os.pwrite(report, json.dumps(fields).encode(), 0)
        os._exit(0)


def _content(descriptor: int) -> bytes:
    """Return the content of a file in memory, and close the file."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _be_the_program(
    file: int,
    connection: int | None,
    isolate: Callable[[], None],
    report: _Report,
    inherited: list[int],
) -> None:
    """Isolate this process, run the program, report how it ended, and exit."""
    try:
        _close(inherited)
        tempfile.tempdir = None
        isolate()
        job = json.loads(_content(file))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        report(began=True)
    except BaseException as error:
        report(failed=f"{type(error).__name__}: {error}")
        os._exit(1)
    owner = os.getpid()
    status = 1
    try:
        names = _become_module(job["code"], job["name"])
        if connection is None:
            fields, status = _execute(job["code"], names)
            if fields["value"]:
                fields["value"] = fields["value"][: job["max_value"]]
        else:
            peer = calls.Peer(connection, connection, guarded=False, has_classes=job["has_classes"])
            tests.attend(job, peer, names, NAME)
            fields = {}
            status = 0
        if os.getpid() == owner:  # a fork of the program also reaches this line and must not report
            report(**fields)
    finally:
        os._exit(status)


def _become_module(code: str, name: str) -> dict[str, Any]:
    """Give this process the standard streams and the main module of the program. Return the names of the module."""
    for number, stream_name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
        stream = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        text = io.TextIOWrapper(stream, encoding="utf-8", errors="replace", line_buffering=number == 2)
        setattr(sys, stream_name, text)
        setattr(sys, f"__{stream_name}__", text)
    sys.argv = [NAME]
    module = types.ModuleType(name)
    # Define these names, because the module `site`, which is not imported, would define them.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.modules[name] = module
    sys.modules["__main__"] = module
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    return vars(module)


def _execute(code: str, names: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Run the text with these names. Return the report and the exit status."""
    report: dict[str, Any] = {
        "finished": False,
        "exception": "",
        "value": None,
        "limit": "",
    }
    status = 0
    try:
        report["value"] = _evaluate(code, names)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        report["finished"] = True
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status = 1
        report["limit"] = tests.limit_behind(error)
        report["exception"] = tests.describe(error)
        with contextlib.suppress(BaseException):
            program_frames = error.__traceback__
            while program_frames and program_frames.tb_frame.f_code.co_filename != NAME:
                program_frames = program_frames.tb_next
            traceback.print_exception(type(error), error, program_frames, limit=-20)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    return report, status & 0xFF


def _evaluate(code: str, names: dict[str, Any]) -> str | None:
    """Run the text. Return the repr of its last line if the line is an expression with a value, as in a notebook."""
    import ast

    original_repr = repr  # the program may replace builtins.repr
    tree = ast.parse(code, NAME)
    last_statement = tree.body[-1] if tree.body else None
    expression: ast.expr | None = None
    if isinstance(last_statement, ast.Expr):
        tree.body.pop()
        expression = last_statement.value
    exec(compile(tree, NAME, "exec", dont_inherit=True), names)
    if expression is None:
        return None
    value = eval(compile(ast.Expression(expression), NAME, "eval", dont_inherit=True), names)
    return None if value is None else original_repr(value)
