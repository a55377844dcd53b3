"""The hosts (processes) of one job: joined before jax is first used, heard of by each other until the end.

    found by jax            GKE, Slurm, mpirun (of Open MPI 4), TPU pods whose environment names their workers
    JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I      anywhere else
    JAXRL_DISTRIBUTED       1 = there must be a job, and jax looks further for it; 0 = this process is the whole job

Every host runs the same program on the same questions; arrays are split over all of them, and what a host alone knows
(scores of its rows) it says in an ``exchange``. All goes through the coordination service of jax, at host 0: numbers,
what each is doing, and the last words of one that fails, so that the others do not wait for it without end.

Owns: which host this is, what hosts say to each other, how they end together. Does not know: what they compute.
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

# jax has no public names for its job's client (orbax takes it from there too) and for how a CPU client is made.
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from jaxrl_llm.config import ConfigError, versions

# The service gives a host up after so long without a sign of life; jax's own 100 and 300 are longer than a user waits.
TIMEOUT_S = 40
JOIN_S, FIND_S = 1200, 60.0  # for all to come, some still being made; for NFS to show what is new in a folder
# Others end when a host is silent for so long: before the service would abort them without a word about which.
SILENT_S = 25
LONGEST_WAIT_MS = 24 * 3600 * 1000  # of a meeting: who is missing there is known by its silence
LIMIT_FILES = "memory.max", "memory.limit_in_bytes"  # of a control group: Linux' container, or a job's share
HANGING_S = 1800  # a process that does one thing for so long shows where all its threads are, and again after as long

T = TypeVar("T")
_doing, _joined, _parting, _leaving = "start", threading.Event(), threading.Event(), threading.Lock()
_meetings = itertools.count()
_heard: dict[str, tuple[str, float]] = {}  # last sign of life of each host: its words, and the time of this host


class MachineError(RuntimeError):
    """A fault of machines, networks or disks, not of what the user has given: the same command again may find none."""


def initialize(*, alone: bool = False) -> None:
    """Join the job that the environment names; without one this process is the whole job.

    Raises:
        ConfigError: it names half a job, or none where JAXRL_DISTRIBUTED=1, or several hosts to what runs ``alone``.
        MachineError: the others do not come.
    """
    wanted, address = os.environ.get("JAXRL_DISTRIBUTED", ""), os.environ.get("JAX_COORDINATOR_ADDRESS")
    if wanted not in ("", "0", "1"):
        raise ConfigError(f"JAXRL_DISTRIBUTED={wanted!r} must be 1 (a job of several hosts), 0 (not) or unset")
    if wanted == "0" or not (wanted or address or _is_found()):
        return
    given: dict[str, Any] = dict.fromkeys(("heartbeat_timeout_seconds", "shutdown_timeout_seconds"), TIMEOUT_S)
    if address:
        numbers = {name: os.environ.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
        for name, value in numbers.items():
            if not value.isdigit():
                raise ConfigError(f"{name}={value!r} must be a number beside JAX_COORDINATOR_ADDRESS={address}")
        count, index = map(int, numbers.values())
        if index >= count:
            raise ConfigError(f"JAX_PROCESS_ID={index} must be less than JAX_NUM_PROCESSES={count}")
        given |= {"coordinator_address": address, "num_processes": count, "process_id": index}
    elif not os.environ.get("MEGASCALE_COORDINATOR_ADDRESS"):  # left by another job they would make slices of this one
        for name in [name for name in os.environ if name.startswith("MEGASCALE_")]:
            del os.environ[name]
    if alone and given.get("num_processes") != 1:
        raise ConfigError("this command runs on one host, not in a job of several: start it with JAXRL_DISTRIBUTED=0")
    # The service would abort the others without a word of which host is gone: ``_watch`` ends them.
    jax.config.update("jax_enable_recoverability", True)
    # Programs that meet others of the same host on few cores would wait for them without end.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborted)
    if address and _is_loopback(address) and not _has_address(socket.gethostname()):
        _meet_on_loopback()
    try:
        jax.distributed.initialize(**given, initialization_timeout=JOIN_S)
    except (RuntimeError, ValueError) as error:  # ValueError: nothing names a job
        kind = MachineError if isinstance(error, RuntimeError) else ConfigError
        raise kind(f"this process cannot join its job: {error}") from error
    _joined.set()
    if jax.process_count() > 1:
        atexit.register(_part)
        threading.Thread(target=_watch, args=(_service(),), daemon=True).start()
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open until the process ends


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
    """A process that leaves this by ``SystemExit`` ends when all that is registered for its end is done.

    What Python would free then takes seconds, of the few that a preempted host has.
    """
    atexit.register(_leave_at_once, _ended)  # of what is registered, the first comes last
    try:
        yield
    except SystemExit as end:
        _ended[:] = [end.code or 0] if isinstance(end.code, int | None) else []
        raise


def _leave_at_once(status: list[int]) -> None:
    if status:
        with contextlib.suppress(Exception):  # Python says so itself where nobody reads what is written
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status[0])


def end_at_sigterm() -> None:
    """SIGTERM to this host ends the job: jax has taken it over, and a command that never asks jax would not hear it."""
    if not is_alone():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _is_found() -> bool:
    """Whether the environment is that of a job of several hosts."""
    of, counts = os.environ.get, ("MEGASCALE_NUM_SLICES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return "," in of("TPU_WORKER_HOSTNAMES", "") or any(of(name, "") not in ("", "1") for name in counts)


def _service() -> Any:
    if (client := distributed.global_state.client) is None:
        raise ConfigError(f"jax finds {count()} processes, and this one has joined no job: set JAXRL_DISTRIBUTED=1")
    return client


def is_alone() -> bool:
    """Whether this process is the whole job. One that has joined none does not ask, which would open the devices."""
    return not jax.distributed.is_initialized() or count() == 1


def count() -> int:
    return jax.process_count()


def is_first() -> bool:
    """Whether this host speaks and writes for all."""
    return jax.process_index() == 0


def doing(what: str) -> None:
    """Say to the others what this host does from now on, and on stderr where its threads are if that never ends."""
    global _doing
    _doing = what
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no stderr, or none with a file
        faulthandler.dump_traceback_later(HANGING_S, repeat=True, file=sys.__stderr__)


def memory_bytes(root: str | os.PathLike = "/") -> int:
    """What this host's processes may have: its memory, or what their container is given (``root``: of proc and sys)."""
    found, groups = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")], pathlib.Path(root, "proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, kind, place = line.split(":", 2)
        if kind in ("", "memory"):  # version 2, and of version 1 what limits memory
            top = pathlib.Path(root, "sys/fs/cgroup", kind)
            folder = top / place.strip("/")
            files = [at / name for at in (folder, *folder.parents) if at.is_relative_to(top) for name in LIMIT_FILES]
            found += [int(text) for x in files if x.is_file() and (text := x.read_text().strip()).isdigit()]
    return min(found)


def exchange(value: T) -> list[T]:
    """What each host gives here, in the hosts' order; all must come, in the same order of calls."""
    if count() == 1:
        return [value]
    service, number, index = _service(), next(_meetings), jax.process_index()
    service.key_value_set_bytes(f"said/{number}/{index}", pickle.dumps(value))
    service.wait_at_barrier(f"said/{number}", LONGEST_WAIT_MS)
    said = {name.rpartition("/")[2]: text for name, text in service.key_value_dir_get_bytes(f"said/{number}/")}
    if number:  # all have read what was said before
        service.key_value_delete(f"said/{number - 1}/{index}")
    return [pickle.loads(said[str(i)]) for i in range(count())]


def complete(values: list[T | None]) -> list[T | None]:
    """The list with what other hosts have in the places where this one has None."""
    return [next((x for x in given if x is not None), None) for given in zip(*exchange(values), strict=True)]


def find(workdir: pathlib.Path, text: str | None) -> None:
    """``MachineError`` if not all find what the first wrote in its workdir's lock: half a checkpoint would be there."""
    if (host := _missing(workdir / "lock", text, FIND_S)) is not None:
        raise MachineError(f"--workdir={workdir} must be a folder that all hosts share; host {host} has another")


def _missing(path: pathlib.Path, text: str | None, seconds: float) -> int | None:
    """A host that does not find in a file, in so many seconds, the text that the first has written there."""
    text, until, found = exchange(text)[0], time.monotonic() + seconds, False
    while text is not None and not found and time.monotonic() < until:
        with contextlib.suppress(OSError):  # not there, or what a network's disk says between two files
            found = path.read_text() == text
        time.sleep(0 if found else 0.2)
    return next((host for host, finds in enumerate(exchange(found)) if not finds), None)


def is_shared(folder: str) -> bool:
    """Whether the folder is one and the same on all hosts: they see a file that the first makes there. "" is none."""
    (place, name), *others = exchange((folder, uuid.uuid4().hex))
    is_same = bool(place) and all(other == place for other, _ in others)
    if not is_same or "://" in place:  # a bucket is one for all
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
    """All hosts must have the same facts.

    Raises:
        ConfigError: (on every host) naming the first that differs, and where.
    """
    if count() == 1:
        return
    texts = {name: fact if isinstance(fact, str) else repr(fact) for name, fact in {"code": _code(), **facts}.items()}
    digests = exchange({name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()})
    for name, text in texts.items():
        if other := [i for i, digest in enumerate(digests) if digest[name] != digests[0][name]]:
            by_host = exchange(text)
            at, first = _difference(by_host[other[0]], by_host[0])
            raise ConfigError(f"{name} of host {other[0]} is not that of host 0: {at!r} instead of {first!r}")


@functools.cache
def _code() -> str:
    """Versions of what computes, and a digest of this package's files."""
    package, digest = pathlib.Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{versions()}, files {digest.hexdigest()[:12]}"


def _difference(one: str, other: str) -> tuple[str, str]:
    """Where two texts begin to differ, a few words of each."""
    start = max(0, next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0) - 40)
    return one[start : start + 80], other[start : start + 80]


def checksums(tree: Any) -> dict[str, str]:
    """Digest of the bytes of each part of each array that this host holds, by name and place; typed keys too.

    Given to ``agree_on_copies`` it finds a copy that is another than that of another host.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for shard in leaf.addressable_shards:
            name = f"{jax.tree_util.keystr(path, simple=True, separator='/')}{shard.index}"
            found.setdefault(name, set()).add(hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()[:16])
    return {name: " ".join(sorted(digests)) for name, digests in found.items()}


def agree_on_copies(tree: Any, **facts: Any) -> None:
    """What several hosts hold a copy of must be the same in all; slow, for tests and for a suspicion.

    Raises:
        RuntimeError: (on every host) naming an array, or a fact, that is not.
    """
    said: dict[str, str] = {}
    for host, sums in enumerate(exchange({**checksums(tree), **{name: repr(fact) for name, fact in facts.items()}})):
        for name, text in sums.items():
            if said.setdefault(name, text) != text or (name not in facts and " " in text):
                raise RuntimeError(f"{name} of host {host} is not what other hosts have")


@contextlib.contextmanager
def together(status_of: Callable[[BaseException], int]) -> Iterator[None]:
    """While entered, what ends this host ends the others, with its words; left in peace, all leave together.

    Args:
        status_of: exit status for an exception.
    """
    if is_alone():
        yield
        return
    try:
        yield
        exchange("done")
    except BaseException as error:
        if isinstance(error, SystemExit):  # the end of all of them
            exchange("done")
        else:
            _end(error, status_of(error))
        raise


def meet(*, key: str, timeout_ms: int) -> None:
    """Where threads that write a checkpoint meet; one with an error ends all hosts, for the others wait elsewhere."""
    if is_alone():
        return
    if error := sys.exception():
        _leave(_end(error, status=1))
    _service().wait_at_barrier(key, timeout_ms)


def _end(error: BaseException, status: int) -> str:
    """Tell the others why this host ends, in the words that are returned."""
    if "JaxRuntimeError" in (type(error).__name__, type(error.__cause__).__name__) or "Gloo" in str(error):
        time.sleep(SILENT_S + 5)  # it may be that another host is gone: ``_watch`` finds out which, and ends this
    service, index, words = _service(), jax.process_index(), f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # the service may be gone
        service.key_value_set(f"failed/{index}", f"{status} {_doing}\n{words}", allow_overwrite=True)
    if index == 0:
        time.sleep(4)  # they read it from here
    return words


def _part() -> None:
    """At the end of this process: the first host stays until the others have left its service."""
    service, index = _service(), jax.process_index()
    _parting.set()
    with contextlib.suppress(Exception):  # the service may be gone
        service.key_value_set(f"left/{index}", "")
        if index > 0:
            jax.distributed.shutdown()
        for _ in range(100 if index == 0 else 0):
            if len(service.key_value_dir_get("left/")) == count():
                service.get_live_nodes(list(range(count())))  # an answer when all others have shut down
                break
            time.sleep(0.1)


def _watch(service: Any) -> None:
    """Say every second that this host lives, and end it when another has failed or is silent."""
    index = jax.process_index()
    for beat in itertools.count():
        if _parting.is_set():
            return None
        try:
            service.key_value_set(f"alive/{index}", f"{beat} {_doing}", allow_overwrite=True)
            alive, failed = service.key_value_dir_get("alive/"), service.key_value_dir_get("failed/")
        except Exception as error:
            return None if _parting.is_set() else _leave(_of_host_0(f"is gone ({str(error).splitlines()[0][:100]})"))
        for name, text in failed:
            if (host := name.rpartition("/")[2]) != str(index):
                (status, _, what), words = text.partition("\n")[0].partition(" "), text.partition("\n")[2]
                return _leave(f"host {host} failed in: {what}: {words}", int(status))
        for name, text in alive:
            host = name.rpartition("/")[2]
            if _heard.get(host, ("",))[0] != text:
                _heard[host] = text, time.monotonic()
            elif time.monotonic() - _heard[host][1] > SILENT_S:
                what = text.partition(" ")[2]
                return _leave(f"host {host} has not been heard of for {SILENT_S} s; it was in: {what}")
        time.sleep(1)


def _of_host_0(how: str) -> str:
    """Why this host ends, in words."""
    return f"host 0 {how}; it was in: {_heard['0'][0].partition(' ')[2] if '0' in _heard else 'start'}"


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(_: int) -> None:
    """In place of what jax's client does where the service ends, or others do not come: abort, with no word of a host.

    A handler of C: those of Python run in the main thread, when it next gets to it, and the process has ended by then.
    """
    if not _joined.is_set():
        os.write(2, f"error: this process cannot join its job: some did not come in {JOIN_S} s\n".encode())
        os._exit(1)
    host, _, port = distributed.global_state.coordinator_address.rpartition(":")
    time.sleep(1)  # one that dies closes its connections one after the other
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        _leave(_of_host_0(f"is gone ({error})"))
    if (silent := time.monotonic() - _heard.get("0", ("", time.monotonic()))[1]) > SILENT_S:
        _leave(_of_host_0(f"has not been heard of for {silent:.0f} s"))
    faulthandler.dump_traceback()  # another abort: what it would have said


def _leave(words: str, status: int = 1) -> None:
    """End this process, wherever its other threads wait; called by two of them, the first has the word."""
    _leaving.acquire()
    # What ends this host by itself has better words; and while the first is there, the others find out for themselves.
    time.sleep(6 if is_first() else 1)
    if _ended:
        os._exit(_ended[0])  # its own work is done: the others may go first
    sys.stderr.write(f"error: {' '.join(words.split())[:2000]}; this host was in: {_doing}\n")
    sys.stderr.flush()
    os._exit(status)
