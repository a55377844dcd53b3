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
from studies.arms import Arm, CostCurve


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
    """Return each seed's run as a separate arm, without bootstrap draws."""
    no_draws = Resampling(1, arm.passed.shape[2], resamples=0)
    arms = []
    for i, run in enumerate(arm.runs):
        passed = arm.passed[i : i + 1]
        evaluation_rows = arm.evaluation_rows[i : i + 1]
        curves = no_draws.curves(passed / arm.samples)
        arm_of_run = dataclasses.replace(
            arm,
            runs=[run],
            passed=passed,
            curves=curves,
            evaluation_rows=evaluation_rows,
            draws=no_draws,
        )
        arms.append(arm_of_run)
    return arms


def ends(arm: Arm, base: Arm) -> Paired:
    """Compare the held-out pass rates at the end: ``arm`` minus ``base``."""
    return paired(arm.end_by_run() - base.end_by_run())


def saving(arm: Arm, base: Arm, threshold: float, cost_curve: CostCurve) -> Paired:
    """Return the share of the base's cost to the threshold that an arm saves."""
    arm_costs = _costs_by_seed(arm, threshold, cost_curve)
    base_costs = _costs_by_seed(base, threshold, cost_curve)
    mean, low, high, p = paired(np.log(arm_costs) - np.log(base_costs))
    # A low cost is a high saving.
    return Paired(1 - np.exp(mean), 1 - np.exp(high), 1 - np.exp(low), p)


def _costs_by_seed(arm: Arm, threshold: float, cost_curve: CostCurve) -> np.ndarray:
    """Return the cost to the threshold of each seed of an arm."""
    costs = []
    for arm_of_seed in by_seed(arm):
        cost = arm_of_seed.cost_to(threshold, cost_curve(arm_of_seed))
        costs.append(float(cost[0]))
    return np.array(costs)


def holm(p_values: Mapping[str, float], level: float = 0.05) -> list[str]:
    """Return the names of the rejected hypotheses, with Holm's control of the family-wise error at ``level``."""
    ordered = sorted(p_values.items(), key=lambda pair: pair[1])
    rejected: list[str] = []
    for i, (name, p) in enumerate(ordered):
        num_left = len(ordered) - i
        if p > level / num_left:
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
    order = draws.argsort(axis=0, kind="stable")
    rank_of_arm = order.argsort(axis=0, kind="stable") + 1
    first = (rank_of_arm == 1).mean(axis=1)
    low, high = np.quantile(rank_of_arm, (0.025, 0.975), axis=1, method="closest_observation")
    return [Rank(*rank) for rank in zip(first.tolist(), low.tolist(), high.tolist(), strict=True)]
