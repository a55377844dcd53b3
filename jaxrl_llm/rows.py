"""JSONL in and out of the commands ``generate`` and ``score``.

Owns: reading rows with errors that name file and line, lengths in buckets. Does not know: models.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from jaxrl_llm.config import ConfigError


def read(path: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file; blank lines are passed over.

    Raises:
        ConfigError: no such file, no row, or a line that is not a JSON object.
    """
    rows = []
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: must be an object, not {type(row).__name__}")
        rows.append(row | {"_line": number})
    if not rows:
        raise ConfigError(f"{path}: holds no row")
    return rows


def check_output(path: str) -> None:
    """Before any work is done: that a file can be written there.

    Raises:
        ConfigError: the folder is not there.
    """
    if not path or not os.path.isdir(pathlib.Path(path).parent) or os.path.isdir(path):
        raise ConfigError(f"--output={path} must be a file in a folder that exists")


def write(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """One object a line, without the reader's own field."""
    lines = (json.dumps({k: v for k, v in row.items() if k != "_line"}) for row in rows)
    pathlib.Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def token_ids(path: str, row: dict[str, Any], field: str, vocab_size: int, *, minimum: int) -> list[int]:
    """The list of token ids in a row's field.

    Raises:
        ConfigError: not a list of ids of this model, or shorter than ``minimum``.
    """
    where = f"{path}:{row['_line']}: `{field}`"
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
