"""Memory of a program beyond one process's own: shared, inherited, or of a process whose first thread has ended."""

import dataclasses
import fcntl
import os

import pytest

from jaxrl_llm.environments import sandbox as sandbox_module
from jaxrl_llm.environments.sandbox import ISOLATIONS, Limits, Sandbox, SandboxError

LIMITS = Limits(seconds=4.0, memory_mb=128, processes=8)


@pytest.fixture(scope="module", params=ISOLATIONS)
def sandbox(request):
    """Each isolation that this machine allows."""
    try:
        pool = Sandbox(LIMITS, isolation=request.param)
    except SandboxError as error:
        pytest.skip(str(error))
    with pool:
        yield pool


FILL = """
import ctypes, mmap, os, threading, time

def shared(megabytes):
    area = mmap.mmap(-1, megabytes * 2**20)
    for i in range(0, len(area), 4096):
        area[i] = 1
    return area

def exit_thread():
    libc = ctypes.CDLL(None)
    libc.syscall({exit_number}, 0)
"""
TOO_MUCH = {
    "shared memory of several processes": """
for _ in range(6):
    if os.fork() == 0:
        kept = shared(60)
        break
time.sleep(20)
""",
    "one process that no area of its own shows, by a fork for each": """
kept = []
for _ in range(6):
    kept.append(shared(60))
    if os.fork():
        time.sleep(20)
    kept.clear()
time.sleep(20)
""",
    "parents that have ended": """
for _ in range(4):
    if os.fork() == 0:
        kept = shared(60)
        if os.fork():
            os._exit(0)
        time.sleep(20)
time.sleep(20)
""",
    "processes whose first thread has ended": """
for _ in range(4):
    if os.fork() == 0:
        kept = shared(60)
        threading.Thread(target=time.sleep, args=(20,)).start()
        exit_thread()
time.sleep(20)
""",
    "private memory of several processes": """
for _ in range(4):
    if os.fork() == 0:
        kept = b"x" * 60 * 2**20
        break
time.sleep(20)
""",
}


@pytest.fixture(scope="module")
def exit_number():
    return {"x86_64": 60, "aarch64": 93}[os.uname().machine]


@pytest.mark.parametrize("attempt", TOO_MUCH)
def test_no_program_holds_more_than_its_limit(sandbox, exit_number, attempt):
    result = sandbox.run(FILL.format(exit_number=exit_number) + TOO_MUCH[attempt])
    assert (result.limit, result.finished) == ("memory", False), result


WITHIN = {
    "private memory": "kept = bytearray(range(256)) * 4096 * {free}\n",
    "shared memory": "kept = shared({free})\n",
    "shared memory of many processes": """
kept = shared({free})
for _ in range(6):
    if os.fork() == 0:
        sum(kept[i] for i in range(0, len(kept), 4096))
        time.sleep(0.5)
        os._exit(0)
""",
    "private memory that many processes inherit": """
kept = bytearray(range(256)) * 4096 * {free}
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
""",
    "many interpreters": """
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
""",
}


@pytest.mark.parametrize("program", WITHIN)
def test_a_program_may_hold_four_fifths_of_its_limit(sandbox, exit_number, program):
    """The limit of address space counts the interpreter too, so one process has less for itself."""
    free = int(0.8 * 256)
    code = FILL.format(exit_number=exit_number) + WITHIN[program].format(free=free) + "time.sleep(0.4)\n"
    result = sandbox.run(code, limits=dataclasses.replace(LIMITS, memory_mb=256))
    assert (result.limit, result.exception, result.finished) == ("", "", True), result


def test_threads_count_among_the_processes(sandbox):
    code = "import threading, time\nfor _ in range(24):\n    threading.Thread(target=time.sleep, args=(3,)).start()"
    result = sandbox.run(code)
    assert (result.limit, result.finished) == ("processes", False)
    few = "import threading, time\nfor _ in range(6):\n    threading.Thread(target=time.sleep, args=(0.4,)).start()"
    assert sandbox.run(few).finished


def test_the_input_of_a_program_cannot_grow(sandbox):
    for code in ("os.write(0, b'x' * 2**20)", "os.ftruncate(0, 2**20)"):
        assert sandbox.run(f"import os\n{code}", stdin="1\n").exception.startswith("PermissionError"), code


def test_a_kernel_that_does_not_share_out_pages_counts_each_in_full(monkeypatch):
    about = sandbox_module._about
    status = about(os.getpid(), "status")
    rollup = about(os.getpid(), "smaps_rollup")
    assert 0 < sandbox_module._proportional(os.getpid(), status) <= 1024 * (rollup["Pss"] + rollup["SwapPss"])
    monkeypatch.setattr(sandbox_module, "_about", lambda pid, name: {} if name == "smaps_rollup" else about(pid, name))
    assert sandbox_module._proportional(os.getpid(), status) == sandbox_module._resident(status) > 0
    assert sandbox_module._about(2**22 + 1, "status") == {}


def test_files_that_are_passed_on_are_sealed():
    with sandbox_module._file(b"text") as file:
        assert file.read() == b"text"
        with pytest.raises(PermissionError):
            os.write(file.fileno(), b"x")
    with sandbox_module._file(None) as file:
        assert not fcntl.fcntl(file, fcntl.F_GET_SEALS) and os.write(file.fileno(), b"x") == 1
