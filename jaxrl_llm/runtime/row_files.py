"""JSONL input and output of the commands ``generate``, ``score``, ``evaluate`` and ``plan``.

Owns: checks of output paths and of token ids in rows, length buckets. Does not know: models.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime import hosts, json_lines


def check_output(path: str, flag: str = "--output") -> None:
    """Check that a file can be written at ``path``, before any work is done.

    Raises:
        ConfigError: the folder does not exist, or the file cannot be written.
    """
    file = pathlib.Path(path)
    try:
        if not file.parent.is_dir() or file.is_dir():
            raise ConfigError(f"{flag}={path!r:.200} must be a file in a folder that exists")
        is_new = not file.exists()
        is_pipe = not is_new and not file.is_file()
        if hosts.is_first() and not is_pipe:  # opening a pipe waits for a reader
            file.open("a").close()
            if is_new:
                file.unlink()
    except OSError as error:
        raise ConfigError(f"{flag}={path!r:.200} cannot be written: {error.strerror}") from error


def write(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line. With several hosts only the first host writes."""
    if not hosts.is_first():
        return
    lines = [json_lines.written(row) + "\n" for row in rows]
    pathlib.Path(path).write_text("".join(lines), encoding="utf-8")


def token_ids(
    where: str,
    row: dict[str, Any],
    field: str,
    vocab_size: int,
    *,
    minimum: int,
) -> list[int]:
    """Return the list of token ids in the field ``field`` of ``row``. ``where`` names the row in error messages.

    Raises:
        ConfigError: the field is not a list of this model's token ids, or has fewer than ``minimum``.
    """
    place = f"{where}: `{field}`"
    ids = row.get(field)
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise ConfigError(f"{place} must be a list of token ids")
    if len(ids) < minimum:
        raise ConfigError(f"{place} must hold at least {minimum} token ids")
    unknown = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if unknown:
        raise ConfigError(f"{place}: token id {unknown[0]} is not in the model's vocabulary 0..{vocab_size - 1}")
    return ids


def bucket(length: int) -> int:
    """Return the padded length for rows of this length: a power of two, at least 16.

    Buckets keep the number of compiled programs small.
    """
    power_of_two = 1 << (length - 1).bit_length()
    return max(16, power_of_two)


def check_positions(where: str, tokens: int, limit: int) -> None:
    """Check that a row has at most ``limit`` tokens, the number of positions of the model.

    Raises:
        ConfigError: the row has more tokens.
    """
    if tokens > limit:
        raise ConfigError(f"{where}: {tokens} tokens are more than the model's {limit} positions")
