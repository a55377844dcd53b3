"""Functions that read and write JSON and JSON Lines: questions, answers, documents, logs of a run, messages.

Python's ``json`` writes and reads NaN and Infinity, which are not JSON. ``written`` formats values for other programs.
``strict`` reads the messages of models and clients.

Owns: the accepted and written form of JSON, the format of a line, the errors for bad lines. Does not know: the meaning
of keys.
"""

from __future__ import annotations

import collections
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl_llm.settings.schema import ConfigError

MAX_LINE_BYTES = 2**26  # limit on the length of a line: a file without line ends must not be read into memory
# Limit on the nesting of lists and objects in a row, because recursive functions send columns to other processes.
MAX_DEPTH = 100


class BadRowError(Exception):
    """Error with the reason why a row cannot be used."""


def written(value: Any, **options: Any) -> str:
    """Return ``value`` as JSON text that every reader accepts.

    A float that is not finite becomes null. A lone surrogate, which UTF-8 cannot encode, is written as an escape.

    Args:
        options: keyword arguments of ``json.dumps``.
    """
    try:
        text = json.dumps(value, allow_nan=False, **options)
    except ValueError:
        text = json.dumps(finite(value), allow_nan=False, **options)
    return text.encode("utf-8", "backslashreplace").decode()


def finite(value: Any) -> Any:
    """Return ``value`` with None for every float that JSON cannot hold (the reward of a rollout that failed is NaN)."""
    if isinstance(value, dict):
        return {finite(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def strict(text: str | bytes) -> Any:
    """Return the value of a JSON text. Reject texts that JSON readers interpret differently.

    Raises:
        ValueError: the text is not JSON, has NaN, Infinity or a number beyond a float, or repeats a key in an object.
        RecursionError: the text is nested too deeply.
    """
    return json.loads(text, parse_constant=_refused, parse_float=_float, object_pairs_hook=_distinct)


def _refused(name: str) -> float:
    """Raise a ``ValueError`` for NaN or Infinity."""
    raise ValueError(f"{name} is not JSON")


def _float(text: str) -> float:
    """Return the number in a text; a ``ValueError`` if a float cannot hold it."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.60} is too large")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary; a ``ValueError`` if a key is repeated."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"the key {_twice(pairs)!r:.60} occurs twice in an object")
    return made


def _twice(pairs: list[tuple[str, Any]]) -> str:
    """Return the most frequent key of the pairs."""
    counts = collections.Counter(key for key, _ in pairs)
    key, _ = counts.most_common(1)[0]
    return key


def read_json(path: Path) -> dict[str, Any]:
    """Return the single JSON object of a file.

    Raises:
        ConfigError: the file cannot be read or does not have a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"{value!r:.60} is not an object")
        return value
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable JSON ({error})") from error


def objects(path: str, wanted: str = "an object") -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a JSON Lines file, each with its location "file:line". Blank lines are skipped.

    Args:
        wanted: description of a valid line, for the error.

    Raises:
        ConfigError: the file cannot be read, has no row, or has a line that is not a JSON object.
    """
    rows = []
    try:
        for number, line in lines(Path(path)):
            where = f"{path}:{number}"
            try:
                row = parse(line)
            except BadRowError as error:
                raise ConfigError(f"{where}: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: must be {wanted}, not {type(row).__name__}")
            rows.append((where, row))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise ConfigError(f"{path}: the file has no row")
    return rows


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that a run writes. An incomplete last line, left by a killed run, is skipped.

    Raises:
        ConfigError: a line is not a JSON object.
    """
    rows = []
    *whole_lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole_lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: not a JSON object")
        rows.append(row)
    return rows


def is_whole(line: bytes) -> bool:
    """Return whether a line of a file that a run writes is complete: a JSON object with a newline."""
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of the lines that are not blank. Numbers start at 1.

    Raises:
        OSError: the file cannot be read.
        ConfigError: a line is too long.
    """
    with opened(path) as file:  # read bytes, so that text in another encoding is only one bad row
        read_line = functools.partial(file.readline, MAX_LINE_BYTES + 1)
        for number, line in enumerate(iter(read_line, b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(f"{path}:{number}: a line may have {MAX_LINE_BYTES >> 20} MiB, and this has more")
            if line.strip():
                yield number, line.rstrip()


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises:
        OSError: the file cannot be opened or is not a regular file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError("it must be a regular file, which can be read again, not a FIFO or a device")
    return path.open("rb")


def parse(line: bytes) -> Any:
    """Return the JSON value of a line of a file.

    Raises:
        BadRowError: the line is not valid JSON in UTF-8.
    """
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object)
        num_brackets = line.count(b"[") + line.count(b"{")
        if num_brackets > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            raise RecursionError
        return value
    except json.JSONDecodeError as error:
        raise BadRowError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        where = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise BadRowError(f"not UTF-8: {where}; a line must be JSON in UTF-8, not compressed") from error
    except RecursionError as error:
        raise BadRowError("not JSON: nested too deeply") from error
    except ValueError as error:  # the number has more digits than Python accepts
        raise BadRowError(f"not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary; a ``BadRowError`` if a key is repeated."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise BadRowError(f"key {_twice(pairs)!r:.60} occurs twice in an object")
    return made


def _depth(value: Any) -> int:
    """Return how deeply lists and dictionaries are nested in a value."""
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    else:
        return 0
    return 1 + max(map(_depth, inner), default=0)
