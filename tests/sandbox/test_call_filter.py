"""Programs that try to reach a process, a socket or a shared object outside their sandbox.

The test itself creates the objects that a program tries to reach.
"""

import ctypes
import errno
import os
import pathlib
import platform
import socket
import subprocess

import pytest
from support import sandboxes

from jaxrl_llm.sandbox import call_filter
from jaxrl_llm.sandbox.sandbox import ISOLATIONS

LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module", autouse=True)
def closed_pools():
    """Close the shared pools after the tests of this module."""
    yield
    sandboxes.close_pools()


@pytest.fixture(params=ISOLATIONS)
def sandbox(request):
    """Each isolation that this machine allows. After the test it must still run programs."""
    pool = sandboxes.shared_pool(request.param)
    yield pool
    assert pool.run("print(6 * 7)").stdout == "42\n"


@pytest.fixture
def victim():
    """A process of the same user. After the test it must still be alive."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        is_alive = process.poll() is None
        process.kill()
    assert is_alive


PRELUDE = """
import ctypes, fcntl, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    '''The errno of a system call, 0 for success.'''
    ctypes.set_errno(0)
    values = [ctypes.c_ulong(x & 2**64 - 1) if isinstance(x, int) else x for x in arguments]
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *values) == -1 else 0

def tried(function, *arguments):
    '''The errno of a function of Python, 0 for success.'''
    try:
        function(*arguments)
    except OSError as error:
        return error.errno
    return 0

r, w = os.pipe()
pair = socket.socketpair()
"""


def results(sandbox, lines):
    """Run the lines, expressions over the prelude, and return the value of each."""
    done = sandbox.run(PRELUDE + "[" + ", ".join(lines) + "]")
    assert done.finished, done
    return dict(zip(lines, eval(done.value), strict=True))


BY_DESCRIPTOR = (
    "tried(fcntl.fcntl, r, 8, {pid})",  # F_SETOWN
    "tried(fcntl.fcntl, r, 8, -{pid})",
    "tried(fcntl.fcntl, r, 15, struct.pack('ii', 1, {pid}))",  # F_SETOWN_EX
    "tried(fcntl.fcntl, r, 10, 9)",  # F_SETSIG
    "tried(fcntl.fcntl, r, fcntl.F_SETFL, os.O_ASYNC)",
    "tried(fcntl.fcntl, r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)",
    "tried(fcntl.fcntl, r, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "tried(fcntl.fcntl, os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, 1)",
    "tried(fcntl.fcntl, w, 1031, 2**20)",  # F_SETPIPE_SZ
    "tried(fcntl.ioctl, r, 0x5452, struct.pack('i', 1))",  # FIOASYNC
    "tried(fcntl.ioctl, pair[0], 0x8901, struct.pack('i', {pid}))",  # FIOSETOWN
    "tried(fcntl.ioctl, pair[0], 0x8902, struct.pack('i', {pid}))",  # SIOCSPGRP
    "tried(fcntl.ioctl, 0, 0x5412, b'x')",  # TIOCSTI
    "tried(fcntl.ioctl, 0, 0x540E, 0)",  # TIOCSCTTY
    "call({fcntl}, r, 8 | 1 << 32, {pid})",  # the kernel reads the lower half of a command
    "call({ioctl}, pair[0].fileno(), 0x8901 | 1 << 32, struct.pack('i', {pid}))",
)


def test_the_kernel_signals_no_process_for_a_program(sandbox, victim):
    names = {name: call_filter.number_of(name) for name in ("fcntl", "ioctl")}
    lines = [line.format(pid=victim, **names) for line in BY_DESCRIPTOR]
    assert results(sandbox, lines) == dict.fromkeys(lines, errno.EPERM)
    kill = "fcntl.fcntl(r, 10, 9)\nfcntl.fcntl(r, 8, {})\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')"
    assert not sandbox.run(PRELUDE + kill.format(victim)).finished
    timer = "call({timer}, 1, struct.pack('Qiii40x', 0, 9, 4, {pid}), ctypes.byref(ctypes.c_int()))"  # SIGEV_THREAD_ID
    line = timer.format(timer={"x86_64": 222, "aarch64": 107}[platform.machine()], pid=victim)
    assert results(sandbox, [line]) == {line: errno.EINVAL}


DATAGRAMS = (
    "tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'out', {address!r}))",
    "tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect({address!r}))",
    "tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)[0].sendto(b'out', {address!r}))",
    "tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)[0].sendto(b'out', {address!r}))",
    "tried(lambda: socket.socketpair(30, socket.SOCK_STREAM))",  # AF_TIPC
    "tried(lambda: pair[0].connect({address!r}))",
    "tried(lambda: pair[0].bind({bound!r}))",
    "tried(lambda: pair[0].listen())",
    "tried(lambda: pair[0].accept())",
    "tried(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'out', {address!r}))",
)


def test_no_socket_outside_is_reached(sandbox, tmp_path):
    abstract = f"\0jaxrl_llm_test_{os.getpid()}"
    for address in (abstract, str(tmp_path / "socket")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            server.bind(address)
            server.setblocking(False)
            lines = [line.format(address=address, bound=abstract + "_bound") for line in DATAGRAMS]
            assert results(sandbox, lines) == dict.fromkeys(lines, errno.EPERM)
            line = f"tried(lambda: pair[0].sendto(b'out', {address!r}))"
            assert results(sandbox, [line])[line] in (errno.EISCONN, errno.EOPNOTSUPP)
            with pytest.raises(BlockingIOError):
                server.recv(9)


ON_PROCESSES = {
    "ptrace": "16, {pid}, 0, 0",
    "process_vm_readv": "{pid}, 0, 0, 0, 0, 0",
    "process_vm_writev": "{pid}, 0, 0, 0, 0, 0",
    "kcmp": "os.getpid(), {pid}, 1, 0, 0",
    "get_robust_list": "{pid}, None, None",
    "migrate_pages": "{pid}, 1, None, None",
    "move_pages": "{pid}, 0, None, None, None, 0",
    "prlimit64": "{pid}, 0, struct.pack('QQ', 1, 1), None",
    "setpriority": "0, {pid}, 19",
    "ioprio_set": "1, {pid}, 3 << 13",
    "sched_setaffinity": "{pid}, 8, struct.pack('Q', 1)",
    "sched_setattr": "{pid}, None, 0",
    "sched_setparam": "{pid}, struct.pack('i', 0)",
    "sched_setscheduler": "{pid}, 3, struct.pack('i', 0)",
    "perf_event_open": "None, {pid}, -1, -1, 0",
}
SIGNALS = {
    "kill": "{pid}, 9",
    "tkill": "{pid}, 9",
    "tgkill": "{pid}, {pid}, 9",
    "rt_sigqueueinfo": "{pid}, 9, struct.pack('iii116x', 9, 0, -1)",
    "rt_tgsigqueueinfo": "{pid}, {pid}, 9, struct.pack('iii116x', 9, 0, -1)",
}
# pidfd_getfd, process_madvise, process_mrelease
NEW = (
    "438, os.pidfd_open(os.getpid()), 0, 0",
    "440, os.pidfd_open(os.getpid()), None, 0, 4, 0",
    "448, os.pidfd_open(os.getpid()), 0",
)


def test_no_process_outside_is_signalled_traced_or_scheduled(sandbox, victim):
    lines = [f"call({call_filter.number_of(name)}, {rest.format(pid=victim)})" for name, rest in ON_PROCESSES.items()]
    assert results(sandbox, lines) == dict.fromkeys(lines, errno.EPERM)
    lines = [f"call({call_filter.number_of(name)}, {rest.format(pid=victim)})" for name, rest in SIGNALS.items()]
    expected = errno.EPERM if sandbox.isolation == "rlimits" else errno.ESRCH
    assert results(sandbox, lines) == dict.fromkeys(lines, expected)
    lines = [f"call({rest})" for rest in NEW]
    assert results(sandbox, lines) == dict.fromkeys(lines, errno.ENOSYS)
    line = f"tried(os.pidfd_open, {victim}) or call(424, os.pidfd_open({victim}), 9, None, 0)"
    assert results(sandbox, [line])[line] == (errno.ENOSYS if sandbox.isolation == "rlimits" else errno.ESRCH)
    scheduled = "call({prctl}, 62, 1, {pid}, 0, 0)".format(prctl=call_filter.number_of("prctl"), pid=victim)
    assert results(sandbox, [scheduled]) == {scheduled: errno.EPERM}  # PR_SCHED_CORE


def test_no_shared_object_outside_is_opened_or_removed(sandbox):
    """A program could use a segment or a queue by its number, without the call that opens it by a key."""
    segment, queue, semaphore = LIBC.shmget(0, 4096, 0o1600), LIBC.msgget(0, 0o1600), LIBC.semget(0, 1, 0o1600)
    assert min(segment, queue, semaphore) >= 0
    calls = {
        "shmat": f"{segment}, None, 0",
        "shmctl": f"{segment}, 0, None",
        "msgsnd": f"{queue}, struct.pack('Q', 1), 0, 0",
        "msgrcv": f"{queue}, bytes(64), 8, 0, 2048",
        "msgctl": f"{queue}, 0, None",
        "semop": f"{semaphore}, struct.pack('Hhh', 0, 1, 0), 1",
        "semtimedop": f"{semaphore}, struct.pack('Hhh', 0, 1, 0), 1, None",
        "semctl": f"{semaphore}, 0, 0, 0",
        "mq_open": "b'jaxrl_llm_test', 0o102, 0o600, None",
        "mq_unlink": "b'jaxrl_llm_test'",
        "add_key": "b'user', b'x', b'x', 1, -3",
        "keyctl": "0, -3, 0",
    }
    try:
        lines = [f"call({call_filter.number_of(name)}, {rest})" for name, rest in calls.items()]
        assert results(sandbox, lines) == dict.fromkeys(lines, errno.EPERM)
    finally:
        removed = LIBC.shmctl(segment, 0, None), LIBC.msgctl(queue, 0, None), LIBC.semctl(semaphore, 0, 0, 0)
    assert removed == (0, 0, 0)  # they were still there


def test_no_shared_memory_of_the_machine_is_written(sandbox):
    name = f"jaxrl_llm_test_{os.getpid()}"
    sandbox.run(f"open('/dev/shm/{name}', 'w').write('x')")
    assert not os.path.exists(f"/dev/shm/{name}")


REFUSED_BY_ARGUMENT = {
    "clone": ("0x10000011, 0, 0, 0, 0", "0x8011, 0, 0, 0, 0"),  # a user namespace; a sibling
    "mmap": ("None, 2**21, 3, 0x40022, -1, 0",),  # MAP_HUGETLB
    # death signal, dumpable, subreaper, huge pages
    "prctl": ("1, 0, 0, 0, 0", "4, 0, 0, 0, 0", "36, 1, 0, 0, 0", "41, 0, 0, 0, 0"),
    "socketpair": ("1, 2, 0, bytes(8)", "1, 5, 0, bytes(8)", "1, 0x80002, 0, bytes(8)"),
}
NEW_CALLS = (425, 426, 427, 435, 438, 440, 442, 443, 447, 448, 450, 459, 463, 466, 467, 469, 470, 500, 512, 547)


def test_calls_that_hold_uncounted_memory_or_change_the_kernel_are_refused(sandbox):
    tables = call_filter.REFUSED
    if sandbox.isolation == "rlimits":
        tables = tables | call_filter.UNSEEN_BY_LANDLOCK
    column = call_filter.MACHINES[platform.machine()][1]
    lines = [
        f"call({numbers[column]}, -1, -1, -1, -1, -1)" for numbers in tables.values() if numbers[column] is not None
    ]
    assert results(sandbox, lines) == dict.fromkeys(lines, errno.EPERM)
    lines = [
        f"call({call_filter.number_of(name)}, {arguments})"
        for name, several in REFUSED_BY_ARGUMENT.items()
        for arguments in several
    ]
    assert results(sandbox, lines) == dict.fromkeys(lines, errno.EPERM)
    lines = [f"call({number}, 0, 0, 0, 0, 0)" for number in NEW_CALLS]
    assert results(sandbox, lines) == dict.fromkeys(lines, errno.ENOSYS)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other calling conventions of x86-64 only")
def test_other_calling_conventions_are_refused(sandbox, victim):
    lines = [f"call({number | call_filter.X32}, {victim}, 9)" for number in (39, 62, 424, 512, 524)]
    assert results(sandbox, lines) == dict.fromkeys(lines, errno.EPERM)
    code = "import mmap, ctypes\npage = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
    code += f"page.write(bytes.fromhex('53b825000000bb{victim.to_bytes(4, 'little').hex()}b909000000cd805bc3'))\n"
    code += "ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"  # kill by int 0x80
    assert sandbox.run(code).exit_code == -31  # SIGSYS


HONEST = (
    "os.get_blocking(r)",
    "os.set_blocking(r, False)",
    "fcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK)",
    "os.set_inheritable(r, True)",
    "os.dup(r)",
    "fcntl.lockf(open('lock', 'w'), fcntl.LOCK_EX)",
    "fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)",
    "pair[0].sendall(b'x') or pair[1].recv(1)",
    "pair[0].setblocking(False)",
    "socket.send_fds(pair[0], [b'x'], [r])",
    "os.isatty(0)",
    "(lambda m: m.mmap(-1, 4096, flags=m.MAP_PRIVATE | m.MAP_ANONYMOUS).write(b'x'))(__import__('mmap'))",
    "(lambda m, f: f.truncate(4096) and m.mmap(f.fileno(), 0).write(b'x'))(__import__('mmap'), open('mapped', 'w+b'))",
    "__import__('resource').setrlimit(0, (1, 1))",
    "__import__('shutil').copyfile(open('lock', 'w').name, 'copy')",
    "__import__('tempfile').TemporaryFile().write(b'x')",
    "__import__('selectors').DefaultSelector().register(r, 1)",
    "__import__('signal').setitimer(0, 100)",
    "__import__('time').sleep(0.001)",
    "(lambda a, b: (a.send(1), b.recv()))(*__import__('multiprocessing').Pipe())",
    "__import__('asyncio').run((lambda: __import__('asyncio').sleep(0))())",
    "__import__('subprocess').run(['/bin/true'], check=True)",
    "os.waitpid(os.fork() or os._exit(0), 0)",
    "__import__('concurrent.futures').futures.ThreadPoolExecutor(2).submit(int).result()",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "os.sendfile(w, os.open('copy', os.O_RDWR | os.O_CREAT), 0, 1)",
    "__import__('random').SystemRandom().random()",
)


@pytest.mark.parametrize("line", HONEST)
def test_honest_programs_make_the_calls_that_they_need(sandbox, line):
    result = sandbox.run(PRELUDE + line)
    assert result.finished, result


def test_a_terminal_s_size_is_not_a_refused_call(sandbox):
    assert sandbox.run("import os\nos.get_terminal_size(1)").exception.startswith("OSError: [Errno 25]")


# Calls that a program may make, whatever their arguments: they act on the program itself, on files that it may open,
# or need a capability that it does not have.
ALLOWED = """
_sysctl access adjtimex afs_syscall alarm arch_prctl arch_specific_syscall brk capget capset chdir clock_adjtime
clock_getres clock_gettime clock_nanosleep clock_settime close copy_file_range creat create_module dup dup2 dup3
epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_wait epoll_wait_old eventfd eventfd2 execve
execveat exit exit_group faccessat fadvise64 fallocate fchdir fdatasync fgetxattr flistxattr flock fork fstat fstatat
fstatfs fsync ftruncate futex get_kernel_syms get_mempolicy get_thread_area getcpu getcwd getdents getdents64 getegid
geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getpmsg getppid getpriority getrandom getresgid
getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr inotify_rm_watch
io_cancel io_destroy io_getevents io_pgetevents io_submit ioprio_get lgetxattr link linkat listxattr llistxattr
lookup_dcookie lseek lstat madvise mbind membarrier mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mprotect
mremap msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat nfsservctl open openat pause personality
pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll pread64 preadv preadv2 pselect6 putpmsg pwrite64 pwritev
pwritev2 query_module read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages rename
renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
sched_getscheduler sched_rr_get_interval sched_yield seccomp security select sendfile sendmmsg sendmsg sendto
set_mempolicy set_robust_list set_thread_area set_tid_address setdomainname setfsgid setfsuid setgid setgroups
sethostname setitimer setpgid setregid setresgid setresuid setreuid setrlimit setsid setsockopt settimeofday setuid
shmdt shutdown sigaltstack signalfd signalfd4 splice stat statfs statx symlink symlinkat sync_file_range
sync_file_range2 sysfs sysinfo tee time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
timerfd_create timerfd_gettime timerfd_settime times truncate tuxcall umask uname unlink unlinkat uselib ustat vfork
vhangup vserver wait4 waitid write writev
"""


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_every_system_call_of_the_kernel_s_headers_is_decided(machine):
    path = pathlib.Path(HEADERS[machine])
    if not path.exists():
        pytest.skip(f"no {path}")
    lines = [line.split()[1:3] for line in path.read_text().splitlines() if "define __NR" in line]
    numbers = {
        name.removeprefix("__NR_").removeprefix("__NR3264_"): int(value) for name, value, *_ in lines if value.isdigit()
    }
    column = call_filter.MACHINES[machine][1]
    tables = call_filter.REFUSED | call_filter.UNSEEN_BY_LANDLOCK | call_filter.SIGNALS
    tables |= call_filter.WITH_ARGUMENTS
    known = {name: columns[column] for name, columns in tables.items() if columns[column] is not None}
    assert {name: numbers[name] for name in known} == known
    older = {name for name, number in numbers.items() if number < 400}
    assert older - known.keys() == older & set(ALLOWED.split())
    newer = call_filter.NEW_AND_ALLOWED | call_filter.NEW_WITH_NAMESPACES
    assert {name: number for name, number in newer.items() if numbers.get(name, number) != number} == {}
