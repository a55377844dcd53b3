"""Nested mappings as nested dataclasses and back.

Owns: the error of bad input, the check of keys and types. Does not know: which settings there are.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from typing import Any


class ConfigError(ValueError):
    """Bad input from the user. Entry points print it as one line and exit with status 2."""


def visible(text: str) -> str:
    """The same with escape codes, turns of the direction of writing and halves of a character as their numbers."""
    hidden = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(hidden, lambda found: ascii(found[0])[1:-1], text)


def build(cls: type, mapping: Any, prefix: str = "") -> Any:
    """An instance of the dataclass ``cls``; what ``mapping`` does not name keeps its default.

    Args:
        mapping: nested as the dataclasses are.
        prefix: dotted path of ``cls`` in the whole, for complaints.

    Raises:
        ConfigError: unknown key or wrong type.
    """
    if not isinstance(mapping, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}={mapping!r:.200} must be a group of settings")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    for key in mapping:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(prefix + n for n in near)}" if near else f"known: {', '.join(names)}"
            raise ConfigError(f"unknown config key {prefix}{key}={mapping[key]!r:.200}; {hint}")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in mapping.items()})


def _convert(hint: Any, value: Any, path: str) -> Any:
    """``value`` as the declared type of its field; int is accepted for float, list for tuple."""
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path + ".")
    origin = typing.get_origin(hint)
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            item = typing.get_args(hint)[0]
            return tuple(_convert(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return math.inf if value > 1e308 else -math.inf if value < -1e308 else float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, hint):
        return value
    name = hint.__name__ if not isinstance(hint, types.GenericAlias) else str(hint)
    raise ConfigError(f"{path}={value!r:.200} must be of type {name}, not {type(value).__name__}")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """``{"update.batch_size": 64, ...}`` of every leaf field."""
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value, prefix + field.name + "."))
        else:
            flat[prefix + field.name] = value
    return flat


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """``{path: (old, new)}`` of the fields that differ."""
    a, b = flatten(old), flatten(new)
    return {path: (a[path], b[path]) for path in a if a[path] != b[path]}
