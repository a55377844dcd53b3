"""Effects of the settings of a sweep on a figure, with bootstrap intervals.

Runs with any other settings are resampled with replacement. With randomly drawn settings, the other settings are alike
on average. The best and the worst value are chosen on the original runs, which favours one of several similar values a
little.

Source: percentile bootstrap, Efron 1979; for settings of reinforcement learning, after the statistical diagnosis of
1,370 random configurations of web agents.
Owns: which settings are compared, these intervals. Does not know: how figures are computed, how effects look.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.sweeps.points import SEED, Sweep
from jaxrl_llm.sweeps.table import Run, figures, hashable

RESAMPLES = 2000
BOUNDS = (0.025, 0.975)  # of a 95 % interval
# Fewer runs get no interval, because resampling a single run gives no spread.
FEWEST_RUNS = 3
# A setting with more different numbers than this is binned into thirds.
MOST_VALUES = 6
# A setting with more values than this that are not numbers is left out.
MOST_NAMES = 50


@dataclasses.dataclass(frozen=True)
class Knob:
    """Effect of a setting on a figure, over all runs that differ in the setting.

    Attributes:
        rows: (value, runs, mean, low, high) of each value. low and high bound 95 % of the resampled means. Both are NaN
            for a value with fewer than ``FEWEST_RUNS`` runs.
        effect: (mean of the best value minus mean of the worst value, low, high). If 0 lies between low and high, the
            effect may be chance. low and high are NaN if one of the two values has too few runs.
    """

    field: str
    rows: list[tuple[str, int, float, float, float]]
    effect: tuple[float, float, float]

    @property
    def size(self) -> float:
        """Return the difference between the best and the worst value, without its sign."""
        difference, _, _ = self.effect
        return abs(difference)


def knobs(runs: Sequence[Run], sweep: Sweep, column: str) -> list[Knob]:
    """Return the settings of a sweep by their effect on a figure, the largest first.

    Args:
        column: a column of ``table.figures``; runs without a number are left out.
    """
    measured_runs = []
    measured_values = []
    for run in runs:
        value = figures(run, sweep)[column]
        if value is not None:
            measured_runs.append(run)
            measured_values.append(value)
    if not measured_runs:
        return []
    y = np.array(measured_values)
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(y), (RESAMPLES, len(y)))
    metric = column.removesuffix(" last").removesuffix(" best")
    effects = []
    for field in sweep.fields():
        values = [run.point.get(field) for run in measured_runs]
        names = _bins(values)
        num_names = len(set(names))
        if field != SEED and 2 <= num_names <= MOST_NAMES:
            is_lower_better = metric in sweep.lower_is_better
            effects.append(_knob(field, names, y, picks, is_lower_better=is_lower_better))
    effects.sort(key=_size, reverse=True)
    return effects


def _size(knob: Knob) -> float:
    return knob.size


def _knob(
    field: str,
    names_of_runs: Sequence[str],
    y: np.ndarray,
    picks: np.ndarray,
    *,
    is_lower_better: bool,
) -> Knob:
    """Return the effect of one setting.

    Args:
        names_of_runs: [runs] names of the setting's values.
        y: [runs] the figure.
        picks: [resamples, runs] numbers of the runs of each resample.
    """
    names = list(dict.fromkeys(names_of_runs))
    # [names, runs]
    is_member = np.array(names, object)[:, None] == np.array(names_of_runs, object)
    counts = is_member.sum(axis=1)
    means = is_member @ y / counts
    drawn = is_member[:, picks]  # [names, resamples, runs]
    sums = (drawn * y[picks]).sum(axis=2)
    with np.errstate(invalid="ignore"):
        resampled = sums / drawn.sum(axis=2)
    has_enough_runs = counts >= FEWEST_RUNS
    low, high = np.where(has_enough_runs, np.nanquantile(resampled, BOUNDS, axis=1), np.nan)
    columns = (counts, means, low, high)
    rows = list(zip(names, *(column.tolist() for column in columns), strict=True))
    lowest = means.argmin()
    highest = means.argmax()
    best, worst = (lowest, highest) if is_lower_better else (highest, lowest)
    difference = float(means[best] - means[worst])
    if not has_enough_runs[best] or not has_enough_runs[worst]:
        return Knob(field, rows, (difference, math.nan, math.nan))
    differences = resampled[best] - resampled[worst]
    low_difference, high_difference = np.nanquantile(differences, BOUNDS).tolist()
    return Knob(field, rows, (difference, low_difference, high_difference))


def _bins(values: Sequence[Any]) -> list[str]:
    """Return a name for each value: the value itself, or its third if there are many different numbers."""
    numbers = [value for value in values if value is not None]  # None if the point does not have the setting
    num_values = len({hashable(value) for value in values})
    are_numbers = all(isinstance(number, (int, float)) for number in numbers)
    if num_values <= MOST_VALUES or not are_numbers:
        return [str(value) for value in values]
    edges = np.quantile(numbers, (0, 1 / 3, 2 / 3, 1))
    thirds = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    names = []
    for value in values:
        if value is None:
            names.append(str(value))
        else:
            third = np.searchsorted(edges[1:3], value, side="right")
            names.append(thirds[third])
    return names
