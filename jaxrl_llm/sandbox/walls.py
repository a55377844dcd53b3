"""Isolation of programs on Linux: namespaces, a separate root folder, Landlock, no capabilities, resource limits.

All functions use ctypes and the standard library. ``enclose`` is for the process that forks programs, the other
functions for each program:

    enclose            user, mount, pid, network, ipc and uts namespaces; a read-only root with ``bound_paths`` only
    mount_tmp          mount a tmpfs before the fork; unmount_tmp removes it after the program
    limit              resource limits; this step and the next ones cannot be undone
    give_up_rights     drop all capabilities
    filter_calls       refuse system calls that reach outside (call_filter.py)
    keep_out_of_files  restrict files with Landlock, if there is no separate root

A process that is root becomes nobody (uid 65534), because the kernel does not count the processes of root.

Source: namespaces(7), user_namespaces(7), pid_namespaces(7), pivot_root(2), capabilities(7), seccomp(2),
landlock(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import resource
import signal
import stat
import struct
import sys
import sysconfig

from jaxrl_llm.sandbox import call_filter

LIBC = ctypes.CDLL(None, use_errno=True)

NOBODY = 65534
SPARE_PROCESSES = 1024  # number of processes that this user may start elsewhere while a program runs
# Flags of clone and unshare.
NEW_NS = 0x20000
NEW_UTS = 0x4000000
NEW_IPC = 0x8000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000
# Flags of mount.
READ_ONLY = 1
NO_SUID = 2
NO_DEV = 4
REMOUNT = 32
BIND = 4096
RECURSIVE = 16384
PRIVATE = 1 << 18
DETACH = 2  # flag of umount2
# Mount flags in the form of statvfs -> in the form of mount. A remount must keep existing flags.
MOUNT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
# Operations of prctl.
DEATH_SIGNAL = 1
DUMPABLE = 4
SECCOMP = 22
DROP_BOUND = 24
CHILD_SUBREAPER = 36
NO_NEW_RIGHTS = 38
NO_HUGE_PAGES = 41
AMBIENT = 47

# The system calls of Landlock, from the first: create a ruleset, add a rule, restrict this process.
LANDLOCK = 444
# Landlock version -> number of file rights that it can restrict.
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
ALL_FILE_RIGHTS = 16
# File rights of Landlock.
EXECUTE = 1
WRITE_FILE = 2
READ_FILE = 4
READ_FOLDER = 8
NO_TCP = 3  # restrict bind and connect, from version 4 on
# Restrict abstract sockets and signals to outside processes, from version 6 on. The filter always refuses both.
NO_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def libc(name: str, *arguments: str | int | bytes | ctypes.Array | None) -> int:
    """Call a function of the C library and return its result.

    Raises:
        OSError: the call failed, or the library has no function of this name (ENOSYS).
    """
    try:
        function = getattr(LIBC, name)
    except AttributeError:
        raise OSError(errno.ENOSYS, f"{name}: not on this system") from None
    result = function(*[_c_value(argument) for argument in arguments])
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _c_value(
    argument: str | int | bytes | ctypes.Array | None,
) -> bytes | ctypes.c_ulong | ctypes.Array | None:
    """Return an argument in the form in which ctypes passes it to C: text as bytes, a number as unsigned long."""
    if isinstance(argument, str):
        return argument.encode()
    if isinstance(argument, int):
        return ctypes.c_ulong(argument)
    return argument


def end_with_parent() -> None:
    libc("prctl", DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)


def hide() -> None:
    """Keep this process's memory and descriptors from other processes of its user, in /proc and by ptrace."""
    libc("prctl", DUMPABLE, 0, 0, 0, 0)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process."""
    libc("prctl", CHILD_SUBREAPER, 1, 0, 0, 0)


@functools.cache
def bound_paths() -> list[str]:
    """Return the paths that a program may read: Python, the system's libraries and commands, and some devices.

    /dev/zero is excluded: a shared mapping of it holds memory that the kernel attributes to no process.
    """
    standard = os.path.realpath(os.path.dirname(os.__file__))
    library = os.path.join(
        sysconfig.get_config_var("LIBDIR") or "",
        sysconfig.get_config_var("INSTSONAME") or "",
    )
    candidates = ["/usr/lib", "/usr/lib64", "/usr/bin", "/lib", "/lib64", "/bin"]
    candidates += [standard, os.path.realpath(sys.executable)]
    if os.path.isfile(library):
        candidates.append(os.path.realpath(library))
    candidates += ["/etc/ld.so.cache", "/dev/null", "/dev/full", "/dev/random", "/dev/urandom"]
    paths: list[str] = []
    for path in candidates:
        is_covered = any(path.startswith(folder + "/") for folder in paths)
        if os.path.lexists(path) and not is_covered:
            paths.append(path)
    return paths


def enclose() -> None:
    """Continue in a child process with its own namespaces. The calling process waits and exits with the child's status.

    The child is process 1 of its namespace. No signal of a program reaches it, and all programs end with it.

    Raises:
        OSError: the system does not allow it; the message names the call. This process can then no longer be used.
    """
    identity = (os.geteuid(), os.getegid())
    is_root = identity[0] == 0
    # Ignore the error, because only root may do this, and not in every user namespace.
    with contextlib.suppress(OSError):
        os.setgroups([])
    helper, start_pipe = _map_from_outside([(NOBODY, NOBODY), identity] if is_root else [identity])
    try:
        libc("unshare", NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS)
    finally:
        os.write(start_pipe, b".")
        os.close(start_pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if status:
        raise OSError(status, f"uid_map: {os.strerror(status)}")
    child = os.fork()
    if child:
        os.closerange(3, 64)  # close the connection, which only the child keeps
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    # Open the paths before the change of user, because the user "nobody" cannot traverse every parent folder.
    sources = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in bound_paths()}
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    libc("prctl", DUMPABLE, 0, 0, 0, 0)
    end_with_parent()
    _change_root(sources)
    for source in sources.values():
        os.close(source)
    if not os.access(os.__file__, os.R_OK):
        raise OSError(errno.EACCES, f"{os.__file__}: not readable for the user of the sandbox")


def _map_from_outside(choices: list[tuple[int, int]]) -> tuple[int, int]:
    """Fork a helper that stays outside the namespace. Return its process id and the pipe that starts it.

    The helper maps user and group 0 of the namespace to the first of ``choices`` that the kernel accepts.
    """
    read_end, write_end = os.pipe()
    target = os.getpid()
    helper = os.fork()
    if not helper:
        number = 0
        os.close(write_end)
        os.read(read_end, 1)
        for uid, gid in choices:
            number = 0
            try:
                _write_maps(target, uid, gid)
                break
            except OSError as error:
                number = error.errno or 1
        os._exit(number)
    os.close(read_end)
    return helper, write_end


def _write_maps(process: int, uid: int, gid: int) -> None:
    """Map user and group 0 of the namespace of a process to ``uid`` and ``gid``."""
    for name, text in (
        ("uid_map", f"0 {uid} 1"),
        ("setgroups", "deny"),
        ("gid_map", f"0 {gid} 1"),
    ):
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def _change_root(sources: dict[str, int]) -> None:
    root = "/tmp"  # the new mount hides the old content of the folder, only in this namespace
    libc(
        "mount",
        "tmpfs",
        root,
        "tmpfs",
        NO_SUID | NO_DEV,
        "size=1m,mode=755,uid=0,gid=0",
    )
    for path, source in sources.items():
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        mode = os.fstat(source).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink("", dir_fd=source), target)
            continue
        if stat.S_ISDIR(mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        libc("mount", f"/proc/self/fd/{source}", target, None, BIND | RECURSIVE, None)
        for mounted in _mounts_in(target):
            present_flags = os.statvfs(mounted).f_flag
            kept_flags = 0
            for statvfs_flag, mount_flag in MOUNT_FLAGS.items():
                if present_flags & statvfs_flag:
                    kept_flags |= mount_flag
            libc(
                "mount",
                None,
                mounted,
                None,
                REMOUNT | BIND | READ_ONLY | kept_flags | NO_SUID,
                None,
            )
    os.mkdir(f"{root}/tmp")
    os.makedirs(f"{root}/dev", exist_ok=True)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.chdir(root)
    libc("syscall", call_filter.number_of("pivot_root"), ".", ".")
    libc("umount2", ".", DETACH)
    os.chdir("/")
    libc("mount", None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV, None)


def _mounts_in(target: str) -> list[str]:
    points: list[str] = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            escaped = line.split()[4]
            point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), escaped)
            if point == target or point.startswith(target + "/"):
                points.append(point)
    return points


def mount_tmp(megabytes: int) -> None:
    options = f"size={megabytes}m,nr_inodes=4096,mode=700,uid=0,gid=0"
    libc("mount", "tmpfs", "/tmp", "tmpfs", NO_SUID | NO_DEV, options)


def unmount_tmp() -> None:
    libc("umount2", "/tmp", DETACH)


def limit(limits: dict[str, float], *, is_alone: bool) -> None:
    """Set the kernel's resource limits of this process.

    ``is_alone`` means that no other process counts as this user's. Otherwise the limit of processes is the user's
    current number of threads, plus ``processes`` and a reserve. The kernel does not count processes of root.
    """
    mib = 2**20
    sizes: dict[str, float] = {
        "AS": limits["memory_mb"] * mib,
        "FSIZE": limits["disk_mb"] * mib,
        "NOFILE": limits["open_files"],
        "CPU": int(2 * limits["seconds"]) + 2,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "STACK": 8 * mib,
    }
    if is_alone:
        sizes["NPROC"] = limits["processes"]
    for name, size in sizes.items():
        number = getattr(resource, f"RLIMIT_{name}")
        _, present_hard = resource.getrlimit(number)
        hard = int(size)
        if present_hard != resource.RLIM_INFINITY:
            hard = min(hard, present_hard)
        soft = hard - 1 if name == "CPU" else hard  # the kernel sends SIGXCPU, and SIGKILL one second later
        resource.setrlimit(number, (soft, hard))
    # Disable huge pages. The kernel keeps a whole huge page while a small part is mapped, and counts only that part.
    with contextlib.suppress(OSError):  # this kernel has no huge pages
        libc("prctl", NO_HUGE_PAGES, 1, 0, 0, 0)
    if not is_alone and os.getuid():
        _limit_processes_of_user(int(limits["processes"]))


def _limit_processes_of_user(num_processes: int) -> None:
    """Limit the processes of this user to the current number of threads, plus ``num_processes`` and a reserve.

    The limit stays unchanged if it is already lower, or if no process could start under the new limit. This happens if
    the user has many processes in other containers, which are not visible here.
    """
    present = resource.getrlimit(resource.RLIMIT_NPROC)
    _, present_hard = present
    maximum = _threads_of_this_user() + num_processes + SPARE_PROCESSES
    if present_hard == resource.RLIM_INFINITY or maximum < present_hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (maximum, present_hard))
        new = (maximum, maximum) if _can_fork() else present
        resource.setrlimit(resource.RLIMIT_NPROC, new)


def _threads_of_this_user() -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _can_fork() -> bool:
    try:
        pid = os.fork()
        if not pid:
            os._exit(0)
    except BlockingIOError:
        return False
    os.waitpid(pid, 0)
    return True


def keep_out_of_files(folder: str) -> None:
    """Restrict a program without namespaces to reading ``bound_paths`` and writing in ``folder``, with Landlock.

    If the kernel's Landlock supports it, TCP, abstract sockets and signals to outside processes are also refused.

    Raises:
        OSError: this kernel has no Landlock.
    """
    version = libc("syscall", LANDLOCK, None, 0, 1)
    everything = (1 << FILE_RIGHTS.get(version, ALL_FILE_RIGHTS)) - 1
    attributes = struct.pack("=Q", everything)
    if version >= 4:
        attributes += struct.pack("=Q", NO_TCP)
    if version >= 6:
        attributes += struct.pack("=Q", NO_ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = libc("syscall", LANDLOCK, attributes, len(attributes), 0)
    for path in (*bound_paths(), folder):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = EXECUTE | READ_FILE
        if os.path.isdir(path):
            rights |= READ_FOLDER
        if path == folder:
            rights |= everything
        elif path.startswith("/dev/"):
            rights |= WRITE_FILE
        libc("syscall", LANDLOCK + 1, rules, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)
    libc("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
    libc("syscall", LANDLOCK + 2, rules, 0)
    os.close(rules)


def give_up_rights() -> None:
    """Drop all capabilities, and prevent gaining any by running another program."""
    for capability in range(64):
        try:
            libc("prctl", DROP_BOUND, capability, 0, 0, 0)
        except OSError:
            break
    libc("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
    libc("prctl", AMBIENT, 4, 0, 0, 0)
    libc("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))


def filter_calls(*, is_apart: bool) -> None:
    """Refuse the system calls that reach outside the program (call_filter.py).

    Args:
        is_apart: whether the program sees only its own processes and files. If False, the program may signal only
            itself and may not change file modes.

    Raises:
        OSError: the system calls of this machine type are unknown, or the kernel has no filters.
    """
    program = call_filter.filter_program(0 if is_apart else os.getpid())
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("H6xQ", len(program) // 8, ctypes.addressof(buffer))
    libc("prctl", SECCOMP, 2, header, 0, 0)
