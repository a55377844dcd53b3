"""What a run of the study costs: in trained rollouts at a declared or its own measured mu, and in seconds.

    compute = sum over iterations of trained (1 + f/3) + generated (mu + g/3)

trained and generated are the rollouts that the run really drew and really sampled, resampling rounds included; f and g
count the forward passes beside that of the update that its method makes of a drawn and of a fresh rollout (of a
reference, of an old policy, of a whole batch before its update). A forward is a third of a forward and backward.

Owns: these sums, the noise that the theory's cost wants to be like the measured one. Does not know: what is learned.
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

from jaxrl_llm.algorithms.views import OTHER_POLICIES, SAID_BY_LEARNER
from jaxrl_llm.config import Config
from jaxrl_llm.replay_plan import Costs, Seconds
from jaxrl_llm.sweep.table import Run
from studies.design import COST_RATIO

GENERATED, TRAINED = "rollout/generated_rows", "replay/drawn_rows"
FORWARD = 1 / 3  # of a forward and backward


class Forwards(NamedTuple):
    """Forward passes beside that of the update."""

    of_trained: int
    of_generated: int


def forwards(config: Config) -> Forwards:
    """What a method adds to an iteration."""
    algorithm = config.algorithm
    of_trained = sum(algorithm.loss_needs(name) for name in OTHER_POLICIES)
    of_trained += bool(algorithm.correction) and algorithm.correction.fact("over_batch") is not None
    return Forwards(of_trained, len({*SAID_BY_LEARNER} & algorithm.columns))


class Times(NamedTuple):
    """Seconds of an iteration of an arm, medians of iterations that had the machine to themselves (studies.timing)."""

    generate_s: float  # rewards included
    update_s: float
    iteration_s: float  # without evaluation and checkpoint
    generated: float  # rollouts
    trained: float

    @property
    def train_s(self) -> float:
        """Seconds to train on a rollout; what a method asks of other policies is in it."""
        return self.update_s / self.trained

    @property
    def mu(self) -> float:
        """Seconds to generate a rollout over seconds to train on one."""
        return (self.generate_s / self.generated) / self.train_s


def read_times(path: pathlib.Path) -> dict[str, Times]:
    """By arm, as a sweep calls it with its rate."""
    return {name: Times(**times) for name, times in json.loads(path.read_text())["times"].items()}


def line(times: Sequence[Times]) -> Seconds:
    """replay_plan's fit of the seconds of an iteration to the rollouts that it generates."""
    return Seconds.of([(t.generated, t.iteration_s) for t in times], statistics.mean(t.trained for t in times))


def compute(run: Run, extra: Forwards, mu: float = COST_RATIO) -> np.ndarray:
    """Compute so far at each row of the run, in trained rollouts."""
    generated, trained = (np.array([row[name] or 0.0 for row in run.rows], float) for name in (GENERATED, TRAINED))
    each = trained * (1 + FORWARD * extra.of_trained) + generated * (mu + FORWARD * extra.of_generated)
    return np.cumsum(each)


def seconds(run: Run, times: Times) -> np.ndarray:
    """Seconds so far at each row; where a run resampled, its generation cost more by what it generated more."""
    generated = np.array([row[GENERATED] or 0.0 for row in run.rows], float)
    more = times.generate_s * (generated / times.generated - 1)
    return np.cumsum(times.iteration_s + more)


@dataclasses.dataclass(frozen=True)
class Noise:
    """The theory's rho and alpha for which its cost J is most like the costs measured, but for a factor.

    Attributes:
        costs: with these, at the mu that they were fitted at.
        error: root mean square of the differences of logarithms.
        left_out_error: likewise of each arm from the fit to the others.
    """

    costs: Costs
    error: float
    left_out_error: float

    @classmethod
    def of(cls, mu: float, measured: Mapping[tuple[int, int], float]) -> Noise:
        """From costs by (y, N / B), finite ones; rho is looked for from 0.001 to 1, alpha from 0 to 0.49."""
        rhos, alphas = np.geomspace(1e-3, 1, 61).tolist(), np.linspace(0, 0.49, 99).tolist()
        grid = [Costs(mu, rho, alpha) for rho in rhos for alpha in alphas]
        theory = np.log([[costs.relative_cost(y * n, y) for y, n in measured] for costs in grid])
        apart = np.log(list(measured.values())) - theory  # [candidates, arms]
        spread = lambda apart: np.sqrt(np.mean((apart - apart.mean(axis=1, keepdims=True)) ** 2, axis=1))
        best = int(np.argmin(spread(apart)))
        left_out = []
        for arm in range(apart.shape[1]):
            others = np.delete(apart, arm, axis=1)
            least = int(np.argmin(spread(others)))
            left_out.append(apart[least, arm] - others[least].mean())
        return cls(grid[best], float(spread(apart)[best]), math.sqrt(np.mean(np.square(left_out))))
