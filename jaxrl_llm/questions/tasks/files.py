"""Questions from JSONL or Parquet files.

A row has ``prompt`` (text or messages) or ``messages``, and any other columns.

``prompts.arguments`` renames columns: ``{"prompt": "question"}`` uses the file's column ``question`` as the prompt.

Owns: which rows are questions. Does not know: the meaning of the columns, which reward functions read; tokenizers.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.runtime.json_lines import BadRowError, lines, opened, parse
from jaxrl_llm.runtime.package_files import data_file
from jaxrl_llm.settings.schema import ConfigError

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

Prompt = str | list[dict[str, str]]  # text or messages
Read = Callable[[Path], Iterable[tuple[int, Any]]]  # yields the rows of a file with their numbers
SCORER = ""  # a file has no scorer: set rewards.functions


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return the first ``config.size`` questions of the file ``config.name`` (0 = all), in file order.

    Host; ``columns`` contains every column except ``prompt`` and ``messages``; ``origin`` is "file:row", from 1.

    Raises:
        ConfigError: the file cannot be read, has no question, or has a bad row under ``prompts.bad_row="error"``.
    """
    del seed
    for name, old in config.arguments.items():
        if not isinstance(old, str):
            raise ConfigError(f"prompts.arguments.{name}={old!r} must be the name of a column of {config.name!r}")
    is_parquet = config.source == "parquet"

    def question_of_row(row: Any) -> tuple[Prompt, dict[str, Any]]:
        parsed = _parse_scalars(row) if is_parquet else parse(row)
        return question(renamed(parsed, config.arguments))

    return load_rows(config, _parquet_rows if is_parquet else lines, question_of_row)


def renamed(row: Any, names: dict[str, str]) -> Any:
    """Return the row with renamed columns. ``names`` maps each new name to the old one.

    Raises:
        BadRowError: the row has no column of an old name, or already has a column of a new name.
    """
    if not isinstance(row, dict) or not names:
        return row
    for name, old in names.items():
        if old not in row:
            named = f"prompts.arguments.{name}={old!r:.200}"
            raise BadRowError(f"has no column `{old:.200}`, which {named} names; its columns are {sorted(row)!s:.300}")
    rest = {key: value for key, value in row.items() if key not in names.values()}
    duplicates = sorted(rest.keys() & names.keys())
    if duplicates:
        name = duplicates[0]
        raise BadRowError(
            f"has a column `{name}` already: prompts.arguments.{name}={names[name]!r:.200} must be left out"
        )
    return rest | {name: row[old] for name, old in names.items()}


def load_rows(
    config: PromptsConfig,
    read: Read,
    question_of_row: Callable[[Any], tuple[Prompt, dict[str, Any]]],
) -> Loaded:
    """Return the first ``config.size`` questions made from the rows of ``config.name``.

    A name with ``*`` or ``?`` that is not itself a file means all matching files, sorted by name. If ``config.size``
    leaves rows unread, a message about them is the first of ``bad_rows``. It raises the same errors as ``load``.

    Args:
        read: function that reads the rows of a file.
        question_of_row: function that returns a row's prompt and columns, or raises BadRowError.
    """
    from jaxrl_llm.types import Example  # imported here because task modules contain scorers and must not import jax

    examples = []
    bad_rows: list[str] = []
    try:
        rows = _all_rows(files_of(config.name), read)
        for origin, row in rows:
            try:
                prompt, columns = question_of_row(row)
                examples.append(Example(prompt, columns, origin))
            except BadRowError as error:
                if config.bad_row == "error":
                    raise ConfigError(f"{origin}: {error} (prompts.bad_row='skip' leaves such rows out)") from error
                bad_rows.append(f"{origin}: {error}")
            if len(examples) == config.size > 0:
                if _has_more(rows):
                    unread = f"the rows after {origin} (prompts.size={config.size}; 0 reads all)"
                    bad_rows.insert(0, unread)
                break
    except OSError as error:
        raise ConfigError(f"prompts.name={config.name!r} cannot be read: {error.strerror or error}") from error
    if not examples:
        reason = "it is empty"
        if bad_rows:
            reason = f"none of its {len(bad_rows)} rows can be used; {bad_rows[0]}"
        raise ConfigError(f"prompts.name={config.name!r} holds no question: {reason}")
    return Loaded(tuple(examples), tuple(bad_rows))


def _all_rows(paths: Iterable[Path], read: Read) -> Iterator[tuple[str, Any]]:
    """Yield the rows of all files, each with its origin ("file:row")."""
    for path in paths:
        for number, row in read(path):
            yield f"{path}:{number}", row


def files_of(name: str) -> list[Path]:
    """Return the file of this name, or the files that match a name with ``*`` or ``?``, sorted by name.

    Raises:
        OSError: no file matches, or the name is a folder.
    """
    path = data_file(name)
    if path.is_dir():
        raise IsADirectoryError(f"Is a directory. Name its files, for example {name.rstrip('/')}/*")
    if path.exists() or not glob.has_magic(name):
        return [path]
    paths = glob.glob(str(path), recursive=True)
    matches = [Path(match) for match in paths if os.path.isfile(match)]
    if not matches:
        raise FileNotFoundError("No such file: no file matches this pattern")
    return sorted(matches)


def _has_more(rows: Iterator[Any]) -> bool:
    try:
        return next(rows, None) is not None
    except (ConfigError, OSError):  # if the rest of the file cannot be read, it counts as more rows
        return True


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the row numbers, from 1, and the rows of a Parquet file. Values are Arrow scalars."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"prompts.source='parquet' needs {error.name}: pip install 'jaxrl_llm[parquet]'") from error
    with opened(path) as file:
        try:
            number = 0
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                names = batch.schema.names
                if len(set(names)) < len(names):
                    raise ConfigError(f"prompts.name={str(path)!r} has two columns with the same name: {names}")
                for row in zip(*batch.columns, strict=True):
                    number += 1
                    yield number, dict(zip(names, row, strict=True))
        # UnicodeDecodeError is raised for a column's name.
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"prompts.name={str(path)!r} is not a Parquet file: {reason}") from error


def _parse_scalars(row: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for name, scalar in row.items():
        try:
            values[name] = scalar.as_py()
        except Exception as error:  # invalid UTF-8 and times outside Python's range raise different types
            raise BadRowError(f"column `{name}` of {scalar.type} is no value of Python: {error}") from error
    return values


def question(row: Any) -> tuple[Prompt, dict[str, Any]]:
    """Return ``(prompt, columns)`` of a row.

    Raises:
        BadRowError: the row is not a question.
    """
    prompt = prompt_of(row)
    for key in ("prompts", "completions"):
        if key in row:
            raise BadRowError(f"column `{key}` has the name of an argument of every reward function")
    columns = dict(row)
    columns.pop("prompt", None)
    columns.pop("messages", None)
    return prompt, columns


def prompt_of(row: Any) -> Prompt:
    """Return the text or the messages of a row. Raise BadRowError if the row has no valid prompt.

    A null counts as an absent value, because Parquet has every column in every row.
    """
    if not isinstance(row, dict):
        raise BadRowError(f"must be an object with `prompt` or `messages`, not {type(row).__name__}")
    prompt = row.get("prompt")
    messages = row.get("messages")
    has_one = (prompt is None) != (messages is None)
    if not has_one:
        raise BadRowError(f"must have one of `prompt` and `messages`; its columns are {sorted(row)!s:.300}")
    if prompt is None:
        return _messages(messages, "messages")
    if not isinstance(prompt, str):
        return _messages(prompt, "prompt")
    if not prompt:
        raise BadRowError("`prompt` is empty")
    return prompt


def _messages(messages: Any, key: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        kinds = "text or a list of messages" if key == "prompt" else "a list of messages"
        raise BadRowError(f"`{key}` must be {kinds}, not {messages!r:.60}")
    for message in messages:
        if not _has_texts(message, "role", "content"):
            raise BadRowError(f"a message must have texts `role` and `content`, not {message!r:.60}")
        if message.get("tool_calls"):
            raise BadRowError("a message has `tool_calls`, which are not read: its `content` must say what it calls")
    if messages[-1]["role"] == "assistant":
        raise BadRowError(f"`{key}` ends with the assistant's own message: nothing is left to answer")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _has_texts(message: Any, *keys: str) -> bool:
    """Return whether a message is an object with a text for each of ``keys``."""
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in keys)
