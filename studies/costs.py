"""What a run of the study costs: in trained rollouts at a declared or its own measured mu, and in seconds.

    compute = sum over iterations of trained (1 + f/3) + generated (mu + g/3)

trained and generated are the rollouts that the run really drew and really sampled, resampling rounds included; f and g
count the forward passes beside that of the update that its method makes of a drawn and of a fresh rollout (of a
reference, of an old policy, of a whole batch before its update). A forward is a third of a forward and backward.

Owns: these sums. Does not know: what is learned for them.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.algorithms.views import OTHER_POLICIES, SAID_BY_LEARNER
from jaxrl_llm.config import Config
from jaxrl_llm.replay_plan import Seconds
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
    def mu(self) -> float:
        """Seconds to generate a rollout over seconds to train on one."""
        return (self.generate_s / self.generated) / (self.update_s / self.trained)


def read_times(path: pathlib.Path) -> dict[str, Times]:
    """By arm (``studies.timing.name_of``)."""
    return {name: Times(**times) for name, times in json.loads(path.read_text())["times"].items()}


def marginal_mu(times: Sequence[Times]) -> float:
    """mu of replay_plan's fit of seconds: what does not depend on how much is generated counts as training."""
    return Seconds.of([(t.generated, t.iteration_s) for t in times], statistics.mean(t.trained for t in times)).mu


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
