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

Declared = Mapping[str, tuple[Any, Any]]  # name of a setting -> (annotation, default)


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
            hint = near(name, defaults)
            raise ConfigError(f"declares {name}={value!r:.200}, which functions of its slot cannot declare: {hint}")
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
                f"the function {self.name!r} cannot be found: the recorded config names a file that is missing. "
                "Restore the file, or choose another function"
            )
        settings = {name: self.settings[name] for name in keywords(self.function)}
        try:
            return self.function(*arguments, **settings)
        except Exception as error:
            if not self.source or isinstance(error, ConfigError):
                raise
            place = self._place_of(error)
            raise ConfigError(f"{place}: {type(error).__name__}: {error}") from error

    def _place_of(self, error: Exception) -> str:
        """Return the function's name, and the line of its file that raised the exception, if the file has one."""
        if self.function is None:
            return self.name
        file = inspect.getsourcefile(self.function)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        if not lines:
            return self.name
        return f"{self.name}, line {lines[-1]}"

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
        settings = repr(sorted(self.settings.items()))
        return hash((self.name, settings, self.source))

    def __str__(self) -> str:
        if not self.settings:
            return self.name
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.name}({settings})"


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
    settings: Declared = dataclasses.field(default_factory=dict)

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
            default_name = default.name if default is not None else ""
            return self._choose_one(value, path, default_name)
        if isinstance(value, Text):
            value = names(value)
        is_one = isinstance(value, str | Mapping | Chosen | ml_collections.ConfigDict)
        if is_one or not isinstance(value, Iterable):
            raise ConfigError(f"{path}={value!r:.200} must be a list of use(NAME, ...)")
        chosen = []
        for i, item in enumerate(value):
            chosen.append(self._choose_one(item, f"{path}[{i}]", ""))
        chosen_names = tuple(function.name for function in chosen)
        if len(set(chosen_names)) < len(chosen_names):
            raise ConfigError(f"{path}={chosen_names!r:.200} must not name a function twice: remove one of them")
        return tuple(chosen)

    def _choose_one(self, value: Any, path: str, default: str) -> Chosen[Any]:
        """Return the function that a name or a mapping names."""
        if isinstance(value, Chosen):
            return value
        given = dict(self._as_mapping(value, path, default))
        name = given.pop("name", default)
        source = given.pop("source", "")
        if self.optional and name == NONE:
            self._check_no_settings(given, path)
            return Chosen(name, facts=self.facts())
        if name in self.table:
            source = ""
            function = self.table[name]
        else:
            try:
                function, digest = self._load(name, path)
            except ConfigError:
                if not source:
                    raise
                # The config is of a run on another machine. It can be read, but not run.
                return Chosen(name, given, source, facts=self.facts())
            source = source or digest
        return Chosen(
            name,
            settings=self._settings(function, name, given, path),
            source=source,
            function=function,
            facts=read_facts(function, self.facts),
        )

    def _check_no_settings(self, given: Mapping[str, Any], path: str) -> None:
        """Raise ConfigError if an empty slot is given settings."""
        for key, value in given.items():
            check_name(key, path)
            raise ConfigError(
                f"{path}.{key}={value!r:.200}: {path}='none' has no settings; {path} may be {self._names()}"
            )

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
                hint = near(key, declared)
                raise ConfigError(f"unknown setting {path}.{key}={value!r:.200} of {name!r}; {hint}")
        settings = {}
        for key, (annotation, default) in declared.items():
            value = given.get(key, default)
            if value is inspect.Parameter.empty:
                raise ConfigError(f"{path}.{key} must be given: {name!r} has no default for it")
            settings[key] = convert(annotation, value, f"{path}.{key}")
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
            settings = keywords(function)
            digest = _digest(function)
        except (Exception, SystemExit) as error:
            kind = type(error).__name__
            raise ConfigError(f"{path}={name!r:.200} cannot be used: {kind}: {error}") from error
        try:
            read_facts(function, self.facts)
        except ConfigError as error:
            raise ConfigError(f"{path}={name!r:.200} {error}") from error
        has_reserved = "name" in settings or "source" in settings
        if has_reserved or not self._accepts(signature):
            note = ": the settings `name` and `source` are reserved" if has_reserved else ""
            raise ConfigError(
                f"{path}={name!r:.200} must be a function of ({self.arguments}) whose settings are keywords after a *, "
                f"not of {signature}{note}"
            )
        return function, digest

    def _accepts(self, signature: inspect.Signature) -> bool:
        """Return whether a function with this signature has the slot's arguments, and no others but keywords."""
        num_positional = 0
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                return False
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                num_positional += 1
        return num_positional == len(self.arguments.split(","))

    def flat(self, value: Any, path: str) -> dict[str, Any]:
        """Return ``{path: name, path.setting: value}``.

        With several functions it is ``{path: names, path.name.setting: value}``.
        """
        flat: dict[str, Any] = {}
        flat[path] = tuple(function.name for function in value) if self.several else value.name
        for place, chosen in self.places(value, path).items():
            for key, setting in chosen.mapping().items():
                if key != "name":
                    flat[f"{place}.{key}"] = setting
        return flat

    def places(self, value: Any, path: str) -> dict[str, Chosen[Any]]:
        """Return the functions in ``value``, a value of this slot, by their dotted paths in the config."""
        if self.several:
            return {f"{path}.{function.name}": function for function in value}
        return {path: value}

    def defaults(self, value: Any, path: str) -> dict[str, Any]:
        """Return the default of every setting of the functions in ``value``, by the paths of ``flat``.

        The value is "" for a setting without a default.
        """
        defaults = {}
        for place, chosen in self.places(value, path).items():
            if chosen.function is None:
                continue
            declared = {**self.settings, **keywords(chosen.function)}
            for key, (_, default) in declared.items():
                if default is inspect.Parameter.empty:
                    default = ""
                defaults[f"{place}.{key}"] = default
        return defaults


def slot(
    table: Mapping[str, Callable[..., Any]],
    arguments: str,
    default: Any = NONE,
    *,
    facts: type[Facts] = Facts,
    several: bool = False,
    settings: Declared | None = None,
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
    chosen = place.choose(default, "default")
    return dataclasses.field(default=chosen, metadata={"slot": place})


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
