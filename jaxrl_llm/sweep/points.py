"""The points of a sweep: settings by dotted name, made from a few functions, checked, and named.

    grid({"optimizer.learning_rate": [1e-4, 1e-3], "replay.capacity": [64, 128]})     4 points, every combination
    zipped({"update.batch_size": [8, 16], "update.micro_batch_size": [4, 8]})         2 points, value by value
    random({"optimizer.learning_rate": log_uniform(1e-5, 1e-2)}, num=10, seed=0)      10 points
    seeds(4)                                                                          seed = 0, 1, 2, 3
    product(a, b)                                                                     each of a with each of b
    a + b                                                                             both

Owns: what a sweep is and what its points are called. Does not know: how points are run, what becomes of them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import Config, ConfigError, freeze
from jaxrl_llm.runtime.nested import override

Point = dict[str, Any]  # {"update.batch_size": 64, ...}: what differs from the sweep file's get_config()

REPORT, AFTER = "report.html", "after.json"  # of a point's folder
SEED = "seed"  # points that differ in this setting alone are one experiment, repeated


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What ``get_sweep()`` of a sweep file returns. Metrics are names of metrics.jsonl.

    Attributes:
        points: a point that is there twice is run once.
        metrics: shown as curves and, by their last and best values, in the table.
        lower_is_better: those metrics, ``x_axis`` and ``pareto`` ones included, of which less is better.
        x_axis: "iteration", or a metric that only grows (time/compute_rollouts, say): curves are drawn over it too.
        facet: a setting; one picture for each of its values instead of one for all points. "" = one picture.
        thresholds: {metric: value}; the table tells where on the x-axis the metric first reaches the value.
        label: what the page calls a point, given without its seed (and, in its pictures, the facet): its settings by
            default, in short where that tells them apart. Points that differ in more must not be called the same.
        pareto: (metric across, metric up) of each plot of last values against each other.
        then: further points, made from the runs (``table.Run``) of ``points`` once all of them are finished: settings
            tuned on some seeds, say, and reported on others (``table.best_points``).
        after: "package.module:function" or "path/to/file.py:function" of a point's (config, workdir), called in its
            process once it has trained: to evaluate it on another task, say, and to throw its checkpoints away. What
            it returns, {name: number}, is kept in ``after.json`` and is columns of the table. "" = nothing.
    """

    points: Sequence[Point]
    metrics: tuple[str, ...] = ("eval/pass_rate",)
    lower_is_better: tuple[str, ...] = ()
    x_axis: str = "iteration"
    facet: str = ""
    thresholds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    pareto: tuple[tuple[str, str], ...] = ()
    then: Callable[[Sequence[Any]], Sequence[Point]] | None = None
    after: str = ""
    label: Callable[[Point], str] | None = None

    @property
    def last_files(self) -> tuple[str, ...]:
        """Files of a point's folder that say that it is finished."""
        return (REPORT, AFTER) if self.after else (REPORT,)

    def named_metrics(self) -> tuple[str, ...]:
        """Every metric the sweep names, each once: its curves first."""
        across = () if self.x_axis == "iteration" else (self.x_axis,)
        named = (*self.metrics, *self.thresholds, *itertools.chain.from_iterable(self.pareto), *across)
        return tuple(dict.fromkeys(named))

    def called(self, point: Point, *, without: str = "") -> str:
        """What ``label`` calls a point, or its settings by the last part of their names, or the whole.

        Args:
            without: a setting that it is not given, beside the seed.
        """
        point = {field: value for field, value in sorted(point.items()) if field not in (SEED, without)}
        named = _last_part if self._is_short_enough else str
        settings = (f"{named(field)} {value}" for field, value in point.items())
        return (self.label(point) if self.label else ", ".join(settings)) or "base"

    def check(self, points: Iterable[Point]) -> None:
        """``ConfigError`` where a threshold, or what ``label`` makes of a point, would end the page or the table.

        Args:
            points: as ``freeze_points`` gives them, and page and table have them.
        """
        for metric, value in self.thresholds.items():
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ConfigError(f"thresholds[{metric!r}]={value!r} must be a number")
        for point, without in itertools.product(points, dict.fromkeys(("", self.facet))):
            try:
                said = self.called(point, without=without)
                fault = "" if isinstance(said, str) else f"returns {said!r:.80}, not text"
            except Exception as error:
                fault = f"raises {type(error).__name__}: {error}"
            if fault:
                left_out = f" without {without}" if without else ""
                raise ConfigError(f"label {fault}, for the point {point}{left_out} (it is not given the seed)")

    @functools.cached_property
    def _is_short_enough(self) -> bool:
        fields = self.fields()
        return len(set(map(_last_part, fields))) == len(fields)

    def fields(self) -> tuple[str, ...]:
        """Every setting that some point sets, in order, the seed last."""
        named = dict.fromkeys(itertools.chain.from_iterable(self.points))
        return tuple(sorted(named, key=lambda field: field == SEED))


def _last_part(field: str) -> str:
    return field.rsplit(".", 1)[-1]


def grid(choices: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every combination of the values; the last setting changes fastest."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def zipped(choices: Mapping[str, Sequence[Any]]) -> list[Point]:
    """The first values together, the second values together, ...

    Raises:
        ConfigError: the settings have different numbers of values.
    """
    lengths = {field: len(values) for field, values in choices.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"zipped settings must have equally many values; they have {lengths}")
    return [dict(zip(choices, values, strict=True)) for values in zip(*choices.values(), strict=True)]


def product(*parts: Sequence[Point]) -> list[Point]:
    """Every choice of one point from each part, put together; the last part changes fastest.

    Raises:
        ConfigError: two parts set the same setting.
    """
    merged = []
    for chosen in itertools.product(*parts):
        fields = list(itertools.chain.from_iterable(chosen))
        if twice := sorted({field for field in fields if fields.count(field) > 1}):
            raise ConfigError(f"product: more than one part sets {', '.join(twice)}")
        merged.append({field: value for point in chosen for field, value in point.items()})
    return merged


def seeds(num: int, first: int = 0) -> list[Point]:
    """``num`` points that set the seed: first, first + 1, ..."""
    return [{SEED: seed} for seed in range(first, first + num)]


def random(
    choices: Mapping[str, Sequence[Any] | Callable[[np.random.Generator], Any]], *, num: int, seed: int
) -> list[Point]:
    """``num`` points, each value drawn on its own: one of a sequence, or what a function makes of a generator.

    A point is of ``seed`` and its place alone: with a larger ``num`` the first points stay what they were.
    """

    def draw(values, generator):
        return values(generator) if callable(values) else values[int(generator.integers(len(values)))]

    generators = [np.random.default_rng([seed, i]) for i in range(num)]
    return [{field: draw(values, generator) for field, values in choices.items()} for generator in generators]


def uniform(low: float, high: float) -> Callable[[np.random.Generator], float]:
    """For ``random``: any number of [low, high)."""
    return lambda generator: float(generator.uniform(low, high))


def log_uniform(low: float, high: float) -> Callable[[np.random.Generator], float]:
    """For ``random``: a number of [low, high), its logarithm uniform."""
    return lambda generator: math.exp(generator.uniform(math.log(low), math.log(high)))


def point_name(point: Point) -> str:
    """A name for the point's folder: its settings, to read, and a hash of them, to tell it from any other.

    Of the point alone: neither other points nor the sweep's base config change it.
    """
    fields = sorted(point, key=lambda field: (field == SEED, field))
    settings = "_".join(f"{field.rsplit('.', 1)[-1]}={point[field]}" for field in fields) or "base"
    digest = hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.=+-]+', '_', settings)[:80]}_{digest}"


def plain(value: Any) -> Any:
    """A point, or a value of one, with its functions as dictionaries."""
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    value = value.to_dict() if hasattr(value, "to_dict") else value
    return {key: plain(x) for key, x in value.items()} if isinstance(value, dict) else value


def freeze_points(
    base: Any, points: Sequence[Point], overrides: Collection[str] = ()
) -> dict[str, tuple[Point, Config]]:
    """``{name: (point, checked config)}`` in the order given; in a bucket each has a folder of its own.

    Args:
        base: the sweep file's ``get_config()``, or nested dictionaries of it.
        overrides: the settings that a command line has put into it, by dotted name.

    Raises:
        ConfigError: no point, or with its name a point whose settings are refused, or that sets what ``overrides`` do.
    """
    frozen, base = {}, base.to_dict() if hasattr(base, "to_dict") else base
    for point in points:
        if not isinstance(point, dict) or not all(isinstance(field, str) for field in point):
            raise ConfigError(f"a point of a sweep is {{setting: value}}, not {point!r}")
        try:
            point = plain(point)
            _check_overrides(point, overrides)
            name = point_name(point)
            frozen[name] = (point, _with_own_bucket(freeze(with_point(base, point)), name))
        except (ConfigError, TypeError) as error:  # a value that JSON does not know is a TypeError
            raise ConfigError(f"point {point}: {error}") from error
    if not frozen:
        raise ConfigError("the sweep has no point")
    return frozen


def _check_overrides(point: Point, overrides: Collection[str]) -> None:
    """Refuse a point that would undo, wholly or in part, what the command line gives; ConfigError."""
    for field, given in itertools.product(point, overrides):
        if f"{field}.".startswith(f"{given}.") or f"{given}.".startswith(f"{field}."):
            raise ConfigError(f"it sets {field}, so that the command line must not: --config.{given}")


def _with_own_bucket(config: Config, name: str) -> Config:
    """The config of a point, which would go on from the checkpoints of the others in a folder that it shares."""
    if not (bucket := config.checkpoint.bucket):
        return config
    folder = f"{bucket.rstrip('/')}/{re.sub('[=+]', '_', name)}"  # of what the name of such a folder may have
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, bucket=folder))


def with_point(base: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """A copy of ``base`` with the point's settings put in, known or not: ``freeze`` judges them."""
    settings = dict(base)
    for field in sorted(point, key=lambda field: field.count(".")):  # a function before its settings
        settings = override(settings, field, point[field])
    return settings
