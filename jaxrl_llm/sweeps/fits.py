"""Learning-curve fits: a sigmoid of compute, fitted to the first part of a curve and tested on the rest.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

R0 is the value before any training, A the ceiling, C_mid the compute at half of the way, and B the steepness there.
Recipes are compared by A first, then by B. A fit that cannot predict its own second half does not determine the
ceiling. Therefore the error on the second half is reported with the fit.

Source: Khatri et al. 2025, arXiv:2510.13786 (ScaleRL), section 3. Differs:

- One curve is fitted to several seeds. On a sweep's page it is their median.
- All points of the first part count. The paper leaves out the first 1,500 of its GPU hours. It reports that this hardly
  matters for stable runs.
- A, C_mid and B are fitted together, by least squares.

Owns: the curve, the fit, its error. Does not know: sweeps, pages.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.optimize


@dataclasses.dataclass(frozen=True)
class Sigmoid:
    """Fitted curve.

    Attributes:
        start: R0, not fitted.
        ceiling: A.
        middle: C_mid, in units of the x-axis.
        steepness: B.
        error: mean |fit - measured| over the points that were not fitted; nan if there are none.
    """

    start: float
    ceiling: float
    middle: float
    steepness: float
    error: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return curve(x, self.start, self.ceiling, self.middle, self.steepness)


def curve(x: np.ndarray, start: float, ceiling: float, middle: float, steepness: float) -> np.ndarray:
    """Return R at compute x > 0."""
    return start + (ceiling - start) / (1 + (middle / x) ** steepness)


SHARE = 0.5  # share of the points that is fitted


def is_long_enough(x: np.ndarray, share: float = SHARE) -> bool:
    """Return whether a curve can be fitted: all compute is above 0, and the first ``share`` has at least 5 points."""
    is_positive = bool((x > 0).all())
    num_fitted = int(len(x) * share)
    return is_positive and num_fitted >= 5


def fit(
    x: np.ndarray,
    y: np.ndarray,
    *,
    start: float,
    share: float = SHARE,
    highest: float = 1.0,
) -> Sigmoid | None:
    """Fit a sigmoid by least squares to the first ``share`` of the points.

    Args:
        x: [points] compute, increasing, above 0.
        y: [points] measured values.
        start: R0, which is not a point of the curve.
        highest: upper bound of the ceiling.

    Returns:
        The fit, or None if the curve is too short or the fit fails.
    """
    if not is_long_enough(x, share):
        return None
    num_fitted = int(len(x) * share)
    fitted_x = x[:num_fitted]
    fitted_y = y[:num_fitted]
    # Bounds and initial values of the ceiling, the middle and the steepness.
    highest = max(highest, start + 1e-6)
    lowest = np.array((start, x[0] / 100, 0.1))
    largest = np.array((highest, x[-1] * 100, 10.0))
    guess = (max(fitted_y), np.median(fitted_x), 1.0)
    first_values = np.clip(guess, lowest, largest)

    def sigmoid(x: np.ndarray, ceiling: float, middle: float, steepness: float) -> np.ndarray:
        return curve(x, start, ceiling, middle, steepness)

    try:
        bounds = (lowest, largest)
        result = scipy.optimize.curve_fit(sigmoid, fitted_x, fitted_y, p0=first_values, bounds=bounds)
    except (RuntimeError, ValueError):
        return None
    ceiling, middle, steepness = result[0]
    predicted = sigmoid(x[num_fitted:], ceiling, middle, steepness)
    errors = np.abs(predicted - y[num_fitted:])
    return Sigmoid(
        start=float(start),
        ceiling=float(ceiling),
        middle=float(middle),
        steepness=float(steepness),
        error=float(errors.mean()) if len(errors) else float("nan"),
    )
