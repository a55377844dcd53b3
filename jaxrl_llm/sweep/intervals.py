"""Intervals: how far a figure of an experiment moves with its seeds and its held-out questions, by resampling both.

    draws = Resampling(num_runs=4, num_questions=64)
    curves = draws.curves(passed)       [4 runs, evaluations, questions] -> [1 + resamples, evaluations]
    Interval.of(curves[:, -1])          0.48 (0.43-0.53): of all runs and questions; of 95 % of the draws

Row 0 of every array of draws is the figure itself, of all runs and questions. Runs are of one seed each, in the order
of the seeds. Experiments with the same seed are asked the same questions, and with another seed others, though nearly
the same by reasoning-gym with neighbouring seeds (docs/sweeps.md). So seeds are drawn alike for every experiment, and
the questions of each seed alike too: a difference of two experiments, or a ratio, taken row by row, has the interval of
the difference.

Seeds that lie apart differ by the questions they are asked already, so that drawing these too makes an interval rather
too wide; four seeds make it too narrow: a run that was not drawn is not there. A seed that is drawn twice is asked
other questions the second time.
Source: percentile bootstrap, Efron 1979; of clusters and within them, Davison and Hinkley 1997, section 3.8.
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
        joint = " to " if self.low < 0 or form.startswith("+") else "-"
        return f"{text[0]} ({text[1]}{joint}{text[2]})" if set(text) != {never} else never


class Resampling:
    """Draws of seeds and of the questions of each, the same for all experiments of as many.

    Attributes:
        runs: [1 + resamples, runs] shares of the runs in each draw.
    """

    def __init__(self, num_runs: int, num_questions: int, *, resamples: int = RESAMPLES, seed: int = 0):
        draw, alike = np.random.default_rng(seed).multinomial, lambda num: np.full(num, 1 / num)
        times = np.concatenate([np.ones((1, num_runs), int), draw(num_runs, alike(num_runs), size=resamples)])
        self.runs = times / num_runs
        asked = draw(times * num_questions, alike(num_questions))  # [1 + resamples, runs, questions]
        asked[0] = 1
        self._shares = asked / (num_runs * num_questions)

    def curves(self, passed: np.ndarray) -> np.ndarray:
        """Mean over runs and questions at each evaluation, [1 + resamples, evaluations].

        Args:
            passed: [runs, evaluations, questions], what each question got.
        """
        return np.einsum("drq,req->de", self._shares, passed, optimize=True)

    def mean_of(self, values: Sequence[float]) -> Interval:
        """Of a figure that each run has one of; over seeds alone."""
        return Interval.of(self.runs @ np.asarray(values, float))


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
