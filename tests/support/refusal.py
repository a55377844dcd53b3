"""Assertions about refused settings: which field and which value an error names. Its other words may change."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxrl_llm.config import ConfigError

ANY = object()


@contextlib.contextmanager
def refused(field: str, value: Any = ANY, *words: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect a ``ConfigError`` that names ``field=value``, and contains each of ``words`` (names, not phrases).

    Without a value, the error must name the field alone.
    """
    with pytest.raises(ConfigError) as error:
        yield error
    check_refusal(str(error.value), field, value, *words)


def check_refusal(message: str, field: str, value: Any = ANY, *words: str) -> None:
    """Assert that an error message names ``field``, its ``value`` and each of ``words``."""
    name = field if value is ANY else f"{field}={value!r}"
    assert re.search(rf"(?<![\w.]){re.escape(name)}", message), f"{message!r} does not name {name}"
    for word in words:
        assert word in message, f"{message!r} does not contain {word!r}"
