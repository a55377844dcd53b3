"""The sandbox against programs that try to escape, survive or take all resources.

All attempts are bounded, in case a protection fails: at most 128 processes, 2 GiB and a minute.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support import sandboxes
from support.refusal import check_refusal, raises_with, refused
from support.sandboxes import LIMITS
from support.tiers import mostly_in

from jaxrl_llm.sandbox import sandbox as sandbox_module
from jaxrl_llm.sandbox.sandbox import ISOLATIONS, LACKING, Limits, Sandbox, SandboxError, SandboxWarning
from jaxrl_llm.scoring import worker_processes

SHORT = dataclasses.replace(LIMITS, seconds=0.4)


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory):
    """A folder for the folders of programs alone. The shared pools are closed after the tests of this module."""
    folder = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sandbox_module.ENVIRONMENT, "TMPDIR", str(folder))
        yield folder
    sandboxes.close_pools()


@pytest.fixture(params=ISOLATIONS)
def sandbox(request):
    """Each isolation that this machine allows. After the test it runs programs, and no process of a program is left."""
    pool = sandboxes.shared_pool(request.param)
    yield pool
    assert pool.run("print(6 * 7)").stdout == "42\n"
    worker = pool._workers[0]
    assert len(worker.processes()) == worker.own_processes


@pytest.fixture
def walled(sandbox):
    """A sandbox that keeps files out of reach."""
    if LACKING["files"] in sandbox.not_enforced:
        pytest.skip(f"not enforced: {sandbox.not_enforced[0]}")
    return sandbox


def test_a_program_prints_has_a_value_and_says_how_it_ended(sandbox):
    result = sandbox.run("import sys\nprint(input() + '!')\nprint('hm', file=sys.stderr)\nsum(range(5))", stdin="hello")
    assert (result.stdout, result.stderr, result.value) == ("hello!\n", "hm\n", "10")
    assert (result.exit_code, result.exception, result.limit, result.finished) == (0, "", "", True)
    assert 0 < result.seconds < LIMITS.seconds
    raised = sandbox.run("def f():\n    return 1 // 0\nf()")
    assert (raised.exit_code, raised.finished, raised.value) == (1, False, None)
    assert raised.exception == "ZeroDivisionError: integer division or modulo by zero"
    assert 'File "<program>", line 2, in f\n    return 1 // 0' in raised.stderr
    assert "sandbox/worker" not in raised.stderr
    assert sandbox.run("if:").exception.startswith("SyntaxError: invalid syntax")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os\nif os.fork(): os._exit(0)", 0),
        ("import os; os._exit(0)", 0),
        ("exit()", 0),
        ("import os; os.abort()", None),
    ],
)
def test_who_leaves_early_has_not_finished(sandbox, code, status):
    result = sandbox.run(code)
    assert not result.finished
    assert result.exit_code == status or (status is None and result.exit_code < 0)


def test_a_program_finds_nothing_of_the_one_before_it(sandbox):
    first = "for name in ('left', '.left'):\n    open(name, 'w').write('x')\n"
    assert sandbox.run(first + "import math, builtins\nmath.pi = 3\nbuiltins.left = 1").finished
    then = sandbox.run("import os, math, builtins\n(os.listdir(), round(math.pi, 2), hasattr(builtins, 'left'))")
    assert then.value == "([], 3.14, False)"


def test_a_program_leaves_no_file_anywhere(walled):
    first = walled.run("open('/tmp/left', 'w').write('x')\nimport os\nos.makedirs('/tmp/a/b')")
    if walled.isolation == "rlimits":  # whose /tmp is everybody's
        assert first.exception.startswith("PermissionError")
        return
    assert "left" not in (listed := walled.run("import os\nos.listdir('/tmp')").value) and "'a'" not in listed


@pytest.mark.tier("sandbox")
def test_a_folder_too_deep_to_be_walked_is_removed(sandbox, temporary):
    assert sandbox.run("import os\nfor _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')").finished
    assert sandbox.run("import os\nos.listdir()").value == "[]"
    assert not list(temporary.glob("jaxrl_sandbox_*/d/d"))


def test_programs_see_no_module_of_ours_and_one_order_of_sets(sandbox):
    code = "import sys\n(any('jaxrl' in x or x == 'numpy' for x in sys.modules), str({'a', 'b', 'c', 'd'}))"
    both = [sandbox.run(code).value for _ in range(2)]
    assert both[0] == both[1] and both[0].startswith("(False")


def test_other_commands_and_threads_run_within(sandbox):
    code = "import subprocess, sys, threading\nt = threading.Thread(target=print, args=('late',))\nt.start()\n"
    code += "subprocess.run([sys.executable, '-S', '-c', 'print(1 + 1)'], capture_output=True, text=True).stdout"
    result = sandbox.run(code)
    assert (result.stdout, result.value) == ("late\n", "'2\\n'"), result
    code = "import asyncio\nasync def f():\n    await asyncio.sleep(0.001)\n    return 3\nasyncio.run(f())"
    assert sandbox.run(code).value == "3"


def test_files_outside_cannot_be_read(walled, tmp_path):
    (tmp_path / "secret").write_text("42")
    for path in (tmp_path / "secret", __file__, "/etc/passwd", "/proc/1/environ", "/proc/self/mem", "/dev/mem"):
        result = walled.run(f"print(open({str(path)!r}).read())")
        assert (result.stdout, result.finished) == ("", False)
        assert result.exception.startswith(("FileNotFoundError", "PermissionError")), (path, result)
    if walled.isolation == "rlimits":
        assert walled.run("import os\nos.listdir('/')").exception.startswith("PermissionError")
    else:
        seen = eval(walled.run("import os\nos.listdir('/')").value)
        assert not {"work", "proc", "sys", "var", "opt", "mnt", "srv", "home"} & set(seen)


def test_files_outside_cannot_be_written(walled, tmp_path):
    python = os.path.realpath(os.path.dirname(os.__file__))
    for folder in (str(tmp_path), "/", "/usr/lib", "/dev", "/etc", python):
        result = walled.run(f"open({folder + '/made'!r}, 'w').write('x')")
        assert result.exception.startswith(("FileNotFoundError", "PermissionError", "OSError: [Errno 30]")), result
        assert not os.path.exists(folder + "/made")
    for call in ("remove({})", "chmod({}, 0)", "utime({})", "rename({}, 'x')", "truncate({}, 0)", "link({}, 'x')"):
        result = walled.run(f"import os\nos.{call.format(repr(python + '/this.py'))}")
        assert result.exception.startswith(("PermissionError", "OSError: [Errno 30]", "OSError: [Errno 18]")), result
    assert os.path.getsize(python + "/this.py")


def test_no_socket_is_opened(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1).send(b'x')"
        assert sandbox.run(code).exception == "PermissionError: [Errno 1] Operation not permitted"
        with pytest.raises(BlockingIOError):
            server.accept()
    for family in ("AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK"):
        result = sandbox.run(f"import socket\nsocket.socket(socket.{family})")
        assert result.exception.startswith("PermissionError"), family


def test_no_process_outside_can_be_signalled(sandbox):
    parents = [os.getpid(), *(process.pid for process in psutil.Process().parents()), 1]
    for pid in [*parents, "os.getppid()"]:
        result = sandbox.run(f"import os\nos.kill({pid}, {0 if pid != 'os.getppid()' else 9})\nprint('did')")
        reached = (
            pid in (1, "os.getppid()") and sandbox.isolation != "rlimits"
        )  # 1 within, whom no signal of theirs ends
        assert result.exception.startswith(("PermissionError", "ProcessLookupError")) or reached, (pid, result)
    for code in ("os.kill(-1, 9)", "os.killpg(0, 9)", "os.kill(0, 9)"):
        assert not sandbox.run(f"import os\n{code}").limit
    calls = sandbox.run("import os, signal\nsignal.signal(10, lambda *_: print('own'))\nos.kill(os.getpid(), 10)")
    assert (calls.stdout, calls.finished) == ("own\n", True)


SYSTEM_CALLS = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *arguments):
    ctypes.set_errno(0)
    return getattr(libc, name)(*arguments) < 0 and ctypes.get_errno() == 1
[refused("unshare", 0x10000000), refused("unshare", 0x20000), refused("chroot", b"/tmp"),
 refused("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None), refused("umount2", b"/tmp", 2),
 refused("ptrace", 16, 1, 0, 0), refused("setns", 0, 0), refused("shmget", 0, 4096, 0o1600),
 refused("prlimit", 1, 7, None, None), refused("setpriority", 0, 1, 19), refused("reboot", 0), refused("acct", None)]
"""


def test_system_calls_that_reach_out_are_refused(sandbox):
    assert sandbox.run(SYSTEM_CALLS).value == str([True] * 12)
    if sandbox.isolation != "rlimits":
        assert sandbox.run("import os\nos.setuid(12345)").exception.startswith(("PermissionError", "OSError"))
    raised = sandbox.run("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert raised.exception.startswith(("ValueError", "PermissionError"))


FORK_BOMB = """
import os, time
for _ in range(7):  # 128 processes at most
    try:
        os.fork()
    except OSError:
        pass
time.sleep(20)
"""


@pytest.mark.parametrize("sandbox", mostly_in("sandbox", ISOLATIONS), indirect=True)
def test_a_fork_bomb_is_held_down_and_ended(sandbox):
    most, stop = [0], threading.Event()
    worker = sandbox._workers[0]

    def look():
        while not stop.wait(0.05):
            most[0] = max(most[0], len(worker.processes()) - worker.own_processes)

    thread = threading.Thread(target=look)
    thread.start()
    began = time.monotonic()
    result = sandbox.run(FORK_BOMB, limits=dataclasses.replace(LIMITS, seconds=1.0))
    stop.set()
    thread.join()
    assert result.limit in ("time", "processes") and not result.finished
    assert time.monotonic() - began < 6
    if sandbox.isolation == "namespaces":  # whose user is nobody else's
        assert most[0] <= LIMITS.processes
        result = sandbox.run("import os, time\nfor _ in range(20):\n    if not os.fork(): time.sleep(20)")
        assert result.limit == "processes" and result.exception.startswith("BlockingIOError")


ENDED = """
import os, time
from jaxrl_llm.sandbox import walls as sandbox_walls
from jaxrl_llm.sandbox import worker as sandbox_worker
sandbox_walls.become_subreaper()
sandbox_worker.END_S, kept, looks, sent = 2.0, os.kill, sandbox_worker._descendants, []

def started(leave):
    ready, began = os.pipe()
    if not (pid := os.fork()):
        os.setsid()
        if not os.fork():
            leave()
            os.write(began, str(os.getpid()).encode())
        time.sleep(20)
        os._exit(0)
    return pid, int(os.read(ready, 9))

def kill(process, number):
    sent.append((process, number.name))
    kept(process, number)

sandbox_worker._descendants = list  # none is looked at
print(sandbox_worker._end(started(lambda: None)[0], "rlimits"))
sandbox_worker._descendants, sandbox_worker.os.kill = looks, kill
pid, other = started(os.setsid)
print(sandbox_worker._end(pid, "rlimits"), [name for process, name in sent if process == other][:2])
"""


def test_a_program_s_group_is_ended_in_one_call_and_who_left_it_is_stopped_first():
    """Once, forks without end were faster than a search for each process, and outlived their program."""
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "-9\n-9 ['SIGSTOP', 'SIGKILL']\n", done.stderr


AS_NOBODY = """
import os, resource, sys
from jaxrl_llm.sandbox import walls as sandbox_walls
from jaxrl_llm.sandbox import worker as sandbox_worker
os.chdir(sys.argv[1])
if not os.getuid():
    os.setresgid(*[65534] * 3)
    os.setresuid(*[65534] * 3)
os.makedirs("a/b/c")
open("a/b/c/file", "w").close()
for name in ("a/b/c", "a/b", "a"):
    os.chmod(name, 0)
sandbox_worker._remove("a")
print(os.listdir())
own = sandbox_walls._threads_of_this_user()
sandbox_walls._threads_of_this_user = lambda: own  # others of this user may start meanwhile
limits = {"memory_mb": 2**20, "disk_mb": 1, "open_files": 64, "seconds": 60, "processes": 4}
sandbox_walls.limit(limits, is_alone=False)
print(resource.getrlimit(resource.RLIMIT_NPROC)[0] - own - sandbox_walls.SPARE_PROCESSES)
"""


def test_who_is_not_root_removes_what_it_may_not_read_and_starts_no_more_than_some(tmp_path):
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    command = [sys.executable, "-c", AS_NOBODY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n4\n", done.stderr


@pytest.mark.parametrize("sandbox", mostly_in("sandbox", ISOLATIONS), indirect=True)
def test_memory_of_one_process_is_limited(sandbox):
    result = sandbox.run("kept = []\nfor _ in range(64):\n    kept.append(b'x' * 2**25)")
    assert (result.limit, result.exception, result.finished) == ("memory", "MemoryError", False)


@pytest.mark.parametrize("sandbox", mostly_in("sandbox", ISOLATIONS), indirect=True)
def test_memory_of_all_processes_together_is_limited(sandbox):
    code = "import os, time\nfor _ in range(4):\n    if not os.fork():\n        x = b'x' * 150 * 2**20\n        break\n"
    result = sandbox.run(code + "time.sleep(20)")
    assert (result.limit, result.finished) == ("memory", False)


@pytest.mark.parametrize("sandbox", mostly_in("sandbox", ISOLATIONS), indirect=True)
def test_a_zip_bomb_takes_no_more_than_any_other(sandbox):
    packer = zlib.compressobj(wbits=-15)
    piece = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)  # pieces can stand behind one another
    unpack = "import zlib\nunpacked = zlib.decompressobj(-15).decompress(bytes.fromhex(input()) * {})\n"
    assert sandbox.run(unpack.format(64), stdin=piece.hex() + "\n").limit == "memory"  # 1 GiB
    write = unpack.format(1) + "with open('out', 'wb') as file:\n    file.write(unpacked)"
    assert sandbox.run(write, stdin=piece.hex() + "\n").limit == "disk"


@pytest.mark.parametrize("sandbox", mostly_in("sandbox", ISOLATIONS), indirect=True)
def test_output_without_end_is_cut(sandbox):
    for stream in (1, 2):
        result = sandbox.run(f"import os\nfor _ in range(1024):\n    os.write({stream}, b'x' * 2**20)")
        assert (result.limit, result.finished) == ("output", False)
        assert len(result.stdout + result.stderr) == 16 * 1024
    assert sandbox.run("print('x' * 20000)").limit == "output"  # all of it in the pipe at once
    assert len(sandbox.run("'x' * 10**6").value) == 16 * 1024
    for descriptor in range(3, 32):  # where the program's process reports
        result = sandbox.run(f"import os\nfor _ in range(64):\n    os.write({descriptor}, b'x' * 2**20)")
        if not result.exception:
            assert result.limit == "output" and not result.finished


def test_files_fill_no_disk_and_no_table(sandbox):
    result = sandbox.run("with open('big', 'wb') as file:\n    for _ in range(64):\n        file.write(bytes(2**20))")
    assert (result.limit, result.finished) == ("disk", False)
    assert sandbox.run("kept = [open('/dev/null') for _ in range(100)]").limit == "open_files"
    if sandbox.isolation == "namespaces":
        many = sandbox.run(
            "for i in range(64):\n    with open(str(i), 'wb') as file:\n        file.write(bytes(2**20))"
        )
        assert many.limit == "disk"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "input() or 10 ** 10 ** 10",  # which no signal's handler interrupts
        pytest.param("import time; time.sleep(60)", marks=pytest.mark.tier("sandbox")),
        pytest.param("int.__pow__(7, 10**9)", marks=pytest.mark.tier("sandbox")),
    ],
)
def test_what_does_not_end_is_ended(sandbox, code):
    ignoring = "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    ignoring += "    except (OSError, ValueError): pass\n"
    began = time.monotonic()
    result = sandbox.run(ignoring + code, stdin="\n", limits=SHORT)
    assert (result.limit, result.finished) == ("time", False)
    assert time.monotonic() - began < 4


DAEMON = """
import os, time
for _ in range(2):
    if os.fork():
        os._exit(0) if _ else None
        break
    os.setsid()
else:
    for i in range(3, 64):
        try: os.close(i)
        except OSError: pass
    for i in range(600):
        open("alive", "a").write("x")
        time.sleep(0.02)
time.sleep(0.3)
"""


def test_a_daemon_does_not_outlive_its_program(sandbox):
    result = sandbox.run(DAEMON + "print(len(open('alive').read()) > 2)")
    assert result.stdout == "True\n"  # it lived
    worker = sandbox._workers[0]
    assert len(worker.processes()) == worker.own_processes


def test_a_verdict_is_not_to_be_had_by_writing_where_the_worker_reads(sandbox):
    forged = b'{"finished": true, "value": "1"}\n'
    code = f"import os\nfor i in range(3, 32):\n    try: os.write(i, {forged!r})\n    except OSError: pass\n"
    assert not sandbox.run(code + "os._exit(0)").finished


def test_a_worker_that_dies_is_the_sandbox_s_failure_and_is_replaced():
    with Sandbox(LIMITS) as pool:
        worker = pool._workers[0]
        threading.Timer(0.3, lambda: os.killpg(worker.process.pid, signal.SIGKILL)).start()
        with raises_with(SandboxError, "process"):
            pool.run("import time; time.sleep(10)")
        assert pool.run("1").value == "1"
        left = worker.processes()
    wait_until_gone(left)
    with raises_with(SandboxError, "closed"):
        pool.run("1")


def wait_until_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


PARENT = """
import threading, time
from jaxrl_llm.sandbox.sandbox import Limits, Sandbox
pool = Sandbox(Limits(seconds=60), isolation={isolation!r})
code = "import os\\nos.fork()\\nwhile True: pass"
threading.Thread(target=pool.run, args=(code,), daemon=True).start()
while len(pool.processes()) < {least}:
    time.sleep(0.01)
print(*(process.pid for process in pool._workers[0].processes()), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("sandbox", mostly_in("sandbox", ISOLATIONS), indirect=True)
def test_all_ends_when_the_parent_is_killed(sandbox):
    least = sandbox._workers[0].own_processes + 2
    program = PARENT.format(isolation=sandbox.isolation, least=least)
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) >= least
        parent.kill()
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    wait_until_gone(processes)


def test_its_processes_have_the_mark_of_who_started_them(monkeypatch):
    """When a reward's process ends, it finds by this mark the processes that outlived a sandbox worker."""
    monkeypatch.setenv(worker_processes.MARK, "1.2")
    with Sandbox(SHORT, isolation="rlimits") as pool:
        assert pool.run(f"import os\nos.environ[{worker_processes.MARK!r}]").value == "'1.2'"


def test_workers_run_programs_at_once_each_its_own():
    with Sandbox(LIMITS, num_workers=2) as pool, ThreadPoolExecutor(4) as threads:
        results = list(threads.map(pool.run, [f"import time; time.sleep({0.2 - 0.05 * i})\n{i}" for i in range(4)]))
    assert [result.value for result in results] == ["0", "1", "2", "3"]


def test_where_there_are_no_namespaces_it_is_said_or_refused(monkeypatch):
    with refused("sandbox.required", True, raises=SandboxError):
        Sandbox(isolation="rlimits", required=True)
    with pytest.warns(SandboxWarning, match="isolation='rlimits'.*disk_mb"):
        pool = Sandbox(isolation="rlimits")
    pool.close()
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    with raises_with(SandboxError, "bwrap"):
        Sandbox(isolation="bubblewrap")
    monkeypatch.setattr(sandbox_module, "ISOLATIONS", ("bubblewrap", "rlimits"))
    with refused("sandbox.required", True, "bubblewrap", "bwrap", raises=SandboxError):
        Sandbox(required=True)
    with (
        pytest.warns(SandboxWarning, match="isolation='rlimits'.*bwrap"),
        Sandbox() as pool,
    ):
        assert pool.isolation == "rlimits" and pool.not_enforced


def test_the_warning_of_a_sandbox_has_a_category_of_its_own_that_fails_no_test():
    """If namespaces are not permitted, every test that opens a sandbox gets this warning."""
    with Sandbox(LIMITS, isolation="rlimits") as pool:
        left = pool.processes()
    wait_until_gone(left)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SandboxWarning)
        with pytest.raises(SandboxWarning):
            Sandbox(LIMITS, isolation="rlimits")
    left = [child for child in psutil.Process().children() if "sandbox.worker" in " ".join(child.cmdline())]
    assert {child.pid for child in left} <= sandboxes.worker_pids()


@pytest.mark.parametrize(
    ("lacks", "isolation", "is_refused"),
    [
        (["calls"], "rlimits", True),
        (["files"], "", True),
        (["files", "calls"], "", True),
        (["files"], "rlimits", False),
    ],
)
def test_a_machine_that_cannot_keep_programs_from_others_is_refused(monkeypatch, lacks, isolation, is_refused):
    class Worker(sandbox_module._Worker):
        def _start(self):
            super()._start()
            self.lacks = lacks

    monkeypatch.setattr(sandbox_module, "_Worker", Worker)
    monkeypatch.setattr(sandbox_module, "ISOLATIONS", ("rlimits",))
    if is_refused:
        with raises_with(SandboxError, LACKING[lacks[0]]):
            Sandbox(LIMITS, isolation=isolation)
        return
    with Sandbox(LIMITS, isolation=isolation) as pool:
        assert LACKING["files"] in pool.not_enforced


def test_bubblewrap_mounts_the_package_that_the_worker_imports(monkeypatch):
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: f"/usr/bin/{name}")
    command = sandbox_module._bubblewrap()
    sources = [command[i + 1] for i, word in enumerate(command) if word in ("--ro-bind", "--dev-bind")]
    assert os.path.dirname(sandbox_module.__file__) in sources
    assert all(os.path.lexists(source) for source in sources)


WITHOUT = """
import warnings
from jaxrl_llm.sandbox.sandbox import Sandbox, SandboxError
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with Sandbox() as pool:
        print(pool.isolation, pool.run("1 + 1").value, len(said), str(said[0].message))
try:
    Sandbox(required=True)
except SandboxError as error:
    print(error)
"""


def test_a_host_that_allows_no_namespaces():
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'  # in a namespace of its own, that of unshare
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", WITHOUT]
    if not shutil.which("unshare") or subprocess.run([*command[:3], "true"], capture_output=True).returncode:
        pytest.skip("none can be forbidden where none is allowed")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": "/usr/bin:/bin"})
    warning, error = done.stdout.splitlines()
    assert warning.startswith("rlimits 2 1 ")
    check_refusal(warning, "isolation", "rlimits", "namespaces", "unshare: No space left on device")
    check_refusal(error, "sandbox.required", True, "namespaces")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"seconds": 0}, ("seconds", 0)),
        ({"seconds": "1"}, ("seconds", "1")),
        ({"memory_mb": 1.5}, ("memory_mb", 1.5)),
        ({"processes": True}, ("processes", True)),
    ],
)
def test_limits_that_are_none_are_refused(settings, named):
    with refused(*named, raises=ValueError):
        Limits(**settings)
    with refused("isolation", "jail", raises=ValueError):
        Sandbox(isolation="jail")
    with refused("num_workers", 0, raises=ValueError):
        Sandbox(num_workers=0)
