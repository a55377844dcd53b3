"""Conversion of nested mappings to nested dataclasses and back.

A field with a "slot" in its metadata holds a function with its settings (``algorithms.use``), or several functions.

Owns: the error for bad input, the check of keys, types and numbers. Does not know: which settings exist.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import json
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, NamedTuple


class Text(str):
    """Text of a value from the command line. The type of its setting determines how the text is read."""


class ConfigError(ValueError):
    """Error for bad input from the user. Entry points print it as one line and exit with status 2."""


def visible(text: str) -> str:
    """Replace control characters, bidirectional controls and lone surrogates by escapes such as ``\\x1b``."""
    hidden = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(hidden, lambda found: ascii(found[0])[1:-1], text)


# Counts are int32 on the devices. A nonzero number must have a size that float32 can multiply and divide by.
MOST = 2**31 - 1
SMALLEST, LARGEST = 1e-20, 1e12


class Bounds(NamedTuple):
    """Allowed range of a number: ``low`` to ``high``.

    ``closed`` also allows ``low`` itself, and ``or_zero`` also allows 0.
    """

    low: float
    high: float = LARGEST
    closed: bool = True
    or_zero: bool = False


class ReadWhen(NamedTuple):
    """Condition under which a run reads a setting, for the ``Annotated`` type of the setting.

    If a run does not read the setting, only its default is allowed.

    Attributes:
        is_read: receives the whole config and returns whether a run reads the setting.
        otherwise: when no run reads the setting, as text for the error: "without environments.factory".
    """

    is_read: Callable[[Any], bool]
    otherwise: str


Number = Annotated[float, Bounds(-LARGEST)]
Positive = Annotated[float, Bounds(0.0, closed=False)]
NotNegative = Annotated[float, Bounds(0.0)]
Share = Annotated[float, Bounds(0.0, 1.0)]
Decay = Annotated[float, Bounds(0.0, 0.9999)]
AtLeastOne = Annotated[float, Bounds(1.0)]
OverOneOrZero = Annotated[float, Bounds(1.0, closed=False, or_zero=True)]
Exponent = Annotated[float, Bounds(0.0, 100.0)]
Rate = Annotated[float, Bounds(0.0, 10.0)]
Count = Annotated[int, Bounds(1, MOST)]
CountOrZero = Annotated[int, Bounds(0, MOST)]
# Types of settings that are declared as plain int or float: UNSIGNED in a config, SIGNED in a function.
UNSIGNED = {int: CountOrZero, float: NotNegative}
SIGNED = {int: Annotated[int, Bounds(-MOST, MOST)], float: Number}


def near(key: str, names: Collection[str], prefix: str = "") -> str:
    """Return a hint for an unknown key: the most similar names, or all names if none is similar."""
    alike = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(prefix + n for n in alike)}" if alike else f"known: {', '.join(names)}"


def check_name(key: Any, path: str) -> None:
    """Raise a ``ConfigError`` if a key cannot be the name of a setting."""
    if not (isinstance(key, str) and key.isidentifier()):
        raise ConfigError(f"{path} has a key that is no name: {key!r:.200}")


def out_of_bounds(value: float, low: float, high: float, closed: bool = True) -> str:
    """Return the rule that a number violates, or "" if the number is allowed. ``closed`` allows ``low`` itself."""
    if not low <= value <= high or (value == low and not closed):
        return f"must be {'at least' if closed else 'more than'} {low} and at most {high}"
    return f"must be 0 or of a size of at least {SMALLEST}" if 0 < abs(value) < SMALLEST else ""


def build(cls: type, mapping: Any, prefix: str = "") -> Any:
    """Return an instance of the dataclass ``cls``. Fields that ``mapping`` does not name keep their defaults.

    Args:
        mapping: nested mapping with the structure of the dataclasses.
        prefix: dotted path of ``cls`` in the whole config, for error messages.

    Raises:
        ConfigError: a key is unknown, or a value has a wrong type or is not allowed.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}={mapping!r:.200} must be a group of settings")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    built = {}
    for key, value in mapping.items():
        check_name(key, prefix.rstrip(".") or "config")
        if key not in fields:
            raise ConfigError(f"unknown config key {prefix}{key}={value!r:.200}; {near(key, fields, prefix)}")
        slot, path = fields[key].metadata.get("slot"), prefix + key
        hint = UNSIGNED.get(hints[key], hints[key])
        built[key] = slot.choose(value, path, fields[key].default) if slot else convert(hint, value, path)
    return cls(**built)


def convert(hint: Any, value: Any, path: str) -> Any:
    """Return ``value`` as the declared type of its field. An int is accepted for a float, and a list for a tuple.

    Raises:
        ConfigError: the value has another type, is out of bounds or is not one of the choices.
    """
    if typing.get_origin(hint) is Annotated:
        kind, bounds, *_ = typing.get_args(hint)
        value = convert(kind, value, path)
        is_free = not isinstance(bounds, Bounds) or (bounds.or_zero and value == 0)
        if not is_free and (wrong := out_of_bounds(value, *bounds[:3])):
            raise ConfigError(f"{path}={value!r:.200} {wrong}{', or 0' if bounds.or_zero else ''}")
        return value
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        value = convert(type(choices[0]), value, path) if isinstance(value, Text) else value
        if value not in choices:
            raise ConfigError(f"{path}={value!r:.200} is not one of {', '.join(map(repr, choices))}")
        return value
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path + ".")
    origin, (item, *_) = typing.get_origin(hint), (*typing.get_args(hint), hint)
    if isinstance(value, Text):
        value = _read(hint, value)
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(convert(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    elif origin is dict:
        if isinstance(value, dict):
            return {key: _read_all(x) for key, x in value.items()}
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return math.inf if value > 1e308 else -math.inf if value < -1e308 else float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    name = f"of type {hint.__name__ if isinstance(hint, type) else hint}"
    if origin is tuple:
        one, *_ = (*typing.get_args(item), item)  # the type of a bounded number, or the first choice
        name = f"a list such as {(one(1) if isinstance(one, type) else one,)}"
    raise ConfigError(f"{path}={value!r:.200} must be {name}, not {type(value).__name__}")


def _read(hint: Any, text: Text) -> Any:
    """Return a text read as the type ``hint``. A text that cannot be read as this type is read as a literal.

    If the text is not a literal either, it is returned as a string.
    """
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), str(text))
    if hint in (int, float, str):
        with contextlib.suppress(ValueError):
            return hint(text)
    return _literal(text)


def _read_all(value: Any) -> Any:
    """Return a value of a free-form group, with every ``Text`` in it read as a literal."""
    if isinstance(value, dict):
        return {key: _read_all(x) for key, x in value.items()}
    return _literal(value) if isinstance(value, Text) else value


def _literal(text: Text) -> Any:
    """Return a text read as a Python or JSON literal, or as a string if it is neither."""
    for read in (ast.literal_eval, lambda text: json.loads(text, parse_constant=str)):  # NaN stays a text
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return read(text)
    return str(text)


def names(text: Text) -> list[Text]:
    """Return the function names in a comma-separated text."""
    return [Text(name.strip("()[]'\" ")) for name in text.split(",") if name.strip("()[]'\" ")]


def override(node: Any, path: str, value: Any) -> Any:
    """Return a copy of a nested mapping with ``value`` at the dotted ``path``. Missing groups on the path are created.

    On the path there may be other nodes than groups:

    - A string is the name of a function, and the rest of the path is a setting of that function.
    - A text that begins with "{" is read as a group.
    - In a list of functions, the next part of the path is the name of a function. If the list does not contain that
      function, it is added.
    """
    if not path:
        return names(value) if isinstance(node, list) and isinstance(value, Text) else value
    key, _, rest = path.partition(".")
    if isinstance(node, (list, tuple)) and all(isinstance(x, str) or hasattr(x, "keys") for x in node):
        functions = [{"name": str(one)} if isinstance(one, str) else dict(one) for one in node]
        known = [str(one.get("name")) for one in functions]
        if own := next((name for name in known if path.startswith(f"{name}.")), ""):  # a file's name has dots
            key, rest = own, path.removeprefix(f"{own}.")
        elif key not in known:
            functions.append({"name": key})
        return [override(one, rest, value) if one.get("name") == key else one for one in functions]
    node = _literal(node) if isinstance(node, Text) and node.lstrip().startswith("{") else node
    node = {"name": str(node)} if isinstance(node, str) else dict(node) if isinstance(node, Mapping) else {}
    return {**node, key: override(node.get(key), rest, value)}


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, slot or None, value) of every setting, including the settings in groups."""
    for field in dataclasses.fields(config):
        value, path, slot = getattr(config, field.name), prefix + field.name, field.metadata.get("slot")
        if dataclasses.is_dataclass(value) and not slot:
            yield from _leaves(value, path + ".")
        else:
            yield path, slot, value


def unread(config: Any, group: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (path, value, default, condition) of each setting that has no effect: not its default, and never read.

    A ``ReadWhen`` in the type of a setting defines when a run reads the setting.

    Args:
        config: the whole config.
        group: the part of the config to check; None = the whole config.
        prefix: dotted path of ``group``.
    """
    group = config if group is None else group
    hints = typing.get_type_hints(type(group), include_extras=True)
    for field in dataclasses.fields(group):
        value, path = getattr(group, field.name), prefix + field.name
        if dataclasses.is_dataclass(value) and "slot" not in field.metadata:
            yield from unread(config, value, path + ".")
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if value == default:
            continue
        for condition in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(condition, ReadWhen) and not condition.is_read(config):
                yield path, value, default, condition.otherwise
                break


def flatten(config: Any, *, whole: bool = False) -> dict[str, Any]:
    """Return ``{"update.batch_size": 64, ...}`` with every leaf field.

    A function has one entry for its name and one for each of its settings.

    Args:
        whole: keep each function with its settings as one entry.
    """
    flat = {}
    for path, slot, value in _leaves(config):
        flat |= slot.flat(value, path) if slot and not whole else {path: value}
    return flat


def function_defaults(config: Any) -> dict[str, Any]:
    """Return ``{path: default}`` of every setting of the functions in a config, by the paths of ``flatten``."""
    chosen = (slot.defaults(value, path) for path, slot, value in _leaves(config) if slot)
    return {path: default for defaults in chosen for path, default in defaults.items()}


def chosen_functions(config: Any) -> dict[str, Any]:
    """Return ``{path: function}`` of every function in a config, by the paths of ``flatten``."""
    found = (slot.places(value, path) for path, slot, value in _leaves(config) if slot)
    return {path: one for places in found for path, one in places.items()}


def plain_text(value: Any) -> str:
    """Return a setting's value as an error shows it: functions by their names and settings."""
    if isinstance(value, tuple) and value and hasattr(value[0], "mapping"):
        return f"({', '.join(map(str, value))})"
    return repr(str(value)) if hasattr(value, "mapping") else repr(value)


def plain(value: Any) -> Any:
    """Return a setting's value in plain types, from which ``build`` makes the same value. A function is a mapping."""
    if isinstance(value, tuple) and value and hasattr(value[0], "mapping"):
        return [one.mapping() for one in value]
    return value.mapping() if hasattr(value, "mapping") else value


def as_mapping(config: Any) -> dict[str, Any]:
    """Return a nested mapping of plain types, from which ``build`` makes the same config."""
    from flax.traverse_util import unflatten_dict  # here: reward workers import this module and must not import jax

    flat = {path: plain(value) or [] if slot else value for path, slot, value in _leaves(config)}
    return unflatten_dict(flat, sep=".")


def differences(old: Any, new: Any, *, whole: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return ``{path: (old, new)}`` of the fields that differ. A setting that one config lacks is None there."""
    a, b = flatten(old, whole=whole), flatten(new, whole=whole)
    return {path: (a.get(path), b.get(path)) for path in {**a, **b} if a.get(path) != b.get(path)}
