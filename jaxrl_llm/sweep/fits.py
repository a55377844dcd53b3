"""Fits: a learning curve as a sigmoid of compute, fitted to its first part and judged on the rest.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

R0 is what the run began with, A the ceiling that it goes to, C_mid the compute at half of the way, B how steep it is
there. Recipes are compared by A first, then by B. A fit that cannot foretell its own second half says nothing of the
ceiling: so the error there stands beside it.

Source: Khatri et al. 2025, arXiv:2510.13786 (ScaleRL), section 3. Differs: fitted to the mean of an experiment's seeds.
Owns: the curve, the fit, its error. Does not know: sweeps, pages.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.optimize


@dataclasses.dataclass(frozen=True)
class Sigmoid:
    """A fitted curve.

    Attributes:
        start: R0, given.
        ceiling: A.
        middle: C_mid, in units of the x-axis.
        steepness: B.
        error: mean |fit - measured| over the points that were left out; nan where none were.
    """

    start: float
    ceiling: float
    middle: float
    steepness: float
    error: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return curve(x, self.start, self.ceiling, self.middle, self.steepness)


def curve(x: np.ndarray, start: float, ceiling: float, middle: float, steepness: float) -> np.ndarray:
    """R at compute x > 0."""
    return start + (ceiling - start) / (1 + (middle / x) ** steepness)


def fit(x: np.ndarray, y: np.ndarray, *, start: float, share: float = 0.5, highest: float = 1.0) -> Sigmoid | None:
    """The sigmoid of the least squares over the first ``share`` of the points.

    Args:
        x: [points] compute, growing, above 0.
        y: [points] what was reached.
        start: R0.
        highest: no ceiling above it.

    Returns:
        None where the points are too few (fewer than 5 are fitted) or no fit is found.
    """
    given = int(len(x) * share)
    if given < 5:
        return None
    bounds = (start, x[0] / 100, 0.1), (max(highest, start + 1e-6), x[-1] * 100, 10.0)
    begin = np.clip((max(y[:given]), np.median(x[:given]), 1.0), *np.array(bounds))
    of = lambda x, ceiling, middle, steepness: curve(x, start, ceiling, middle, steepness)
    try:
        (ceiling, middle, steepness), _ = scipy.optimize.curve_fit(of, x[:given], y[:given], p0=begin, bounds=bounds)
    except (RuntimeError, ValueError):
        return None
    left = np.abs(of(x[given:], ceiling, middle, steepness) - y[given:])
    error = float(left.mean()) if len(left) else float("nan")
    return Sigmoid(float(start), float(ceiling), float(middle), float(steepness), error)
