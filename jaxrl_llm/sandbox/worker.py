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
memory. Tests run in a separate process (sandbox_tests.py), which is forked first. Only the process of the tests has the
file of the tests and the file of their report.

Owns: the life of one program. Does not know: the kinds of isolation (sandbox_walls.py), pools, how tests are judged.
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
BY_SIGNAL = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "disk"}
REPORT_BYTES = 2**20  # size of a report beyond the limit of the program's output
MAX_DESCRIPTORS = 4  # program, input, tests, report
END_S = 4.0  # maximum time until all processes of a killed program have ended; less than the parent waits


def main(descriptor: int, isolation: str) -> None:
    """Serve programs from the socket until it closes.

    Args:
        isolation: "namespaces"; "jail", if another program has put this process into namespaces as process 1; or
            "rlimits".
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles signals to the whole group
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills this process and not the run
    try:
        if isolation == "jail" and not (os.getpid() == 1 and os.path.ismount("/tmp")):
            raise OSError(errno.EINVAL, "jail: this is not process 1 of its namespace, or has no /tmp of its own")
        if isolation == "namespaces":
            walls.enclose()
        if isolation == "rlimits":
            with contextlib.suppress(OSError):
                walls.become_subreaper()
    except Exception as error:
        os.write(descriptor, json.dumps({"error": str(error) or type(error).__name__}).encode() + b"\n")
        os._exit(1)
    sys.executable = os.path.realpath(sys.executable)  # the virtual environment is not visible here
    sys.path[:] = [path for path in sys.path if path.startswith(os.path.dirname(os.__file__))]
    for name in MODULES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxrl_llm"]:
        del sys.modules[name]  # hide these modules from programs; this module keeps its own references
    with contextlib.suppress(OSError):
        call_filter.filter_program(0)  # cached for every program
    gc.collect()
    gc.freeze()
    line = _Lines(descriptor)
    lacks = _missing(isolation)
    os.write(descriptor, json.dumps({"ready": True, "lacks": lacks}).encode() + b"\n")
    while (request := line.next()) is not None:
        if "limits" not in request:
            continue  # a stop message that arrived after the program's end
        reply = json.dumps(_run(request["limits"], isolation, lacks, line)).encode() + b"\n"
        while reply:
            reply = reply[os.write(descriptor, reply) :]


class _Lines:
    """Lines of JSON from a socket, and the descriptors sent with them."""

    def __init__(self, descriptor: int):
        self.descriptor, self._buffer = descriptor, bytearray()
        self._socket = socket.socket(fileno=descriptor)
        self._passed: list[int] = []

    def passed(self) -> list[int]:
        """Return the descriptors that arrived since the last call."""
        passed, self._passed = self._passed, []
        return passed

    def next(self) -> dict[str, Any] | None:
        """Wait for the next message and return it, or None when the connection has closed."""
        while b"\n" not in self._buffer:
            try:
                received, descriptors, _, _ = socket.recv_fds(self._socket, 2**20, MAX_DESCRIPTORS)
                self._passed += descriptors
            except OSError:
                received = b""
            if not received:
                return None
            self._buffer += received
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        return json.loads(line)


def _run(limits: dict[str, Any], isolation: str, lacks: list[str], line: _Lines) -> dict[str, Any]:
    """Fork, watch and end one program, with the process of its tests if any. Return the reply to the parent."""
    room = int(limits["output_kb"] * 1024)
    folder = _open_folder(isolation, limits)
    os.environ.update(HOME=folder, TMPDIR=folder)
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, report
    mark = os.urandom(16).hex()  # prefix of our own reports, so that no program writes one by chance or by guessing
    program, stdin, *of_tests = line.passed()
    began = time.monotonic()
    enter = functools.partial(_wall_in, limits, isolation, lacks, folder)
    ends = list(itertools.chain(*pipes))
    tester = 0
    try:
        tester, connection = _fork_tests(of_tests, enter, [line.descriptor, program, stdin, *ends])
        _close(of_tests)  # before the program's process begins as a copy of this one
        of_tests = []
        pid = _fork_program(program, stdin, connection, enter, pipes, mark, [line.descriptor])
    except OSError as error:
        _close([program, stdin, *of_tests, *ends])
        if tester:
            os.kill(tester, signal.SIGKILL)
            os.waitpid(tester, 0)
        return {"error": f"no process starts: {error}"}
    _close([program, stdin, *(write for _, write in pipes)])
    outputs = {read: bytearray() for read, _ in pipes}
    rooms = dict(zip(outputs, (room, room, room + REPORT_BYTES), strict=True))
    reached = _watch(tester or pid, began + limits["seconds"], outputs, rooms, line)
    status = _end(pid, isolation)
    seconds = time.monotonic() - began
    _drain(outputs, rooms)
    for read in outputs:
        os.close(read)
    _clear_folder(isolation, folder)
    if reached is None:
        os._exit(0)  # the parent is gone
    out, err, report = outputs.values()
    if not reached and max(len(out), len(err)) > room:
        reached = "output"  # the rest was in the pipe when it ended
    said = _report(bytes(report), mark, is_judged=bool(tester))
    if said["failed"]:
        return {"error": said["failed"]}
    if not said["began"] and not reached:
        return {"error": "a program ended before it began"}
    return {
        "stdout": bytes(out[:room]).decode(errors="replace"),
        "stderr": bytes(err[:room]).decode(errors="replace"),
        "value": said["value"],
        "exception": "" if reached else said["exception"],
        "exit_code": status,
        "limit": reached or said["limit"] or BY_SIGNAL.get(-status, ""),
        "finished": not reached and said["finished"],
        "seconds": seconds,
    }


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _fork_tests(of_tests: list[int], enter: Callable[[], None], others: list[int]) -> tuple[int, socket.socket | None]:
    """Fork the process of the tests. Return its process id and the program's end of the connection, or 0 and None.

    Raises:
        OSError: no process starts.
    """
    if not of_tests:
        return 0, None
    own, connection = socket.socketpair()
    with own:
        pid = os.fork()
        if not pid:
            connection.close()
            _be_the_tests(*of_tests, own.detach(), enter, others)
    return pid, connection


def _fork_program(
    program: int,
    stdin: int,
    connection: socket.socket | None,
    enter: Callable[[], None],
    pipes: list[tuple[int, int]],
    mark: str,
    others: list[int],
) -> int:
    """Fork the program's process and return its process id.

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
            calls_to = connection.detach() if connection else None
            _be_the_program(program, calls_to, enter, report, [stdin, *others, *itertools.chain(*pipes)])
    return pid


def _open_folder(isolation: str, limits: dict[str, Any]) -> str:
    """Return an empty folder for a program."""
    if isolation == "namespaces":
        walls.mount_tmp(limits["disk_mb"])
    return "/tmp" if isolation == "namespaces" else tempfile.mkdtemp(prefix="jaxrl_sandbox_")


def _clear_folder(isolation: str, folder: str) -> None:
    if isolation == "namespaces":
        walls.unmount_tmp()
    elif isolation == "jail":  # programs can write only to /tmp
        with contextlib.suppress(OSError):
            os.chmod("/tmp", 0o700)  # the program may have changed the mode
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


def _watch(pid: int, deadline: float, outputs: dict[int, bytearray], rooms: dict[int, int], line: _Lines) -> str | None:
    """Read the program's output until it ends. Return the limit that it reached, "" for none, None without a parent."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (ended, line.descriptor, *outputs):
        poll.register(descriptor, select.POLLIN)
    try:
        while (left := deadline - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poll.poll(left * 1000)]
            for descriptor in ready:
                if descriptor in outputs:
                    text = os.read(descriptor, 2**16)
                    outputs[descriptor] += text
                    if not text:
                        poll.unregister(descriptor)
                    if len(outputs[descriptor]) > rooms[descriptor]:
                        return "output"
            if line.descriptor in ready:
                message = line.next()
                if message is None or "stop" in message:
                    return message and message["stop"]
            if ended in ready:
                return ""
        return "time"
    finally:
        os.close(ended)


def _end(pid: int, isolation: str) -> int:
    """Kill the program and all its processes. Return its exit status, or -n if signal n ended it."""
    status, deadline = None, time.monotonic() + END_S
    if isolation == "rlimits":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # one call for all: a fork bomb outruns a loop
        _wait(pid, 0.05)  # cheaper than a search through all processes of the machine
    while time.monotonic() < deadline:
        try:  # orphans become children of this process, so that no children means that everything has ended
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = os.waitstatus_to_exitcode(ended[1]) if ended[0] == pid else status
        except ChildProcessError:
            return -signal.SIGKILL if status is None else status
        if isolation == "rlimits":
            found: set[int] = set()  # processes that left the group; stop them first, so that they cannot fork
            while (new := set(_descendants()) - found) and time.monotonic() < deadline:
                _signal(new, signal.SIGSTOP)
                found |= new
            _signal(found, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # every process of the namespace except this one
        time.sleep(1e-4)
    os._exit(1)  # the parent starts a new worker


def _wait(pid: int, seconds: float) -> None:
    """Wait until a child has ended, without reaping it, for at most ``seconds``."""
    with contextlib.suppress(OSError), open(os.pidfd_open(pid), "rb", buffering=0) as ended:
        select.select([ended], [], [], seconds)


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def _descendants() -> list[int]:
    """Return all descendants of this process, which is a subreaper."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found = list(parents.get(os.getpid(), ()))
    for process in found:  # the list grows during the loop
        found += parents.get(process, ())
    return found


def _drain(outputs: dict[int, bytearray], rooms: dict[int, int]) -> None:
    """Read the rest of the output from the pipes of a program that has ended."""
    for descriptor, text in outputs.items():
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while len(text) <= rooms[descriptor] and (more := os.read(descriptor, 2**16)):
                text += more


def _walls(isolation: str, folder: str) -> dict[str, Callable[[], None]]:
    """Return the last isolation steps of a program's process, by the name of the thing that they block."""
    of_files = {"files": functools.partial(walls.keep_out_of_files, folder)} if isolation == "rlimits" else {}
    return of_files | {"calls": functools.partial(walls.filter_calls, is_apart=isolation != "rlimits")}


def _missing(isolation: str) -> list[str]:
    """Return the names of ``_walls`` that do not work on this machine. Each is tried in its own process."""
    missing = []
    for name, wall in _walls(isolation, "/tmp").items():
        if not (pid := os.fork()):
            try:
                walls.give_up_rights()
                wall()
            except OSError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            missing.append(name)
    return missing


def _report(text: bytes, mark: str, *, is_judged: bool) -> dict[str, Any]:
    """Read the report of the program's process. If tests judge the program (``is_judged``), only its start counts.

    Our code reports ``began`` before the program's text runs. Later lines may come from the program itself. Therefore
    lines that are not JSON objects are skipped, and a field of a wrong type keeps its default. Only a line before
    ``began`` can report that the sandbox has ``failed``.
    """
    said: dict[str, Any] = {
        "began": False,
        "failed": "",
        "finished": False,
        "exception": "",
        "limit": "",
        "value": None,
    }
    for line in text.splitlines():
        if is_judged and said["began"]:
            break
        if not line.startswith(mark.encode()):
            continue
        try:
            found = json.loads(line[len(mark) :])
        except (ValueError, RecursionError):
            continue
        if not isinstance(found, dict):
            continue
        if not said["began"]:
            said["failed"] = said["failed"] or str(found.get("failed", ""))
        for name in (said.keys() & found.keys()) - {"failed"}:
            if type(found[name]) is type(said[name]) or (name == "value" and isinstance(found[name], str)):
                said[name] = found[name]
    said["limit"] = said["limit"] if said["limit"] in tests.LIMITS else ""
    return said


# The code below runs in the process of the program, or of its tests.


class _Report:
    """Sender of reports to the watching process.

    The functions that it calls are bound at creation, so that a program which replaces ``os.write`` or ``json.dumps``
    does not replace them here. A program can still search for the mark and write to the descriptor. Reports from a
    program's process therefore cannot be trusted.
    """

    def __init__(self, descriptor: int, mark: str):
        self._descriptor, self._mark = descriptor, mark
        self._write, self._dumps = os.write, json.JSONEncoder().encode

    def __call__(self, **said) -> None:
        with contextlib.suppress(OSError):
            self._write(self._descriptor, f"\n{self._mark}{self._dumps(said)}\n".encode())


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


def _be_the_tests(file: int, report: int, connection: int, enter: Callable[[], None], inherited: list[int]) -> None:
    """Isolate this process, run the tests, write the report, and exit."""
    said: dict[str, Any] = {}
    try:
        _close(inherited)
        os.dup2(1, 2)  # stdout is /dev/null, and tests may print
        walls.hide()
        enter()
        job = json.loads(_content(file))
    except BaseException as error:
        said["failed"] = f"{type(error).__name__}: {error}"
    else:
        sys.argv = [""]
        peer = calls.Peer(connection, connection, guarded=True, has_classes=job["has_classes"])
        said = tests.judge(job, peer)
        said["value"] = said["value"] and said["value"][: job["max_value"]]
    finally:
        with contextlib.suppress(OSError, MemoryError):
            os.pwrite(report, json.dumps(said).encode(), 0)
        os._exit(0)


def _content(descriptor: int) -> bytes:
    """Return the content of a file in memory, and close the file."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _be_the_program(
    file: int, connection: int | None, enter: Callable[[], None], report: _Report, inherited: list[int]
) -> None:
    """Isolate this process, run the program, report how it ended, and exit."""
    try:
        _close(inherited)
        tempfile.tempdir = None
        enter()
        job = json.loads(_content(file))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        report(began=True)
    except BaseException as error:
        report(failed=f"{type(error).__name__}: {error}")
        os._exit(1)
    owner, status = os.getpid(), 1
    try:
        names = _become_module(job["code"], job["name"])
        if connection is None:
            said, status = _execute(job["code"], names)
            said["value"] = said["value"] and said["value"][: job["max_value"]]
        else:
            peer = calls.Peer(connection, connection, guarded=False, has_classes=job["has_classes"])
            tests.attend(job, peer, names, NAME)
            said, status = {}, 0
        if os.getpid() == owner:  # a fork of the program also reaches this line and must not report
            report(**said)
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
    builtins.exit = builtins.quit = sys.exit  # `site` is not imported and would define these
    sys.modules[name] = sys.modules["__main__"] = module
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    return vars(module)


def _execute(code: str, names: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Run the text with these names. Return the report and the exit status."""
    said: dict[str, Any] = {"finished": False, "exception": "", "value": None, "limit": ""}
    status = 0
    try:
        said["value"] = _evaluate(code, names)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        said["finished"] = True
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status = 1
        said["limit"] = tests.limit_behind(error)
        said["exception"] = tests.described(error)
        with contextlib.suppress(BaseException):
            own = error.__traceback__
            while own and own.tb_frame.f_code.co_filename != NAME:
                own = own.tb_next
            traceback.print_exception(type(error), error, own, limit=-20)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    return said, status & 0xFF


def _evaluate(code: str, names: dict[str, Any]) -> str | None:
    """Run the text. Return the repr of its last line if the line is an expression with a value, as in a notebook."""
    import ast

    show = repr  # the program may replace builtins.repr
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NAME, "exec", dont_inherit=True), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), NAME, "eval", dont_inherit=True), names)
    return None if value is None else show(value)
