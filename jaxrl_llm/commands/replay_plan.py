"""How much to replay: the replay ratio and the ring's horizon that make the best use of a budget of compute.

    python -m jaxrl_llm.replay_plan --mu=5.28 --alpha=0.1 [--rho=0.05] [--rollouts=64]
    python -m jaxrl_llm.replay_plan --workdir=runs/local [--mu=5.28]
    python -m jaxrl_llm.replay_plan --workdir=runs/y1,runs/y4

An iteration generates R rollouts and trains on B rollouts, which it draws from the last N. The horizon is x = N/R
iterations, and the replay ratio is y = B/R, the number of times that a rollout is trained on. With a budget of
sum(B + mu R) the squared gradient norm scales with

    J(x, y) = x^(2 alpha) (1 + y/mu) (1/y + 1/x + rho)

mu is the time to generate a rollout divided by the time to train on one. There are two ways to measure it:

- One run: the median of its ``time/cost_ratio``. This is the ratio at the run's own sizes. An iteration has fixed
  costs: half as many rollouts take more than half the time. A run with much reuse therefore has a higher ratio. Use an
  on-policy run.
- Several runs with the same B and different R: a line is fitted to the seconds of an iteration,

      s(R) = s0 + s1 R = s0 / B (B + mu R)    with    mu = s1 B / s0.

  Costs that do not depend on R count as training.

rho is the correlation of the noise of rollouts made by nearly the same weights, 0 to 1. No run measures it. The default
is 0.05, as in studies/replay_study.md.

alpha is the growth of the noise with age, sigma ~ age^alpha, below 1/2. Without --alpha it is fitted to the importance
ratios of the runs that replay.

A batch does not repeat a rollout, so that N >= B and x >= y. The ring holds the rollouts of an iteration, so that
x >= 1. The theory holds for runs that are long compared with x. If filling the ring takes half of a run, accuracy is
lost (studies/replay_study.md).

Source: Arnal et al. 2026, arXiv:2604.08706, theorem 4.5 and its corollary for a power law. The cases x = y and x = 1,
and the fits of seconds and of alpha, are not from the paper.

Owns: the closed forms and their table, the fits of seconds and of alpha. Does not know: rings, configs.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from jaxrl_llm.config import ConfigError
from jaxrl_llm.reports.metric_table import AGE_LABELS
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import cli
from jaxrl_llm.types import AGE_BUCKETS

FLAGS = flags.FLAGS

RHO = 0.05  # declared by studies/replay_study.md; no run measures it
RATIOS = (1.0, 2.0, 4.0, 8.0, 16.0)  # replay ratios of the table


@dataclasses.dataclass(frozen=True)
class Costs:
    """The constants that determine the optimum.

    Raises:
        ConfigError: a value is outside the range of the theory.
    """

    mu: float
    rho: float
    alpha: float

    def __post_init__(self) -> None:
        if not (1e-9 <= self.mu <= 1e9):
            raise ConfigError(f"--mu={self.mu} must be more than 0: at least 1e-9 and at most 1e9")
        if not (0 <= self.rho <= 1):
            raise ConfigError(f"--rho={self.rho} must be at least 0 and at most 1")
        if not (0 <= self.alpha < 0.5):
            raise ConfigError(f"--alpha={self.alpha} must be at least 0 and less than 0.5")

    def relative_cost(self, x: float, y: float) -> float:
        """Return J(x, y), in units of sigma^2 at age 1."""
        return x ** (2 * self.alpha) * (1 + y / self.mu) * (1 / y + 1 / x + self.rho)

    def unconstrained(self) -> tuple[float, float]:
        """Return (x*, y*) of batches that may repeat rollouts. A value is infinite if more is always better.

        y* = (sqrt(alpha^2 + mu rho (1 - 2 alpha)) - alpha) / rho
        x* = y*^2 / (2 alpha (mu + y*))
        """
        root = math.sqrt(self.alpha**2 + self.mu * self.rho * (1 - 2 * self.alpha))
        # Rewrite y* so that no two nearly equal numbers are subtracted.
        y = _ratio(self.mu * (1 - 2 * self.alpha), self.alpha + root)
        if y == math.inf:
            return math.inf, y
        return _ratio(y * y, 2 * self.alpha * (self.mu + y)), y

    def optimum(self) -> tuple[float, float]:
        """Return (x*, y*) with x >= y and x >= 1.

        If the unconstrained optimum has x < y, then x = y is the root of dJ(y, y)/dy,

            (1 + 2 alpha) rho y^2 + 2 alpha (2 + mu rho) y = 2 mu (1 - 2 alpha).

        If this x is below 1, then x = 1, and y minimises J there: sqrt(mu / (1 + rho)), at most 1.
        """
        x, y = self.unconstrained()
        if x < y:
            a = (1 + 2 * self.alpha) * self.rho
            b = 2 * self.alpha * (2 + self.mu * self.rho)
            c = 2 * self.mu * (1 - 2 * self.alpha)
            x = 2 * c / (b + math.sqrt(b**2 + 4 * a * c))
            y = x
        if x >= 1:
            return x, y
        return 1.0, min(1.0, math.sqrt(self.mu / (1 + self.rho)))

    def best_horizon(self, y: float) -> float:
        """Return the x that minimises J at this y, with x >= y and x >= 1; infinite if the noise does not grow."""
        return max(y, 1.0, _ratio(1 - 2 * self.alpha, 2 * self.alpha * (1 / y + self.rho)))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.inf


def table(costs: Costs, rollouts: int = 0) -> str:
    """Return a table with one line per replay ratio and one line for the optimum.

    Args:
        rollouts: R; the table also shows the sizes B and N. 0 = leave them out.
    """
    header = f"{'':10}{'y = B/R':>10}{'x = N/R':>10}{'N/B':>10}{'J':>10}{'compute':>10}"
    if rollouts:
        header += f"{'B':>10}{'N':>10}"
    plans = [("on-policy", (1.0, 1.0))]
    plans += [("", (costs.best_horizon(ratio), ratio)) for ratio in RATIOS]
    plans.append(("best", costs.optimum()))
    lines = [header]
    lines += [_table_line(costs, name, x, y, rollouts) for name, (x, y) in plans]
    lines.append("compute: of the on-policy run's, for an equal bound on the gradient norm")
    return "\n".join(lines)


def _table_line(costs: Costs, name: str, x: float, y: float, rollouts: int) -> str:
    """Return a line of the table for the horizon x and the replay ratio y."""
    on_policy_cost = costs.relative_cost(1, 1)
    cost = costs.relative_cost(min(x, 1e12), min(y, 1e12))
    batches = x / y if math.isfinite(y) else math.nan
    line = f"{name:10}{_shown(y, '.2f'):>10}{_shown(x, '.2f'):>10}{batches:>10.2f}{cost:>10.3f}"
    line += f"{cost / on_policy_cost:>10.0%}"
    if rollouts:
        line += f"{_shown(y * rollouts, '.0f'):>10}{_shown(x * rollouts, '.0f'):>10}"
    return line


def _shown(value: float, form: str) -> str:
    return "no limit" if value == math.inf else format(value, form)


def measured_mu(workdir: str) -> float:
    """Return the median of the cost ratios of a run's iterations. It raises the errors of ``trained_rows``."""
    return statistics.median(row["time/cost_ratio"] for row in trained_rows(workdir))


def price_of(workdir: str) -> str:
    """Return a warning about the mu of a run with reuse, or "" for any other run."""
    rows = trained_rows(workdir)
    num_trained = sum(row["replay/drawn_rows"] for row in rows)
    num_generated = sum(row["rollout/generated_rows"] for row in rows)
    uses = num_trained / num_generated
    if uses < 1.5:
        return ""
    return (
        f"mu is of a run that trains {uses:.2g} times on a rollout. It generates few rollouts at once, and each costs "
        "more: give the mu of an on-policy run as --mu, or give several runs"
    )


def trained_rows(workdir: str) -> list[dict[str, Any]]:
    """Return the metrics of the iterations that trained. The first one, which warms up, is left out if possible.

    Raises:
        ConfigError: no iteration trained.
    """
    rows = [row for row in read_metrics(pathlib.Path(workdir)) if row.get("time/cost_ratio") is not None]
    if not rows:
        raise ConfigError(f"--workdir={workdir} has no finished iteration that trained")
    return rows[1:] or rows


class Seconds(NamedTuple):
    """Seconds of an iteration: ``fixed + per_rollout * R``.

    Attributes:
        batch: B, rollouts trained in an iteration.
        measured: (R, seconds) of each run, medians over its iterations.
    """

    fixed: float
    per_rollout: float
    batch: float
    measured: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, measured: Sequence[tuple[float, float]], batch: float) -> Seconds:
        """Fit the line by least squares."""
        slope, fixed = statistics.linear_regression(*zip(*measured, strict=True))
        return cls(fixed, slope, batch, tuple(sorted(measured)))

    @property
    def mu(self) -> float:
        return self.per_rollout * self.batch / self.fixed

    def shown(self) -> str:
        """Return the fit as text, and the measured and fitted seconds of each run."""
        lines = [f"an iteration takes {self.fixed:.3g} s + {self.per_rollout:.3g} s for each rollout it generates"]
        for rollouts, seconds in self.measured:
            fitted_seconds = self.fixed + self.per_rollout * rollouts
            lines.append(
                f"  {rollouts:.0f} generated, {self.batch:.0f} trained: {seconds:.3g} s measured, "
                f"{fitted_seconds:.3g} s fitted"
            )
        return "\n".join(lines)


def fitted(workdirs: Sequence[str]) -> Seconds:
    """Fit the seconds of an iteration to runs that differ in the number of rollouts that an iteration generates.

    Raises:
        ConfigError: the runs do not differ in R, they have different batches, or their seconds do not grow with R.
    """
    flag = f"--workdir={','.join(workdirs)}"
    measured = []
    batches = {}
    for workdir in workdirs:
        rows = trained_rows(workdir)
        generated = statistics.median(row["rollout/generated_rows"] for row in rows)
        seconds = statistics.median(
            row["time/generate_s"] + row["time/reward_s"] + row["time/update_s"] for row in rows
        )
        measured.append((generated, seconds))
        batches[workdir] = statistics.median(row["replay/drawn_rows"] for row in rows)
    batch = statistics.median(batches.values())
    if any(abs(other - batch) > 0.05 * batch for other in batches.values()):
        sizes = ", ".join(f"{workdir} {size:.0f}" for workdir, size in batches.items())
        raise ConfigError(f"{flag} must be runs that train on equally many rollouts an iteration; they do on {sizes}")
    rollouts = {generated for generated, _ in measured}
    if len(rollouts) < 2:
        raise ConfigError(f"{flag} must be runs that differ: all generate {rollouts.pop():.0f} rollouts an iteration")
    line = Seconds.of(measured, batch)
    if not (line.per_rollout > 0 and line.fixed > 0):
        raise ConfigError(
            f"{flag}: the runs fit {line.fixed:.3g} s + {line.per_rollout:.3g} s for each rollout; both must be above 0"
        )
    return line


class Ageing(NamedTuple):
    """Growth of the noise of rollouts with their age.

    A rollout of age a, in iterations, counts as ess(a) fresh rollouts: ess is the effective sample size of its
    importance ratios (``update/ess_frac_age_*``). The noise of a ring with horizon x is the mean over the ages in it,

        sigma^2(x) = mean of 1 / ess(a) over a < x,    log sigma^2(x) / sigma^2(1) = 2 alpha log x

    Attributes:
        alpha: least-squares fit over x = 2, 4, 8, 16, as far as the ages of the runs go.
        noise: (x, sigma^2(x) / sigma^2(1)) for each x. The ratio is taken within a run, because the noise of fresh
            rollouts differs from run to run; the mean is over the runs whose ages reach x.
    """

    alpha: float
    noise: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, runs: Iterable[Sequence[Mapping[str, Any]]]) -> Ageing | None:
        """Fit alpha to the metrics of runs. Return None if no run used rollouts of both age 0 and age 1."""
        ratios: dict[int, list[float]] = {}
        for rows in runs:
            noise = _noise_by_horizon(rows)
            for x, sigma in noise[1:]:
                ratios.setdefault(x, []).append(sigma / noise[0][1])
        relative = tuple((x, statistics.fmean(values)) for x, values in ratios.items())
        if not relative:
            return None
        logs = [(math.log(x), math.log(sigma)) for x, sigma in relative]
        # Least squares of log sigma^2 = 2 alpha log x, a line through the origin.
        covariance = sum(log_x * log_sigma for log_x, log_sigma in logs)
        variance = sum(log_x * log_x for log_x, _ in logs)
        return cls(covariance / variance / 2, relative)

    def shown(self) -> str:
        sizes = ", ".join(str(x) for x, _ in self.noise)
        noise = ", ".join(f"{sigma:.2f}" for _, sigma in self.noise)
        return f"alpha {self.alpha:.2g}: a ring of {sizes} iterations is {noise} times as noisy as fresh rollouts"


def _noise_by_horizon(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (x, sigma^2(x)) of a run, for each x up to the first age bucket without rollouts."""
    noise: list[tuple[int, float]] = []
    total = 0.0
    ages = 0
    for highest, label in zip(AGE_BUCKETS, AGE_LABELS, strict=False):  # the last bucket has no highest age
        name = f"update/ess_frac_age_{label}"
        inverse = [1 / row[name] for row in rows if row.get(name)]
        if not inverse:
            break
        total += (highest + 1 - ages) * statistics.fmean(inverse)
        ages = highest + 1
        noise.append((ages, total / ages))
    return noise


def measured_alpha(workdirs: Sequence[str]) -> Ageing:
    """Fit alpha, the growth of gradient noise with age, on the runs that reuse rollouts.

    Raises:
        ConfigError: no run used rollouts of age 0 and 1, or the noise grows faster than the theory allows.
    """
    ageing = Ageing.of(map(trained_rows, workdirs))
    names = ",".join(workdirs)
    if ageing is None:
        raise ConfigError(f"--workdir={names} has no run that trained on rollouts of age 0 and of age 1: give --alpha")
    if ageing.alpha >= 0.5:
        raise ConfigError(f"--workdir={names}: {ageing.shown()}; the theory requires less than 0.5: reuse less")
    return ageing


def replay_plan(
    *,
    mu: float | None = None,
    alpha: float | None = None,
    rho: float = RHO,
    workdirs: Sequence[str] = (),
    rollouts: int = 0,
) -> str:
    """Return the text of the plan: the fits to the runs, and the table.

    Args:
        mu: time to generate a rollout, relative to the time to train on one; None = as the runs measured it.
        alpha: growth of the noise with age; None = as the runs measured it.
        rho: correlation of the noise of rollouts from nearly the same weights.
        workdirs: folders of the runs.
        rollouts: R, the rollouts that an iteration generates; 0 = do not show the sizes B and N.

    Raises:
        ConfigError: a value is out of range, or mu or alpha has no value and no run.
    """
    workdir = ",".join(workdirs)
    if mu is None and not workdirs:
        raise ConfigError("give --mu, or with --workdir a run that has measured it")
    if workdirs and mu is not None and alpha is not None:
        raise ConfigError(f"--mu={mu} and --alpha={alpha} leave --workdir={workdir} unused: leave out one of the three")
    if not 0 <= rollouts < 2**31:
        raise ConfigError(f"--rollouts={rollouts} must be at least 0 and less than 2147483648")
    if not workdirs and alpha is None:
        raise ConfigError(f"--mu={mu} needs --alpha, or with --workdir a run that has measured it")
    lines = []
    if mu is None and len(workdirs) > 1:
        seconds = fitted(workdirs)
        lines.append(seconds.shown())
        mu = seconds.mu
    elif mu is None:
        mu = measured_mu(workdirs[0])
        warning = price_of(workdirs[0])
        if warning:
            lines.append(warning)
    if alpha is None:
        ageing = measured_alpha(workdirs)
        lines.append(ageing.shown())
        alpha = max(ageing.alpha, 0.0)
    return "\n".join([*lines, f"mu {mu:.3g}", table(Costs(mu, rho, alpha), rollouts)])


def main() -> None:
    """Run the command with the values of its flags."""
    workdirs = [] if FLAGS.workdir is None else FLAGS.workdir.split(",")
    print(
        replay_plan(
            mu=FLAGS.mu,
            alpha=FLAGS.alpha,
            rho=FLAGS.rho,
            workdirs=workdirs,
            rollouts=FLAGS.rollouts,
        )
    )


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_float(
        "mu",
        None,
        "Time to generate a rollout over time to train on one; default: the run's.",
    )
    flags.DEFINE_string(
        "workdir",
        None,
        "A run that measured mu and alpha, or several runs, separated by commas.",
    )
    flags.DEFINE_float(
        "rho",
        RHO,
        "Correlation of rollouts of nearly the same weights, 0 to 1. No run measures it.",
    )
    flags.DEFINE_float(
        "alpha",
        None,
        "Growth of the noise with age, sigma ~ age^alpha; default: the runs'.",
    )
    flags.DEFINE_integer(
        "rollouts",
        0,
        "Rollouts that an iteration generates, R: the table also shows B and N.",
    )


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
