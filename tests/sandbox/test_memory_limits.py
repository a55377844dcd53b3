"""Memory that a program's processes share, inherit, release in part, or hold after their first thread."""

import dataclasses
import errno
import fcntl
import os

import pytest

from jaxrl_llm.sandbox import sandbox as sandbox_module
from jaxrl_llm.sandbox.sandbox import ISOLATIONS, LACKING, NOT_ENFORCED, Limits, Sandbox, SandboxError

# The plain suite limits memory in tests/sandbox/test_sandbox.py.
pytestmark = pytest.mark.tier("sandbox")

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

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_long

def filled(megabytes, flags=PRIVATE, descriptor=-1):
    area = mmap.mmap(descriptor, megabytes * 2**20, flags=flags)
    for i in range(0, len(area), 4096):
        area[i] = 1
    return area

def exit_thread():
    libc.syscall({exit_number}, 0)
"""
TOO_MUCH = {
    "one process that no area of its own shows, by a fork for each": """
kept = []
for _ in range(6):
    kept.append(filled(60))
    if os.fork():
        time.sleep(20)
    kept.clear()
time.sleep(20)
""",
    "parents that have ended": """
for _ in range(4):
    if os.fork() == 0:
        kept = filled(60)
        if os.fork():
            os._exit(0)
        time.sleep(20)
time.sleep(20)
""",
    "processes whose first thread has ended": """
for _ in range(4):
    if os.fork() == 0:
        kept = filled(60)
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
    # Room for processes that have ended and count until they are waited for.
    limits = dataclasses.replace(LIMITS, processes=32)
    result = sandbox.run(FILL.format(exit_number=exit_number) + TOO_MUCH[attempt], limits=limits)
    assert (result.limit, result.finished) == ("memory", False), result


SHARED_WITHOUT_A_FILE = (
    "libc.mmap(None, 4096, 3, SHARED, -1, 0)",
    "libc.mmap(None, 4096, 3, SHARED | mmap.MAP_PRIVATE, -1, 0)",  # MAP_SHARED_VALIDATE
    "libc.mmap(None, 4096, 3, SHARED | 0x4000, -1, 0)",  # MAP_NORESERVE
    "libc.mmap(None, 4096, 0, SHARED, -1, 0)",  # mprotect could make it writable
)


@pytest.mark.parametrize("call", SHARED_WITHOUT_A_FILE)
def test_no_program_maps_shared_memory_without_a_file(sandbox, call):
    result = sandbox.run(FILL.format(exit_number=0) + f"({call}, ctypes.get_errno())")
    assert result.value == str((-1, errno.ENOMEM)), result
    private = call.replace("SHARED | mmap.MAP_PRIVATE", "PRIVATE").replace("SHARED", "PRIVATE")
    assert sandbox.run(FILL.format(exit_number=0) + f"{private} != -1").value == "True"


WAYS_TO_SHARE = {
    "anonymous memory": "filled(50, SHARED)",
    "/dev/zero": "filled(50, mmap.MAP_SHARED, os.open('/dev/zero', os.O_RDWR))",
    "a file in memory": "filled(50, mmap.MAP_SHARED, sized(os.memfd_create('x')))",
    "an unlinked file in /dev/shm": "filled(50, mmap.MAP_SHARED, unlinked('/dev/shm/x'))",
    "an unlinked file": "filled(50, mmap.MAP_SHARED, unlinked('x'))",
}
RELEASE_IN_PART = {
    "munmap": "libc.munmap(ctypes.c_void_p(start + 4096), ctypes.c_size_t(len(area) - 4096))",
    "MADV_DONTNEED": "area.madvise(mmap.MADV_DONTNEED, 4096)",
}
HOLD_IN_MANY = """
def sized(descriptor):
    os.ftruncate(descriptor, 50 * 2**20)
    return descriptor

def unlinked(path):
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.unlink(path)
    return sized(descriptor)

for _ in range(6):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        area = {share}
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        {release}
        print(50, flush=True)
        os.close(write)
        time.sleep(20)
    os.close(write)
    os.read(read, 1)
time.sleep(0.3)
"""


@pytest.mark.parametrize("release", RELEASE_IN_PART)
@pytest.mark.parametrize("way", WAYS_TO_SHARE)
def test_no_program_holds_shared_memory_that_it_has_released_in_part(sandbox, exit_number, way, release):
    """The kernel attributes such memory to no process, so only the size of files can be limited."""
    is_file = "unlinked" in way
    if is_file and NOT_ENFORCED["bubblewrap"][0] in sandbox.not_enforced:
        pytest.skip("not enforced: disk_mb over all files together")
    if "/dev" in way and LACKING["files"] in sandbox.not_enforced:
        pytest.skip(f"not enforced: {LACKING['files']}")
    code = HOLD_IN_MANY.format(share=WAYS_TO_SHARE[way], release=RELEASE_IN_PART[release])
    limits = dataclasses.replace(LIMITS, disk_mb=64)
    result = sandbox.run(FILL.format(exit_number=exit_number) + code, limits=limits)
    held = sum(map(int, result.stdout.split()))
    assert held <= (limits.disk_mb if is_file else 0), result


HUGE_PAGES = """
import subprocess, sys

state = "import ctypes; print(ctypes.CDLL(None).prctl(42, 0, 0, 0, 0))"  # PR_GET_THP_DISABLE
print(libc.prctl(41, 0, 0, 0, 0), ctypes.get_errno(), flush=True)  # PR_SET_THP_DISABLE
exec(state)
sys.stdout.flush()
if os.fork() == 0:
    os.execv(sys.executable, [sys.executable, "-S", "-c", state])
os.wait()
area = filled(32)
area.madvise(mmap.MADV_HUGEPAGE)
area.madvise(25)  # MADV_COLLAPSE
"""


def test_no_program_has_huge_pages(sandbox, exit_number):
    """The kernel keeps a whole huge page while a small part of it is mapped, and counts only that part."""
    result = sandbox.run(FILL.format(exit_number=exit_number) + HUGE_PAGES)
    assert result.stdout.splitlines() == [f"-1 {errno.EPERM}", "1", "1"], result
    assert result.exception == f"OSError: [Errno {errno.EINVAL}] Invalid argument"


WITHIN = {
    "private memory that is released in part": """
kept = []
for _ in range(3):
    kept.append(filled({free} // 2))
    kept[-1].resize(4096)
""",
    "private memory": "kept = bytearray(range(256)) * 4096 * {free}\n",
    "a file that many processes map": """
with open("mapped", "w+b") as file:
    file.truncate({free} // 2 * 2**20)
    kept = filled({free} // 2, mmap.MAP_SHARED, file.fileno())
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
    """The limit of address space includes the interpreter, so one process has less for itself."""
    free = int(0.8 * 256)
    code = FILL.format(exit_number=exit_number) + WITHIN[program].format(free=free) + "time.sleep(0.4)\n"
    result = sandbox.run(code, limits=dataclasses.replace(LIMITS, memory_mb=256, disk_mb=256))
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
    about = sandbox_module._proc_numbers
    status = about(os.getpid(), "status")
    rollup = about(os.getpid(), "smaps_rollup")
    assert 0 < sandbox_module._proportional(os.getpid(), status) <= 1024 * (rollup["Pss"] + rollup["SwapPss"])
    monkeypatch.setattr(
        sandbox_module, "_proc_numbers", lambda pid, name: {} if name == "smaps_rollup" else about(pid, name)
    )
    assert sandbox_module._proportional(os.getpid(), status) == sandbox_module._resident(status) > 0
    assert sandbox_module._proc_numbers(2**22 + 1, "status") == {}


def test_files_that_are_passed_on_are_sealed():
    with sandbox_module._file(b"text") as file:
        assert file.read() == b"text"
        with pytest.raises(PermissionError):
            os.write(file.fileno(), b"x")
    with sandbox_module._file(None) as file:
        assert not fcntl.fcntl(file, fcntl.F_GET_SEALS) and os.write(file.fileno(), b"x") == 1
