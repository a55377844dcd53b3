"""JSONL in and out of commands: ``generate``, ``score``, ``evaluate``, ``plan``.

Owns: what an output and token ids of a row may be, lengths in buckets. Does not know: models.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime import hosts, json_lines


def check_output(path: str, flag: str = "--output") -> None:
    """Before any work is done: that a file can be written there.

    Raises:
        ConfigError: the folder is not there, or no file can be.
    """
    file = pathlib.Path(path)
    try:
        if not file.parent.is_dir() or file.is_dir():
            raise ConfigError(f"{flag}={path!r:.200} must be a file in a folder that exists")
        is_new = not file.exists()
        if (is_new or file.is_file()) and hosts.is_first():  # no pipe, which would wait for who reads
            file.open("a").close()
            if is_new:
                file.unlink()
    except OSError as error:
        raise ConfigError(f"{flag}={path!r:.200} cannot be written: {error.strerror}") from error


def write(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """One object a line, by the first of several hosts."""
    if hosts.is_first():
        pathlib.Path(path).write_text("".join(json_lines.written(row) + "\n" for row in rows), encoding="utf-8")


def token_ids(where: str, row: dict[str, Any], field: str, vocab_size: int, *, minimum: int) -> list[int]:
    """The list of token ids in the field of a row at ``where``.

    Raises:
        ConfigError: not a list of ids of this model, or shorter than ``minimum``.
    """
    where = f"{where}: `{field}`"
    ids = row.get(field)
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{where} must be a list of token ids")
    if len(ids) < minimum:
        raise ConfigError(f"{where} must hold at least {minimum} token ids")
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise ConfigError(f"{where}: token id {wrong[0]} is not in the model's vocabulary 0..{vocab_size - 1}")
    return ids


def bucket(length: int) -> int:
    """The power of two, 16 or more, that rows of this length are padded to: few programs serve all lengths."""
    return max(16, 1 << (length - 1).bit_length())


def check_positions(where: str, tokens: int, limit: int) -> None:
    if tokens > limit:
        raise ConfigError(f"{where}: {tokens} tokens are more than the model's {limit} positions")
