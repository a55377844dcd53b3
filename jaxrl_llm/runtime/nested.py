"""Nested mappings as nested dataclasses and back.

A field whose metadata has a "slot" holds a function with its settings (algorithms.use), or several.

Owns: the error of bad input, the check of keys, types and numbers. Does not know: which settings there are.
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
    """A value as a command line has it: what it is, the type of its setting tells."""


class ConfigError(ValueError):
    """Bad input from the user. Entry points print it as one line and exit with status 2."""


def visible(text: str) -> str:
    """The same with escape codes, turns of the direction of writing and halves of a character as their numbers."""
    hidden = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(hidden, lambda found: ascii(found[0])[1:-1], text)


# Counts are int32 on the devices. What is not 0 keeps a size that float32 can multiply and divide by.
MOST = 2**31 - 1
SMALLEST, LARGEST = 1e-20, 1e12


class Bounds(NamedTuple):
    """What a number may be; the lowest value itself only where ``closed``, and 0 besides where ``or_zero``."""

    low: float
    high: float = LARGEST
    closed: bool = True
    or_zero: bool = False


class ReadWhen(NamedTuple):
    """When a run reads a setting, for its ``Annotated`` type. Its default is the only value allowed at other times.

    Attributes:
        is_read: whether a run of a whole config reads it.
        otherwise: the condition under which nothing reads it, for the error: "without environments.factory".
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
# Of settings whose declaration says no more: of a config, and of a function.
UNSIGNED = {int: CountOrZero, float: NotNegative}
SIGNED = {int: Annotated[int, Bounds(-MOST, MOST)], float: Number}


def near(key: str, names: Collection[str], prefix: str = "") -> str:
    """What a key that is not known may have meant."""
    alike = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(prefix + n for n in alike)}" if alike else f"known: {', '.join(names)}"


def check_name(key: Any, path: str) -> None:
    """Raises a ``ConfigError`` where a key cannot be the name of a setting."""
    if not (isinstance(key, str) and key.isidentifier()):
        raise ConfigError(f"{path} has a key that is no name: {key!r:.200}")


def out_of_bounds(value: float, low: float, high: float, closed: bool = True) -> str:
    """What a number must be and is not; "" where it is. ``closed``: it may be the lowest itself."""
    if not low <= value <= high or (value == low and not closed):
        return f"must be {'at least' if closed else 'more than'} {low} and at most {high}"
    return f"must be 0 or of a size of at least {SMALLEST}" if 0 < abs(value) < SMALLEST else ""


def build(cls: type, mapping: Any, prefix: str = "") -> Any:
    """An instance of the dataclass ``cls``; what ``mapping`` does not name keeps its default.

    Args:
        mapping: nested as the dataclasses are.
        prefix: dotted path of ``cls`` in the whole, for complaints.

    Raises:
        ConfigError: unknown key or wrong type.
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
    """``value`` as the declared type of its field, within its bounds; int is accepted for float, list for tuple.

    Raises:
        ConfigError: another type, out of bounds, none of the choices.
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
        one, *_ = (*typing.get_args(item), item)  # the type of what has bounds, or the first choice
        name = f"a list such as {(one(1) if isinstance(one, type) else one,)}"
    raise ConfigError(f"{path}={value!r:.200} must be {name}, not {type(value).__name__}")


def _read(hint: Any, text: Text) -> Any:
    """What a text says where it is to be of a type; the text where it does not."""
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), str(text))
    if hint in (int, float, str):
        with contextlib.suppress(ValueError):
            return hint(text)
    return _literal(text)


def _read_all(value: Any) -> Any:
    """A value of a free-form group with the texts in it read."""
    if isinstance(value, dict):
        return {key: _read_all(x) for key, x in value.items()}
    return _literal(value) if isinstance(value, Text) else value


def _literal(text: Text) -> Any:
    for read in (ast.literal_eval, lambda text: json.loads(text, parse_constant=str)):  # NaN stays a text
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return read(text)
    return str(text)


def names(text: Text) -> list[Text]:
    """Those of functions, with commas between."""
    return [Text(name.strip("()[]'\" ")) for name in text.split(",") if name.strip("()[]'\" ")]


def override(node: Any, path: str, value: Any) -> Any:
    """A copy of a nested mapping with a value put in, by dotted path; groups on the way that are not there are made.

    A name where a group is wanted is that of a function whose setting is meant, a text of a group the group; of a list
    of functions the next part of the path tells which, and one that is not among them is added.
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
    """(path, slot or None, value) of every setting; of a group those that are in it."""
    for field in dataclasses.fields(config):
        value, path, slot = getattr(config, field.name), prefix + field.name, field.metadata.get("slot")
        if dataclasses.is_dataclass(value) and not slot:
            yield from _leaves(value, path + ".")
        else:
            yield path, slot, value


def unread(config: Any, group: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (path, value, default, condition) of each setting that is not its default and that a run does not read.

    A setting says when it is read by a ``ReadWhen`` in its type.

    Args:
        config: the whole config.
        group: the part of it to look at; None = the whole.
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
    """``{"update.batch_size": 64, ...}`` of every leaf field; of a function its name, and each of its settings.

    Args:
        whole: functions are leaves, with their settings.
    """
    flat = {}
    for path, slot, value in _leaves(config):
        flat |= slot.flat(value, path) if slot and not whole else {path: value}
    return flat


def function_defaults(config: Any) -> dict[str, Any]:
    """``{path: default}`` of each setting of the functions that a config has chosen, by the paths of ``flatten``."""
    chosen = (slot.defaults(value, path) for path, slot, value in _leaves(config) if slot)
    return {path: default for defaults in chosen for path, default in defaults.items()}


def chosen_functions(config: Any) -> dict[str, Any]:
    """Return ``{path: function}`` of every function that a config has chosen, by the paths of ``flatten``."""
    found = (slot.places(value, path) for path, slot, value in _leaves(config) if slot)
    return {path: one for places in found for path, one in places.items()}


def plain_text(value: Any) -> str:
    """Return a setting's value as an error shows it: functions by their names and settings."""
    if isinstance(value, tuple) and value and hasattr(value[0], "mapping"):
        return f"({', '.join(map(str, value))})"
    return repr(str(value)) if hasattr(value, "mapping") else repr(value)


def plain(value: Any) -> Any:
    """A setting's value of plain types that ``build`` makes the same of: a function as the mapping of ``use``."""
    if isinstance(value, tuple) and value and hasattr(value[0], "mapping"):
        return [one.mapping() for one in value]
    return value.mapping() if hasattr(value, "mapping") else value


def as_mapping(config: Any) -> dict[str, Any]:
    """The nested mapping that ``build`` makes the same of; its functions of plain types."""
    from flax.traverse_util import unflatten_dict  # here: reward workers import this module, and jax would come along

    flat = {path: plain(value) or [] if slot else value for path, slot, value in _leaves(config)}
    return unflatten_dict(flat, sep=".")


def differences(old: Any, new: Any, *, whole: bool = False) -> dict[str, tuple[Any, Any]]:
    """``{path: (old, new)}`` of the fields that differ; None where one of the two has no such setting."""
    a, b = flatten(old, whole=whole), flatten(new, whole=whole)
    return {path: (a.get(path), b.get(path)) for path in {**a, **b} if a.get(path) != b.get(path)}
