"""The replay study's design: arms that differ in how often a rollout is used, at equal compute, each at its own rate.

Declared before the runs: the learning rate of an arm is the one of three or four with the largest mean held-out pass
rate over the whole run (sweep.table.best_points), on seeds 100 and 101; reported are seeds 0 to 3, which chose
nothing. What a run does beyond the budget counts for nothing.

Owns: what an arm sets and is called, how its rate is chosen. Does not know: model, task, objective
(configs/study_*.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.sweep.points import SEED, Point, Sweep, grid, product, seeds
from jaxrl_llm.sweep.table import Run, best_points

COST_RATIO = 5.28  # mu of the paper's 7B runs: generating a rollout costs so many times training on it
GROUP = 8
RATE, EVERY, SAMPLES = "optimizer.learning_rate", "eval.every_iterations", "eval.num_samples"
COMPUTE = "time/compute_rollouts"  # so far
RATES = (2e-4, 4e-4, 8e-4)
TUNING, REPORTED = seeds(2, first=100), seeds(4)
METRICS = ("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps")


@dataclasses.dataclass(frozen=True)
class Design:
    """A study.

    Attributes:
        batch: rollouts of a step.
        on_policy_steps: what so many on-policy steps cost is the budget of every arm.
        evaluations: of a run.
    """

    batch: int
    on_policy_steps: int
    evaluations: int

    @property
    def budget(self) -> float:
        """In trained rollouts."""
        return self.on_policy_steps * self.batch * (1 + COST_RATIO)

    def arm(self, ratio: int, batches: int, *, at_once: bool = False, **settings: Any) -> dict[str, Any]:
        """Steps on B rollouts, B / ``ratio`` of them new, drawn from the last ``batches`` * B: the budget's.

        Args:
            at_once: an iteration is ``ratio`` such steps, before which all their new rollouts are generated.
        """
        assert self.batch % (ratio * GROUP) == 0, f"y = {ratio} leaves no whole groups of a batch of {self.batch}"
        steps = ratio if at_once else 1
        generated = self.batch * steps // ratio
        iterations = round(self.budget / (steps * self.batch + COST_RATIO * generated))
        return {
            "rollout.prompts_per_iteration": generated // GROUP,
            "replay.capacity": self.batch * batches,
            "num_iterations": iterations,
            EVERY: max(1, iterations // self.evaluations),
            **({"update.updates_per_iteration": steps} if at_once else {}),
            **settings,
        }

    def label(self, settings: Mapping[str, Any]) -> str:
        """What an arm is called: its replay ratio, its ring in batches, and what else it sets."""
        budget = ("rollout.prompts_per_iteration", "replay.capacity", "num_iterations", EVERY)
        ratio = self.batch // (GROUP * settings["rollout.prompts_per_iteration"])
        shown = lambda value: f"{value:.3g}" if isinstance(value, float) else value
        others = [f"{name.rsplit('.', 1)[-1]} {shown(value)}" for name, value in settings.items() if name not in budget]
        return ", ".join((f"y {ratio}", f"N {settings['replay.capacity'] // self.batch} B", *others))


SUMS = Design(batch=128, on_policy_steps=200, evaluations=40)  # configs/study_arithmetic.py
THRESHOLD = 0.40  # of the small model's held-out pass rate: compute is counted to it, declared before the runs
SMOLLM2 = Design(batch=32, on_policy_steps=24, evaluations=24)  # configs/study_smollm2.py
SMOLLM2_GPU = Design(batch=128, on_policy_steps=96, evaluations=48)  # configs/study_smollm2_gpu.py
SMOLLM2_GPU_SHORT = Design(batch=128, on_policy_steps=40, evaluations=40)  # configs/sweeps/smollm2_gpu_tasks.py
SMOLLM2_RATES = (1e-5, 2e-5, 4e-5)
SMOLLM2_THRESHOLD = 0.30  # it begins at 0.16 and 0.17


def tuning(arm: Point, samples: int) -> Point:
    """The arm as it is run to choose its rate: evaluated a quarter as often, with fewer answers."""
    return arm | {EVERY: 4 * arm[EVERY], SAMPLES: samples}


def as_reported(point: Point) -> Point:
    """What ``tuning`` made it from; a point that chooses no rate is itself."""
    if SAMPLES not in point:
        return point
    return {name: value for name, value in point.items() if name != SAMPLES} | {EVERY: point[EVERY] // 4}


def within(spent: np.ndarray, budget: float) -> int:
    """How many of a run's iterations the budget pays for, to the nearest one, by what was spent up to each."""
    return int((spent <= budget + spent[-1] / len(spent) / 2).sum())


def sweep_of(
    arms: Sequence[Point],
    label: Callable[[Point], str],
    rates: Sequence[float] = RATES,
    *,
    samples: int = 16,
    choosing: Sequence[Point] = TUNING,
    budget: float = SUMS.budget,
) -> Sweep:
    """Every arm at every rate on the seeds that choose, then at its best one on those that are reported.

    Args:
        samples: answers to each held-out question in the former.
        budget: in trained rollouts.
    """

    def at_best(runs: Sequence[Run]) -> list[Point]:
        paid = [within(np.array([row[COMPUTE] for row in run.rows]), budget) for run in runs]
        runs = [dataclasses.replace(run, rows=run.rows[:rows]) for run, rows in zip(runs, paid, strict=True)]
        return product(REPORTED, [as_reported(point) for point in best_points(runs, RATE, METRICS[0])])

    points = product(choosing, [tuning(arm, samples) for arm in arms], grid({RATE: rates}))
    return dataclasses.replace(shown_as(label, points), then=at_best)


def shown_as(label: Callable[[Point], str], points: Sequence[Point]) -> Sweep:
    """A sweep of the study: an arm is called by its settings without the learning rate, and by that."""

    def named(settings: Point) -> str:
        arm = {name: value for name, value in as_reported(settings).items() if name != RATE}
        return f"{label(arm)}, rate {settings[RATE]:.2g}" + ", to choose it" * (SAMPLES in settings)

    return Sweep(
        points,
        label=named,
        metrics=METRICS,
        x_axis=COMPUTE,
        thresholds={METRICS[0]: THRESHOLD},
        pareto=(("update/entropy_nats", METRICS[0]),),
    )


def is_reported(seed: int) -> bool:
    """Whether runs of this seed are reported, and so chose no learning rate."""
    return seed in {point[SEED] for point in REPORTED}


def without_rate(name: str) -> str:
    """What an arm is called, of what a sweep of the study calls its runs."""
    return name.rsplit(", rate ", 1)[0]


def smollm2_sweep(
    arms: Mapping[str, Mapping[str, Point]],
    budget: float = SMOLLM2.budget,
    rates: Sequence[float] = SMOLLM2_RATES,
) -> Sweep:
    """Of the study of SmolLM2, by task and name of the arm; rates chosen on one seed."""
    numbers = lambda digits: {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": digits}
    tasks = {
        "sums": {"prompts.name": "chain_sum", "prompts.arguments": numbers(1)},
        "products": {"prompts.name": "products", "prompts.max_tokens": 56, "prompts.arguments": numbers(1)},
        "longer sums": {"prompts.name": "chain_sum", "prompts.arguments": numbers(2)},
    }
    points = {f"{task}: {name}": tasks[task] | arm for task, of_task in arms.items() for name, arm in of_task.items()}
    label = lambda settings: next(name for name, its in points.items() if its == settings)
    sweep = sweep_of(list(points.values()), label, rates, samples=2, choosing=TUNING[:1], budget=budget)
    return dataclasses.replace(sweep, after="studies.transfer:measure")
