"""Arms of a sweep, computed from its raw metrics (studies.raw), and a table with one line per arm.

The figures use the reported seeds, up to the study's budget. Intervals are 95 % bootstrap intervals over seeds and
questions (sweeps.intervals).

- Held-out pass rate: the mean of the last three evaluations.
- Compute to the threshold, in batches: the point at which the mean curve of the seeds first reaches the threshold.
  Each point of the curve is averaged with its two neighbours.
- If iterations were timed: also the cost in seconds, and the cost at each arm's own measured mu.

Owns: figures of arms, the table of arms. Does not know: how runs were made (jaxrl_llm.sweep), what they cost (costs).
"""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.sweeps import intervals
from jaxrl_llm.sweeps.intervals import Interval, Resampling
from jaxrl_llm.sweeps.points import SEED
from jaxrl_llm.sweeps.table import Run, groups
from studies import costs, raw
from studies.costs import Times
from studies.design import COST_RATIO, EVERY, GROUP, RATE, within, without_rate

METRIC = "eval/pass_rate"
LAST = 3  # number of evaluations averaged for the pass rate at the end
DELTA_V = "algorithm.advantage.delta_v"
NOT_WORK = ("replay.capacity", "num_iterations", EVERY, RATE, SEED, DELTA_V)  # do not affect an iteration's seconds


@dataclasses.dataclass(frozen=True)
class Arm:
    """Reported runs of one arm, and bootstrap draws of its learning curve.

    Attributes:
        curves: [1 + resamples, evaluations] held-out pass rate; row 0 is the mean of all seeds and questions.
        draws: bootstrap draws of seeds and questions, the same for every arm.
        evaluation_rows: [runs, evaluations] row numbers of the evaluations.
        passed: [runs, evaluations, questions] number of answers that passed, out of ``samples``.
        times: seconds of an iteration, or None if they were not measured.
        batch: rollouts in the study's batch, which is the unit of compute.
    """

    name: str
    runs: Sequence[Run]
    samples: int
    passed: np.ndarray
    curves: np.ndarray
    draws: Resampling
    evaluation_rows: np.ndarray
    extra: costs.Forwards
    times: Times | None
    batch: int

    def end(self) -> np.ndarray:
        """Return draws of the held-out pass rate at the end."""
        return self.curves[:, -LAST:].mean(axis=1)

    def end_by_run(self) -> np.ndarray:
        """Return the held-out pass rate of each run at the end."""
        return self.passed[:, -LAST:].mean(axis=(1, 2)) / self.samples

    def pass_at(self, k: int, evaluation: int = -1) -> Interval:
        """Return pass@k at an evaluation; the default is the last evaluation."""
        rates = intervals.pass_at_k(self.passed[:, evaluation][:, None], self.samples, k)
        return Interval.of(self.draws.curves(rates)[:, 0])

    def compute(self, mu: float) -> np.ndarray:
        """Return the compute at the evaluations [1 + resamples, evaluations], in batches, at the cost ratio ``mu``."""
        compute_of_runs = [costs.compute(run, self.extra, mu) for run in self.runs]
        return self._at_evaluations(compute_of_runs) / self.batch

    def compute_at_own_mu(self, base: Arm) -> np.ndarray:
        """Return the compute as ``compute`` does, but at the arm's own measured mu.

        The unit is the time in which the base trains on one batch. Extra forward passes are not added, because the
        measured seconds include them.
        """
        assert self.times is not None and base.times is not None
        no_forwards = costs.Forwards(0, 0)
        compute_of_runs = [costs.compute(run, no_forwards, self.times.mu) for run in self.runs]
        return self._at_evaluations(compute_of_runs) / self.batch * self.times.train_s / base.times.train_s

    def seconds(self) -> np.ndarray:
        """Return the seconds at the evaluations [1 + resamples, evaluations]."""
        assert self.times is not None
        return self._at_evaluations([costs.seconds(run, self.times) for run in self.runs])

    def has_full_ring_at(self, threshold: float) -> bool:
        """Return whether the ring was full when the mean curve first reached the threshold."""
        cumulative_rollouts = []
        for run in self.runs:
            generated = [row[costs.GENERATED] for row in run.rows]
            cumulative_rollouts.append(np.cumsum(generated))
        rollouts_to_threshold = self.cost_to(threshold, self._at_evaluations(cumulative_rollouts))[0]
        return bool(rollouts_to_threshold >= self.runs[0].point["replay.capacity"])

    def _at_evaluations(self, cumulative: Sequence[np.ndarray]) -> np.ndarray:
        """Return draws [1 + resamples, evaluations] of a cumulative figure that has one array [rows] per run."""
        by_run = [values[rows] for values, rows in zip(cumulative, self.evaluation_rows, strict=True)]
        return self.draws.runs @ np.stack(by_run)

    def cost_to(self, threshold: float, x: np.ndarray) -> np.ndarray:
        """Return draws of the ``x`` at which the smoothed curve first reaches the threshold."""
        return intervals.first_crossing(x, intervals.smooth(self.curves), threshold)

    def after(self, name: str) -> Interval:
        """Return the interval of a figure that was measured for each run after training."""
        return self.draws.mean_of([run.after[name] for run in self.runs])

    def first_evaluation_at(self, threshold: float) -> int:
        """Return the first evaluation at which the smoothed mean curve is at least the threshold, or the last one."""
        is_reached = intervals.smooth(self.curves)[0] >= threshold
        return int(is_reached.argmax()) if is_reached.any() else len(is_reached) - 1

    def mean_around(self, metric: str, evaluation: int) -> Interval:
        """Return the mean of a training metric between the evaluations before and after ``evaluation``."""
        means = []
        for run, evaluation_rows in zip(self.runs, self.evaluation_rows, strict=True):
            begin = evaluation_rows[evaluation - 1] + 1 if evaluation else 0
            last_evaluation = len(evaluation_rows) - 1
            end = evaluation_rows[min(evaluation + 1, last_evaluation)]
            means.append(np.mean(_values(run.rows[begin : end + 1], metric)))
        return self.draws.mean_of(means)

    def last_tenth(self, metric: str) -> Interval:
        """Return the mean of a training metric over the last tenth of the iterations that have the metric."""
        means = []
        for run in self.runs:
            values = _values(run.rows, metric)
            num_last = max(1, len(values) // 10)
            means.append(np.mean(values[-num_last:]) if values else np.nan)
        return self.draws.mean_of(means)


def _values(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """Return the values of a metric, of the rows that have the metric."""
    return [row[metric] for row in rows if row.get(metric) is not None]


CostCurve = Callable[[Arm], np.ndarray]  # the cost of an arm at its evaluations


def at_mu(mu: float) -> CostCurve:
    """Return a function from an arm to its compute at the cost ratio ``mu``."""

    def compute(arm: Arm) -> np.ndarray:
        return arm.compute(mu)

    return compute


DECLARED = at_mu(COST_RATIO)


def arms_of(study: raw.Study, times: Mapping[str, Times] | None = None) -> list[Arm]:
    """Return the arms of a study in the order of its sweep, from their reported runs up to the budget.

    Runs are cut at the budget, because resampling and extra forward passes can cost more than the sweep planned. An arm
    is left out until all its seeds are there.
    """
    batch, budget = _budget(study)
    runs_of_arms = _complete_arms(study)
    first_runs = [runs[0] for runs in runs_of_arms]
    num_questions = next(iter(study.passed.values())).shape[-1]
    draws = Resampling(len(runs_of_arms[0]), num_questions)
    pooled_times = times_of_work({study.labels[run.name]: run for run in first_runs}, times or {})
    arms = []
    for runs, config in zip(runs_of_arms, raw.configs(study, first_runs), strict=True):
        assert _seeds(runs) == _seeds(runs_of_arms[0]), "every arm must have the seeds that are drawn"
        name = study.labels[runs[0].name]
        samples = study.samples_of[runs[0].name]
        extra = costs.forwards(config)
        paid_runs = [_up_to(run, budget, extra) for run in sorted(runs, key=lambda run: run.point[SEED])]
        evaluation_rows = [_evaluation_rows(run) for run in paid_runs]
        num_evaluations = min(map(len, evaluation_rows))
        kept = _evenly(evaluation_rows[0][:num_evaluations])
        passed = np.stack([study.passed[run.name][kept] for run in paid_runs])
        arm = Arm(
            name=name,
            runs=paid_runs,
            samples=samples,
            passed=passed,
            curves=draws.curves(passed / samples),
            draws=draws,
            evaluation_rows=np.stack([rows[kept] for rows in evaluation_rows]),
            extra=extra,
            times=pooled_times.get(name),
            batch=batch,
        )
        arms.append(arm)
    return arms


def _complete_arms(study: raw.Study) -> list[list[Run]]:
    """Return the reported runs of each arm that has all its seeds."""
    arms = list(groups(study.reported()).values())
    num_seeds = max(map(len, arms))
    return [runs for runs in arms if len(runs) == num_seeds]


def _seeds(runs: Sequence[Run]) -> set[int]:
    return {run.point[SEED] for run in runs}


def _evaluation_rows(run: Run) -> np.ndarray:
    """Return the numbers of the rows that have an evaluation."""
    return np.flatnonzero([row.get(METRIC) is not None for row in run.rows])


def times_of_work(arms: Mapping[str, Run], times: Mapping[str, Times]) -> dict[str, Times]:
    """Return the times by arm. Arms with the same work per iteration share the medians of their times.

    An arm is missing if no arm with the same work was measured.

    The times of arms with the same work differ only by measurement noise. The size of the ring, the learning rate and
    the number of iterations do not change the work of an iteration.
    """
    work = {}
    for name, run in arms.items():
        settings = sorted((key, value) for key, value in run.point.items() if key not in NOT_WORK)
        work[name] = repr(settings)
    times_by_work: dict[str, list[Times]] = {}
    for name in arms:
        if name in times:
            times_by_work.setdefault(work[name], []).append(times[name])
    medians = {key: Times(*np.median(measured, axis=0).tolist()) for key, measured in times_by_work.items()}
    return {name: medians[work[name]] for name in arms if work[name] in medians}


def _budget(study: raw.Study) -> tuple[int, float]:
    """Return the batch of a study and its budget in trained rollouts: the cost of its on-policy base config."""
    config = runpy.run_path(study.config)["get_config"]()
    batch = config.update.batch_size
    assert batch == config.rollout.prompts_per_iteration * config.rollout.group_size
    return batch, config.num_iterations * batch * (1 + COST_RATIO)


def _up_to(run: Run, budget: float, extra: costs.Forwards) -> Run:
    """Return the run with the rows that the budget pays for at the declared mu, to the nearest step."""
    num_rows = within(costs.compute(run, extra), budget)
    return dataclasses.replace(run, rows=run.rows[:num_rows])


def _evenly(evaluation_rows: np.ndarray) -> np.ndarray:
    """Return the numbers of the evaluations to keep.

    The last but one is dropped if its gap to the last is less than half the gap before it.
    """
    kept = np.arange(len(evaluation_rows))
    if len(evaluation_rows) <= 2:
        return kept
    gaps = np.diff(evaluation_rows)
    if 2 * gaps[-1] < gaps[-2]:
        return np.delete(kept, -2)
    return kept


def tuning(study: raw.Study) -> dict[str, dict[float, float]]:
    """Return the mean held-out pass rate on the choosing seeds up to the budget, by arm (without rate) and rate."""
    _, budget = _budget(study)
    reported = {run.name for run in study.reported()}
    choosing_runs = [run for run in study.runs if run.name not in reported]
    runs_of_arms = list(groups(choosing_runs).values())
    first_runs = [runs[0] for runs in runs_of_arms]
    scores: dict[str, dict[float, float]] = {}
    for runs, config in zip(runs_of_arms, raw.configs(study, first_runs), strict=True):
        extra = costs.forwards(config)
        scores_of_runs = []
        for run in runs:
            num_evaluations = len(_evaluation_rows(_up_to(run, budget, extra)))
            num_passed = np.mean(study.passed[run.name][:num_evaluations])
            scores_of_runs.append(num_passed / study.samples_of[run.name])
        name = without_rate(study.labels[runs[0].name])
        rate = runs[0].point[RATE]
        scores.setdefault(name, {})[rate] = float(np.mean(scores_of_runs))
    return scores


def gain(arm: Arm, base: Arm) -> Interval:
    """Return the held-out pass rate of ``arm`` at the end minus the rate of ``base``."""
    return Interval.of(arm.end() - base.end())


def saving(arm: Arm, base: Arm, threshold: float, cost_curve: CostCurve) -> Interval:
    """Return the share of the base's cost to the threshold that an arm saves.

    The saving is minus infinity if the arm never reaches the threshold. If the base does not reach it, its total cost
    is used, so the saving is understated.
    """
    cost = arm.cost_to(threshold, cost_curve(arm))
    costs_of_base = cost_curve(base)
    base_cost = np.minimum(base.cost_to(threshold, costs_of_base), costs_of_base[:, -1])
    return Interval.of(1 - cost / base_cost)


def table(
    arms: Sequence[Arm],
    threshold: float,
    *,
    base: Arm | None = None,
    more: Mapping[str, Callable[[Arm], str]] | None = None,
) -> str:
    """Return a Markdown table of arms.

    If the base was timed, the table has costs by the clock, with "-" for arms that were not timed.

    Args:
        threshold: held-out pass rate up to which cost is counted.
        base: the arm that savings are relative to; None = no column of savings.
        more: functions of further columns, by column head.
    """
    more = more or {}
    has_base = base is not None
    is_timed = (base or arms[0]).times is not None
    saved_column = ["saved"] if has_base else []
    head = ["arm", "held-out pass rate"]
    if has_base:
        head.append("more")
    head.append(f"pass@{_largest_k(arms[0])}")
    head += [f"batches to {threshold:.2f}", *saved_column]
    if is_timed:
        head += ["own mu", "batches at own mu", *saved_column]
        head += ["seconds", *saved_column]
    head += ["entropy", *more]
    rows = []
    for arm in arms:
        more_cells = [cell_of(arm) for cell_of in more.values()]
        rows.append([arm.name, *_cells(arm, threshold, base, is_timed), *more_cells])
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    rule = "|" + "---|" * len(head)
    return "\n".join([first, rule, *others])


def _largest_k(arm: Arm) -> int:
    """Return the largest k of pass@k that the table shows."""
    return min(32, arm.samples)


def _cells(arm: Arm, threshold: float, base: Arm | None, is_timed: bool) -> list[str]:
    """Return the cells of an arm, without its name and without further columns."""
    cells = [Interval.of(arm.end()).text()]
    if base is not None:
        cells.append("" if arm is base else gain(arm, base).text("+.2f"))
    cells.append(arm.pass_at(_largest_k(arm)).text())
    cells += _cost_cells(arm, threshold, base, DECLARED, ".0f")
    if is_timed:
        cells += _timed_cells(arm, threshold, base)
    cells.append(arm.last_tenth("update/entropy_nats").text())
    return cells


def _timed_cells(arm: Arm, threshold: float, base: Arm | None) -> list[str]:
    """Return the cells of the costs by the clock: mu, batches at this mu, and seconds. "-" means not timed."""
    if arm.times is None:
        num_cells = 3 if base is None else 5
        return ["-"] * num_cells

    def at_own_mu(arm: Arm) -> np.ndarray:
        return arm.compute_at_own_mu(base or arm)

    cells = [f"{arm.times.mu:.2f}"]
    cells += _cost_cells(arm, threshold, base, at_own_mu, ".0f")
    cells += _cost_cells(arm, threshold, base, Arm.seconds, ".1f")
    return cells


def _cost_cells(arm: Arm, threshold: float, base: Arm | None, cost_curve: CostCurve, form: str) -> list[str]:
    """Return the cost to the threshold and, if there is a base, the share of its cost that the arm saves."""
    cells = [Interval.of(arm.cost_to(threshold, cost_curve(arm))).text(form)]
    if base is not None:
        cells.append("" if arm is base else saving(arm, base, threshold, cost_curve).text(".0%"))
    return cells


def on_policy(arms: Sequence[Arm]) -> Arm | None:
    """Return the on-policy arm: its ring is one batch, and each step replaces all of it.

    Return the arm with the highest end if there are several, and None if there is none.
    """

    def is_on_policy(arm: Arm) -> bool:
        point = arm.runs[0].point
        num_generated = GROUP * point.get("rollout.prompts_per_iteration", 0)
        return num_generated == point.get("replay.capacity") == arm.batch

    return max(filter(is_on_policy, arms), key=lambda arm: arm.end()[0], default=None)
