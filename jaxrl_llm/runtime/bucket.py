"""Folders of checkpoints, on a disk or in a bucket of Google Cloud Storage (``gs://BUCKET/FOLDER``, extra ``gcs``).

On a disk a checkpoint folder gets its name when it is complete. A bucket has no folders to rename, so orbax writes a
marker object last. To move a checkpoint in a bucket, its objects are copied, the marker last. Then the old objects are
removed, the marker first.

Only one run at a time holds a folder. In a bucket an object names the holder; on a disk the holder locks a file. The
holder writes a heartbeat there every few seconds. If the heartbeat stops, the next run takes the folder over:

    bucket   the holder's process was killed
    disk     the holder's machine is gone; the server of a network disk may keep the lock of that machine forever

Owns: when a checkpoint or a file is complete, how it is moved and removed, which run may write, the address of a folder
for tensorstore. Does not know: the content of a folder.
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

# Both names are defined by orbax.
PREFIX = "gs://"
MARKER = "commit_success.txt"
WRITER = "writer.txt"
# Seconds between heartbeats of a holder, and seconds without a heartbeat after which a folder in a bucket is free.
BEAT_S = 10.0
STALE_S = 45.0
# STALE_LOCK_S is the same time for a network disk: its server may not answer for a minute, and hosts may see old file
# attributes for as long. WAIT_S limits the wait for a run on another machine that is being stopped or has died.
STALE_LOCK_S = 100.0
WAIT_S = 120.0


def place(where: str | os.PathLike, setting: str = "") -> Any:
    """Return the path of a folder. The path of a folder in a bucket has the methods of ``pathlib.Path``.

    Args:
        where: the folder, on a disk or in a bucket.
        setting: the name of the setting that names the folder, for error messages.

    Raises:
        ConfigError: the text is not a valid name of a bucket and a folder, or the packages for buckets are missing.
    """
    text = os.fspath(where)
    if not is_bucket(text):
        return pathlib.Path(text)
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[\w.-]+)+/?", text, re.ASCII):
        named = f"{setting}={text!r}" if setting else repr(text)
        raise ConfigError(f"{named} must be gs://BUCKET/FOLDER, of letters, digits and _.-/")
    missing = [name for name in ("gcsfs", "google.cloud.storage") if not _is_installed(name)]
    if missing:
        raise ConfigError(f"{text} needs the package {missing[0]}: pip install 'jaxrl_llm[gcs]'")
    import fsspec.config  # the package is installed with gcsfs
    from etils import epath

    # Silence the logger, because it logs every failed attempt and the last error is also raised.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # A host must see objects that another host has written, so gcsfs must not cache its list of names.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(text.rstrip("/"))


def _is_installed(name: str) -> bool:
    """Return whether a module can be found."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def is_bucket(where: str | os.PathLike) -> bool:
    """Return whether the text or path is that of a bucket."""
    return os.fspath(where).startswith(PREFIX)


def absolute(path: Any) -> Any:
    """Return a path on disk as an absolute path, and a path in a bucket unchanged."""
    return path if is_bucket(path) else path.resolve()


def check(workdir: pathlib.Path, setting: str) -> None:
    """Check that a run may use this workdir with this setting of ``checkpoint.bucket``.

    Raises:
        ConfigError: the run may not use the workdir, for one of three reasons:

            - The setting does not name a bucket.
            - The run in the workdir has its checkpoints in another place.
            - The run in the workdir has ended and has no checkpoint. A new run would overwrite its metrics.
    """
    if setting and not is_bucket(setting):
        raise ConfigError(f"checkpoint.bucket={setting!r:.200} must be '' or '{PREFIX}BUCKET/FOLDER'")
    before = setting
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        settings = json.loads((workdir / "config.json").read_text())
        before = settings["checkpoint"].get("bucket", "")
    if before != setting:
        raise ConfigError(
            f"checkpoint.bucket={setting!r}, but the run of --workdir={workdir} has its checkpoints in "
            f"{before or 'the workdir'}: set it back, or use another workdir"
        )
    root = place(setting or workdir / "checkpoints", "checkpoint.bucket")
    rows = workdir / "metrics.jsonl"
    has_rows = rows.is_file() and rows.stat().st_size > 0
    has_report = has_rows and (workdir / "report.html").is_file()
    # The holder's object does not count.
    has_checkpoint = root.is_dir() and any(path.name != WRITER for path in root.iterdir())
    if has_report and not has_checkpoint and not _is_cut(workdir):
        raise ConfigError(
            f"--workdir={workdir} has a run that has ended and no checkpoint of it in {root}: a new run would "
            "overwrite its metrics. Use another workdir, or remove report.html"
        )


def _is_cut(workdir: pathlib.Path) -> bool:
    """Return whether the metrics end before the last iteration. A run that has not ended may have a report too."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        planned = json.loads((workdir / "config.json").read_text())["num_iterations"]
        last_row = json.loads((workdir / "metrics.jsonl").read_bytes().splitlines()[-1])
        return last_row["iteration"] < planned
    return False


@contextlib.contextmanager
def held(setting: str, who: str) -> Iterator[None]:
    """Hold a folder in a bucket for this run while entered, so that no other run overwrites its checkpoints.

    Args:
        setting: ``gs://BUCKET/FOLDER``; for any other text there is nothing to hold.
        who: text that identifies this process; no other process may use the same text.

    Raises:
        ConfigError: the name is not valid, this machine may not write there, or another run holds the folder.
        MachineError: the bucket does not answer.
    """
    if not is_bucket(setting):
        yield
        return
    place(setting, "checkpoint.bucket")
    from google.cloud import storage

    bucket, _, folder = setting.removeprefix(PREFIX).rstrip("/").partition("/")
    try:
        writer = _Writer(storage.Client().bucket(bucket), f"{folder}/{WRITER}", who)
        writer.take(f"checkpoint.bucket={setting!r}")
    except ConfigError:
        raise
    except Exception as error:  # catch every exception, because network errors have no common class
        from google.api_core.exceptions import ClientError
        from google.auth.exceptions import DefaultCredentialsError

        is_refused = isinstance(error, ClientError | DefaultCredentialsError)
        # The HTTP status is that of a timeout or of too many requests.
        is_temporary = not is_refused or getattr(error, "code", None) in (408, 429)
        kind = MachineError if is_temporary else ConfigError
        raise kind(f"checkpoint.bucket={setting!r} cannot be written: {type(error).__name__}: {error}") from error
    ended = threading.Event()
    threading.Thread(target=writer.keep, args=(ended,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        with contextlib.suppress(Exception):  # ignore the error, because the folder becomes free without heartbeats
            writer.release()


class _Writer:
    """Object in a bucket that names the holder of a folder.

    Each write names the generation (version) of the object that it replaces. The bucket rejects the write if another
    process has replaced that generation.
    """

    def __init__(self, bucket: Any, name: str, who: str):
        self._bucket = bucket
        self._name = name
        self._who = who
        self._generation = 0  # 0 = the object does not exist
        self._writing = threading.Lock()

    def take(self, subject: str) -> None:
        """Write the object as soon as it does not exist or its holder has sent no heartbeat for ``STALE_S`` seconds.

        Raises:
            ConfigError: the holder is alive. The message begins with ``subject``.
        """
        before = 0
        since = time.monotonic()
        while True:
            self._generation, text = self._read()
            is_dead = before and time.monotonic() - since > STALE_S
            if before and self._generation not in (0, before):
                raise ConfigError(f"{subject} is in use by {text}: use another folder, or wait for its end")
            if (self._generation == 0 or is_dead) and self._write():
                return
            if self._generation and not before:
                before = self._generation
                print(
                    f"{subject} was taken by {text}: does it live? ({STALE_S:.0f} s at most)",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(1)

    def keep(self, ended: threading.Event) -> None:
        """Write a heartbeat every few seconds until ``ended`` is set.

        If this process sent no heartbeat for too long, another process may take the folder over. Then end this process.
        """
        while not ended.wait(BEAT_S):
            # After a network error, try again at the next heartbeat.
            with contextlib.suppress(Exception), self._writing:
                if ended.is_set() or self._write():
                    continue
                self._generation, text = self._read()
                if text not in ("", self._who):
                    _end("checkpoint.bucket", text)

    def release(self) -> None:
        """Remove the object. The bucket rejects this if another process has replaced the object."""
        with self._writing:
            self._bucket.blob(self._name).delete(if_generation_match=self._generation, timeout=BEAT_S)

    def _read(self) -> tuple[int, str]:
        """Return the generation and the text of the object, or (0, "") if it does not exist."""
        from google.api_core.exceptions import NotFound

        while True:
            blob = self._bucket.get_blob(self._name, timeout=BEAT_S)
            if blob is None:
                return 0, ""
            with contextlib.suppress(NotFound):  # the object was removed or replaced since the lookup
                return blob.generation, blob.download_as_text(timeout=BEAT_S)

    def _write(self) -> bool:
        """Write the object, and return False if another process has written or removed it in the meantime."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(self._who, if_generation_match=self._generation, timeout=BEAT_S)
        except (NotFound, PreconditionFailed):
            return False
        self._generation = blob.generation
        return True


def machine() -> str:
    """Return a name of this machine that is unique and changes when the machine restarts.

    On systems other than Linux this is the host name, which does not change.
    """
    with contextlib.suppress(OSError):  # Linux
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def wait_for(path: pathlib.Path, subject: str) -> IO[str]:
    """Wait until the holder of a folder on disk releases it or sends no heartbeat. Return the locked lock file.

    Raises:
        ConfigError: a run on this machine holds the folder. The system would release the lock of a dead process at
            once, so that run is alive. The message begins with ``subject``.
        MachineError: a run on another machine still holds the folder after ``WAIT_S`` seconds.
    """
    started = time.monotonic()
    beat = 0
    since = 0.0
    while True:
        lock = open(path, "a+")  # noqa: SIM115, reopened each time: a network disk then shows its current content
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):  # the locked file is still the file of this name
                return lock
            lock.close()
            continue
        except BlockingIOError:
            lock.seek(0)
            who, _, where = lock.read().partition("\n")
            modified = os.fstat(lock.fileno()).st_mtime_ns
            lock.close()
        now = time.monotonic()
        if where in ("", machine()):  # an empty text was written by a version without heartbeats
            raise ConfigError(f"{subject} is in use by {who}")
        if now - started > WAIT_S:
            raise MachineError(f"{subject} is still in use by {who}")
        if not beat:
            print(
                f"{subject} is in use by {who}, on another machine: waiting for its end, {WAIT_S:.0f} s at most",
                file=sys.stderr,
                flush=True,
            )
        if modified != beat:
            beat = modified
            since = now
        if now - since > STALE_LOCK_S:
            return _take_over(path)
        time.sleep(1)


def _take_over(path: pathlib.Path) -> IO[str]:
    """Replace a lock file by a new file. Return the new file, which this process has locked."""
    new = path.with_name(f"{path.name}-{os.getpid()}-{machine()}")
    lock = open(new, "a+")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(new, path)
    return lock


@contextlib.contextmanager
def alive(path: pathlib.Path, text: str) -> Iterator[None]:
    """Write a heartbeat to the lock file while entered. End this process if another run has taken the folder over.

    Args:
        path: the lock file; a heartbeat updates its modification time.
        text: the content of the lock file while this process holds the folder.
    """
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # after a network error, try again at the next heartbeat
                found = path.read_text()
                if found == text:
                    os.utime(path)
                elif found and not ended.is_set():
                    _end(f"--workdir={path.parent}", found)

    threading.Thread(target=keep, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _end(setting: str, who: str) -> None:
    """End this process, because another run treated it as dead and took its folder over."""
    sys.stderr.write(f"error: {setting} was taken over by {' '.join(who.split())}\n")
    sys.stderr.flush()
    os._exit(1)


def is_whole(path: Any) -> bool:
    """Return whether the path is a complete checkpoint."""
    return (path / MARKER).exists() if is_bucket(path) else path.is_dir()


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a text file on disk atomically: afterwards the file has the whole text, or still its old content."""
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # without fsync a power cut may leave an empty file of this name
    os.replace(unfinished, path)


def remove(path: Any) -> None:
    """Remove a folder if it exists."""
    if not is_bucket(path):
        return shutil.rmtree(path, ignore_errors=True)
    (path / MARKER).unlink(missing_ok=True)
    if path.exists():
        path.rmtree()


def move(path: Any, to: Any) -> None:
    """Rename a checkpoint folder. In a bucket its objects are copied and then removed."""
    if not is_bucket(path):
        path.rename(to)
        return
    import fsspec

    files = fsspec.filesystem("gcs")
    old = os.fspath(path).removeprefix(PREFIX)
    new = os.fspath(to).removeprefix(PREFIX)

    def is_marker(name: str) -> bool:
        return name == f"{old}/{MARKER}"

    names = sorted(files.find(old), key=is_marker)
    for batch in (names[:-1], names[-1:]):  # the marker last
        files.copy(batch, [new + name.removeprefix(old) for name in batch])
    remove(path)


def store(path: Any) -> dict[str, str]:
    """Return the description of a folder that tensorstore expects as the base of a key-value store."""
    text = os.fspath(path)
    if not is_bucket(text):
        return {"driver": "file", "path": text}
    bucket, _, folder = text.removeprefix(PREFIX).partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": folder}
