"""Functions as settings: a config chooses a function by name, and the function's keywords are further settings.

    config.algorithm.surrogate = use("clipped", high=0.28)             a function of the slot's table
    config.algorithm.surrogate = use("mine.py:tempered", power=0.5)    a function in your file, or in a package
    --config.algorithm.surrogate=cispo --config.algorithm.surrogate.high=4.0

Every keyword-only argument of a function is a setting. Its annotation is the type of the setting with its bounds, and
its default is the default of the setting. A function may declare facts about itself with ``declare``. The slot's record
(a subclass of ``Facts``) has one field for each fact that functions of this slot may declare.

Owns: the choice by name, the check of settings, the check of declared facts. Does not know: the functions and facts
themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import ml_collections

from jaxrl_llm.settings import functions
from jaxrl_llm.settings.schema import SIGNED, ConfigError, Text, check_name, convert, names, near

NONE = "none"  # name of an empty slot

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that the functions of a slot declare. Each slot has a subclass with one field for each fact."""


FactsOfSlot = TypeVar("FactsOfSlot", bound=Facts)


def declare(**facts: Any) -> Callable[[Decorated], Decorated]:
    """Return a decorator that records facts about a function. The slot that the function is used in checks them."""

    def decorate(function: Decorated) -> Decorated:
        setattr(function, "declared_facts", facts)  # noqa: B010, a type checker knows no such attribute of a function
        return function

    return decorate


def read_facts(function: Callable[..., Any] | None, record: type[FactsOfSlot]) -> FactsOfSlot:
    """Return the declared facts of a function as the record of its slot.

    Raises:
        ConfigError: the slot's record has no field for a declared fact, or the value has another type.
    """
    declared = getattr(function, "declared_facts", {})
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    for name, value in declared.items():
        if name not in defaults:
            raise ConfigError(f"declares {name}={value!r:.200}, but its slot has no such fact: {near(name, defaults)}")
        if isinstance(defaults[name], bool) and not isinstance(value, bool):
            raise ConfigError(f"declares {name}={value!r:.200}, which must be True or False")
    return record(**declared)


def use(name: str, **settings: Any) -> ml_collections.ConfigDict:
    """Return the choice of a function: a name in the slot's table or "path/to/file.py:function", and its settings."""
    return ml_collections.ConfigDict({"name": name, **settings})


@dataclasses.dataclass(frozen=True)
class Chosen(Generic[FactsOfSlot]):
    """A chosen function with all its settings.

    Attributes:
        settings: value of each setting by name, including the slot's own settings.
        source: digest of the file of a user's function; "" for functions of the slot's table.
        function: the Python function. It receives the slot's arguments, and its settings as keywords. None if the slot
            is empty, or if the config is of a run whose file of functions is missing here.
        facts: facts that the function declares.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    function: Callable[..., Any] | None = dataclasses.field(default=None, compare=False, repr=False)
    # The default is never used: slots always pass a record.
    facts: FactsOfSlot = dataclasses.field(default=typing.cast(Any, Facts()), compare=False, repr=False)

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's value.

        Raises:
            ConfigError: the file of a user's function is missing, or a user's function raised an exception.
        """
        if self.function is None:
            raise ConfigError(
                f"the function {self.name!r} cannot be found: this config is of a run that had its file. Put the file "
                "back, or choose another function"
            )
        settings = {name: self.settings[name] for name in keywords(self.function)}
        try:
            return self.function(*arguments, **settings)
        except Exception as error:
            if not self.source or isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self._place_of(error)}: {type(error).__name__}: {error}") from error

    def _place_of(self, error: Exception) -> str:
        """Return the function's name, and the line of its file that raised the exception, if the file has one."""
        file = inspect.getsourcefile(self.function) if self.function is not None else None
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f"{self.name}, line {lines[-1]}" if lines else self.name

    def moved(self) -> str:
        """Return a message if the file of a recorded user's function is missing or has changed, else ""."""
        if not self.source:
            return ""
        if self.function is None:
            return "cannot be loaded: the run that recorded it had its file. Put the file where this path names it"
        if _digest(self.function) != self.source:
            return "is of a file that has changed since it was recorded: restore the file, or choose the function anew"
        return ""

    def __bool__(self) -> bool:
        return self.name != NONE

    def __getitem__(self, setting: str) -> Any:
        return self.settings[setting]

    def replace(self, **settings: Any) -> Chosen[FactsOfSlot]:
        """Return the same function with other values for these settings."""
        return dataclasses.replace(self, settings={**self.settings, **settings})

    def mapping(self) -> dict[str, Any]:
        """Return plain values from which a slot chooses the same function again."""
        mapping = {"name": self.name, **self.settings}
        if self.source:
            mapping["source"] = self.source
        return mapping

    def __hash__(self) -> int:
        return hash((self.name, repr(sorted(self.settings.items())), self.source))

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.name}({settings})" if settings else self.name


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in a config for a function, or for several functions.

    Attributes:
        table: functions of the package by name.
        arguments: names of the positional arguments, for the error about a function with other arguments.
        facts: record of the facts that its functions may declare.
        several: the slot holds any number of functions, in order.
        optional: the slot may stay empty ("none").
        settings: settings of the slot itself, which every function has: name -> (annotation, default).
    """

    table: Mapping[str, Callable[..., Any]]
    arguments: str
    facts: type[Facts] = Facts
    several: bool = False
    optional: bool = False
    settings: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, function in self.table.items():
            try:
                read_facts(function, self.facts)
            except ConfigError as error:
                raise ConfigError(f"the function {name!r} {error}") from error

    def choose(self, value: Any, path: str, default: Any = None) -> Any:
        """Return the function that ``value`` names; a tuple of functions if the slot holds several.

        Args:
            value: a name, or a mapping of "name" and settings.
            path: dotted path of the slot, for errors.
            default: function of a mapping that has no name.

        Raises:
            ConfigError: there is no such function or setting, or the setting does not allow the value.
        """
        if not self.several:
            return self._choose_one(value, path, default.name if default is not None else "")
        if isinstance(value, Text):
            value = names(value)
        is_one = isinstance(value, (str, Mapping, Chosen, ml_collections.ConfigDict))
        if is_one or not isinstance(value, Iterable):
            raise ConfigError(f"{path}={value!r:.200} must be a list of use(NAME, ...)")
        chosen = tuple(self._choose_one(item, f"{path}[{i}]", "") for i, item in enumerate(value))
        chosen_names = [item.name for item in chosen]
        if len(set(chosen_names)) < len(chosen_names):
            raise ConfigError(f"{path}={tuple(chosen_names)!r:.200} must not name a function twice: remove one of them")
        return chosen

    def _choose_one(self, value: Any, path: str, default: str) -> Chosen[Any]:
        """Return the function that a name or a mapping names."""
        if isinstance(value, Chosen):
            return value
        mapping = self._as_mapping(value, path, default)
        given = {key: setting for key, setting in mapping.items() if key not in ("name", "source")}
        name = mapping.get("name", default)
        if self.optional and name == NONE:
            for key in given:
                check_name(key, path)
                raise ConfigError(
                    f"{path}.{key}={given[key]!r:.200}: {path}='none' has no settings; {path} may be {self._names()}"
                )
            return Chosen(name, facts=self.facts())
        if name in self.table:
            source = ""
            function = self.table[name]
        else:
            source = mapping.get("source", "")
            try:
                function, digest = self._load(name, path)
            except ConfigError:
                if not source:
                    raise
                # The config is of a run on another machine. It can be read, but not run.
                return Chosen(name, given, source, facts=self.facts())
            source = source or digest
        settings = self._settings(function, name, given, path)
        return Chosen(name, settings, source, function, read_facts(function, self.facts))

    def _as_mapping(self, value: Any, path: str, default: str) -> Mapping[str, Any]:
        """Return a name or a mapping as a mapping of "name" and settings."""
        if hasattr(value, "to_dict"):
            value = value.to_dict()
        mapping = {"name": value} if isinstance(value, str) else value
        if not isinstance(mapping, Mapping) or not isinstance(mapping.get("name", default), str):
            raise ConfigError(f"{path}={value!r:.200} must be use(NAME, ...), NAME one of {self._names()}")
        return mapping

    def _settings(
        self,
        function: Callable[..., Any],
        name: str,
        given: Mapping[str, Any],
        path: str,
    ) -> dict[str, Any]:
        """Return the value of every setting of a function: the given value or the default, as the setting's type."""
        declared = {**self.settings, **keywords(function)}
        for key, value in given.items():
            check_name(key, path)
            if key not in declared:
                raise ConfigError(f"unknown setting {path}.{key}={value!r:.200} of {name!r}; {near(key, declared)}")
        settings = {}
        for key, (hint, default) in declared.items():
            if key not in given and default is inspect.Parameter.empty:
                raise ConfigError(f"{path}.{key} must be given: {name!r} has no default for it")
            settings[key] = convert(hint, given.get(key, default), f"{path}.{key}")
        return settings

    def _names(self) -> str:
        """Return the names of the functions that the slot may hold, for errors."""
        listed = [*self.table]
        if self.optional:
            listed.append(NONE)
        return ", ".join(map(repr, listed))

    def _load(self, name: str, path: str) -> tuple[Callable[..., Any], str]:
        """Return a user's function, and the digest of its file.

        Raises:
            ConfigError: the function cannot be loaded, has other arguments, or declares something that its slot does
                not allow.
        """
        if ":" not in name:
            raise ConfigError(
                f"{path}={name!r:.200} is not one of {self._names()}; a function of your own is named "
                "'path/to/file.py:function'"
            )
        try:
            function = functions.resolve(name)
            signature = inspect.signature(function)
            reserved = {"name", "source"} & {*keywords(function)}
            digest = _digest(function)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{path}={name!r:.200} cannot be used: {type(error).__name__}: {error}") from error
        try:
            read_facts(function, self.facts)
        except ConfigError as error:
            raise ConfigError(f"{path}={name!r:.200} {error}") from error
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        num_positional = sum(kind in positional for kind in kinds)
        is_open = inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds
        if num_positional != len(self.arguments.split(",")) or is_open or reserved:
            note = ": the settings `name` and `source` are reserved" if reserved else ""
            raise ConfigError(
                f"{path}={name!r:.200} must be a function of ({self.arguments}) whose settings are keywords after a *, "
                f"not of {signature}{note}"
            )
        return function, digest

    def flat(self, value: Any, path: str) -> dict[str, Any]:
        """Return ``{path: name, path.setting: value}``.

        With several functions it is ``{path: names, path.name.setting: value}``.
        """
        flat: dict[str, Any] = {path: tuple(item.name for item in value) if self.several else value.name}
        for place, chosen in self.places(value, path).items():
            for key, setting in chosen.mapping().items():
                if key != "name":
                    flat[f"{place}.{key}"] = setting
        return flat

    def places(self, value: Any, path: str) -> dict[str, Chosen[Any]]:
        """Return the functions in ``value``, a value of this slot, by their dotted paths in the config."""
        if self.several:
            return {f"{path}.{item.name}": item for item in value}
        return {path: value}

    def defaults(self, value: Any, path: str) -> dict[str, Any]:
        """Return the default of every setting of the functions in ``value``, by the paths of ``flat``.

        The value is "" for a setting without a default.
        """
        defaults = {}
        for place, chosen in self.places(value, path).items():
            if chosen.function is None:
                continue
            for key, (_, default) in {
                **self.settings,
                **keywords(chosen.function),
            }.items():
                defaults[f"{place}.{key}"] = "" if default is inspect.Parameter.empty else default
        return defaults


def slot(
    table: Mapping[str, Callable[..., Any]],
    arguments: str,
    default: Any = NONE,
    *,
    facts: type[Facts] = Facts,
    several: bool = False,
    settings: Mapping[str, tuple[Any, Any]] | None = None,
) -> Any:
    """Return a field of a config's dataclass that holds a function of ``table``, or several; see ``Slot``."""
    place = Slot(
        table,
        arguments,
        facts,
        several,
        optional=default == NONE,
        settings=settings or {},
    )
    return dataclasses.field(default=place.choose(default, "default"), metadata={"slot": place})


@functools.cache
def keywords(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings of a function: name -> (annotation, default).

    A setting without an annotation has the type of its default.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    settings = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        hint = hints.get(parameter.name, type(parameter.default))
        settings[parameter.name] = (SIGNED.get(hint, hint), parameter.default)
    return settings


def _digest(function: Callable[..., Any]) -> str:
    """Return the digest of a function's file; "" if the function has none."""
    path = inspect.getsourcefile(function)
    return functions.digest(path) if path else ""
