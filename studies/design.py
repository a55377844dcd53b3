"""The replay study's design: arms that differ in how often a rollout is used, at equal compute.

Owns: what an arm sets and is called. Does not know: model, task, objective (configs/study_*.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

COST_RATIO = 5.28  # mu of the paper's 7B runs: generating a rollout costs so many times training on it
GROUP = 8


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

    def arm(self, ratio: int, batches: int, **settings: Any) -> dict[str, Any]:
        """Steps on B rollouts, B / ``ratio`` of them new, drawn from the last ``batches`` * B: the budget's."""
        generated = self.batch // ratio
        steps = round(self.budget / (self.batch + COST_RATIO * generated))
        return {
            "rollout.prompts_per_iteration": generated // GROUP,
            "replay.capacity": self.batch * batches,
            "num_iterations": steps,
            "eval.every_iterations": steps // self.evaluations,
            **settings,
        }

    def label(self, settings: Mapping[str, Any]) -> str:
        """What an arm is called: its replay ratio, its ring in batches, and what else it sets."""
        budget = ("rollout.prompts_per_iteration", "replay.capacity", "num_iterations", "eval.every_iterations")
        ratio = self.batch // (GROUP * settings["rollout.prompts_per_iteration"])
        shown = lambda value: f"{value:.3g}" if isinstance(value, float) else value
        others = [f"{name.rsplit('.', 1)[-1]} {shown(value)}" for name, value in settings.items() if name not in budget]
        return ", ".join((f"y {ratio}", f"N {settings['replay.capacity'] // self.batch} B", *others))


SUMS = Design(batch=128, on_policy_steps=300, evaluations=10)  # configs/study_arithmetic.py
SMOLLM2 = Design(batch=64, on_policy_steps=24, evaluations=6)  # configs/study_smollm2.py
