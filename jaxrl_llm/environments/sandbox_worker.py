"""A small clean interpreter that forks once for each program and says what became of it.

    parent (sandbox.py)                 this process                        the program
    -------------------                 ------------                        -----------
    start it, how to wall in    --->    enclose itself, import modules
                                <---    ready, and what is not enforced
    a program, its limits       --->    fork                       --->     private /tmp, limits, no rights; run it
    stop: a limit of all        --->    kill it with all it began
                                <---    what it printed, how it ended, which limit

One line of JSON each way. When the connection closes, this process kills what runs and ends.

Owns: one program's life. Does not know: which walls there are (sandbox_walls.py), pools. The standard library is all
that it imports, for what it has imported every program finds there.
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
import json
import linecache
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from jaxrl_llm.environments import sandbox_walls as walls

# Imported once, before programs are forked: what programs import most.
MODULES = ("ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools")
MODULES += ("hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string")
MODULES += ("textwrap", "typing", "unittest", "cmath", "array", "enum", "abc", "asyncio", "subprocess", "pickle")
NAME = "<program>"
BY_SIGNAL = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "disk"}
REPORT_BYTES = 2**20  # beside what a program may print
END_S = 4.0  # for all of a killed program to be gone; less than the parent waits


def main(descriptor: int, isolation: str) -> None:
    """Serve programs from the socket until it closes.

    Args:
        isolation: "namespaces"; "jail", where something else has put this process in namespaces and it is process 1;
            or "rlimits".
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles signals to the whole group
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # out of memory, the kernel kills this and not the run
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
    sys.executable = os.path.realpath(sys.executable)  # that of a virtual environment is not in here
    sys.path[:] = [path for path in sys.path if path.startswith(os.path.dirname(os.__file__))]
    for name in MODULES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxrl_llm"]:
        del sys.modules[name]  # not for programs; what is needed here is named here
    with contextlib.suppress(OSError):
        walls.filter_program(0)  # kept for every program
    gc.collect()
    gc.freeze()
    line = _Lines(descriptor)
    lacks = _missing(isolation)
    os.write(descriptor, json.dumps({"ready": True, "lacks": lacks}).encode() + b"\n")
    while (request := line.next()) is not None:
        if "code" not in request:
            continue  # a stop that came after the end
        reply = json.dumps(_run(request, isolation, lacks, line)).encode() + b"\n"
        while reply:
            reply = reply[os.write(descriptor, reply) :]


class _Lines:
    """Lines of JSON from a descriptor."""

    def __init__(self, descriptor: int):
        self.descriptor, self._buffer = descriptor, bytearray()

    def next(self) -> dict[str, Any] | None:
        """Wait for one; None when the connection has closed."""
        while b"\n" not in self._buffer:
            try:
                received = os.read(self.descriptor, 2**20)
            except OSError:
                received = b""
            if not received:
                return None
            self._buffer += received
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        return json.loads(line)


def _run(request: dict[str, Any], isolation: str, lacks: list[str], line: _Lines) -> dict[str, Any]:
    """Fork, watch and end one program."""
    limits, room = request["limits"], int(request["limits"]["output_kb"] * 1024)
    folder = _open_folder(isolation, limits)
    os.environ.update(HOME=folder, TMPDIR=folder)
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, report
    mark = os.urandom(16).hex()  # of what our own code reports, so that a program does not by chance or by guessing
    began = time.monotonic()
    try:
        pid = os.fork()
    except OSError as error:
        for pipe in pipes:
            for end in pipe:
                os.close(end)
        return {"error": f"no process starts: {error}"}
    if not pid:
        for i, (_, write) in enumerate(pipes[:2], 1):
            os.dup2(write, i)
        report = _Report(os.dup(pipes[2][1]), mark)
        _be_the_program(
            request, isolation, lacks, folder, report, [line.descriptor, *(x for pipe in pipes for x in pipe)]
        )
    for _, write in pipes:
        os.close(write)
    outputs = {read: bytearray() for read, _ in pipes}
    rooms = dict(zip(outputs, (room, room, room + REPORT_BYTES), strict=True))
    reached = _watch(pid, began + limits["seconds"], outputs, rooms, line)
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
    heard = _report(bytes(report), mark)
    if heard.get("failed"):
        return {"error": heard["failed"]}
    if "began" not in heard and not reached:
        return {"error": "a program ended before it began"}
    return {
        "stdout": bytes(out[:room]).decode(errors="replace"),
        "stderr": bytes(err[:room]).decode(errors="replace"),
        "value": heard.get("value"),
        "exception": "" if reached else heard.get("exception", ""),
        "exit_code": status,
        "limit": reached or heard.get("limit") or BY_SIGNAL.get(-status, ""),
        "finished": not reached and bool(heard.get("finished")),
        "seconds": seconds,
    }


def _open_folder(isolation: str, limits: dict[str, Any]) -> str:
    """An empty folder for a program."""
    if isolation == "namespaces":
        walls.mount_tmp(limits["disk_mb"])
    return "/tmp" if isolation == "namespaces" else tempfile.mkdtemp(prefix="jaxrl_sandbox_")


def _clear_folder(isolation: str, folder: str) -> None:
    if isolation == "namespaces":
        walls.unmount_tmp()
    elif isolation == "jail":  # all that it can have written is there
        with contextlib.suppress(OSError):
            os.chmod("/tmp", 0o700)  # whatever the program has made of it
        for name in os.listdir("/tmp"):
            _remove(f"/tmp/{name}")
    else:
        _remove(folder)


def _remove(path: str) -> None:
    """A file, or a folder of any depth and modes."""
    with contextlib.suppress(OSError):
        os.remove(path)
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)


def _watch(pid: int, deadline: float, outputs: dict[int, bytearray], rooms: dict[int, int], line: _Lines) -> str | None:
    """Read what the program prints until it ends; which limit it came to, "" for none; None: no parent."""
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
    """Kill the program with all that it started; its exit status, -number where a signal ended it."""
    status, deadline = None, time.monotonic() + END_S
    if isolation == "rlimits":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # in one call: processes that fork without end outrun a look at each
    while time.monotonic() < deadline:
        try:  # what has lost its parent is a child of this process: without children, nothing is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = os.waitstatus_to_exitcode(ended[1]) if ended[0] == pid else status
        except ChildProcessError:
            return -signal.SIGKILL if status is None else status
        if isolation == "rlimits":
            found: set[int] = set()  # has left the group; who is stopped forks no more
            while (new := set(_descendants()) - found) and time.monotonic() < deadline:
                _signal(new, signal.SIGSTOP)
                found |= new
            _signal(found, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of the namespace but this process
        time.sleep(1e-4)
    os._exit(1)  # the parent starts another


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def _descendants() -> list[int]:
    """Processes that this one, a subreaper, has as children, and theirs."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found = list(parents.get(os.getpid(), ()))
    for process in found:  # grows as it is gone through
        found += parents.get(process, ())
    return found


def _drain(outputs: dict[int, bytearray], rooms: dict[int, int]) -> None:
    """What is still in the pipes of a program that has ended."""
    for descriptor, text in outputs.items():
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while len(text) <= rooms[descriptor] and (more := os.read(descriptor, 2**16)):
                text += more


def _walls(isolation: str, folder: str) -> dict[str, Callable[[], None]]:
    """What a program's process does last, by the name of what it keeps it from."""
    of_files = {"files": functools.partial(walls.keep_out_of_files, folder)} if isolation == "rlimits" else {}
    return of_files | {"calls": functools.partial(walls.filter_calls, is_apart=isolation != "rlimits")}


def _missing(isolation: str) -> list[str]:
    """Those of ``_walls`` that cannot be had here, each tried in a process of its own."""
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


def _report(text: bytes, mark: str) -> dict[str, Any]:
    """What our own code in the process of the program said of it."""
    heard: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(mark.encode()):
            with contextlib.suppress(ValueError):
                heard |= json.loads(line[len(mark) :])
    return heard


# Below: in the process of the program.


class _Report:
    """Says to the watching process what becomes of the program."""

    def __init__(self, descriptor: int, mark: str):
        self._descriptor, self._mark = descriptor, mark

    def __call__(self, **said) -> None:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, f"\n{self._mark}{json.dumps(said)}\n".encode())


def _be_the_program(
    request: dict[str, Any], isolation: str, lacks: list[str], folder: str, report: _Report, inherited: list[int]
) -> None:
    """Wall in, run, say how it ended, exit."""
    limits = request["limits"]
    try:
        os.setsid()
        walls.end_with_parent()
        for descriptor in inherited:
            os.close(descriptor)
        _standard_input(request["stdin"])
        os.chdir(folder)
        tempfile.tempdir = None
        walls.limit(limits, is_alone=isolation != "rlimits")
        walls.give_up_rights()
        for name, wall in _walls(isolation, folder).items():
            if name not in lacks:
                wall()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        report(began=True)
    except BaseException as error:
        report(failed=f"{type(error).__name__}: {error}")
        os._exit(1)
    owner, status = os.getpid(), 1
    try:
        said, status = _execute(request["code"], request["name"])
        if os.getpid() == owner:  # not a copy that the program forked and that came to its end too
            said["value"] = said["value"] and said["value"][: int(limits["output_kb"] * 1024)]
            report(**said)
    finally:
        os._exit(status)


def _standard_input(text: str) -> None:
    """The text as descriptor 0, which needs no writer beside the program."""
    descriptor = os.memfd_create("stdin")
    view = memoryview(text.encode(errors="replace"))
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)


def _execute(code: str, name: str) -> tuple[dict[str, Any], int]:
    """Run the text as a module of that name; what is to be said of it, and its exit status."""
    for number, stream_name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
        stream = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        text = io.TextIOWrapper(stream, encoding="utf-8", errors="replace", line_buffering=number == 2)
        setattr(sys, stream_name, text)
        setattr(sys, f"__{stream_name}__", text)
    sys.argv = [NAME]
    module = types.ModuleType(name)
    builtins.exit = builtins.quit = sys.exit  # as where `site` is imported
    sys.modules[name] = sys.modules["__main__"] = module
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    said: dict[str, Any] = {"finished": False, "exception": "", "value": None, "limit": ""}
    status = 0
    try:
        said["value"] = _evaluate(code, module.__dict__)
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
        said["limit"] = _limit_behind(error)
        with contextlib.suppress(BaseException):
            said["exception"] = f"{type(error).__name__}: {str(error)[:300]}".removesuffix(": ")
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
    """Run it; the repr of its last line where that is an expression with a value, as notebooks show it."""
    import ast

    show = repr  # not what the program may put there
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NAME, "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), NAME, "eval"), names)
    return None if value is None else show(value)


def _limit_behind(error: BaseException) -> str:
    """The limit that an exception tells of, "" for none."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        found = {errno.EAGAIN: "processes", errno.ENOSPC: "disk", errno.EFBIG: "disk", errno.EDQUOT: "disk"}
        return (found | {errno.EMFILE: "open_files", errno.ENOMEM: "memory"}).get(error.errno, "")
    return "processes" if isinstance(error, RuntimeError) and "can't start new thread" in str(error) else ""
