"""Cost of a run of the study: in trained rollouts, at the declared or the arm's own measured mu, and in seconds.

    compute = sum over iterations of trained (1 + f/3) + generated (mu + g/3)

"trained" and "generated" count the rollouts that the run actually drew and sampled, including resampling rounds.
f and g count the extra forward passes of a method per drawn and per fresh rollout, without the forward pass of the
update. Examples are passes of a reference, of an old policy, or over a whole batch before its update. A forward pass
costs a third of a forward and backward pass.

Owns: these sums, the fit of the theory's noise to measured costs. Does not know: what is learned.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.algorithms.inputs import COMPUTED_BY_LEARNER, OTHER_POLICIES
from jaxrl_llm.commands.replay_plan import Costs, Seconds
from jaxrl_llm.config import Config
from jaxrl_llm.sweeps.table import Run
from studies.design import COST_RATIO

GENERATED = "rollout/generated_rows"
TRAINED = "replay/drawn_rows"
FORWARD = 1 / 3  # cost relative to a forward and backward pass


class Forwards(NamedTuple):
    """Numbers of extra forward passes, without the forward pass of the update."""

    of_trained: int
    of_generated: int


def forwards(config: Config) -> Forwards:
    """Return the extra forward passes that the method of ``config`` makes per trained and per generated rollout."""
    algorithm = config.algorithm
    num_trained = sum(algorithm.loss_needs(name) for name in OTHER_POLICIES)
    if algorithm.correction and algorithm.correction.facts.over_batch is not None:
        num_trained += 1
    num_generated = len({*COMPUTED_BY_LEARNER} & algorithm.columns)
    return Forwards(num_trained, num_generated)


class Times(NamedTuple):
    """Median seconds of an iteration of an arm, measured with nothing else on the machine (studies.timing)."""

    generate_s: float  # includes the rewards
    update_s: float
    iteration_s: float  # excludes evaluation and checkpoints
    generated: float  # rollouts per iteration, like ``trained``
    trained: float

    @property
    def train_s(self) -> float:
        """Return the seconds to train on one rollout, including the method's forward passes of other policies."""
        return self.update_s / self.trained

    @property
    def mu(self) -> float:
        """Return the seconds to generate a rollout divided by the seconds to train on one."""
        return (self.generate_s / self.generated) / self.train_s


def read_times(path: pathlib.Path) -> dict[str, Times]:
    """Return the times in a file by arm. An arm has the name that its sweep gives it, including the learning rate."""
    return {name: Times(**times) for name, times in json.loads(path.read_text())["times"].items()}


def line(times: Sequence[Times]) -> Seconds:
    """Fit the seconds of an iteration to the number of generated rollouts (``replay_plan.Seconds``)."""
    return Seconds.of(
        [(t.generated, t.iteration_s) for t in times],
        statistics.mean(t.trained for t in times),
    )


def compute(run: Run, extra: Forwards, mu: float = COST_RATIO) -> np.ndarray:
    """Return the cumulative compute at each row of the run, in trained rollouts."""
    generated = _column(run, GENERATED)
    trained = _column(run, TRAINED)
    cost = trained * (1 + FORWARD * extra.of_trained) + generated * (mu + FORWARD * extra.of_generated)
    return np.cumsum(cost)


def _column(run: Run, name: str) -> np.ndarray:
    """Return a metric of all rows of a run, 0 if it is missing."""
    return np.array([row[name] or 0.0 for row in run.rows], float)


def seconds(run: Run, times: Times) -> np.ndarray:
    """Return the cumulative seconds at each row.

    The seconds of generation scale with the number of generated rollouts, so resampling costs more.
    """
    generated = _column(run, GENERATED)
    extra_s = times.generate_s * (generated / times.generated - 1)
    return np.cumsum(times.iteration_s + extra_s)


@dataclasses.dataclass(frozen=True)
class Noise:
    """The theory's rho and alpha whose cost J fits the measured costs best, up to a constant factor.

    Attributes:
        costs: the cost model with the fitted rho and alpha, at the mu of the fit.
        error: root mean square of the differences between the logarithms of theory and measurement.
        left_out_error: the same error for each arm, predicted from a fit to the other arms.
    """

    costs: Costs
    error: float
    left_out_error: float

    @classmethod
    def of(cls, mu: float, measured: Mapping[tuple[int, int], float]) -> Noise:
        """Fit rho in [0.001, 1] and alpha in [0, 0.49] by grid search.

        Args:
            mu: cost ratio of the measured costs.
            measured: finite costs by (y, N / B): replay ratio, and ring in batches.
        """
        rhos = np.geomspace(1e-3, 1, 61).tolist()
        alphas = np.linspace(0, 0.49, 99).tolist()
        grid = [Costs(mu, rho, alpha) for rho in rhos for alpha in alphas]
        theory = [[costs.relative_cost(y * n, y) for y, n in measured] for costs in grid]
        gaps = np.log(list(measured.values())) - np.log(theory)  # [candidates, arms]
        errors = _spread(gaps)
        best = int(np.argmin(errors))
        left_out = []
        for arm in range(gaps.shape[1]):
            others = np.delete(gaps, arm, axis=1)
            best_of_others = int(np.argmin(_spread(others)))
            left_out.append(gaps[best_of_others, arm] - others[best_of_others].mean())
        return cls(grid[best], float(errors[best]), math.sqrt(np.mean(np.square(left_out))))


def _spread(gaps: np.ndarray) -> np.ndarray:
    """Return the standard deviation of each candidate's gaps over the arms: a constant factor does not count."""
    return np.sqrt(np.mean((gaps - gaps.mean(axis=1, keepdims=True)) ** 2, axis=1))
