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
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, TypeVar


class Text(str):
    """Text of a value from the command line. The type of its setting determines how the text is read."""


class ConfigError(ValueError):
    """Error for bad input from the user. Entry points print it as one line and exit with status 2."""


def visible(text: str) -> str:
    """Replace control characters, bidirectional controls and lone surrogates by escapes such as ``\\x1b``."""
    return re.sub(HIDDEN, _escaped, text)


HIDDEN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"


def _escaped(match: re.Match[str]) -> str:
    quoted = ascii(match[0])
    return quoted[1:-1]


MOST = 2**31 - 1  # largest count, because counts are int32 on the devices
# Limits of a nonzero number. Products and quotients of such numbers fit into float32.
SMALLEST = 1e-20
LARGEST = 1e12
LARGEST_FLOAT = 1e308  # largest number, because larger integers become inf in float32


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


Group = TypeVar("Group", bound=Dataclass)  # a dataclass of settings


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
        otherwise: condition under which no run reads the setting, as text for the error: "without
            environments.factory".
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
    similar = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    if not similar:
        known = ", ".join(names)
        return f"known: {known}"
    suggested = ", ".join(prefix + name for name in similar)
    return f"did you mean {suggested}"


def check_name(key: Any, path: str) -> None:
    """Raise a ``ConfigError`` if a key cannot be the name of a setting."""
    if not (isinstance(key, str) and key.isidentifier()):
        raise ConfigError(f"{path} has a key that is not a name: {key!r:.200}")


def out_of_bounds(value: float, low: float, high: float, closed: bool = True) -> str:
    """Return the rule that a number violates, or "" if the number is allowed. ``closed`` allows ``low`` itself."""
    is_inside = low <= value <= high and (closed or value != low)
    if not is_inside:
        above_low = f"at least {low}" if closed else f"more than {low}"
        return f"must be {above_low} and at most {high}"
    if 0 < abs(value) < SMALLEST:
        return f"must be 0 or of a size of at least {SMALLEST}"
    return ""


def build(cls: type[Group], mapping: Any, prefix: str = "") -> Group:
    """Return an instance of the dataclass ``cls``. Fields that ``mapping`` does not name keep their defaults.

    Args:
        mapping: nested mapping with the structure of the dataclasses.
        prefix: dotted path of ``cls`` in the whole config, for error messages.

    Raises:
        ConfigError: a key is unknown, or a value has a wrong type or is not allowed.
    """
    group = prefix.rstrip(".") or "config"
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{group}={mapping!r:.200} must be a group of settings")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for key, value in mapping.items():
        check_name(key, group)
        path = prefix + key
        if is_replaced_setting(cls, key, value, path):
            continue
        if key not in fields:
            hint = near(key, fields, prefix)
            raise ConfigError(f"unknown config key {path}={value!r:.200}; {hint}")
        field = fields[key]
        slot = field.metadata.get("slot")
        if slot:
            values[key] = slot.choose(value, path, field.default)
        else:
            kind = hints[key]
            values[key] = convert(UNSIGNED.get(kind, kind), value, path)
    return cls(**values)


def is_replaced_setting(cls: type, key: str, value: Any, path: str) -> bool:
    """Return whether ``key`` is a setting of earlier versions, with the value that had no effect.

    Args:
        cls: dataclass of settings. Its ``REPLACED_SETTINGS`` has (value without effect, replacement) for each old name.
        path: dotted path of the setting, for error messages.

    Raises:
        ConfigError: ``key`` is a setting of earlier versions, and its value had an effect.
    """
    replaced_settings = getattr(cls, "REPLACED_SETTINGS", {})
    if key not in replaced_settings:
        return False
    no_effect, replacement = replaced_settings[key]
    if value == no_effect:  # in the record of a run of an earlier version
        return True
    raise ConfigError(f"{path}={value!r:.200} is a setting of earlier versions: set {replacement}")


def convert(hint: Any, value: Any, path: str) -> Any:
    """Return ``value`` as the declared type of its field. An int is accepted for a float, and a list for a tuple.

    Args:
        hint: type of the field. It can be any annotation of a dataclass field, so it has no narrower type than Any.
        value: value from a config file or from the command line.
        path: dotted path of the setting, for error messages.

    Raises:
        ConfigError: the value has another type, is out of bounds or is not one of the choices.
    """
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _convert_bounded(hint, value, path)
    if origin is typing.Literal:
        return _convert_choice(hint, value, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, path + ".")
    if isinstance(value, Text):
        value = _read(hint, value)
    if origin is tuple:
        return _convert_tuple(hint, value, path)
    if origin is dict:
        if isinstance(value, dict):
            return {key: _read_all(item) for key, item in value.items()}
    elif isinstance(value, bool):
        if hint is bool:
            return value
    elif hint is float:
        if isinstance(value, int | float):
            return _to_float(value)
    elif isinstance(value, hint):
        return value
    expected = hint.__name__ if isinstance(hint, type) else hint
    found = type(value).__name__
    raise ConfigError(f"{path}={value!r:.200} must be of type {expected}, not {found}")


def _convert_bounded(hint: Any, value: Any, path: str) -> Any:
    """Convert the value of an ``Annotated`` type and check its bounds."""
    kind, bounds, *_ = typing.get_args(hint)
    value = convert(kind, value, path)
    if not isinstance(bounds, Bounds):
        return value
    if bounds.or_zero and value == 0:
        return value
    violated = out_of_bounds(value, bounds.low, bounds.high, bounds.closed)
    if violated and bounds.or_zero:
        violated += ", or 0"
    if violated:
        raise ConfigError(f"{path}={value!r:.200} {violated}")
    return value


def _convert_choice(hint: Any, value: Any, path: str) -> Any:
    """Return the value if it is one of the choices of a ``Literal`` type."""
    choices = typing.get_args(hint)
    if isinstance(value, Text):
        value = convert(type(choices[0]), value, path)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{path}={value!r:.200} is not one of {listed}")
    return value


def _convert_tuple(hint: Any, value: Any, path: str) -> tuple[Any, ...]:
    """Convert a list or a tuple to ``tuple[item, ...]``."""
    item_hint = typing.get_args(hint)[0]
    if isinstance(value, list | tuple):
        items = []
        for i, item in enumerate(value):
            items.append(convert(item_hint, item, f"{path}[{i}]"))
        return tuple(items)
    arguments = typing.get_args(item_hint)
    example = arguments[0] if arguments else item_hint  # the type of a bounded number, or the first of the choices
    if isinstance(example, type):
        example = example(1)
    found = type(value).__name__
    raise ConfigError(f"{path}={value!r:.200} must be a list such as {(example,)}, not {found}")


def _to_float(value: float) -> float:
    """Return a number as a float. An integer that a float cannot hold becomes inf or -inf."""
    if value > LARGEST_FLOAT:
        return math.inf
    if value < -LARGEST_FLOAT:
        return -math.inf
    return float(value)


def _read(hint: Any, text: Text) -> Any:
    """Return a text read as the type ``hint``. A text that cannot be read as this type is read as a literal.

    If the text is not a literal either, it is returned as a string.
    """
    if hint is bool:
        truths = {"true": True, "false": False}
        return truths.get(text.lower(), str(text))
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
    errors = (ValueError, SyntaxError, MemoryError, RecursionError, TypeError)
    with contextlib.suppress(*errors):
        return ast.literal_eval(text)
    with contextlib.suppress(*errors):
        return json.loads(text, parse_constant=str)  # the text "nan" stays a text
    return str(text)


def names(text: Text) -> list[Text]:
    """Return the function names in a comma-separated text."""
    stripped = [name.strip("()[]'\" ") for name in text.split(",")]
    return [Text(name) for name in stripped if name]


def override(node: Any, path: str, value: Any) -> Any:
    """Return a copy of a nested mapping with ``value`` at the dotted ``path``. Missing groups on the path are created.

    The path may also lead through nodes that are not groups of settings:

    - A string is the name of a function, and the rest of the path is a setting of that function.
    - A text that begins with "{" is read as a mapping, a group of settings.
    - In a list of functions, the next part of the path is the name of a function. If the list does not contain that
      function, it is added.
    """
    if not path:
        is_list_in_text = isinstance(node, list) and isinstance(value, Text)
        return names(value) if is_list_in_text else value
    if _is_function_list(node):
        return _override_function(node, path, value)
    key, _, rest = path.partition(".")
    group = _as_group(node)
    return {**group, key: override(group.get(key), rest, value)}


def _is_function_list(node: Any) -> bool:
    """Return whether a value is a list of functions: names, or mappings of a name and settings."""
    if not isinstance(node, list | tuple):
        return False
    return all(isinstance(item, str) or hasattr(item, "keys") for item in node)


def _override_function(node: Collection[Any], path: str, value: Any) -> list[Any]:
    """Return the list of functions with ``value`` at ``path``, which begins with the name of a function."""
    functions: list[dict[str, Any]] = []
    for function in node:
        functions.append({"name": str(function)} if isinstance(function, str) else dict(function))
    known_names = [str(function.get("name")) for function in functions]
    key, _, rest = path.partition(".")
    # The name of a function in a file has dots, so it is compared as a whole.
    matching = [name for name in known_names if path.startswith(f"{name}.")]
    if matching:
        key = matching[0]
        rest = path.removeprefix(f"{key}.")
    elif key not in known_names:
        functions.append({"name": key})
    for i, function in enumerate(functions):
        if function.get("name") == key:
            functions[i] = override(function, rest, value)
    return functions


def _as_group(node: Any) -> dict[str, Any]:
    """Return a node on the path of an override as a group of settings."""
    if isinstance(node, Text) and node.lstrip().startswith("{"):
        node = _literal(node)
    if isinstance(node, str):
        return {"name": str(node)}
    return dict(node) if isinstance(node, Mapping) else {}


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, slot or None, value) of every setting, including the settings in groups."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = prefix + field.name
        slot = field.metadata.get("slot")
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
        value = getattr(group, field.name)
        path = prefix + field.name
        if dataclasses.is_dataclass(value) and "slot" not in field.metadata:
            yield from unread(config, value, path + ".")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
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
        if slot and not whole:
            flat |= slot.flat(value, path)
        else:
            flat[path] = value
    return flat


def function_defaults(config: Any) -> dict[str, Any]:
    """Return ``{path: default}`` of every setting of the functions in a config, by the paths of ``flatten``."""
    by_path = {}
    for path, slot, value in _leaves(config):
        if slot:
            by_path |= slot.defaults(value, path)
    return by_path


def chosen_functions(config: Any) -> dict[str, Any]:
    """Return ``{path: function}`` of every function in a config, by the paths of ``flatten``."""
    by_path = {}
    for path, slot, value in _leaves(config):
        if slot:
            by_path |= slot.places(value, path)
    return by_path


def plain_text(value: Any) -> str:
    """Return a setting's value as text for an error message. Functions appear with their names and settings."""
    if _is_function_tuple(value):
        functions = ", ".join(str(function) for function in value)
        return f"({functions})"
    if hasattr(value, "mapping"):
        return repr(str(value))
    return repr(value)


def plain(value: Any) -> Any:
    """Return a setting's value in plain types, from which ``build`` makes the same value. A function is a mapping."""
    if _is_function_tuple(value):
        return [function.mapping() for function in value]
    if hasattr(value, "mapping"):
        return value.mapping()
    return value


def _is_function_tuple(value: Any) -> bool:
    """Return whether a value is a tuple of functions with settings (``algorithms.use.Chosen``)."""
    if not isinstance(value, tuple) or not value:
        return False
    return hasattr(value[0], "mapping")


def as_mapping(config: Any) -> dict[str, Any]:
    """Return a nested mapping of plain types, from which ``build`` makes the same config."""
    mapping: dict[str, Any] = {}
    for path, slot, value in _leaves(config):
        *groups, key = path.split(".")
        group = mapping
        for name in groups:
            group = group.setdefault(name, {})
        group[key] = (plain(value) or []) if slot else value
    return mapping


def differences(old: Any, new: Any, *, whole: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return ``{path: (old, new)}`` of the fields that differ. If one config lacks a setting, its value is None."""
    before = flatten(old, whole=whole)
    after = flatten(new, whole=whole)
    changed = {}
    for path in {**before, **after}:
        old_value = before.get(path)
        new_value = after.get(path)
        if old_value != new_value:
            changed[path] = (old_value, new_value)
    return changed
