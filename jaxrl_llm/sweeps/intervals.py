"""Confidence intervals: the uncertainty of a figure over seeds and held-out questions, by resampling both.

    draws = Resampling(num_runs=4, num_questions=64)
    curves = draws.curves(passed)       [4 runs, evaluations, questions] -> [1 + resamples, evaluations]
    Interval.of(curves[:, -1])          0.48 (0.43-0.53): the figure over all runs and questions; 95 % of the draws

Row 0 of every array of draws is the figure itself, over all runs and questions. There is one run per seed, in the order
of the seeds.

Experiments with the same seed have the same questions. Other seeds have other questions, but neighbouring seeds of
reasoning-gym have nearly the same questions (docs/how-to/run_a_sweep.md). Therefore all experiments draw the same
seeds, and the same questions of each seed. A difference or a ratio of two experiments, taken row by row, has its own
valid interval.

Different seeds already differ in their questions, so that resampling the questions too makes an interval rather too
wide. Four seeds make it too narrow, because runs with other seeds are missing. A seed that is drawn twice gets other
questions the second time.
Source: percentile bootstrap, Efron 1979; of clusters and within them, Davison and Hinkley 1997, section 3.8.
Owns: draws, intervals, first crossings. Does not know: where figures come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.actor import evaluation
from jaxrl_llm.sweeps.table import RESAMPLES


class Interval(NamedTuple):
    """Figure with the bounds of 95 % of its draws."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray) -> Interval:
        """Return the interval of draws [1 + resamples].

        The first is the figure itself; infinite draws ("never") are largest.
        """
        low, high = np.quantile(draws[1:], (0.025, 0.975), method="closest_observation")
        return cls(float(draws[0]), float(low), float(high))

    def shown(self, form: str = ".2f", never: str = "never") -> str:
        """Return the interval as text, ``0.48 (0.43-0.53)`` or ``5% (-26% to 42%)``."""
        text = [format(x, form) if math.isfinite(x) else never for x in self]
        joint = " to " if self.low < 0 or form.startswith("+") else "-"
        return f"{text[0]} ({text[1]}{joint}{text[2]})" if set(text) != {never} else never


class Resampling:
    """Draws of seeds and of each seed's questions. Experiments of the same size share the same draws.

    Attributes:
        runs: [1 + resamples, runs] weight of each run in each draw.
    """

    def __init__(self, num_runs: int, num_questions: int, *, resamples: int = RESAMPLES, seed: int = 0):
        draw, alike = np.random.default_rng(seed).multinomial, lambda num: np.full(num, 1 / num)
        times = np.concatenate([np.ones((1, num_runs), int), draw(num_runs, alike(num_runs), size=resamples)])
        self.runs = times / num_runs
        asked = draw(times * num_questions, alike(num_questions))  # [1 + resamples, runs, questions]
        asked[0] = 1
        self._shares = asked / (num_runs * num_questions)

    def curves(self, passed: np.ndarray) -> np.ndarray:
        """Return the mean over runs and questions at each evaluation, [1 + resamples, evaluations].

        Args:
            passed: [runs, evaluations, questions], the score of each question.
        """
        return np.einsum("drq,req->de", self._shares, passed, optimize=True)

    def mean_of(self, values: Sequence[float]) -> Interval:
        """Return the interval of a figure with one value per run, over seeds only."""
        return Interval.of(self.runs @ np.asarray(values, float))


def smooth(curves: np.ndarray, width: int = 3) -> np.ndarray:
    """Return the mean of each point [..., points] and its neighbours, ``width`` points in total, fewer at the ends.

    A noisy curve crosses a threshold too early. Smoothing reduces this error.
    """
    reach, points = width // 2, curves.shape[-1]
    windows = [curves[..., max(0, i - reach) : i + reach + 1].mean(axis=-1) for i in range(points)]
    return np.stack(windows, axis=-1)


def first_crossing(x: np.ndarray, y: np.ndarray, threshold: float) -> np.ndarray:
    """Return the x at which each curve first reaches the threshold, with linear interpolation.

    Args:
        x: [draws, points], increasing.
        y: [draws, points].

    Returns:
        [draws]; infinite if a curve stays below, and the first x if the curve begins at or above the threshold.
    """
    reached = y >= threshold
    first = reached.argmax(axis=1)
    rows, before = np.arange(len(y)), np.maximum(first - 1, 0)
    x0, x1, y0, y1 = x[rows, before], x[rows, first], y[rows, before], y[rows, first]
    share = np.where(y1 > y0, (threshold - y0) / np.where(y1 > y0, y1 - y0, 1.0), 1.0)
    return np.where(reached.any(axis=1), np.where(first > 0, x0 + share * (x1 - x0), x1), np.inf)


def pass_at_k(passed: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Return pass@k (actor.evaluation) of each question.

    Args:
        passed: [..., questions], number of the ``samples`` answers that passed.
    """
    return np.array([evaluation.pass_at_k(samples, c, k) for c in range(samples + 1)])[passed]
