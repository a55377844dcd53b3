"""Intervals: how far a figure of an experiment moves with its seeds and its held-out questions, by resampling both.

    draws = Resampling(num_questions=64)
    curves = draws.curves(passed, draws.runs(4))    [4 runs, evaluations, questions] -> [1 + resamples, evaluations]
    Interval.of(curves[:, -1])                      0.48 (0.43-0.53): of all runs and questions; of 95 % of the draws

Row 0 of every array of draws is the figure itself, of all runs and questions. Questions are drawn alike for every
experiment, for all are asked the same ones; runs are drawn for each by itself. So a difference of two experiments, or
a ratio, taken row by row, has the interval of the difference.

With four seeds an interval over seeds is too narrow rather than too wide: a run that was not drawn is not there.
Source: percentile bootstrap, Efron 1979; over two factors, Owen 2007, arXiv:0712.1111: each factor resampled by itself.
Owns: draws, intervals, first crossings. Does not know: where figures come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.actor import evaluation
from jaxrl_llm.sweep.table import RESAMPLES


class Interval(NamedTuple):
    """A figure, and what bounds 95 % of its draws."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray) -> Interval:
        """Of draws [1 + resamples] whose first is the figure itself; infinite ones ("never") are larger than all."""
        low, high = np.quantile(draws[1:], (0.025, 0.975), method="closest_observation")
        return cls(float(draws[0]), float(low), float(high))

    def shown(self, form: str = ".2f", never: str = "never") -> str:
        """``0.48 (0.43-0.53)``, or ``5% (-26% to 42%)``."""
        text = [format(x, form) if math.isfinite(x) else never for x in self]
        joint = " to " if self.low < 0 else "-"
        return f"{text[0]} ({text[1]}{joint}{text[2]})" if set(text) != {never} else never


class Resampling:
    """Draws of questions that all experiments share, and of runs for each.

    Args:
        num_questions: held out, the same ones in every run.
    """

    def __init__(self, num_questions: int, *, resamples: int = RESAMPLES, seed: int = 0):
        self._generator = np.random.default_rng(seed)
        self._resamples = resamples
        self._questions = self._weights(num_questions)

    def _weights(self, num: int) -> np.ndarray:
        """Shares of ``num`` things in each draw [1 + resamples, num]: all alike, then drawn with replacement."""
        counts = self._generator.multinomial(num, np.full(num, 1 / num), size=self._resamples)
        return np.concatenate([np.ones((1, num)), counts]) / num

    def runs(self, num: int) -> np.ndarray:
        """Shares of ``num`` runs [1 + resamples, num], for ``curves`` of one experiment."""
        return self._weights(num)

    def curves(self, passed: np.ndarray, runs: np.ndarray) -> np.ndarray:
        """Mean over runs and questions at each evaluation, [1 + resamples, evaluations].

        Args:
            passed: [runs, evaluations, questions], what each question got.
            runs: of ``runs``.
        """
        by_run = np.einsum("dq,req->dre", self._questions, passed, optimize=True)
        return np.einsum("dr,dre->de", runs, by_run, optimize=True)


def smooth(curves: np.ndarray, width: int = 3) -> np.ndarray:
    """Mean of each point [..., points] and its neighbours, ``width`` in all; fewer at the ends.

    A first crossing of a noisy curve comes too early; of neighbours' means less so.
    """
    reach, points = width // 2, curves.shape[-1]
    windows = [curves[..., max(0, i - reach) : i + reach + 1].mean(axis=-1) for i in range(points)]
    return np.stack(windows, axis=-1)


def first_crossing(x: np.ndarray, y: np.ndarray, threshold: float) -> np.ndarray:
    """Where each curve first reaches the threshold, on lines between its points.

    Args:
        x: [draws, points], growing.
        y: [draws, points].

    Returns:
        [draws]; infinite where a curve stays below, and x of the first point where it begins at or above.
    """
    reached = y >= threshold
    first = reached.argmax(axis=1)
    rows, before = np.arange(len(y)), np.maximum(first - 1, 0)
    x0, x1, y0, y1 = x[rows, before], x[rows, first], y[rows, before], y[rows, first]
    share = np.where(y1 > y0, (threshold - y0) / np.where(y1 > y0, y1 - y0, 1.0), 1.0)
    return np.where(reached.any(axis=1), np.where(first > 0, x0 + share * (x1 - x0), x1), np.inf)


def pass_at_k(passed: np.ndarray, samples: int, k: int) -> np.ndarray:
    """pass@k (actor.evaluation) of each question [..., questions], of which so many of ``samples`` answers passed."""
    return np.array([evaluation.pass_at_k(samples, c, k) for c in range(samples + 1)])[passed]


def mean_of(values: Sequence[float], runs: np.ndarray) -> Interval:
    """Of a figure that each run has one of."""
    return Interval.of(runs @ np.asarray(values, float))
