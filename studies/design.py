"""Design of the replay study: arms differ in how often they use a rollout, at equal compute, each at its own rate.

These rules were declared before the runs:

- The learning rate of an arm is one of three or four. It has the largest mean held-out pass rate over the whole run
  (sweep.table.best_points) on seeds 100 and 101.
- The reported results are of seeds 0 to 3, which are not used to choose the rate.
- Iterations beyond the budget do not count.

Owns: the settings and the name of an arm, the choice of its rate. Does not know: model, task, objective
(configs/study_*.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.sweeps.points import SEED, Point, Sweep, grid, product, seeds
from jaxrl_llm.sweeps.table import Run, best_points

COST_RATIO = 5.28  # mu of the paper's 7B runs: cost of generating a rollout over the cost of training on it
GROUP = 8
RATE = "optimizer.learning_rate"
EVERY = "eval.every_iterations"
SAMPLES = "eval.num_samples"
COMPUTE = "time/compute_rollouts"  # cumulative
RATES = (2e-4, 4e-4, 8e-4)
TUNING = seeds(2, first=100)
REPORTED = seeds(4)
METRICS = ("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats", "replay/age_mean_steps")


@dataclasses.dataclass(frozen=True)
class Design:
    """Sizes of one study.

    Attributes:
        batch: rollouts per optimizer step.
        on_policy_steps: the budget of every arm is the cost of this number of on-policy steps.
        evaluations: planned number of evaluations per run.
    """

    batch: int
    on_policy_steps: int
    evaluations: int

    @property
    def budget(self) -> float:
        """Return the budget of an arm in trained rollouts."""
        return self.on_policy_steps * self.batch * (1 + COST_RATIO)

    def arm(self, ratio: int, batches: int, *, at_once: bool = False, **settings: Any) -> dict[str, Any]:
        """Return the settings of an arm that spends the budget.

        Each step trains on B rollouts drawn from the last ``batches`` * B. B / ``ratio`` rollouts per step are new.

        Args:
            at_once: an iteration has ``ratio`` steps and generates all their new rollouts before the first step.
            settings: further settings of the arm.
        """
        assert self.batch % (ratio * GROUP) == 0, f"y = {ratio} leaves no whole groups of a batch of {self.batch}"
        steps = ratio if at_once else 1
        generated = self.batch * steps // ratio
        iterations = round(self.budget / (steps * self.batch + COST_RATIO * generated))
        arm = {
            "rollout.prompts_per_iteration": generated // GROUP,
            "replay.capacity": self.batch * batches,
            "num_iterations": iterations,
            EVERY: max(1, iterations // self.evaluations),
        }
        if at_once:
            arm["update.updates_per_iteration"] = steps
        return arm | settings

    def label(self, settings: Mapping[str, Any]) -> str:
        """Return the name of an arm: its replay ratio, its ring in batches, and its other settings."""
        budget = ("rollout.prompts_per_iteration", "replay.capacity", "num_iterations", EVERY)
        ratio = self.batch // (GROUP * settings["rollout.prompts_per_iteration"])
        others = []
        for name, value in settings.items():
            if name not in budget:
                text = f"{value:.3g}" if isinstance(value, float) else value
                short_name = name.rsplit(".", 1)[-1]
                others.append(f"{short_name} {text}")
        ring = settings["replay.capacity"] // self.batch
        return ", ".join((f"y {ratio}", f"N {ring} B", *others))


SUMS = Design(batch=128, on_policy_steps=200, evaluations=40)  # configs/study_arithmetic.py
THRESHOLD = 0.40  # held-out pass rate up to which compute is counted; declared before the runs
SMOLLM2 = Design(batch=32, on_policy_steps=24, evaluations=24)  # configs/study_smollm2.py
SMOLLM2_GPU = Design(batch=128, on_policy_steps=96, evaluations=48)  # configs/study_smollm2_gpu.py
SMOLLM2_GPU_SHORT = Design(batch=128, on_policy_steps=40, evaluations=40)  # configs/sweeps/smollm2_gpu_tasks.py
SMOLLM2_RATES = (1e-5, 2e-5, 4e-5)
SMOLLM2_THRESHOLD = 0.30  # the pass rate begins at 0.16 and 0.17


def tuning(arm: Point, samples: int) -> Point:
    """Return the arm for the runs that choose its rate: evaluated a quarter as often, with ``samples`` answers."""
    return arm | {EVERY: 4 * arm[EVERY], SAMPLES: samples}


def as_reported(point: Point) -> Point:
    """Return the point that ``tuning`` was applied to. Return a point without ``tuning`` unchanged."""
    if SAMPLES not in point:
        return point
    reported = dict(point)
    del reported[SAMPLES]
    reported[EVERY] = point[EVERY] // 4
    return reported


def within(spent: np.ndarray, budget: float) -> int:
    """Return the number of iterations that the budget pays for, rounded to the nearest iteration.

    ``spent`` has the cumulative cost at each iteration.
    """
    half_iteration = spent[-1] / len(spent) / 2
    return int((spent <= budget + half_iteration).sum())


def sweep_of(
    arms: Sequence[Point],
    label: Callable[[Point], str],
    rates: Sequence[float] = RATES,
    *,
    samples: int = 16,
    choosing: Sequence[Point] = TUNING,
    budget: float = SUMS.budget,
) -> Sweep:
    """Return a sweep of every arm at every rate on the choosing seeds, then at its best rate on the reported seeds.

    Args:
        samples: answers to each held-out question in the runs that choose the rate.
        budget: compute of a run that counts, in trained rollouts.
    """

    def at_best(runs: Sequence[Run]) -> list[Point]:
        paid_runs = []
        for run in runs:
            spent = np.array([row[COMPUTE] for row in run.rows])
            num_rows = within(spent, budget)
            paid_runs.append(dataclasses.replace(run, rows=run.rows[:num_rows]))
        best = best_points(paid_runs, RATE, METRICS[0])
        return product(REPORTED, [as_reported(point) for point in best])

    tuned_arms = [tuning(arm, samples) for arm in arms]
    points = product(choosing, tuned_arms, grid({RATE: rates}))
    return dataclasses.replace(shown_as(label, points), then=at_best)


def shown_as(label: Callable[[Point], str], points: Sequence[Point]) -> Sweep:
    """Return a sweep whose runs are named by the label of the arm and its learning rate.

    ``label`` receives the settings without the learning rate.
    """

    def named(settings: Point) -> str:
        arm = {name: value for name, value in as_reported(settings).items() if name != RATE}
        name = f"{label(arm)}, rate {settings[RATE]:.2g}"
        return f"{name}, to choose it" if SAMPLES in settings else name

    return Sweep(
        points,
        label=named,
        metrics=METRICS,
        x_axis=COMPUTE,
        thresholds={METRICS[0]: THRESHOLD},
        pareto=(("update/entropy_nats", METRICS[0]),),
    )


def is_reported(seed: int) -> bool:
    """Return whether runs of this seed are reported. Reported seeds are not used to choose a learning rate."""
    return seed in {point[SEED] for point in REPORTED}


def without_rate(name: str) -> str:
    """Return the name of an arm from the name of a run: drop the learning rate."""
    return name.rsplit(", rate ", 1)[0]


def smollm2_sweep(
    arms: Mapping[str, Mapping[str, Point]],
    budget: float = SMOLLM2.budget,
    rates: Sequence[float] = SMOLLM2_RATES,
) -> Sweep:
    """Return a sweep of the SmolLM2 study. ``arms`` are by task and name; one seed chooses the rates."""
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    two_digits = one_digit | {"max_digits": 2}
    tasks = {
        "sums": {"prompts.name": "chain_sum", "prompts.arguments": one_digit},
        "products": {
            "prompts.name": "products",
            "prompts.max_tokens": 56,
            "prompts.arguments": one_digit,
        },
        "longer sums": {"prompts.name": "chain_sum", "prompts.arguments": two_digits},
    }
    points = {}
    for task, arms_of_task in arms.items():
        for name, arm in arms_of_task.items():
            points[f"{task}: {name}"] = tasks[task] | arm

    def label(settings: Point) -> str:
        return next(name for name, point in points.items() if point == settings)

    sweep = sweep_of(
        list(points.values()),
        label,
        rates,
        samples=2,
        choosing=TUNING[:1],
        budget=budget,
    )
    return dataclasses.replace(sweep, after="studies.transfer:measure")
