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

Different seeds already have different questions. Resampling the questions too therefore makes an interval slightly too
wide. With only four seeds an interval is too narrow. If a seed is drawn twice, its questions are resampled separately.
Source: percentile bootstrap, Efron 1979; of clusters and within them, Davison and Hinkley 1997, section 3.8.
Owns: draws, intervals, first crossings. Does not know: where figures come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.actor import evaluation
from jaxrl_llm.sweeps.effects import BOUNDS, RESAMPLES


class Interval(NamedTuple):
    """Figure with the bounds of 95 % of its draws."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray) -> Interval:
        """Return the interval of draws [1 + resamples].

        The first draw is the figure itself. Infinite draws ("never") count as the largest.
        """
        low, high = np.quantile(draws[1:], BOUNDS, method="closest_observation")
        return cls(
            value=float(draws[0]),
            low=float(low),
            high=float(high),
        )

    def text(self, form: str = ".2f", never: str = "never") -> str:
        """Return the interval as text, ``0.48 (0.43-0.53)`` or ``5% (-26% to 42%)``."""
        texts = []
        for number in self:
            texts.append(format(number, form) if math.isfinite(number) else never)
        value, low, high = texts
        if value == low == high == never:
            return never
        has_signs = self.low < 0 or form.startswith("+")
        dash = " to " if has_signs else "-"
        return f"{value} ({low}{dash}{high})"


class Resampling:
    """Draws of seeds and of each seed's questions. Experiments of the same size share the same draws.

    Attributes:
        runs: [1 + resamples, runs] weight of each run in each draw.
    """

    def __init__(
        self,
        num_runs: int,
        num_questions: int,
        *,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ):
        generator = np.random.default_rng(seed)
        once = np.ones((1, num_runs), int)
        equal_runs = np.full(num_runs, 1 / num_runs)
        drawn_runs = generator.multinomial(num_runs, equal_runs, size=resamples)
        run_counts = np.concatenate([once, drawn_runs])
        self.runs = run_counts / num_runs
        # [1 + resamples, runs, questions]
        equal_questions = np.full(num_questions, 1 / num_questions)
        question_counts = generator.multinomial(run_counts * num_questions, equal_questions)
        question_counts[0] = 1
        self._shares = question_counts / (num_runs * num_questions)

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
    reach = width // 2
    means = []
    for i in range(curves.shape[-1]):
        first = max(0, i - reach)
        last = i + reach
        window = curves[..., first : last + 1]
        means.append(window.mean(axis=-1))
    return np.stack(means, axis=-1)


def first_crossing(x: np.ndarray, y: np.ndarray, threshold: float) -> np.ndarray:
    """Return the x at which each curve first reaches the threshold, with linear interpolation.

    Args:
        x: [draws, points], increasing.
        y: [draws, points].

    Returns:
        [draws]; infinite if a curve stays below, and the first x if the curve begins at or above the threshold.
    """
    is_reached = y >= threshold
    first = is_reached.argmax(axis=1)
    before = np.maximum(first - 1, 0)
    rows = np.arange(len(y))
    x0 = x[rows, before]
    x1 = x[rows, first]
    y0 = y[rows, before]
    y1 = y[rows, first]
    is_rising = y1 > y0
    rise = np.where(is_rising, y1 - y0, 1.0)
    share = np.where(is_rising, (threshold - y0) / rise, 1.0)
    interpolated = x0 + share * (x1 - x0)
    crossing = np.where(first > 0, interpolated, x1)
    return np.where(is_reached.any(axis=1), crossing, np.inf)


def pass_at_k(passed: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Return pass@k (actor.evaluation) of each question.

    Args:
        passed: [..., questions], number of the ``samples`` answers that passed.
    """
    by_count = []
    for num_passed in range(samples + 1):
        by_count.append(evaluation.pass_at_k(samples, num_passed, k))
    return np.array(by_count)[passed]
