"""Folders of checkpoints, on a disk or in a bucket of Google Cloud Storage (``gs://BUCKET/FOLDER``, extra ``gcs``).

On a disk a checkpoint is renamed when it is whole. A bucket has no folders to rename: there orbax writes a marker when
all else is written, and what is moved is copied, the marker last, and then removed, the marker first.

Owns: what is whole, how it is moved and removed, where tensorstore finds it. Does not know: what is in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import pathlib
import re
import shutil
from typing import Any

from jaxrl_llm.config import ConfigError

PREFIX, MARKER = "gs://", "commit_success.txt"  # orbax's


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


def check(folder: Any, workdir: pathlib.Path, setting: str, text: str) -> None:
    """Write who uses a folder of a bucket into it: before there is a checkpoint to be lost.

    Raises:
        ConfigError: it is in no bucket or cannot be written, or the run of the workdir has its checkpoints elsewhere.
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
    if not setting:
        return
    try:
        (folder / "writer.txt").write_text(text)
    except Exception as error:  # those of gcsfs, of its credentials and of the network have no class in common
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"checkpoint.bucket={setting!r} cannot be written: {why}") from error


def is_whole(path: Any) -> bool:
    """Whether there is a checkpoint there, all of it."""
    return (path / MARKER).exists() if is_bucket(path) else path.is_dir()


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
