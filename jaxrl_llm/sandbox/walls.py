"""Isolation of programs on Linux: namespaces, a separate root folder, Landlock, no capabilities, resource limits.

All functions use ctypes and the standard library. ``enclose`` is for the process that forks programs, the other
functions for each program:

    enclose            user, mount, pid, network, ipc and uts namespaces; a read-only root with ``bound_paths`` only
    mount_tmp          mount a tmpfs before the fork; unmount_tmp removes it after the program
    limit              resource limits; this step and the next ones cannot be undone
    give_up_rights     drop all capabilities
    filter_calls       refuse system calls that reach outside (sandbox_filter.py)
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
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
# Mount flags in the form of statvfs -> in the form of mount. A remount must keep existing flags.
KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
DEATH_SIGNAL, DUMPABLE, SECCOMP, DROP_BOUND, CHILD_SUBREAPER, NO_NEW_RIGHTS, AMBIENT = 1, 4, 22, 24, 36, 38, 47
NO_HUGE_PAGES = 41

# The system calls of Landlock, from the first: create a ruleset, add a rule, restrict this process.
LANDLOCK = 444
# Landlock version -> number of file rights that it can restrict.
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
ALL_FILE_RIGHTS = 16
NO_TCP = 3  # restrict bind and connect, from version 4 on
# Restrict abstract sockets and signals to outside processes, from version 6 on. The filter always refuses both.
NO_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def libc(name: str, *arguments) -> int:
    """Call a function of the C library and return its result.

    Raises:
        OSError: the call failed, or the library has no function of this name (ENOSYS).
    """
    try:
        function = getattr(LIBC, name)
    except AttributeError:
        raise OSError(errno.ENOSYS, f"{name}: not on this system") from None
    values = [x.encode() if isinstance(x, str) else ctypes.c_ulong(x) if isinstance(x, int) else x for x in arguments]
    result = function(*values)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


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
    library = os.path.join(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
    wanted = ["/usr/lib", "/usr/lib64", "/usr/bin", "/lib", "/lib64", "/bin"]
    wanted += [standard, os.path.realpath(sys.executable)]
    wanted += [os.path.realpath(library)] if os.path.isfile(library) else []
    wanted += ["/etc/ld.so.cache", *(f"/dev/{name}" for name in ("null", "full", "random", "urandom"))]
    paths: list[str] = []
    for path in wanted:
        if os.path.lexists(path) and not any(path.startswith(other + "/") for other in paths):
            paths.append(path)
    return paths


def enclose() -> None:
    """Continue in a child process with its own namespaces. The calling process waits and exits with the child's status.

    The child is process 1 of its namespace. No signal of a program reaches it, and all programs end with it.

    Raises:
        OSError: the system does not allow it; the message names the call. This process can then no longer be used.
    """
    own = (os.geteuid(), os.getegid())
    with contextlib.suppress(OSError):  # only root may do this, and not in every user namespace
        os.setgroups([])
    helper, ask = _map_from_outside([(NOBODY, NOBODY), own] if own[0] == 0 else [own])
    try:
        libc("unshare", NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS)
    finally:
        os.write(ask, b".")
        os.close(ask)
        status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if status:
        raise OSError(status, f"uid_map: {os.strerror(status)}")
    child = os.fork()
    if child:
        os.closerange(3, 64)  # only the child keeps the connection
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    # Open the paths before the change of user, because nobody cannot traverse every parent folder.
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
    asked, ask = os.pipe()
    target = os.getpid()
    helper = os.fork()
    if not helper:
        number = 0
        os.close(ask)
        os.read(asked, 1)
        for uid, gid in choices:
            number = 0
            try:
                for name, text in (("uid_map", f"0 {uid} 1"), ("setgroups", "deny"), ("gid_map", f"0 {gid} 1")):
                    with open(f"/proc/{target}/{name}", "w") as file:
                        file.write(text)
                break
            except OSError as error:
                number = error.errno or 1
        os._exit(number)
    os.close(asked)
    return helper, ask


def _change_root(sources: dict[str, int]) -> None:
    root = "/tmp"  # the new mount hides its content, only in this namespace
    libc("mount", "tmpfs", root, "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=755,uid=0,gid=0")
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
            have = os.statvfs(mounted).f_flag
            kept = sum(flag for there, flag in KEPT.items() if have & there)
            libc("mount", None, mounted, None, REMOUNT | BIND | READ_ONLY | kept | NO_SUID, None)
    os.mkdir(f"{root}/tmp")
    os.makedirs(f"{root}/dev", exist_ok=True)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.chdir(root)
    libc("syscall", call_filter.number_of("pivot_root"), ".", ".")
    libc("umount2", ".", DETACH)
    os.chdir("/")
    libc("mount", None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV, None)


def _mounts_in(target: str) -> list[str]:
    with open("/proc/self/mountinfo") as file:
        points = [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), line.split()[4]) for line in file]
    return [point for point in points if point == target or point.startswith(target + "/")]


def mount_tmp(megabytes: int) -> None:
    libc("mount", "tmpfs", "/tmp", "tmpfs", NO_SUID | NO_DEV, f"size={megabytes}m,nr_inodes=4096,mode=700,uid=0,gid=0")


def unmount_tmp() -> None:
    libc("umount2", "/tmp", DETACH)


def limit(limits: dict[str, float], *, is_alone: bool) -> None:
    """Set the kernel's resource limits of this process.

    ``is_alone`` means that no other process counts as this user's. Otherwise the limit of processes is the user's
    current number of threads, plus ``processes`` and a reserve. The kernel does not count processes of root.
    """
    mib = 2**20
    sizes = {"AS": limits["memory_mb"] * mib, "FSIZE": limits["disk_mb"] * mib, "NOFILE": limits["open_files"]}
    sizes |= {"CPU": int(2 * limits["seconds"]) + 2, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0, "STACK": 8 * mib}
    if is_alone:
        sizes["NPROC"] = limits["processes"]
    for name, size in sizes.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        size = int(size) if hard == resource.RLIM_INFINITY else min(int(size), hard)
        resource.setrlimit(number, (size - (name == "CPU"), size))  # one second from SIGXCPU to SIGKILL
    # Without this, the kernel keeps a whole huge page while a small part is mapped, and counts only that part.
    with contextlib.suppress(OSError):  # a kernel without huge pages
        libc("prctl", NO_HUGE_PAGES, 1, 0, 0, 0)
    if not is_alone and os.getuid():
        now = resource.getrlimit(resource.RLIMIT_NPROC)
        most = _threads_of_this_user() + limits["processes"] + SPARE_PROCESSES
        if now[1] == resource.RLIM_INFINITY or most < now[1]:
            resource.setrlimit(resource.RLIMIT_NPROC, (most, now[1]))
            can = _can_fork()  # fails if this user has many processes in other containers, which are not visible here
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most) if can else now)


def _threads_of_this_user() -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _can_fork() -> bool:
    try:
        if not (pid := os.fork()):
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
    execute, write, read, list_folder = 1, 2, 4, 8
    for path in (*bound_paths(), folder):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = execute | read | (list_folder if os.path.isdir(path) else 0)
        rights |= everything if path == folder else write if path.startswith("/dev/") else 0
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
    """Refuse the system calls that reach outside the program (sandbox_filter.py).

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
