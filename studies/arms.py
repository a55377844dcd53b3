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
ELSE = ("replay.capacity", "num_iterations", EVERY, RATE, SEED, DELTA_V)  # do not affect an iteration's seconds


@dataclasses.dataclass(frozen=True)
class Arm:
    """Reported runs of one arm, and bootstrap draws of its learning curve.

    Attributes:
        curves: [1 + resamples, evaluations] held-out pass rate; row 0 is the mean of all seeds and questions.
        draws: bootstrap draws of seeds and questions, the same for every arm.
        at: [runs, evaluations] row numbers of the evaluations.
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
    at: np.ndarray
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

    def over(self, mu: float) -> np.ndarray:
        """Return the compute at the evaluations [1 + resamples, evaluations], in batches, at the cost ratio ``mu``."""
        return self._x([costs.compute(run, self.extra, mu) for run in self.runs]) / self.batch

    def over_own(self, base: Arm) -> np.ndarray:
        """Return the compute as ``over`` does, but at the arm's own measured mu.

        The unit is the time in which the base trains on one batch. Extra forward passes are not added, because the
        measured seconds include them.
        """
        assert self.times is not None and base.times is not None
        costs_at = [costs.compute(run, costs.Forwards(0, 0), self.times.mu) for run in self.runs]
        return self._x(costs_at) / self.batch * self.times.train_s / base.times.train_s

    def over_seconds(self) -> np.ndarray:
        """Return the seconds at the evaluations [1 + resamples, evaluations]."""
        assert self.times is not None
        return self._x([costs.seconds(run, self.times) for run in self.runs])

    def filled(self, threshold: float) -> bool:
        """Return whether the ring was full when the mean curve first reached the threshold."""
        generated = self._x([np.cumsum([row[costs.GENERATED] for row in run.rows]) for run in self.runs])
        return bool(self.to(threshold, generated)[0] >= self.runs[0].point["replay.capacity"])

    def _x(self, so_far: Sequence[np.ndarray]) -> np.ndarray:
        return self.draws.runs @ np.stack([x[rows] for x, rows in zip(so_far, self.at, strict=True)])

    def to(self, threshold: float, x: np.ndarray) -> np.ndarray:
        """Return draws of the ``x`` at which the smoothed curve first reaches the threshold."""
        return intervals.first_crossing(x, intervals.smooth(self.curves), threshold)

    def after(self, name: str) -> Interval:
        """Return the interval of a figure that was measured for each run after training."""
        return self.draws.mean_of([run.after[name] for run in self.runs])

    def at_first(self, threshold: float) -> int:
        """Return the first evaluation at which the smoothed mean curve is at least the threshold, or the last one."""
        reached = intervals.smooth(self.curves)[0] >= threshold
        return int(reached.argmax()) if reached.any() else len(reached) - 1

    def around(self, metric: str, evaluation: int) -> Interval:
        """Return the mean of a training metric between the evaluations before and after ``evaluation``."""
        means = []
        for run, at in zip(self.runs, self.at, strict=True):
            begin = at[evaluation - 1] + 1 if evaluation else 0
            end = at[min(evaluation + 1, len(at) - 1)]
            values = [row[metric] for row in run.rows[begin : end + 1] if row.get(metric) is not None]
            means.append(np.mean(values))
        return self.draws.mean_of(means)

    def last_tenth(self, metric: str) -> Interval:
        """Return the mean of a training metric over the last tenth of the iterations that have the metric."""
        values = [[row[metric] for row in run.rows if row.get(metric) is not None] for run in self.runs]
        means = [np.mean(some[-max(1, len(some) // 10) :]) if some else np.nan for some in values]
        return self.draws.mean_of(means)


Way = Callable[[Arm], np.ndarray]  # the cost of an arm at its evaluations


def at_mu(mu: float) -> Way:
    """Return a function from an arm to its compute at the cost ratio ``mu``."""
    return lambda arm: arm.over(mu)


DECLARED = at_mu(COST_RATIO)


def arms_of(study: raw.Study, times: Mapping[str, Times] | None = None) -> list[Arm]:
    """Return the arms of a study in the order of its sweep, from their reported runs up to the budget.

    Runs are cut at the budget, because resampling and extra forward passes can cost more than the sweep planned. An arm
    is left out until all its seeds are there.
    """
    found = []
    batch, budget = _budget(study)
    every = list(groups(study.reported()).values())
    num_seeds = max(map(len, every))
    arms = [members for members in every if len(members) == num_seeds]
    draws = Resampling(len(arms[0]), next(iter(study.passed.values())).shape[-1])
    pooled = times_of_work({study.labels[runs[0].name]: runs[0] for runs in arms}, times or {})
    for members, config in zip(arms, raw.configs(study, [members[0] for members in arms]), strict=True):
        extra = costs.forwards(config)
        members = sorted(members, key=lambda run: run.point[SEED])
        assert {run.point[SEED] for run in members} == {run.point[SEED] for run in arms[0]}, "draws are of these seeds"
        members = [_up_to(run, budget, extra) for run in members]
        at = [np.flatnonzero([row.get(METRIC) is not None for row in run.rows]) for run in members]
        kept = _evenly(at[0][: min(map(len, at))])
        at = np.stack([rows[kept] for rows in at])
        passed = np.stack([study.passed[run.name][kept] for run in members])
        samples = study.samples_of[members[0].name]
        name = study.labels[members[0].name]
        curves = draws.curves(passed / samples)
        found.append(Arm(name, members, samples, passed, curves, draws, at, extra, pooled.get(name), batch))
    return found


def times_of_work(arms: Mapping[str, Run], times: Mapping[str, Times]) -> dict[str, Times]:
    """Return the times by arm. Arms with the same work per iteration share the medians of their times.

    An arm is missing if no arm with the same work was measured.

    The times of arms with the same work differ only by measurement noise. The size of the ring, the learning rate and
    the number of iterations do not change the work of an iteration.
    """
    work = {}
    for name, run in arms.items():
        settings = sorted((key, value) for key, value in run.point.items() if key not in ELSE)
        work[name] = repr(settings)
    times_by_work: dict[str, list[Times]] = {}
    for name in arms:
        if name in times:
            times_by_work.setdefault(work[name], []).append(times[name])
    medians = {key: Times(*np.median(measured, axis=0).tolist()) for key, measured in times_by_work.items()}
    return {name: medians[work[name]] for name in arms if work[name] in medians}


def _budget(study: raw.Study) -> tuple[int, float]:
    """Return the batch of a study and its budget in trained rollouts: the cost of its on-policy base config."""
    of_study = runpy.run_path(study.config)["get_config"]()
    batch = of_study.update.batch_size
    assert batch == of_study.rollout.prompts_per_iteration * of_study.rollout.group_size
    return batch, of_study.num_iterations * batch * (1 + COST_RATIO)


def _up_to(run: Run, budget: float, extra: costs.Forwards) -> Run:
    """Return the run with the rows that the budget pays for at the declared mu, to the nearest step."""
    return dataclasses.replace(run, rows=run.rows[: within(costs.compute(run, extra), budget)])


def _evenly(at: np.ndarray) -> np.ndarray:
    """Return the evaluations to keep.

    The last but one is dropped if its gap to the last is less than half the gap before it.
    """
    kept = np.arange(len(at))
    if len(at) > 2:
        last_gap = at[-1] - at[-2]
        gap_before = at[-2] - at[-3]
        if 2 * last_gap < gap_before:
            return np.delete(kept, -2)
    return kept


def tuning(study: raw.Study) -> dict[str, dict[float, float]]:
    """Return the mean held-out pass rate on the choosing seeds up to the budget, by arm (without rate) and rate."""
    reported = {run.name for run in study.reported()}
    found: dict[str, dict[float, float]] = {}
    _, budget = _budget(study)
    choosing = list(groups([run for run in study.runs if run.name not in reported]).values())
    for members, config in zip(choosing, raw.configs(study, [members[0] for members in choosing]), strict=True):
        extra = costs.forwards(config)
        scores = []
        for run in members:
            paid_rows = _up_to(run, budget, extra).rows
            evaluations = sum(row.get(METRIC) is not None for row in paid_rows)
            scores.append(np.mean(study.passed[run.name][:evaluations]) / study.samples_of[run.name])
        name = without_rate(study.labels[members[0].name])
        found.setdefault(name, {})[members[0].point[RATE]] = float(np.mean(scores))
    return found


def gained(arm: Arm, base: Arm) -> Interval:
    """Return the held-out pass rate of ``arm`` at the end minus the rate of ``base``."""
    return Interval.of(arm.end() - base.end())


def saved(arm: Arm, base: Arm, threshold: float, way: Way) -> Interval:
    """Return the share of the base's cost to the threshold that an arm saves.

    The saving is minus infinity if the arm never reaches the threshold. If the base does not reach it, its total cost
    is used, so the saving is understated.
    """
    x = way(base)
    return Interval.of(1 - arm.to(threshold, way(arm)) / np.minimum(base.to(threshold, x), x[:, -1]))


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
    most = _most(arms[0])
    head = ["arm", "held-out pass rate", *["more"] * (base is not None), f"pass@{most}"]
    head += [f"batches to {threshold:.2f}", *["saved"] * (base is not None)]
    is_timed = (base or arms[0]).times is not None
    if is_timed:
        head += ["own mu", "batches at own mu", *["saved"] * (base is not None)]
        head += ["seconds", *["saved"] * (base is not None)]
    head += ["entropy", *more]
    rows = [[arm.name, *_cells(arm, threshold, base, is_timed), *(of(arm) for of in more.values())] for arm in arms]
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def _most(arm: Arm) -> int:
    """Return the largest k of pass@k that the table shows."""
    return min(32, arm.samples)


def _cells(arm: Arm, threshold: float, base: Arm | None, is_timed: bool) -> list[str]:
    cells = [Interval.of(arm.end()).shown()]
    if base is not None:
        cells.append("" if arm is base else gained(arm, base).shown("+.2f"))
    cells.append(arm.pass_at(_most(arm)).shown())
    ways: list[tuple[Way, str]] = [(DECLARED, ".0f")]
    if is_timed:
        ways += [(lambda arm: arm.over_own(base or arm), ".0f"), (Arm.over_seconds, ".1f")]
    for i, (way, form) in enumerate(ways):
        if i and not arm.times:
            cells += ["-"] * ((i == 1) + 1 + (base is not None))
            continue
        if i == 1:
            cells.append(f"{arm.times.mu:.2f}")
        cells.append(Interval.of(arm.to(threshold, way(arm))).shown(form))
        if base is not None:
            cells.append("" if arm is base else saved(arm, base, threshold, way).shown(".0%"))
    return [*cells, arm.last_tenth("update/entropy_nats").shown()]


def on_policy(arms: Sequence[Arm]) -> Arm | None:
    """Return the on-policy arm: its ring is one batch, and each step replaces all of it.

    Return the arm with the highest end if there are several, and None if there is none.
    """

    def is_one(arm: Arm) -> bool:
        point = arm.runs[0].point
        new = GROUP * point.get("rollout.prompts_per_iteration", 0)
        return new == point.get("replay.capacity") == arm.batch

    return max(filter(is_one, arms), key=lambda arm: arm.end()[0], default=None)
