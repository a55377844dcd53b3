"""A table of docs/replay_study.md from the raw metrics of a sweep (studies.raw): a line for each of its arms.

    python -m studies.arms --raw=docs/raw/e2.json.xz [--times=docs/raw/e2_times.json] [--best-first]

Figures are of the seeds that chose no learning rate, with 95 % bootstrap intervals over seeds and questions
(sweep.intervals). Held-out pass rate: mean of the last three evaluations. Compute to the declared threshold: where the
mean of the seeds' curves, each point with its two neighbours, first reaches it, in batches. With --times two costs
more: at each arm's own measured mu, and in seconds.

Owns: figures of arms, the table of them. Does not know: how runs were made (jaxrl_llm.sweep), what they cost (costs).
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import runpy
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_llm.sweep import intervals
from jaxrl_llm.sweep.__main__ import read_sweep
from jaxrl_llm.sweep.intervals import Interval, Resampling
from jaxrl_llm.sweep.table import Run, groups, label
from studies import costs, raw
from studies.costs import Times
from studies.design import COST_RATIO, GROUP, RATE, THRESHOLD

METRIC = "eval/pass_rate"
LAST = 3  # evaluations that the end is the mean of


@dataclasses.dataclass(frozen=True)
class Arm:
    """Its reported runs, and draws of its learning curve.

    Attributes:
        curves: [1 + resamples, evaluations] held-out pass rate; row 0 is of all seeds and questions.
        draws: of questions, the same for every arm.
        shares: [1 + resamples, runs] of the seeds in each draw.
        at: [runs, evaluations] rows of the evaluations.
        passed: [runs, evaluations, questions] answers that passed, of ``samples``.
        times: of an iteration, where they were measured.
        batch: rollouts of the study's batch, in which compute is counted.
    """

    name: str
    runs: Sequence[Run]
    samples: int
    passed: np.ndarray
    curves: np.ndarray
    draws: Resampling
    shares: np.ndarray
    at: np.ndarray
    extra: costs.Forwards
    times: Times | None
    batch: int

    def end(self) -> np.ndarray:
        """Draws of the held-out pass rate at the end."""
        return self.curves[:, -LAST:].mean(axis=1)

    def pass_at(self, k: int) -> Interval:
        """pass@k at the last evaluation."""
        rates = intervals.pass_at_k(self.passed[:, -1:], self.samples, k)
        return Interval.of(self.draws.curves(rates, self.shares)[:, 0])

    def over(self, mu: float) -> np.ndarray:
        """Compute at the evaluations [1 + resamples, evaluations] in batches, at a cost ratio."""
        return self._x([costs.compute(run, self.extra, mu) for run in self.runs]) / self.batch

    def over_seconds(self) -> np.ndarray:
        """Seconds at the evaluations [1 + resamples, evaluations]."""
        assert self.times is not None
        return self._x([costs.seconds(run, self.times) for run in self.runs])

    def _x(self, so_far: Sequence[np.ndarray]) -> np.ndarray:
        return self.shares @ np.stack([x[rows] for x, rows in zip(so_far, self.at, strict=True)])

    def to(self, threshold: float, x: np.ndarray) -> np.ndarray:
        """Draws of where the curve over ``x`` first reaches the threshold."""
        return intervals.first_crossing(x, intervals.smooth(self.curves), threshold)

    def after(self, name: str) -> Interval:
        """Of a figure that each run got after it had trained."""
        return intervals.mean_of([run.after[name] for run in self.runs], self.shares)

    def last_tenth(self, metric: str) -> Interval:
        """Of a metric of training, its mean over each run's last tenth of the iterations that have it."""
        values = [[row[metric] for row in run.rows if row.get(metric) is not None] for run in self.runs]
        means = [np.mean(some[-max(1, len(some) // 10) :]) if some else np.nan for some in values]
        return intervals.mean_of(means, self.shares)


def arms_of(study: raw.Study, times: Mapping[str, Times] | None = None) -> list[Arm]:
    """The arms of a study's file in the order of its sweep, by their reported runs."""
    sweep, found = read_sweep(study.config), []
    draws = Resampling(next(iter(study.passed.values())).shape[-1])
    batch = runpy.run_path(study.config)["get_config"]().update.batch_size
    arms = list(groups(study.reported()).values())
    for members, config in zip(arms, raw.configs(study, [members[0] for members in arms]), strict=True):
        passed = np.stack([study.passed[run.name] for run in members])
        at = np.stack([np.flatnonzero([row.get(METRIC) is not None for row in run.rows]) for run in members])
        extra = costs.forwards(config)
        shares = draws.runs(len(members))
        samples = study.samples_of[members[0].name]
        curves = draws.curves(passed / samples, shares)
        name = label(members[0], sweep)
        its_times = times[name] if times else None
        found.append(Arm(name, members, samples, passed, curves, draws, shares, at, extra, its_times, batch))
    return found


def tuning(study: raw.Study) -> dict[str, dict[float, float]]:
    """By arm, without its rate, and rate: mean over the choosing seeds of the mean held-out pass rate over a run."""
    reported, sweep = {run.name for run in study.reported()}, read_sweep(study.config)
    found: dict[str, dict[float, float]] = {}
    for members in groups([run for run in study.runs if run.name not in reported]).values():
        score = np.mean([np.mean(study.passed[run.name] / study.samples_of[run.name]) for run in members])
        name = label(members[0], sweep).rsplit(", rate ", 1)[0]
        found.setdefault(name, {})[members[0].point[RATE]] = float(score)
    return found


def saved(to: np.ndarray, base: np.ndarray) -> Interval:
    """Share of the base's cost that is saved, draw by draw; an arm that never gets there saves minus infinity.

    Where the base does not get there either, it is charged what it spent, so the saving is understated.
    """
    return Interval.of(1 - to / base)


def table(
    arms: Sequence[Arm],
    threshold: float,
    *,
    base: Arm | None = None,
    more: Mapping[str, Callable[[Arm], str]] | None = None,
) -> str:
    """Markdown.

    Args:
        threshold: held-out pass rate up to which cost is counted.
        base: savings are against it; None = no such column.
        more: further columns by their head.
    """
    more = more or {}
    most = _most(arms[0])
    head = ["arm", "held-out pass rate", f"pass@{most}", f"batches to {threshold:.2f}"]
    head += ["saved"] * (base is not None)
    is_timed = all(arm.times for arm in arms)
    if is_timed:
        head += ["own mu", "batches at own mu", *["saved"] * (base is not None)]
        head += ["seconds", *["saved"] * (base is not None)]
    head += ["entropy", *more]
    rows = [[arm.name, *_cells(arm, threshold, base, is_timed), *(of(arm) for of in more.values())] for arm in arms]
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def _most(arm: Arm) -> int:
    """Largest k of pass@k that is shown."""
    return min(32, arm.samples)


def _cells(arm: Arm, threshold: float, base: Arm | None, is_timed: bool) -> list[str]:
    cells = [Interval.of(arm.end()).shown(), arm.pass_at(_most(arm)).shown()]
    ways: list[tuple[Callable[[Arm], np.ndarray], str]] = [(lambda arm: arm.over(COST_RATIO), ".0f")]
    if is_timed:
        ways += [(lambda arm: arm.over(arm.times.mu), ".0f"), (Arm.over_seconds, ".1f")]
    for i, (way, form) in enumerate(ways):
        to = arm.to(threshold, way(arm))
        if i == 1:
            cells.append(f"{arm.times.mu:.2f}")
        cells.append(Interval.of(to).shown(form))
        if base is not None:
            x = way(base)
            cells.append("" if arm is base else saved(to, np.minimum(base.to(threshold, x), x[:, -1])).shown(".0%"))
    return [*cells, f"{arm.last_tenth('update/entropy_nats').value:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--raw", type=pathlib.Path, required=True)
    parser.add_argument("--times", type=pathlib.Path)
    parser.add_argument("--threshold", type=float, default=THRESHOLD)
    parser.add_argument("--best-first", action="store_true")
    given = parser.parse_args()
    arms = arms_of(raw.read(given.raw), costs.read_times(given.times) if given.times else None)
    if given.best_first:
        arms.sort(key=lambda arm: -arm.end()[0])
    print(table(arms, given.threshold, base=on_policy(arms)))


def on_policy(arms: Sequence[Arm]) -> Arm | None:
    """The arm whose ring is its batch, all of it new, where there is one; of several, that which ends highest."""

    def is_one(arm: Arm) -> bool:
        point = arm.runs[0].point
        new = GROUP * point.get("rollout.prompts_per_iteration", 0)
        return new == point.get("replay.capacity") == arm.batch

    return max(filter(is_one, arms), key=lambda arm: arm.end()[0], default=None)


if __name__ == "__main__":
    main()
