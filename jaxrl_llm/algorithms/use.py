"""A method's functions as settings: one is chosen by name, and its keywords are its settings.

    config.algorithm.surrogate = use("clipped", high=0.28)             a function of the slot's table
    config.algorithm.surrogate = use("mine.py:tempered", power=0.5)    one of a file, or of a package ("mine:tempered")
    --config.algorithm.surrogate=cispo --config.algorithm.surrogate.high=4.0

A keyword-only argument of the function is a setting: its annotation is the type with its bounds, its default the
default, and nothing else knows of it. What a function wants to be there (columns of the rollouts, siblings beside each
other) it declares with ``needs``.

Owns: choice by name, check of settings, what functions declare. Does not know: any function, what it is for.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ml_collections

from jaxrl_llm.algorithms.inputs import COLUMNS, MADE_BY_CREDIT, OTHER_POLICIES, SAID_BY_LEARNER
from jaxrl_llm.settings import functions
from jaxrl_llm.settings.schema import SIGNED, ConfigError, Text, check_name, convert, names, near

NONE = "none"  # of a slot that may stay empty


class Needs(NamedTuple):
    """What a function wants to be there.

    Attributes:
        columns: names of ``views.COLUMNS``, and of ``views.OTHER_POLICIES`` in a loss.
        siblings: it compares the rows of a group: they must be two or more, and stand beside each other in a loss.
        facts: what else those who call functions of its slot ask of them, by name.
    """

    columns: frozenset[str] = frozenset()
    siblings: bool = False
    facts: Mapping[str, Any] = {}


def needs(*columns: str, siblings: bool = False, **facts: Any) -> Callable[[Callable], Callable]:
    """Declares what the decorated function wants."""

    def mark(function: Callable) -> Callable:
        function.needs = Needs(frozenset(columns), siblings, facts)
        return function

    return mark


def columns_to_need() -> tuple[str, ...]:
    """Return the names that a function may declare with ``needs``: columns of rows, and other policies."""
    from_rewards = [name for name, column in COLUMNS.items() if column.from_rewards]
    return ("entropy", *from_rewards, MADE_BY_CREDIT, *SAID_BY_LEARNER, *OTHER_POLICIES)


def use(name: str, **settings: Any) -> ml_collections.ConfigDict:
    """A function of a slot's table, or "path/to/file.py:function", and what of its settings is not its default."""
    return ml_collections.ConfigDict({"name": name, **settings})


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A function and all its settings.

    Attributes:
        settings: keyword by keyword, those of the slot too.
        source: digest of the file that a function of the user's own stands in; "" for those of a table.
        function: takes the slot's arguments, and what of ``settings`` are its own; None where the slot is empty, or the
            config is of a run whose file of functions is not here.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    function: Callable | None = dataclasses.field(default=None, compare=False, repr=False)

    def __call__(self, *arguments: Any) -> Any:
        """The function's value; ``ConfigError`` where a function of the user's own is not there, or raises."""
        if self.function is None:
            raise ConfigError(f"{self.name!r} cannot be found: this config is of a run that had its file")
        try:
            return self.function(*arguments, **{name: self.settings[name] for name in keywords(self.function)})
        except Exception as error:
            if not self.source or isinstance(error, ConfigError):
                raise
            frames = traceback.extract_tb(error.__traceback__)
            own = [x.lineno for x in frames if x.filename == inspect.getsourcefile(self.function)]
            where = f"{self.name}, line {own[-1]}" if own else self.name
            raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error

    def moved(self) -> str:
        """Return what has become of the file of a function that a run has recorded; "" if it is as it was."""
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

    def replace(self, **settings: Any) -> Chosen:
        return dataclasses.replace(self, settings={**self.settings, **settings})

    def mapping(self) -> dict[str, Any]:
        """What ``use`` gives of it: plain values."""
        return {"name": self.name, **self.settings, **({"source": self.source} if self.source else {})}

    @property
    def needs(self) -> Needs:
        return getattr(self.function, "needs", Needs())

    def fact(self, name: str, default: Any = None) -> Any:
        return self.needs.facts.get(name, default)

    def __hash__(self) -> int:
        return hash((self.name, repr(sorted(self.settings.items())), self.source))

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.name}({settings})" if settings else self.name


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place of a config for a function.

    Attributes:
        table: those that come with the package.
        arguments: what each is given, for the complaint about one that takes something else.
        several: it holds any number of functions, in order.
        optional: it may stay empty ("none").
        settings: of the slot, whatever the function: name -> (annotation, default).
    """

    table: Mapping[str, Callable]
    arguments: str
    several: bool = False
    optional: bool = False
    settings: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    def choose(self, value: Any, path: str, default: Any = None) -> Any:
        """The function that ``value`` names: a name, or a mapping of "name" and settings. Of ``several``, a tuple.

        Args:
            default: whose function a mapping without a name is of.

        Raises:
            ConfigError: no such function, a setting it does not have, or a value that it does not allow.
        """
        if not self.several:
            return self._one(value, path, default.name if default is not None else "")
        if isinstance(value, Text):
            value = names(value)
        if isinstance(value, (str, Mapping, Chosen, ml_collections.ConfigDict)) or not isinstance(value, Iterable):
            raise ConfigError(f"{path}={value!r:.200} must be a list of use(NAME, ...)")
        chosen = tuple(self._one(one, f"{path}[{i}]", "") for i, one in enumerate(value))
        named = [one.name for one in chosen]
        if len(set(named)) < len(named):
            raise ConfigError(f"{path} must not name a function twice: {', '.join(named)}")
        return chosen

    def _one(self, value: Any, path: str, default: str) -> Chosen:
        if isinstance(value, Chosen):
            return value
        mapping = value.to_dict() if hasattr(value, "to_dict") else {"name": value} if isinstance(value, str) else value
        if not isinstance(mapping, Mapping) or not isinstance(mapping.get("name", default), str):
            raise ConfigError(f"{path}={value!r:.200} must be use(NAME, ...), NAME one of {self._names()}")
        given = {key: value for key, value in mapping.items() if key not in ("name", "source")}
        name, source = mapping.get("name", default), ""
        if self.optional and name == NONE:
            function, known = None, {}
        else:
            source = "" if name in self.table else mapping.get("source", "")
            try:
                function, digest = (self.table[name], "") if name in self.table else self._own(name, path)
            except ConfigError:
                if not source:
                    raise
                return Chosen(name, given, source)  # of a run of elsewhere: to be read, not to be run
            source, known = source or digest, {**self.settings, **keywords(function)}
        for key in given:
            check_name(key, path)
            if function is None:
                raise ConfigError(
                    f"{path}.{key}={given[key]!r:.200}: {path}='none' has no settings; {path} may be {self._names()}"
                )
            if key not in known:
                raise ConfigError(f"unknown setting {path}.{key}={given[key]!r:.200} of {name!r}; {near(key, known)}")
        settings = {}
        for key, (hint, default_value) in known.items():
            if key not in given and default_value is inspect.Parameter.empty:
                raise ConfigError(f"{path}.{key} must be given: {name!r} has no default for it")
            settings[key] = convert(hint, given.get(key, default_value), f"{path}.{key}")
        return Chosen(name, settings, source, function)

    def _names(self) -> str:
        return ", ".join(map(repr, (*self.table, *([NONE] if self.optional else []))))

    def _own(self, name: str, path: str) -> tuple[Callable, str]:
        """A function of the user's, and the digest of its file."""
        if ":" not in name:
            raise ConfigError(
                f"{path}={name!r:.200} is not one of {self._names()}; a function of your own is named "
                "'path/to/file.py:function'"
            )
        try:
            function = functions.resolve(name)
            parameters = inspect.signature(function).parameters.values()
            taken = {"name", "source"} & {*keywords(function)}
            digest = _digest(function)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{path}={name!r:.200} cannot be used: {type(error).__name__}: {error}") from error
        wants = getattr(function, "needs", Needs()).columns
        unknown = wants.difference(columns_to_need())
        if unknown:
            raise ConfigError(f"{path}={name!r:.200} needs {min(unknown)!r}: {near(min(unknown), columns_to_need())}")
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        is_open = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        if len(by_place) != len(self.arguments.split(",")) or is_open or taken:
            raise ConfigError(
                f"{path}={name!r:.200} must be a function of ({self.arguments}) whose settings are keywords after a *, "
                f"not of {inspect.signature(function)}{': `name` and `source` are taken' if taken else ''}"
            )
        return function, digest

    def flat(self, value: Any, path: str) -> dict[str, Any]:
        """``{path: name, path.setting: value}``; of ``several`` ``{path: names, path.name.setting: value}``."""
        flat = {path: tuple(one.name for one in value) if self.several else value.name}
        for place, one in self.places(value, path).items():
            flat |= {f"{place}.{key}": x for key, x in one.mapping().items() if key != "name"}
        return flat

    def places(self, value: Any, path: str) -> dict[str, Chosen]:
        """Return the functions of ``value`` by path."""
        return {f"{path}.{one.name}": one for one in value} if self.several else {path: value}

    def defaults(self, value: Any, path: str) -> dict[str, Any]:
        """Of the functions that ``value`` names, the default of each setting, by the paths of ``flat``; "" for none."""
        functions = {place: one.function for place, one in self.places(value, path).items() if one.function}
        known = {place: {**self.settings, **keywords(function)} for place, function in functions.items()}
        given = {f"{place}.{key}": default for place, hints in known.items() for key, (_, default) in hints.items()}
        return {key: "" if default is inspect.Parameter.empty else default for key, default in given.items()}


def slot(table: Mapping[str, Callable], arguments: str, default: Any = NONE, **how: Any) -> Any:
    """A field of a config's dataclass that holds a function of ``table``; see ``Slot``."""
    place = Slot(table, arguments, optional=default == NONE, **how)
    return dataclasses.field(default=place.choose(default, "default"), metadata={"slot": place})


@functools.cache
def keywords(function: Callable) -> dict[str, tuple[Any, Any]]:
    """Settings of a function: name -> (annotation, default). What is not annotated has the type of its default."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    declared = {p.name: (hints.get(p.name, type(p.default)), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: (SIGNED.get(hint, hint), default) for name, (hint, default) in declared.items()}


def _digest(function: Callable) -> str:
    path = inspect.getsourcefile(function)
    return functions.digest(path) if path else ""
