"""Folders of checkpoints, on a disk or in a bucket of Google Cloud Storage (``gs://BUCKET/FOLDER``, extra ``gcs``).

On a disk a checkpoint is renamed when it is whole. A bucket has no folders to rename: there orbax writes a marker when
all else is written, and what is moved is copied, the marker last, and then removed, the marker first.

One run at a time has a folder: of a bucket an object in it says which, of a disk a file that is locked, and a sign of
life goes there every few seconds. What gets none any more was left by a process that was killed, or on a disk, whose
server may keep its lock for ever, by a machine that is gone: the next run takes it over.

Owns: what is whole, how a file becomes so, how it is moved and removed, who may write it, where tensorstore finds it.
Does not know: what is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import pathlib
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime.hosts import MachineError

PREFIX, MARKER = "gs://", "commit_success.txt"  # orbax's
WRITER = "writer.txt"
# A folder's holder writes so often, and lets one go that nobody has written to for so long.
BEAT_S, STALE_S = 10.0, 45.0
# Of a disk a network's: its server may be away for a minute, and hosts know for as long what is there no more. A run on
# another machine is waited for that is being stopped, or has died with it.
STALE_LOCK_S, WAIT_S = 100.0, 120.0


def place(where: str | os.PathLike) -> Any:
    """The path of a folder; in a bucket, one that has the methods of ``pathlib``'s.

    Raises:
        ConfigError: no such name of a bucket and a folder, or the packages for it are missing.
    """
    text = os.fspath(where)
    if not is_bucket(text):
        return pathlib.Path(text)
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[\w.-]+)+/?", text, re.ASCII):
        raise ConfigError(f"{text!r} must be gs://BUCKET/FOLDER, of letters, digits and _.-/")
    if missing := [name for name in ("gcsfs", "google.cloud.storage") if not _is_installed(name)]:
        raise ConfigError(f"{text} needs the package {missing[0]}: pip install 'jaxrl_llm[gcs]'")
    import fsspec.config  # comes with gcsfs
    from etils import epath

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it tells of every try what it raises after the last
    # A host must see what another has written: not the names that it found there before.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(text.rstrip("/"))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def is_bucket(where: str | os.PathLike) -> bool:
    return os.fspath(where).startswith(PREFIX)


def absolute(path: Any) -> Any:
    return path if is_bucket(path) else path.resolve()


def check(workdir: pathlib.Path, setting: str) -> None:
    """Refuse a run whose checkpoints would lie elsewhere than they do, or which has ended and has none any more.

    Raises:
        ConfigError: the setting names no bucket, the run of the workdir has its checkpoints elsewhere, or to begin it
            anew would take its metrics.
    """
    if setting and not is_bucket(setting):
        raise ConfigError(f"checkpoint.bucket={setting!r:.200} must be '' or '{PREFIX}BUCKET/FOLDER'")
    before = setting
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        before = json.loads((workdir / "config.json").read_text())["checkpoint"].get("bucket", "")
    if before != setting:
        raise ConfigError(
            f"checkpoint.bucket={setting!r}, but the run of --workdir={workdir} has its checkpoints in "
            f"{before or 'the workdir'}: set it back, or use another workdir"
        )
    root, rows = place(setting or workdir / "checkpoints"), workdir / "metrics.jsonl"
    has_report = (workdir / "report.html").is_file() and rows.is_file() and rows.stat().st_size > 0
    is_empty = not (root.is_dir() and any(path.name != WRITER for path in root.iterdir()))  # but for this run's sign
    if has_report and is_empty and not _is_cut(workdir):
        raise ConfigError(
            f"--workdir={workdir} has a run that has ended and no checkpoint of it in {root}: it would begin anew and "
            "lose its metrics. Use another workdir, or remove report.html"
        )


def _is_cut(workdir: pathlib.Path) -> bool:
    """Whether metrics are known to end before the last iteration: a report may be made of a living run."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        planned = json.loads((workdir / "config.json").read_text())["num_iterations"]
        return json.loads((workdir / "metrics.jsonl").read_bytes().splitlines()[-1])["iteration"] < planned
    return False


@contextlib.contextmanager
def held(setting: str, who: str) -> Iterator[None]:
    """While entered no other run may have this folder of a bucket ("" = there is none): before a checkpoint is lost.

    Args:
        who: words like those of no other process.

    Raises:
        ConfigError: it is in no bucket, this machine may not write there, or another run has it.
        MachineError: the bucket does not answer.
    """
    if not is_bucket(setting):
        yield
        return
    place(setting)
    from google.cloud import storage

    bucket, _, folder = setting.removeprefix(PREFIX).rstrip("/").partition("/")
    try:
        writer = _Writer(storage.Client().bucket(bucket), f"{folder}/{WRITER}", who)
        writer.take(f"checkpoint.bucket={setting!r}")
    except ConfigError:
        raise
    except Exception as error:  # those of the network have no class in common
        from google.api_core.exceptions import ClientError
        from google.auth.exceptions import DefaultCredentialsError

        is_refused = isinstance(error, ClientError | DefaultCredentialsError)
        passes = not is_refused or getattr(error, "code", None) in (408, 429)  # too slow, too many
        said = f"checkpoint.bucket={setting!r} cannot be written: {type(error).__name__}: {error}"
        raise (MachineError if passes else ConfigError)(said) from error
    ended = threading.Event()
    threading.Thread(target=writer.keep, args=(ended,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        with contextlib.suppress(Exception):  # it is let go by itself
            writer.release()


class _Writer:
    """The object that says who has a folder; each write is of the generation that it replaces, or is refused."""

    def __init__(self, bucket: Any, name: str, who: str):
        self._bucket, self._name, self._who = bucket, name, who
        self._generation, self._writing = 0, threading.Lock()  # 0 = there is none

    def take(self, what: str) -> None:
        """Write it when there is none, or none that is alive; else ``ConfigError`` about ``what``."""
        before, since = 0, time.monotonic()
        while True:
            self._generation, text = self._read()
            is_dead = before and time.monotonic() - since > STALE_S
            if before and self._generation not in (0, before):
                raise ConfigError(f"{what} is in use by {text}: use another folder, or wait for its end")
            if (self._generation == 0 or is_dead) and self._write():
                return
            if self._generation and not before:
                before = self._generation
                print(
                    f"{what} was taken by {text}: does it live? ({STALE_S:.0f} s at most)", file=sys.stderr, flush=True
                )
            time.sleep(1)

    def keep(self, ended: threading.Event) -> None:
        """Write it again until ``ended``; end this process if another has it, which takes what was silent for dead."""
        while not ended.wait(BEAT_S):
            with contextlib.suppress(Exception), self._writing:  # of the network: again at the next beat
                if ended.is_set() or self._write():
                    continue
                self._generation, text = self._read()
                if text not in ("", self._who):
                    _end("checkpoint.bucket", text)

    def release(self) -> None:
        with self._writing:
            self._bucket.blob(self._name).delete(if_generation_match=self._generation, timeout=BEAT_S)

    def _read(self) -> tuple[int, str]:
        from google.api_core.exceptions import NotFound

        while (blob := self._bucket.get_blob(self._name, timeout=BEAT_S)) is not None:
            with contextlib.suppress(NotFound):  # let go, or written again, since it was looked up
                return blob.generation, blob.download_as_text(timeout=BEAT_S)
        return 0, ""

    def _write(self) -> bool:
        """Whether nobody else has written it since."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(self._who, if_generation_match=self._generation, timeout=BEAT_S)
        except (NotFound, PreconditionFailed):
            return False
        self._generation = blob.generation
        return True


def machine() -> str:
    """A name that no other machine has, nor this one when it has started anew."""
    with contextlib.suppress(OSError):  # Linux
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def wait_for(path: pathlib.Path, what: str) -> IO[str]:
    """The file that locks a folder of a disk, locked, when who has it lets it go or gives no sign of life.

    Raises:
        ConfigError: a run of this machine has it, about ``what``: a lock whose machine lives is let go at once.
        MachineError: a run of another machine does, and goes on.
    """
    started, beat, since = time.monotonic(), 0, 0.0
    while True:
        lock = open(path, "a+")  # noqa: SIM115, anew, for a network to tell what is there
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):  # nobody has put another in its place
                return lock
            lock.close()
            continue
        except BlockingIOError:
            lock.seek(0)
            (who, _, where), seen = lock.read().partition("\n"), os.fstat(lock.fileno()).st_mtime_ns
            lock.close()
        now = time.monotonic()
        if where in ("", machine()):  # "": of a version without signs of life
            raise ConfigError(f"{what} is in use by {who}")
        if now - started > WAIT_S:
            raise MachineError(f"{what} is still in use by {who}")
        if not beat:
            said = f"{what} is in use by {who}, on another machine: waiting for its end, {WAIT_S:.0f} s at most"
            print(said, file=sys.stderr, flush=True)
        if seen != beat:
            beat, since = seen, now
        if now - since > STALE_LOCK_S:
            new = path.with_name(f"{path.name}-{os.getpid()}-{machine()}")
            lock = open(new, "a+")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(new, path)
            return lock
        time.sleep(1)


@contextlib.contextmanager
def alive(path: pathlib.Path, text: str) -> Iterator[None]:
    """While entered others see by a locked file, which has this ``text``, that this process lives; another ends it."""
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # of the network: again at the next beat
                if (found := path.read_text()) == text:
                    os.utime(path)
                elif found and not ended.is_set():
                    _end(f"--workdir={path.parent}", found)

    threading.Thread(target=keep, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _end(what: str, who: str) -> None:
    """End this process, which was silent for so long that it was taken for dead."""
    sys.stderr.write(f"error: {what} was taken over by {' '.join(who.split())}\n")
    sys.stderr.flush()
    os._exit(1)


def is_whole(path: Any) -> bool:
    """Whether there is a checkpoint there, all of it."""
    return (path / MARKER).exists() if is_bucket(path) else path.is_dir()


def write_whole(path: pathlib.Path, text: str) -> None:
    """A file of a disk: it has all of the text, or what it had."""
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a power cut may leave its name and nothing in it
    os.replace(unfinished, path)


def remove(path: Any) -> None:
    """A folder, if it is there."""
    if not is_bucket(path):
        return shutil.rmtree(path, ignore_errors=True)
    (path / MARKER).unlink(missing_ok=True)
    if path.exists():
        path.rmtree()


def move(path: Any, to: Any) -> None:
    if not is_bucket(path):
        path.rename(to)
        return
    import fsspec

    files, (old, new) = fsspec.filesystem("gcs"), (os.fspath(x).removeprefix(PREFIX) for x in (path, to))
    names = sorted(files.find(old), key=lambda name: name == f"{old}/{MARKER}")
    for some in (names[:-1], names[-1:]):
        files.copy(some, [new + name.removeprefix(old) for name in some])
    remove(path)


def store(path: Any) -> dict[str, str]:
    """What tensorstore calls a folder."""
    text = os.fspath(path)
    if not is_bucket(text):
        return {"driver": "file", "path": text}
    bucket, _, folder = text.removeprefix(PREFIX).partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": folder}
