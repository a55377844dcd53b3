"""Fits: a learning curve as a sigmoid of compute, fitted to its first part and judged on the rest.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

R0 is what the run began with, before any training, A the ceiling that it goes to, C_mid the compute at half of the way,
B how steep it is there. Recipes are compared by A first, then by B. A fit that cannot foretell its own second half says
nothing of the ceiling: so the error there stands beside it.

Source: Khatri et al. 2025, arXiv:2510.13786 (ScaleRL), section 3. Differs: of several seeds one curve is fitted, their
median on a sweep's page; all points of the first part count, where the paper leaves out the first 1,500 of its GPU
hours, which hardly matters, it says, where runs are stable; A, C_mid and B are fitted together, by least squares.
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


SHARE = 0.5  # of the points that are fitted


def is_long_enough(x: np.ndarray, share: float = SHARE) -> bool:
    """Whether a curve can be fitted: compute above 0, and 5 points or more in the first ``share``."""
    return bool((x > 0).all()) and int(len(x) * share) >= 5


def fit(x: np.ndarray, y: np.ndarray, *, start: float, share: float = SHARE, highest: float = 1.0) -> Sigmoid | None:
    """The sigmoid of the least squares over the first ``share`` of the points.

    Args:
        x: [points] compute, growing, above 0.
        y: [points] what was reached.
        start: R0, which is no point of the curve.
        highest: no ceiling above it.

    Returns:
        None where the curve is too short or no fit is found.
    """
    if not is_long_enough(x, share):
        return None
    given = int(len(x) * share)
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
