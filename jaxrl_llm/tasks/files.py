"""Questions from a JSONL or Parquet file: ``prompt`` (text or messages) or ``messages``, and any other columns.

Owns: which rows are questions, and how a bad one is reported. Does not know: what the columns mean (reward
functions do), tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError, PromptsConfig
from jaxrl_llm.tasks.protocol import Loaded

SCORER = ""  # a file has no scorer of its own: rewards.functions names one


class BadRowError(Exception):
    """Why one row is no question."""


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """The first ``config.size`` questions of the file ``config.name`` (0 = all), in file order.

    Host; ``columns`` is everything beside ``prompt`` and ``messages``; ``origin`` is "file:row", from 1.

    Raises:
        ConfigError: the file cannot be read, holds no question, or (``prompts.bad_row="error"``) has a bad row.
    """
    from jaxrl_llm.types import Example  # here: scorers live in task modules, which stay free of jax

    del seed
    path = Path(config.name).expanduser()
    examples, bad_rows = [], []
    try:
        for number, row in (_parquet_rows if config.source == "parquet" else _json_rows)(path):
            origin = f"{path}:{number}"
            try:
                prompt, columns = question(parse(row) if isinstance(row, bytes) else row)
                examples.append(Example(prompt, columns, origin))
            except BadRowError as error:
                if config.bad_row == "error":
                    raise ConfigError(f"{origin}: {error} (prompts.bad_row='skip' leaves such rows out)") from error
                bad_rows.append(f"{origin}: {error}")
            if len(examples) == config.size > 0:
                break
    except OSError as error:
        raise ConfigError(f"prompts.name={config.name!r} cannot be read: {error.strerror or error}") from error
    if not examples:
        reason = f"none of its {len(bad_rows)} rows can be used; {bad_rows[0]}" if bad_rows else "it is empty"
        raise ConfigError(f"prompts.name={config.name!r} holds no question: {reason}")
    return Loaded(tuple(examples), tuple(bad_rows))


def _json_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:  # bytes, so that text in another encoding is one bad row and not the end
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.rstrip()


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"prompts.source='parquet' needs {error.name}: pip install 'jaxrl_llm[parquet]'") from error
    with path.open("rb") as file:
        try:
            number = 0
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except pyarrow.ArrowInvalid as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"prompts.name={str(path)!r} is not a Parquet file: {reason}") from error


def parse(line: bytes) -> Any:
    """The JSON value of a line of a file.

    Raises:
        BadRowError: there is none.
    """
    try:
        text = line.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise BadRowError("half a character (a surrogate by itself)") from error
    except json.JSONDecodeError as error:
        raise BadRowError(f"not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise BadRowError(f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from error
    except RecursionError as error:
        raise BadRowError("not JSON: nested too deeply") from error
    except ValueError as error:
        raise BadRowError(f"not JSON: {error}") from error  # a number of thousands of digits


def question(row: Any) -> tuple[str | list[dict[str, str]], dict[str, Any]]:
    """``(prompt, columns)`` of a row. A null is an absent value: Parquet has every column in every row.

    Raises:
        BadRowError: it is no question.
    """
    if not isinstance(row, dict):
        raise BadRowError(f"must be an object with `prompt` or `messages`, not {type(row).__name__}")
    given = [key for key in ("prompt", "messages") if row.get(key) is not None]
    if len(given) != 1:
        raise BadRowError(f"must have one of `prompt` and `messages`; its columns are {sorted(row)}")
    for key in ("prompts", "completions"):
        if key in row:
            raise BadRowError(f"column `{key}` has the name of an argument of every reward function")
    prompt = row[given[0]]
    columns = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
    if given == ["prompt"] and isinstance(prompt, str):
        if not prompt:
            raise BadRowError("`prompt` is empty")
        return prompt, columns
    return _messages(prompt, given[0]), columns


def _messages(messages: Any, key: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        kinds = "text or a list of messages" if key == "prompt" else "a list of messages"
        raise BadRowError(f"`{key}` must be {kinds}, not {messages!r:.60}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadRowError(f"a message must have texts `role` and `content`, not {message!r:.60}")
    if messages[-1]["role"] == "assistant":
        raise BadRowError(f"`{key}` ends with the assistant's own message: nothing is left to answer")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
