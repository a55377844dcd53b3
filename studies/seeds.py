"""Statistics over seeds alone: paired t intervals, Holm's correction for many arms, ranks.

Percentile intervals over four seeds cover less than their nominal 95 % (sweeps.intervals). Here each seed gives one
figure. The arm and the base are compared seed by seed, and the four differences give a t interval.

    low, high = mean -+ t(0.975, n - 1) s / sqrt(n)

Savings are differences of logarithms of costs.
If a run never reaches the threshold, its cost is infinite and there is no interval.
Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
Owns: these statistics. Does not know: draws of questions (sweeps.intervals), how tables look (all).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from jaxrl_llm.sweeps.intervals import Resampling
from studies.arms import Arm, Way


class Paired(NamedTuple):
    """Mean of paired differences, its 95 % t interval, and the two-sided p value of the hypothesis of no difference."""

    mean: float
    low: float
    high: float
    p: float


def paired(differences: Sequence[float]) -> Paired:
    """Return the paired t statistics of one difference per seed; NaN with p = 1 if a difference is not finite."""
    x = np.asarray(differences, float)
    if not np.isfinite(x).all():
        return Paired(np.nan, np.nan, np.nan, 1.0)
    mean = x.mean()
    freedom = len(x) - 1
    error = x.std(ddof=1) / np.sqrt(len(x))
    reach = stats.t.ppf(0.975, freedom) * error
    p = 2 * stats.t.sf(abs(mean) / error, freedom) if error else float(mean == 0)
    return Paired(float(mean), float(mean - reach), float(mean + reach), float(p))


def by_seed(arm: Arm) -> list[Arm]:
    """Return each seed's run as an arm of its own, without bootstrap draws."""
    no_draws = Resampling(1, arm.passed.shape[2], resamples=0)
    arms = []
    for i, run in enumerate(arm.runs):
        passed = arm.passed[i : i + 1]
        at = arm.at[i : i + 1]
        curves = no_draws.curves(passed / arm.samples)
        arms.append(dataclasses.replace(arm, runs=[run], passed=passed, curves=curves, at=at, draws=no_draws))
    return arms


def ends(arm: Arm, base: Arm) -> Paired:
    """Compare the held-out pass rates at the end: ``arm`` minus ``base``."""
    return paired(arm.end_by_run() - base.end_by_run())


def saved(arm: Arm, base: Arm, threshold: float, way: Way) -> Paired:
    """Return the share of the base's cost to the threshold that an arm saves."""
    logarithms = np.log(_costs_by_seed(arm, threshold, way)) - np.log(_costs_by_seed(base, threshold, way))
    mean, low, high, p = paired(logarithms)
    return Paired(1 - np.exp(mean), 1 - np.exp(high), 1 - np.exp(low), p)


def _costs_by_seed(arm: Arm, threshold: float, way: Way) -> np.ndarray:
    """Return the cost to the threshold of each seed of an arm."""
    costs = [run_of_seed.to(threshold, way(run_of_seed))[0] for run_of_seed in by_seed(arm)]
    return np.array([float(cost) for cost in costs])


def holm(p: Mapping[str, float], level: float = 0.05) -> list[str]:
    """Return the names of the rejected hypotheses, with Holm's control of the family-wise error at ``level``."""
    rejected: list[str] = []
    for i, (name, value) in enumerate(sorted(p.items(), key=lambda pair: pair[1])):
        if value > level / (len(p) - i):
            break
        rejected.append(name)
    return rejected


class Rank(NamedTuple):
    """Rank of an arm among others over bootstrap draws; rank 1 is the cheapest."""

    first: float  # share of the draws in which it is the cheapest
    low: int
    high: int


def ranks(costs: np.ndarray) -> list[Rank]:
    """Return the rank of each arm with a 95 % range over the draws.

    ``costs`` is [arms, 1 + resamples]. Column 0 has the figures themselves and is not a draw.
    """
    draws = costs[:, 1:]
    order = draws.argsort(axis=0, kind="stable").argsort(axis=0, kind="stable") + 1
    first = (order == 1).mean(axis=1)
    low, high = np.quantile(order, (0.025, 0.975), axis=1, method="closest_observation")
    return [Rank(*rank) for rank in zip(first.tolist(), low.tolist(), high.tolist(), strict=True)]
