"""Assertions about errors: which field and value, or which row of a file, a message names.

The other words of a message may change without a change of the tests.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxrl_llm.config import ConfigError

ANY = object()


@contextlib.contextmanager
def refused(
    field: str, value: Any = ANY, *words: str, raises: type[Exception] = ConfigError
) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error that names ``field=value``, and contains each of ``words`` (names, not phrases).

    Without a value, the error must name the field alone.
    """
    with pytest.raises(raises) as error:
        yield error
    check_refusal(str(error.value), field, value, *words)


def check_refusal(message: str, field: str, value: Any = ANY, *words: str) -> None:
    """Assert that an error message names ``field``, its ``value`` and each of ``words``."""
    name = field if value is ANY else f"{field}={value!r}"
    assert re.search(rf"(?<![\w.]){re.escape(name)}", message), f"{message!r} does not name {name}"
    check_words(message, *words)


@contextlib.contextmanager
def refused_row(
    path: str | os.PathLike, line: int, *words: str, raises: type[Exception] = ConfigError
) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error that names the row ``path:line``, and contains each of ``words`` (columns and values)."""
    with pytest.raises(raises) as error:
        yield error
    check_row(str(error.value), path, line, *words)


def check_row(message: str, path: str | os.PathLike, line: int, *words: str) -> None:
    """Assert that an error message names the row ``path:line`` and contains each of ``words``."""
    name = f"{path}:{line}"
    assert re.search(rf"{re.escape(name)}(?!\d)", message), f"{message!r} does not name {name}"
    check_words(message, *words)


@contextlib.contextmanager
def raises_with(raises: type[BaseException], *words: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error that contains each of ``words``: names, paths and numbers, not phrases."""
    with pytest.raises(raises) as error:
        yield error
    check_words(str(error.value), *words)


def check_words(message: str, *words: str) -> None:
    """Assert that a message contains each of ``words``."""
    for word in words:
        assert word in message, f"{message!r} does not contain {word!r}"
