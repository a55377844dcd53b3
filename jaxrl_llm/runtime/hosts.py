"""The hosts (processes) of one job: how they join, exchange values, watch each other and end together.

A process joins its job before jax is first used. The environment names the job:

    found by jax            GKE, Slurm, mpirun (of Open MPI 4), TPU pods whose environment names their workers
    JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I      anywhere else
    JAXRL_DISTRIBUTED       1 = a job is required, and jax also tries its other ways to find one
                            0 = this process is the whole job

Every host runs the same program on the same questions, and arrays are sharded over all hosts. A value that only one
host has, for example the scores of its rows, reaches the other hosts through ``exchange``. All messages go through the
coordination service of jax, which runs on host 0. The messages are exchanged values, the current activity of each host
and the error of a host that fails. Because of the error, the other hosts do not wait forever for the failed host.

Owns: the index of this host, the messages between hosts, how hosts end together. Does not know: the computation of
a host.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import hashlib
import itertools
import os
import pathlib
import pickle
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

# jax has no public names for the client of its job and for the function that makes a CPU client. orbax also imports the
# client of the job from ``jax._src``.
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime.run_record import versions

# Seconds without a heartbeat after which the service treats a host as dead. The defaults of jax, 100 and 300 seconds,
# are longer than a user waits.
TIMEOUT_S = 40
# Seconds in which all hosts must join (some may still be starting), and in which NFS must show a new file.
JOIN_S = 1200
FIND_S = 60.0
# Seconds of silence of one host after which the others end. Later the service would abort them and name no host.
SILENT_S = 25
LONGEST_WAIT_MS = 24 * 3600 * 1000  # timeout of a barrier; ``_watch`` finds a missing host much earlier
LIMIT_FILES = "memory.max", "memory.limit_in_bytes"  # memory limits of a Linux control group, as in a container
HANGING_S = 1800  # a process that stays in one activity prints the tracebacks of its threads every so many seconds

T = TypeVar("T")
_doing = "start"
_joined = threading.Event()
_parting = threading.Event()
_leaving = threading.Lock()
_meetings = itertools.count()
_latest: dict[str, tuple[str, float]] = {}  # latest heartbeat of each host, and when this host first saw it


class MachineError(RuntimeError):
    """Fault of a machine, a network or a disk. The user's input is valid, and the same command may succeed later."""


def initialize(*, alone: bool = False) -> None:
    """Join the job that the environment names. If the environment names none, this process is the whole job.

    Args:
        alone: the command must run on one host.

    Raises:
        ConfigError: the job cannot be joined, for one of three reasons:

            - A variable of the job is missing or has a value that is not allowed.
            - JAXRL_DISTRIBUTED=1 is set, but no job is found.
            - A job of several hosts is found for a command that runs ``alone``.
        MachineError: the other hosts do not join.
    """
    required = os.environ.get("JAXRL_DISTRIBUTED", "")
    address = os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    if required not in ("", "0", "1"):
        raise ConfigError(
            f"JAXRL_DISTRIBUTED={required!r} must be 1 (a job of several hosts), 0 (this process is the whole "
            "job) or unset"
        )
    if required == "0":
        return
    if not (required or address or _is_found()):
        return
    num_processes = None
    process_id = None
    if address:
        num_processes, process_id = _numbers_of(address)
    elif not os.environ.get("MEGASCALE_COORDINATOR_ADDRESS"):
        _remove_megascale_variables()
    if alone and num_processes != 1:
        raise ConfigError("this command runs on one host, not in a job of several: start it with JAXRL_DISTRIBUTED=0")
    # Without recoverability the service would abort the other hosts and name no host. ``_watch`` ends them instead.
    jax.config.update("jax_enable_recoverability", True)
    # With asynchronous dispatch, programs that communicate could wait forever for each other on a host with few cores.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborted)
    if address and _is_loopback(address) and not _has_address(socket.gethostname()):
        _meet_on_loopback()
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=num_processes,
            process_id=process_id,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=TIMEOUT_S,
            shutdown_timeout_seconds=TIMEOUT_S,
        )
    except (RuntimeError, ValueError) as error:  # a ValueError means that jax finds no job
        kind = MachineError if isinstance(error, RuntimeError) else ConfigError
        raise kind(f"this process cannot join its job: {error}") from error
    _joined.set()
    if jax.process_count() > 1:
        atexit.register(_part)
        threading.Thread(target=_watch, args=(_service(),), daemon=True).start()
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open until the process ends


def _numbers_of(address: str) -> tuple[int, int]:
    """Return the number of processes of the job at ``address``, and the number of this process."""
    num_processes = _number_of("JAX_NUM_PROCESSES", address)
    process_id = _number_of("JAX_PROCESS_ID", address)
    if process_id >= num_processes:
        raise ConfigError(f"JAX_PROCESS_ID={process_id} must be less than JAX_NUM_PROCESSES={num_processes}")
    return num_processes, process_id


def _number_of(name: str, address: str) -> int:
    """Return the value of an environment variable of the job at ``address``."""
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ConfigError(f"{name}={value!r} must be a number if JAX_COORDINATOR_ADDRESS={address} is set")
    return int(value)


def _remove_megascale_variables() -> None:
    """Remove variables that another job has left in the environment. jax would read TPU slices from these variables."""
    names = [name for name in os.environ if name.startswith("MEGASCALE_")]
    for name in names:
        del os.environ[name]


def _is_loopback(address: str) -> bool:
    """Return whether HOST:PORT names this machine, so that all processes of the job run on it."""
    host = address.rpartition(":")[0]
    return host in ("127.0.0.1", "localhost", "[::1]")


def _has_address(host: str) -> bool:
    """Return whether a host name can be resolved. In a bare container the machine's own name often cannot."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return False
    return True


def _meet_on_loopback() -> None:
    """Let CPU processes of one machine reach each other at 127.0.0.1.

    Gloo, which carries jax's collectives between CPU processes, otherwise looks up the machine's own name and fails if
    the name has no address.
    """

    def make_cpu_client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed.global_state.client, hostname="127.0.0.1"
        )
        return xla_bridge.make_cpu_client(collectives=collectives)

    xla_bridge.register_backend_factory("cpu", make_cpu_client, priority=0, fail_quietly=False)


_ended: list[int] = []  # the status that this process is ending with


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process right after its ``atexit`` functions if the context is left by ``SystemExit``.

    Python would otherwise free its objects first. This takes seconds, and a preempted host has only a few seconds.
    """
    atexit.register(_leave_at_once, _ended)  # atexit runs this function last, because it is registered first
    try:
        yield
    except SystemExit as end:
        _ended[:] = [end.code or 0] if isinstance(end.code, int | None) else []
        raise


def _leave_at_once(status: list[int]) -> None:
    """Flush the output and exit with ``status[0]``. If the list is empty, do nothing."""
    if status:
        with contextlib.suppress(Exception):  # if the reader of a pipe has gone, let Python's normal exit report it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status[0])


def end_at_sigterm() -> None:
    """Let a SIGTERM to this host end the job.

    In a job of several hosts jax handles SIGTERM and only records it. A command that never asks jax would go on.
    """
    if not is_alone():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _is_found() -> bool:
    """Return whether the environment belongs to a job of several hosts."""
    if "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        return True
    counts = ("MEGASCALE_NUM_SLICES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return any(os.environ.get(name, "") not in ("", "1") for name in counts)


def _service() -> Any:
    """Return the client of the coordination service; a ``ConfigError`` if this process has joined no job."""
    client = distributed.global_state.client
    if client is None:
        raise ConfigError(f"jax finds {count()} processes, and this one has joined no job: set JAXRL_DISTRIBUTED=1")
    return client


def is_alone() -> bool:
    """Return whether this process is the whole job.

    A process that has not joined a job does not ask jax for the count, because that would open the devices.
    """
    return not jax.distributed.is_initialized() or count() == 1


def count() -> int:
    """Return the number of hosts."""
    return jax.process_count()


def is_first() -> bool:
    """Return whether this is host 0, which prints and writes files for all hosts."""
    return jax.process_index() == 0


def doing(activity: str) -> None:
    """Set the activity that this host reports to the other hosts.

    If the activity is not replaced within ``HANGING_S`` seconds, the process prints its tracebacks to stderr.
    """
    global _doing
    _doing = activity
    if sys.__stderr__ is None:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr has no file descriptor
        faulthandler.dump_traceback_later(HANGING_S, repeat=True, file=sys.__stderr__)


def memory_bytes(root: str | os.PathLike = "/") -> int:
    """Return the bytes of memory that the processes of this host may use: the memory limit of its container, if lower.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    groups = pathlib.Path(root, "proc/self/cgroup")
    if not groups.is_file():
        return limits[0]
    for line in groups.read_text().splitlines():
        _, controller, place = line.split(":", 2)
        if controller in ("", "memory"):  # version 2, or the memory controller of version 1
            top = pathlib.Path(root, "sys/fs/cgroup", controller)
            limits += _memory_limits(top, top / place.strip("/"))
    return min(limits)


def _memory_limits(top: pathlib.Path, folder: pathlib.Path) -> list[int]:
    """Return the memory limits in a control group and in the groups around it, up to ``top``."""
    limits = []
    for group in (folder, *folder.parents):
        if not group.is_relative_to(top):
            continue
        for file in (group / name for name in LIMIT_FILES):
            text = file.read_text().strip() if file.is_file() else ""
            if text.isdigit():
                limits.append(int(text))
    return limits


def exchange(value: T) -> list[T]:
    """Return the values that all hosts pass to this call, in the order of the hosts.

    Every host must make the same calls in the same order. A call waits for all hosts.
    """
    if count() == 1:
        return [value]
    service = _service()
    number = next(_meetings)
    index = jax.process_index()
    service.key_value_set_bytes(f"exchanged/{number}/{index}", pickle.dumps(value))
    service.wait_at_barrier(f"exchanged/{number}", LONGEST_WAIT_MS)
    by_host = {}
    for name, data in service.key_value_dir_get_bytes(f"exchanged/{number}/"):
        by_host[name.rpartition("/")[2]] = data
    if number:  # every host has read the values of the call before this one
        service.key_value_delete(f"exchanged/{number - 1}/{index}")
    return [pickle.loads(by_host[str(i)]) for i in range(count())]


def complete(values: list[T | None]) -> list[T | None]:
    """Return the list with each None replaced by the value that another host has at that position, if there is one."""
    merged = []
    for candidates in zip(*exchange(values), strict=True):
        known = [value for value in candidates if value is not None]
        merged.append(known[0] if known else None)
    return merged


def find(workdir: pathlib.Path, text: str | None) -> None:
    """Check that all hosts see the same workdir. Otherwise each workdir would get only a part of a checkpoint.

    Args:
        text: the content that the first host has written to the file ``lock``. The other hosts pass None.

    Raises:
        MachineError: a host does not find this content in its workdir.
    """
    host = _missing(workdir / "lock", text, FIND_S)
    if host is not None:
        raise MachineError(f"--workdir={workdir} must be a folder that all hosts share; host {host} has another")


def _missing(path: pathlib.Path, text: str | None, seconds: float) -> int | None:
    """Return the first host that does not find the text of host 0 in the file within ``seconds``; None if all do."""
    text = exchange(text)[0]
    until = time.monotonic() + seconds
    found = False
    while text is not None and not found and time.monotonic() < until:
        with contextlib.suppress(OSError):  # the file does not exist yet, or a network disk is replacing it
            found = path.read_text() == text
        time.sleep(0 if found else 0.2)
    return next((host for host, finds in enumerate(exchange(found)) if not finds), None)


def is_shared(folder: str) -> bool:
    """Return whether all hosts share the folder: whether they see a file that the first host creates in the folder.

    The result is False for an empty ``folder``.
    """
    (place, name), *others = exchange((folder, uuid.uuid4().hex))
    is_same = bool(place) and all(other == place for other, _ in others)
    if not is_same or "://" in place:  # a bucket is always shared
        return is_same
    path = pathlib.Path(place, f"seen-by-all-{name}")
    with contextlib.suppress(OSError):
        if is_first():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    missing = _missing(path, name, 10.0)
    with contextlib.suppress(OSError):
        path.unlink()
    return missing is None


def agree(**facts: Any) -> None:
    """Check that all hosts have the same facts, and the same code.

    Raises:
        ConfigError: a fact differs. Every host raises the error, which quotes the first difference of that fact.
    """
    if count() == 1:
        return
    texts = {"code": _code()}
    for name, fact in facts.items():
        texts[name] = fact if isinstance(fact, str) else repr(fact)
    digests = exchange({name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()})
    for name, text in texts.items():
        others = [i for i, digest in enumerate(digests) if digest[name] != digests[0][name]]
        if others:
            by_host = exchange(text)
            other_text, first_text = _difference(by_host[others[0]], by_host[0])
            raise ConfigError(
                f"{name} of host {others[0]} differs from host 0: {other_text!r} instead of {first_text!r}"
            )


@functools.cache
def _code() -> str:
    """Return the recorded versions and a digest of the files of this package."""
    package = pathlib.Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{versions()}, files {digest.hexdigest()[:12]}"


def _difference(one: str, other: str) -> tuple[str, str]:
    """Return 80 characters of each text around the first position where the texts differ."""
    first = 0
    for i, (character, other_character) in enumerate(zip(one, other, strict=False)):
        if character != other_character:
            first = i
            break
    start = max(0, first - 40)
    return one[start : start + 80], other[start : start + 80]


def checksums(tree: Any) -> dict[str, str]:
    """Return the digest of each array shard on this host, keyed by the name of the array and the index of the shard.

    The tree may contain typed PRNG keys. If copies of a shard differ on this host, the value lists all their digests.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for shard in leaf.addressable_shards:
            name = f"{jax.tree_util.keystr(path, simple=True, separator='/')}{shard.index}"
            data = np.asarray(shard.data).tobytes()
            found.setdefault(name, set()).add(hashlib.sha256(data).hexdigest()[:16])
    return {name: " ".join(sorted(digests)) for name, digests in found.items()}


def agree_on_copies(tree: Any, **facts: Any) -> None:
    """Check that all copies of an array shard, or of a fact, are equal on all hosts. This is slow: use it to debug.

    Raises:
        RuntimeError: copies differ. Every host raises the error, which names the array or the fact.
    """
    own_texts = checksums(tree)
    for name, fact in facts.items():
        own_texts[name] = repr(fact)
    first_texts: dict[str, str] = {}
    for host, texts in enumerate(exchange(own_texts)):
        for name, text in texts.items():
            differs = text != first_texts.setdefault(name, text)
            has_several_digests = name not in facts and " " in text
            if differs or has_several_digests:
                raise RuntimeError(f"{name} of host {host} differs from the other hosts")


@contextlib.contextmanager
def together(status_of: Callable[[BaseException], int]) -> Iterator[None]:
    """End all hosts together. An exception that leaves the context on one host also ends the others, with its message.

    When the context is left without an exception, each host waits for all the others.

    Args:
        status_of: returns the exit status for an exception.
    """
    if is_alone():
        yield
        return
    try:
        yield
        exchange("done")
    except BaseException as error:
        if isinstance(error, SystemExit):  # every host raises this error
            exchange("done")
        else:
            _end(error, status_of(error))
        raise


def meet(*, key: str, timeout_ms: int) -> None:
    """Wait at a barrier for the threads of all hosts that write a checkpoint.

    A thread that handles an exception ends all hosts, because the other hosts may wait at another barrier.
    """
    if is_alone():
        return
    error = sys.exception()
    if error:
        _leave(_end(error, status=1))
    _service().wait_at_barrier(key, timeout_ms)


def _end(error: BaseException, status: int) -> str:
    """Publish to the other hosts the message of the error that ends this host, and return the message."""
    is_of_jax = "JaxRuntimeError" in (type(error).__name__, type(error.__cause__).__name__)
    if is_of_jax or "Gloo" in str(error):
        time.sleep(SILENT_S + 5)  # if another host is gone, ``_watch`` names it and ends this host
    service = _service()
    index = jax.process_index()
    words = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # ignore the error, because the service may have ended
        service.key_value_set(f"failed/{index}", f"{status} {_doing}\n{words}", allow_overwrite=True)
    if index == 0:
        time.sleep(4)  # the service of this host must live until the others have read the message
    return words


def _part() -> None:
    """Leave the job at the end of the process. The first host waits until the others have left its service."""
    service = _service()
    index = jax.process_index()
    _parting.set()
    with contextlib.suppress(Exception):  # ignore the error, because the service may have ended
        service.key_value_set(f"left/{index}", "")
        if index > 0:
            jax.distributed.shutdown()
        for _ in range(100 if index == 0 else 0):
            if len(service.key_value_dir_get("left/")) == count():
                service.get_live_nodes(list(range(count())))  # this call returns when all other hosts have shut down
                break
            time.sleep(0.1)


def _watch(service: Any) -> None:
    """Send a heartbeat every second, and end this host when another host has failed or is silent."""
    index = jax.process_index()
    for beat in itertools.count():
        if _parting.is_set():
            return
        try:
            service.key_value_set(f"alive/{index}", f"{beat} {_doing}", allow_overwrite=True)
            alive = service.key_value_dir_get("alive/")
            failed = service.key_value_dir_get("failed/")
        except Exception as error:
            if not _parting.is_set():
                reason = str(error).splitlines()[0][:100]
                _leave(_of_host_0(f"is gone ({reason})"))
            return
        for name, text in failed:
            _, _, host = name.rpartition("/")
            if host != str(index):
                status_and_activity, _, message = text.partition("\n")
                status, _, activity = status_and_activity.partition(" ")
                return _leave(f"host {host} failed in: {activity}: {message}", int(status))
        for name, text in alive:
            _, _, host = name.rpartition("/")
            latest, since = _latest.get(host, ("", 0.0))
            if latest != text:
                _latest[host] = text, time.monotonic()
            elif time.monotonic() - since > SILENT_S:
                _, _, activity = text.partition(" ")
                return _leave(f"host {host} has not been heard of for {SILENT_S} s; it was in: {activity}")
        time.sleep(1)


def _of_host_0(state: str) -> str:
    """Return the error message for a lost host 0, with the last activity that host 0 reported."""
    activity = "start"
    if "0" in _latest:
        heartbeat, _ = _latest["0"]
        _, _, activity = heartbeat.partition(" ")
    return f"host 0 {state}; it was in: {activity}"


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(_: int) -> None:
    """Handle SIGABRT: print an error that names the missing host, and exit.

    The client of jax aborts the process when the service ends or when hosts do not join, and it names no host. This is
    a C handler, because a Python handler runs later in the main thread, and the process has ended by then.
    """
    if not _joined.is_set():
        os.write(
            2,
            f"error: this process cannot join its job: some did not come in {JOIN_S} s\n".encode(),
        )
        os._exit(1)
    coordinator = distributed.global_state.coordinator_address
    assert coordinator is not None  # holds, because this process has joined a job
    host, port = coordinator.rsplit(":", 1)
    time.sleep(1)  # a host that dies closes its connections one after the other
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        _leave(_of_host_0(f"is gone ({error})"))
    _heartbeat, since = _latest.get("0", ("", time.monotonic()))
    silent_s = time.monotonic() - since
    if silent_s > SILENT_S:
        _leave(_of_host_0(f"has not been heard of for {silent_s:.0f} s"))
    faulthandler.dump_traceback()  # an abort with another cause: print the traceback that it would have printed


def _leave(words: str, status: int = 1) -> None:
    """Print an error and end this process, even while its other threads wait.

    Two threads may call this function. Only the first one prints its error.
    """
    _leaving.acquire()
    # If this host is about to fail by itself, its own error is more useful, so wait for that error. The first host
    # waits longer, because the others need its service to find out which host has failed.
    time.sleep(6 if is_first() else 1)
    if _ended:
        os._exit(_ended[0])  # this host has finished, and another host may leave before it
    sys.stderr.write(f"error: {' '.join(words.split())[:2000]}; this host was in: {_doing}\n")
    sys.stderr.flush()
    os._exit(status)
