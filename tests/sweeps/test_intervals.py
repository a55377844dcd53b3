"""Intervals and fits compared with loops of single draws, with numbers by hand, and with curves of known parameters."""

import itertools
import math

import numpy as np
import pytest

from jaxrl_llm.sweeps import fits, intervals
from jaxrl_llm.sweeps.intervals import Interval, Resampling

DRAW = np.random.default_rng(3)
PASSED = DRAW.integers(0, 5, size=(3, 4, 6)) / 4  # 3 runs, 4 evaluations, 6 questions


def test_the_first_row_is_the_mean_of_all_runs_and_questions():
    curves = Resampling(3, 6, resamples=5).curves(PASSED)
    assert curves.shape == (6, 4)
    np.testing.assert_allclose(curves[0], PASSED.mean(axis=(0, 2)), rtol=1e-12)


def test_a_draw_is_a_mean_over_seeds_and_over_questions_of_each_drawn_with_replacement():
    """Every draw is one of the means over 3 of 3 seeds, with 2 of 2 questions of each. All means occur."""
    passed = np.array([[[0.0, 1.0]], [[0.25, 0.5]], [[0.125, 0.75]]])  # 3 runs, 1 evaluation, 2 questions
    found = Resampling(3, 2, resamples=5000).curves(passed)[1:, 0]
    of_seed = [[np.mean([row[0][i], row[0][j]]) for i in range(2) for j in range(2)] for row in passed]
    possible = {
        round(float(np.mean(means)), 9)
        for runs in itertools.product(of_seed, repeat=3)
        for means in itertools.product(*runs)  # of a seed that is drawn twice, its questions are drawn twice
    }
    assert {round(float(x), 9) for x in found} == possible
    assert found.mean() == pytest.approx(passed.mean(), abs=0.02)
    # Between seeds, and within one: of means of 3 of 3, and of 2 of 2 in each.
    variance = passed.mean(axis=(1, 2)).var() / 3 + passed.var(axis=(1, 2)).mean() / 6
    assert found.var() == pytest.approx(variance, rel=0.06)


def test_seeds_and_their_questions_are_drawn_alike_for_all_experiments():
    """A constant difference between two experiments with the same seeds and questions has no interval.

    Their ends have one.
    """
    one, other = (Resampling(3, 6, resamples=200).curves(PASSED + more)[:, 0] for more in (0.0, 0.25))
    np.testing.assert_allclose(other - one, 0.25, rtol=1e-12)
    assert one.std() > 0.02


def test_questions_of_one_seed_say_nothing_of_those_of_another():
    """The questions of two seeds add different values to a draw. With as many as 50 seeds the differences cancel."""
    questions = np.arange(6) / 6
    few, many = (
        Resampling(num, 6, resamples=400).curves(np.tile(questions, (num, 1, 1)))[1:, 0].std() for num in (1, 50)
    )
    assert many < few / 5  # 1 / sqrt(50)


def test_the_interval_of_a_mean_is_about_two_standard_errors():
    values = np.random.default_rng(5).normal(size=400)
    interval = Resampling(400, 1).mean_of(values)
    error = values.std() / 20
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - 1.96 * error, abs=0.2 * error)
    assert interval.high == pytest.approx(values.mean() + 1.96 * error, abs=0.2 * error)


def test_what_is_never_reached_is_more_than_all_and_is_said():
    draws = np.array([3.0, *[2.0] * 50, *[math.inf] * 50])
    assert Interval.of(draws) == (3.0, 2.0, math.inf)
    assert Interval.of(draws).text(".0f") == "3 (2-never)"
    assert Interval.of(np.full(9, math.inf)).text() == "never"
    assert Interval(0.481, 0.43, 0.53).text() == "0.48 (0.43-0.53)"
    assert Interval(0.05, -0.26, 0.42).text(".0%") == "5% (-26% to 42%)"


def test_a_first_crossing_lies_on_the_line_between_two_points():
    x = np.array([[10.0, 20.0, 40.0]] * 5)
    y = np.array([[0.1, 0.2, 0.6], [0.5, 0.2, 0.6], [0.1, 0.2, 0.3], [0.1, 0.5, 0.2], [0.1, 0.4, 0.4]])
    # A quarter.. from 20 to 40: (0.4 - 0.2) / 0.4; at once; never; 3 / 4 of the way; at a point.
    assert intervals.first_crossing(x, y, 0.4).tolist() == pytest.approx([30.0, 10.0, math.inf, 17.5, 20.0])


def test_smoothing_is_a_mean_with_the_neighbours_that_are_there():
    assert intervals.smooth(np.array([[0.0, 3.0, 6.0, 0.0]])).tolist() == [[1.5, 3.0, 3.0, 3.0]]


def test_pass_at_k_is_the_share_of_subsets_with_a_passing_answer():
    samples = 6
    for k, passed in itertools.product((1, 2, 5, 6), range(samples + 1)):
        subsets = list(itertools.combinations(range(samples), k))
        expected = sum(any(answer < passed for answer in subset) for subset in subsets) / len(subsets)
        assert intervals.pass_at_k(np.array([passed]), samples, k)[0] == pytest.approx(expected)


# ---- fits ------------------------------------------------------------------------------------------------------


def test_the_curve_is_half_way_at_its_middle_and_goes_to_its_ceiling():
    x = np.array([1e-9, 50.0, 100.0, 1e9])
    expected = [0.2, 0.2 + 0.6 / (1 + 2.0**1.5), 0.5, 0.8]
    np.testing.assert_allclose(fits.curve(x, 0.2, 0.8, 100.0, 1.5), expected, atol=1e-6)


def test_a_fit_of_the_first_half_finds_the_curve_and_foretells_the_second():
    x = np.linspace(10, 800, 40)
    y = fits.curve(x, 0.2, 0.7, 150.0, 1.8)
    found = fits.fit(x, y, start=0.2)
    assert (found.ceiling, found.middle, found.steepness) == pytest.approx((0.7, 150.0, 1.8), rel=1e-3)
    assert found.error < 1e-4
    falls = np.where(np.arange(40) < 20, y, y - 0.3)  # a run that collapses: the fit cannot know
    assert fits.fit(x, falls, start=0.2).error == pytest.approx(0.3, abs=1e-3)


def test_too_few_points_have_no_fit():
    assert fits.fit(np.arange(1.0, 9.0), np.linspace(0, 1, 8), start=0.0) is None
