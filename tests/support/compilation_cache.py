"""Keep the compilation cache of the tests whole and small. Several test processes share its folder."""

import os
import pathlib

from jax._src import lru_cache


def write_whole_entries() -> None:
    """Make jax write a cache entry under another name and rename it.

    Without this, one process can read an entry that another process has written in part, and a process that is
    killed leaves such an entry for ever. jax warns about a broken entry, and warnings are errors in the tests.
    """

    def put(self: lru_cache.LRUCache, key: str, value: bytes) -> None:
        path = pathlib.Path(str(self.path)) / f"{key}-cache"
        if path.exists():
            return
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(value)
        part.rename(path)

    lru_cache.LRUCache.put = put


def prune(folder: pathlib.Path, most_bytes: int) -> None:
    """Remove the entries that were used least recently, down to half of ``most_bytes``, if the cache holds more."""
    entries = []
    total = 0
    for path in folder.glob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:  # another session prunes as well
            continue
        total += status.st_size
        entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    if total <= most_bytes:
        return
    for _, size, path in sorted(entries):
        path.unlink(missing_ok=True)
        total -= size
        if total <= most_bytes // 2:
            return
