"""Questions from JSONL or Parquet files: ``prompt`` (text or messages) or ``messages``, and any other columns.

``prompts.arguments`` names columns anew, ``{"prompt": "question"}``: the file's ``question`` is the prompt.

Owns: which rows are questions. Does not know: what the columns mean (reward functions do), tokenizers.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.runtime.json_lines import BadRowError, lines, opened, parse
from jaxrl_llm.runtime.nested import ConfigError

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = ""  # a file has no scorer of its own: rewards.functions names one


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """The first ``config.size`` questions of the file ``config.name`` (0 = all), in file order: ``load_rows``.

    Host; ``columns`` is everything beside ``prompt`` and ``messages``; ``origin`` is "file:row", from 1.

    Raises:
        ConfigError: the file cannot be read, holds no question, or (``prompts.bad_row="error"``) has a bad row.
    """
    del seed
    read, parse_row = (_parquet_rows, _parse_scalars) if config.source == "parquet" else (lines, parse)
    for name, old in config.arguments.items():
        if not isinstance(old, str):
            raise ConfigError(f"prompts.arguments.{name}={old!r} must be the name of a column of {config.name!r}")
    return load_rows(config, read, lambda row: question(renamed(parse_row(row), config.arguments)))


def renamed(row: Any, names: dict[str, str]) -> Any:
    """A row whose columns have these names: new name -> old one.

    Raises:
        BadRowError: it has no such column, or one of the new name.
    """
    if not isinstance(row, dict) or not names:
        return row
    if absent := [old for old in names.values() if old not in row]:
        raise BadRowError(f"has no column `{absent[0]}` (prompts.arguments); its columns are {sorted(row)!s:.300}")
    rest = {key: value for key, value in row.items() if key not in names.values()}
    if twice := rest.keys() & names.keys():
        raise BadRowError(f"has a column `{min(twice)}` already (prompts.arguments)")
    return rest | {name: row[old] for name, old in names.items()}


def load_rows(
    config: PromptsConfig,
    read: Callable[[Path], Iterable[tuple[int, Any]]],
    made: Callable[[Any], tuple[str | list[dict[str, str]], dict[str, Any]]],
) -> Loaded:
    """The first ``config.size`` questions that are made of the rows of the file ``config.name``; raises as ``load``.

    A name that is none of a file but has a ``*`` or ``?`` is of all that match it, one after another by their names.
    Rows after the last question are told among the bad ones.

    Args:
        read: a file's rows, with their numbers.
        made: a row's prompt and columns, or BadRowError.
    """
    from jaxrl_llm.types import Example  # here: scorers live in task modules, which stay free of jax

    examples, bad_rows = [], []
    try:
        rows = ((path, *row) for path in files_of(config.name) for row in read(path))
        for path, number, row in rows:
            origin = f"{path}:{number}"
            try:
                prompt, columns = made(row)
                examples.append(Example(prompt, columns, origin))
            except BadRowError as error:
                if config.bad_row == "error":
                    raise ConfigError(f"{origin}: {error} (prompts.bad_row='skip' leaves such rows out)") from error
                bad_rows.append(f"{origin}: {error}")
            if len(examples) == config.size > 0:
                if _has_more(rows):
                    bad_rows.insert(0, f"the rows after {origin} (prompts.size={config.size}; 0 reads all)")
                break
    except OSError as error:
        raise ConfigError(f"prompts.name={config.name!r} cannot be read: {error.strerror or error}") from error
    if not examples:
        reason = f"none of its {len(bad_rows)} rows can be used; {bad_rows[0]}" if bad_rows else "it is empty"
        raise ConfigError(f"prompts.name={config.name!r} holds no question: {reason}")
    return Loaded(tuple(examples), tuple(bad_rows))


def files_of(name: str) -> list[Path]:
    """The file of this name, or those that a name with ``*`` or ``?`` matches, by their names.

    Raises:
        OSError: none does, or it is a folder.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        raise IsADirectoryError(f"Is a directory: its files are {name.rstrip('/')}/*")
    if path.exists() or not glob.has_magic(name):
        return [path]
    if not (found := sorted(Path(one) for one in glob.glob(str(path), recursive=True) if os.path.isfile(one))):
        raise FileNotFoundError("No such file is there")
    return found


def _has_more(rows: Iterator[Any]) -> bool:
    try:
        return next(rows, None) is not None
    except (ConfigError, OSError):  # what cannot be read is more too
        return True


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of Arrow's scalars."""
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
                    raise ConfigError(f"prompts.name={str(path)!r} has two columns of a name: {names}")
                for row in zip(*batch.columns, strict=True):
                    number += 1
                    yield number, dict(zip(names, row, strict=True))
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # the latter of a column's name
            reason = str(error).splitlines()[0]
            raise ConfigError(f"prompts.name={str(path)!r} is not a Parquet file: {reason}") from error


def _parse_scalars(row: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for name, scalar in row.items():
        try:
            values[name] = scalar.as_py()
        except Exception as error:  # text that is not UTF-8, times that Python has not: each of another kind
            raise BadRowError(f"column `{name}` of {scalar.type} is no value of Python: {error}") from error
    return values


def question(row: Any) -> tuple[str | list[dict[str, str]], dict[str, Any]]:
    """``(prompt, columns)`` of a row.

    Raises:
        BadRowError: it is no question.
    """
    prompt = prompt_of(row)
    for key in ("prompts", "completions"):
        if key in row:
            raise BadRowError(f"column `{key}` has the name of an argument of every reward function")
    return prompt, {key: value for key, value in row.items() if key not in ("prompt", "messages")}


def prompt_of(row: Any) -> str | list[dict[str, str]]:
    """Text or messages of a row, or BadRowError. A null is an absent value: Parquet has every column in every row."""
    if not isinstance(row, dict):
        raise BadRowError(f"must be an object with `prompt` or `messages`, not {type(row).__name__}")
    given = [key for key in ("prompt", "messages") if row.get(key) is not None]
    if len(given) != 1:
        raise BadRowError(f"must have one of `prompt` and `messages`; its columns are {sorted(row)!s:.300}")
    prompt = row[given[0]]
    if given == ["prompt"] and isinstance(prompt, str):
        if not prompt:
            raise BadRowError("`prompt` is empty")
        return prompt
    return _messages(prompt, given[0])


def _messages(messages: Any, key: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        kinds = "text or a list of messages" if key == "prompt" else "a list of messages"
        raise BadRowError(f"`{key}` must be {kinds}, not {messages!r:.60}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadRowError(f"a message must have texts `role` and `content`, not {message!r:.60}")
        if message.get("tool_calls"):
            raise BadRowError("a message has `tool_calls`, which are not read: its `content` must say what it calls")
    if messages[-1]["role"] == "assistant":
        raise BadRowError(f"`{key}` ends with the assistant's own message: nothing is left to answer")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
