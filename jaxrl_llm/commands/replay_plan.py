"""How much to replay: the replay ratio and the ring's horizon that spend a budget of compute best.

    python -m jaxrl_llm.replay_plan --mu=5.28 --alpha=0.1 [--rho=0.05] [--rollouts=64]
    python -m jaxrl_llm.replay_plan --workdir=runs/local [--mu=5.28]
    python -m jaxrl_llm.replay_plan --workdir=runs/y1,runs/y4

An iteration generates R rollouts and trains on B drawn from the last N; with x = N/R (horizon, iterations) and
y = B/R (times a rollout is trained on), a budget of sum(B + mu R) reaches a squared gradient norm that scales with

    J(x, y) = x^(2 alpha) (1 + y/mu) (1/y + 1/x + rho)

mu: seconds to generate a rollout over seconds to train on one. Of one run it is the median of its ``time/cost_ratio``,
the price at that run's own sizes: half as many rollouts seldom take half the seconds, for an iteration costs something
whatever it generates, and so a run with much reuse has a higher one. That of an on-policy run is wanted, or several
runs: with one batch B and different R the seconds of an iteration are fitted, and then

    s(R) = s0 + s1 R = s0 / B (B + mu R)    with    mu = s1 B / s0

is the cost of the theory again: what does not depend on R counts as training.

rho: correlation of the noise of rollouts made by nearly the same weights, 0..1; no run measures it, and without --rho
it is the 0.05 that studies/replay_study.md declares. alpha: growth of the noise with age, sigma ~ age^alpha, below 1/2;
without --alpha it is that of importance ratios of the runs that replay. A batch does not repeat a rollout, so N >= B:
x >= y; and the ring holds what an iteration generates: x >= 1. The theory is of runs that are long against x; a ring
that half of a run went into filling cost accuracy (studies/replay_study.md).
Source: Arnal et al. 2026, arXiv:2604.08706, theorem 4.5 and its corollary for a power law; the cases x = y and x = 1,
and the fits of seconds and of alpha, are ours.

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

RHO = 0.05  # declared by docs/replay_study.md; no run measures it


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the optimum depends on.

    Raises:
        ConfigError: a value that the theory has no answer for.
    """

    mu: float
    rho: float
    alpha: float

    def __post_init__(self):
        if not (1e-9 <= self.mu <= 1e9):
            raise ConfigError(f"--mu={self.mu} must be more than 0: at least 1e-9 and at most 1e9")
        if not (0 <= self.rho <= 1):
            raise ConfigError(f"--rho={self.rho} must be at least 0 and at most 1")
        if not (0 <= self.alpha < 0.5):
            raise ConfigError(f"--alpha={self.alpha} must be at least 0 and less than 0.5")

    def relative_cost(self, x: float, y: float) -> float:
        """J(x, y), in units of sigma^2 at age 1."""
        return x ** (2 * self.alpha) * (1 + y / self.mu) * (1 / y + 1 / x + self.rho)

    def unconstrained(self) -> tuple[float, float]:
        """(x*, y*) where a batch may repeat rollouts; infinite where more is always better.

        y* = (sqrt(alpha^2 + mu rho (1 - 2 alpha)) - alpha) / rho
        x* = y*^2 / (2 alpha (mu + y*))
        """
        mu, rho, alpha = self.mu, self.rho, self.alpha
        root = math.sqrt(alpha**2 + mu * rho * (1 - 2 * alpha))
        y = _ratio(mu * (1 - 2 * alpha), alpha + root)  # the same without a difference of near numbers
        return (math.inf if y == math.inf else _ratio(y * y, 2 * alpha * (mu + y))), y

    def optimum(self) -> tuple[float, float]:
        """(x*, y*) with x >= y and x >= 1: where the unconstrained one has x < y, the root of dJ(y, y)/dy,

            (1 + 2 alpha) rho y^2 + 2 alpha (2 + mu rho) y = 2 mu (1 - 2 alpha)

        and where that x is below 1, x = 1 and the y of least J there, sqrt(mu / (1 + rho)), at most 1.
        """
        x, y = self.unconstrained()
        if x < y:
            a = (1 + 2 * self.alpha) * self.rho
            b = 2 * self.alpha * (2 + self.mu * self.rho)
            c = 2 * self.mu * (1 - 2 * self.alpha)
            x = y = 2 * c / (b + math.sqrt(b**2 + 4 * a * c))
        return (x, y) if x >= 1 else (1.0, min(1.0, math.sqrt(self.mu / (1 + self.rho))))

    def best_horizon(self, y: float) -> float:
        """The x >= y, 1 of least J at this y; infinite where the noise does not grow with age."""
        return max(y, 1.0, _ratio(1 - 2 * self.alpha, 2 * self.alpha * (1 / y + self.rho)))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.inf


def table(costs: Costs, rollouts: int = 0) -> str:
    """One line per replay ratio and one for the optimum; ``rollouts`` (R) adds the sizes B and N."""
    on_policy = costs.relative_cost(1, 1)
    lines = [f"{'':10}{'y = B/R':>10}{'x = N/R':>10}{'N/B':>10}{'J':>10}{'compute':>10}"]
    lines[0] += f"{'B':>10}{'N':>10}" if rollouts else ""
    plans = [("on-policy", (1.0, 1.0))]
    plans += [("", (costs.best_horizon(ratio), ratio)) for ratio in (1.0, 2.0, 4.0, 8.0, 16.0)]
    for name, (x, y) in [*plans, ("best", costs.optimum())]:
        cost = costs.relative_cost(min(x, 1e12), min(y, 1e12))
        sizes = "".join(f"{_shown(size * rollouts, '.0f'):>10}" for size in (y, x)) if rollouts else ""
        batches = x / y if math.isfinite(y) else math.nan
        shown = f"{_shown(y, '.2f'):>10}{_shown(x, '.2f'):>10}{batches:>10.2f}{cost:>10.3f}{cost / on_policy:>10.0%}"
        lines.append(f"{name:10}{shown}{sizes}")
    lines.append("compute: of the on-policy run's, for an equal bound on the gradient norm")
    return "\n".join(lines)


def _shown(value: float, form: str) -> str:
    return "no limit" if value == math.inf else format(value, form)


def measured_mu(workdir: str) -> float:
    """The median of what a run's iterations measured; raises as ``trained_rows``."""
    return statistics.median(row["time/cost_ratio"] for row in trained_rows(workdir))


def price_of(workdir: str) -> str:
    """What to know of a mu that a run with reuse has measured; "" of any other."""
    rows = trained_rows(workdir)
    uses = sum(row["replay/drawn_rows"] for row in rows) / sum(row["rollout/generated_rows"] for row in rows)
    if uses < 1.5:
        return ""
    return (
        f"mu is of a run that trains {uses:.2g} times on a rollout, and so generates few at once, which cost more: "
        "give that of an on-policy run as --mu, or several runs"
    )


def trained_rows(workdir: str) -> list[Mapping[str, Any]]:
    """Metrics of the iterations that trained, but the first, which warms up, where there are more; or ConfigError."""
    rows = [row for row in read_metrics(pathlib.Path(workdir)) if row.get("time/cost_ratio") is not None]
    if not rows:
        raise ConfigError(f"--workdir={workdir} has no finished iteration that trained")
    return rows[1:] or rows


class Seconds(NamedTuple):
    """Of an iteration: ``fixed + per_rollout * R``.

    Attributes:
        measured: (R, seconds) of each run, medians over its iterations.
        batch: B, rollouts trained in an iteration.
    """

    fixed: float
    per_rollout: float
    batch: float
    measured: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, measured: Sequence[tuple[float, float]], batch: float) -> Seconds:
        """Least squares."""
        slope, fixed = statistics.linear_regression(*zip(*measured, strict=True))
        return cls(fixed, slope, batch, tuple(sorted(measured)))

    @property
    def mu(self) -> float:
        return self.per_rollout * self.batch / self.fixed

    def shown(self) -> str:
        """The fit, and of each run what was measured beside what the fit has."""
        lines = [f"an iteration takes {self.fixed:.3g} s + {self.per_rollout:.3g} s for each rollout it generates"]
        lines += [
            f"  {rollouts:.0f} generated, {self.batch:.0f} trained: {seconds:.3g} s measured, "
            f"{self.fixed + self.per_rollout * rollouts:.3g} s fitted"
            for rollouts, seconds in self.measured
        ]
        return "\n".join(lines)


def fitted(workdirs: Sequence[str]) -> Seconds:
    """Least squares over runs that differ in how many rollouts an iteration generates.

    Raises:
        ConfigError: fewer than two such numbers, other batches, or seconds that do not grow with R.
    """
    measured, batches = [], {}
    for workdir in workdirs:
        rows = trained_rows(workdir)
        of = lambda *names: statistics.median(sum(row[name] for name in names) for row in rows)  # noqa: B023
        measured.append((of("rollout/generated_rows"), of("time/generate_s", "time/reward_s", "time/update_s")))
        batches[workdir] = of("replay/drawn_rows")
    batch = statistics.median(batches.values())
    if any(abs(other - batch) > 0.05 * batch for other in batches.values()):
        listed = ", ".join(f"{workdir} {size:.0f}" for workdir, size in batches.items())
        raise ConfigError(f"--workdir: the runs must train on equally many rollouts an iteration; they do on {listed}")
    rollouts = {generated for generated, _ in measured}
    if len(rollouts) < 2:
        said = f"all runs generate {rollouts.pop():.0f} rollouts an iteration"
        raise ConfigError(f"--workdir: {said}; give runs that differ")
    seconds = Seconds.of(measured, batch)
    if not (seconds.per_rollout > 0 and seconds.fixed > 0):
        found = f"{seconds.fixed:.3g} s + {seconds.per_rollout:.3g} s for each rollout"
        raise ConfigError(f"--workdir: {found} fits what they measured; both must be above 0")
    return seconds


class Ageing(NamedTuple):
    """How the noise of rollouts grows with their age.

    A rollout of age a, in iterations, counts as ess(a) fresh ones, the effective sample size of its importance ratios
    (``update/ess_frac_age_*``). The noise of a ring with horizon x is the mean over the ages in it,

        sigma^2(x) = mean of 1 / ess(a) over a < x,    log sigma^2(x) / sigma^2(1) = 2 alpha log x

    Attributes:
        alpha: by least squares over x = 2, 4, 8, 16, as far as the ages of the runs go.
        noise: (x, sigma^2(x) / sigma^2(1)) of each, the mean over the runs that go so far of the ratio within a run:
            how noisy fresh rollouts are differs from run to run.
    """

    alpha: float
    noise: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, runs: Iterable[Sequence[Mapping[str, Any]]]) -> Ageing | None:
        """From metrics of runs' iterations; None where none of them used rollouts of age 0 and 1."""
        ratios: dict[int, list[float]] = {}
        for rows in runs:
            total, noise = 0.0, [(0, 0.0)]
            for highest, label in zip(AGE_BUCKETS, AGE_LABELS, strict=False):  # not the last, which has no highest age
                name = f"update/ess_frac_age_{label}"
                if not (found := [1 / row[name] for row in rows if row.get(name)]):
                    break
                total += (highest + 1 - noise[-1][0]) * statistics.fmean(found)
                noise.append((highest + 1, total / (highest + 1)))
            for x, sigma in noise[2:]:
                ratios.setdefault(x, []).append(sigma / noise[1][1])
        relative = tuple((x, statistics.fmean(of_runs)) for x, of_runs in ratios.items())
        if not relative:
            return None
        logs = [(math.log(x), math.log(sigma)) for x, sigma in relative]
        return cls(sum(x * s for x, s in logs) / sum(x * x for x, _ in logs) / 2, relative)

    def shown(self) -> str:
        sizes = ", ".join(str(x) for x, _ in self.noise)
        noise = ", ".join(f"{sigma:.2f}" for _, sigma in self.noise)
        return f"alpha {self.alpha:.2g}: a ring of {sizes} iterations is {noise} times as noisy as fresh rollouts"


def measured_alpha(workdirs: Sequence[str]) -> Ageing:
    """Of those of these runs that used rollouts again.

    Raises:
        ConfigError: none of age 0 and 1 are used, or their noise grows faster than the theory allows.
    """
    ageing = Ageing.of(map(trained_rows, workdirs))
    listed = ",".join(workdirs)
    if ageing is None:
        raise ConfigError(f"--workdir={listed} has not used rollouts both fresh and an iteration later: give --alpha")
    if ageing.alpha >= 0.5:
        raise ConfigError(f"--workdir={listed}: {ageing.shown()}; the theory has no optimum from 0.5 on: reuse less")
    return ageing


def replay_plan(
    *,
    mu: float | None = None,
    alpha: float | None = None,
    rho: float = RHO,
    workdirs: Sequence[str] = (),
    rollouts: int = 0,
) -> str:
    """Return the text of the plan: fits of what the runs measured, and the table.

    Args:
        mu: relative price of a rollout; None = as the runs measured it.
        alpha: growth of the noise with age; None = as the runs measured it.
        rho: correlation of the noise of rollouts from nearly the same weights.
        workdirs: folders of the runs.
        rollouts: R, the rollouts that an iteration generates; 0 = do not show the sizes B and N.

    Raises:
        ConfigError: a value is out of range, or neither a value nor a run is given for mu or alpha.
    """
    workdir = ",".join(workdirs)
    if mu is None and not workdirs:
        raise ConfigError("give --mu, or with --workdir a run that has measured it")
    if workdirs and mu is not None and alpha is not None:
        raise ConfigError(f"--mu={mu} and --alpha={alpha} leave --workdir={workdir} nothing to tell")
    if not 0 <= rollouts < 2**31:
        raise ConfigError(f"--rollouts={rollouts} must be at least 0 and less than 2147483648")
    if not workdirs and alpha is None:
        raise ConfigError(f"--mu={mu} wants an --alpha, which only a run (--workdir) can tell")
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
    print(replay_plan(mu=FLAGS.mu, alpha=FLAGS.alpha, rho=FLAGS.rho, workdirs=workdirs, rollouts=FLAGS.rollouts))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_float("mu", None, "Seconds to generate a rollout over seconds to train on one; of the run by default.")
    flags.DEFINE_string("workdir", None, "Of a run that measured --mu and --alpha, or of several, with commas.")
    flags.DEFINE_float(
        "rho",
        RHO,
        "Correlation of rollouts of nearly the same weights, 0..1: no run measures it; by default the study's guess.",
    )
    flags.DEFINE_float("alpha", None, "Growth of the noise with age, sigma ~ age^alpha; of the runs by default.")
    flags.DEFINE_integer("rollouts", 0, "Rollouts generated in an iteration, R: show B and N too.")


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
