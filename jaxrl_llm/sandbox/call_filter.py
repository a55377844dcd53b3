"""Seccomp filter of the system calls that a program in the sandbox may make.

The filter refuses every call that

    - signals, inspects, schedules or limits another process;
    - reaches a socket, a queue or a shared segment that the program did not make itself;
    - occupies memory that no limit counts;
    - changes namespaces, mounts or the kernel.

Some calls are allowed with some arguments only: clone, fcntl, ioctl, mmap, prctl, prlimit64, socketpair, and the calls
that send signals. A call from number 424 on has the same number on every machine, and Linux still adds calls. From this
number on, only the calls in ``NEW_AND_ALLOWED`` are allowed.

Source: seccomp(2), syscalls(2), fcntl(2), ioctl_list(2), prctl(2), unix(7), signal(7).
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
import sys

# Number of each machine type in a filter, and its column in the tables below.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name: (number on x86_64, number on aarch64); None if the machine does not have the call.
Table = dict[str, tuple[int | None, int | None]]

OTHER_PROCESSES: Table = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "get_robust_list": (274, 100),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "perf_event_open": (298, 241),
}
SOCKETS: Table = {
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
}
# Segments, queues and keys that every process of the user may open by their number, without having made them.
SHARED_OBJECTS: Table = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
UNCOUNTED_MEMORY: Table = {
    "memfd_create": (319, 279),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    "userfaultfd": (323, 282),
}
KERNEL: Table = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "bpf": (321, 280),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
REFUSED = OTHER_PROCESSES | SOCKETS | SHARED_OBJECTS | UNCOUNTED_MEMORY | KERNEL

# Without namespaces the filter also refuses calls on files that Landlock does not check.
UNSEEN_BY_LANDLOCK: Table = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
}
# Without namespaces a program may send signals to its own process only.
SIGNALS: Table = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
WITH_ARGUMENTS: Table = {
    "clone": (56, 220),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "mmap": (9, 222),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
}
FIRST_NEW = 424  # from this number on a call has the same number on every machine
NEW_AND_ALLOWED = {
    "pidfd_open": 434,
    "close_range": 436,
    "openat2": 437,
    "faccessat2": 439,
    "epoll_pwait2": 441,
    "futex_waitv": 449,
    "map_shadow_stack": 453,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
    "mseal": 462,
}
NEW_WITH_NAMESPACES = {"pidfd_send_signal": 424, "fchmodat2": 452}
X32 = 0x40000000  # numbers with this bit are the same calls for 32-bit pointers

CLONE_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
CLONE_PARENT = 0x8000  # refused, because the child's parent would be the worker
O_ASYNC = 0x2000
F_SETFL = 4
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_SETLK, F_SETLKW, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW,
# F_DUPFD_QUERY, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS. Not F_SETOWN, F_SETSIG, F_SETLEASE, F_NOTIFY,
# because they make the kernel send signals. Not F_SETPIPE_SZ, because no limit counts the content of a pipe.
FCNTL_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1027, 1030, 1032, 1033, 1034)
# TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, FICLONE. Not FIOASYNC, FIOSETOWN, SIOCSPGRP and
# TIOCSTI.
IOCTL_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450, 0x40049409)
# MAP_SHARED and MAP_ANONYMOUS. If a program fills such a mapping and unmaps all of it but a page, the kernel keeps all
# the pages and counts them in no process. MAP_SHARED_VALIDATE contains the bit of MAP_SHARED.
SHARED_ANONYMOUS = 0x21
MAP_HUGETLB = 0x40000  # refused, because the machine reserves huge pages for others, and no memory limit counts them
# PR_SET_PDEATHSIG: a program ends with its worker. PR_SET_DUMPABLE: its memory must be readable from outside.
# PR_SET_CHILD_SUBREAPER: a process whose parent ends must become the worker's. PR_SET_THP_DISABLE: the sandbox has
# disabled huge pages. PR_SCHED_CORE: acts on other processes.
PRCTL_REFUSED = (1, 4, 36, 41, 62)
AF_UNIX = 1
# Only streams are allowed: other types send to any address, but a connected stream reaches only its other end.
SOCK_STREAM = 1
SOCK_TYPE_MASK = 0xF

# Instructions of classic BPF.
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
AND = 0x54
RETURN = 0x06
Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, constant
ALLOW: Instruction = (RETURN, 0, 0, 0x7FFF0000)
KILL: Instruction = (RETURN, 0, 0, 0x80000000)
REFUSE: Instruction = (RETURN, 0, 0, 0x50000 | errno.EPERM)
NO_MEMORY: Instruction = (RETURN, 0, 0, 0x50000 | errno.ENOMEM)
UNKNOWN: Instruction = (RETURN, 0, 0, 0x50000 | errno.ENOSYS)  # the C library uses an older call instead
CALL: Instruction = (LOAD, 0, 0, 0)
MACHINE: Instruction = (LOAD, 0, 0, 4)


def number_of(name: str) -> int:
    """Return this machine's number of a system call that one of the tables names."""
    tables = REFUSED | UNSEEN_BY_LANDLOCK | SIGNALS | WITH_ARGUMENTS
    number = tables[name][_column()]
    if number is None:
        raise OSError(errno.ENOSYS, f"{name}: not a system call of {platform.machine()}")
    return number


@functools.cache
def filter_program(signal_target: int) -> bytes:
    """Return the instructions of the filter.

    Args:
        signal_target: without namespaces, the only process that the program may signal. 0 means that the program has
            its own namespaces. Then it may signal every process that it sees and change the modes of files.

    Raises:
        OSError: the numbers of this machine's system calls are not known.
    """
    has_namespaces = not signal_target
    column = _column()
    code = [MACHINE, (EQUAL, 1, 0, MACHINES[platform.machine()][0]), KILL]
    code += [CALL, (AT_LEAST, 0, 1, X32), REFUSE]
    allowed = NEW_AND_ALLOWED
    if has_namespaces:
        allowed = NEW_AND_ALLOWED | NEW_WITH_NAMESPACES
    for number in sorted(allowed.values()):
        code += _rule(number, [ALLOW])
    code += [(AT_LEAST, 0, 1, FIRST_NEW), UNKNOWN]
    rules = {name: [REFUSE] for name in REFUSED}
    rules |= _rules_of_arguments()
    if not has_namespaces:
        rules |= {name: [REFUSE] for name in UNSEEN_BY_LANDLOCK}
        rules |= {name: _only_with(0, (signal_target,)) for name in SIGNALS}
    tables = REFUSED | UNSEEN_BY_LANDLOCK | SIGNALS | WITH_ARGUMENTS
    for name, rule in rules.items():
        number = tables[name][column]
        if number is not None:
            code += _rule(number, rule)
    code.append(ALLOW)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _column() -> int:
    if platform.machine() not in MACHINES or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"no filter of system calls for {platform.machine()}")
    return MACHINES[platform.machine()][1]


def _rules_of_arguments() -> dict[str, list[Instruction]]:
    """Return, by the name of a call, the instructions that decide on its arguments."""
    is_stream = [
        _argument(1),
        (AND, 0, 0, SOCK_TYPE_MASK),
        (EQUAL, 0, 1, SOCK_STREAM),
        ALLOW,
        REFUSE,
    ]
    is_shared = [(AND, 0, 0, SHARED_ANONYMOUS), (EQUAL, 0, 1, SHARED_ANONYMOUS), NO_MEMORY, ALLOW]
    set_flags = [_argument(2), (ANY_BIT, 0, 1, O_ASYNC), REFUSE, ALLOW]
    control_process = [_argument(0)]
    for operation in PRCTL_REFUSED:
        control_process += _rule(operation, [REFUSE])
    control_process.append(ALLOW)
    return {
        "clone": [
            _argument(0),
            (ANY_BIT, 0, 1, CLONE_NAMESPACES | CLONE_PARENT),
            REFUSE,
            ALLOW,
        ],
        "fcntl": [
            _argument(1),
            *_rule(F_SETFL, set_flags),
            *_only_with(1, FCNTL_COMMANDS),
        ],
        "ioctl": _only_with(1, IOCTL_REQUESTS),
        "mmap": [_argument(3), (ANY_BIT, 0, 1, MAP_HUGETLB), REFUSE, *is_shared],
        "prctl": control_process,
        "prlimit64": _only_with(0, (0,)),
        "socketpair": [_argument(0), (EQUAL, 1, 0, AF_UNIX), REFUSE, *is_stream],
    }


def _argument(index: int) -> Instruction:
    """Return the instruction that loads the lower 32 bits of an argument.

    The kernel reads only these bits of the arguments that the filter checks.
    """
    return (LOAD, 0, 0, 16 + 8 * index)


def _rule(value: int, instructions: list[Instruction]) -> list[Instruction]:
    """Return instructions that run ``instructions``, which must end in a return, if the loaded number is ``value``."""
    return [(EQUAL, 0, len(instructions), value), *instructions]


def _only_with(index: int, values: tuple[int, ...]) -> list[Instruction]:
    """Return instructions that allow a call if one of its arguments is among ``values``."""
    instructions = [_argument(index)]
    for value in values:
        instructions += _rule(value, [ALLOW])
    instructions.append(REFUSE)
    return instructions
