"""Every named method on the replay study's task, at equal compute: the league table.

    python -m jaxrl_llm.sweep --config=configs/sweeps/league.py --workdir=runs/league --workers=2

Runs of 2026-11-24, held-out pass rate at the end, medians of two seeds (docs/replay_study.md has the table): ppo_ewma
0.72, poise 0.68, rr 0.63; grpo 0.54; replay_positive_bias 0.34, with 0.75 as its best; spo, agro and vcpo at most 0.30.
"""

import pathlib
import runpy

from jaxrl_llm.config import defaults, freeze
from jaxrl_llm.runtime.nested import differences, plain
from jaxrl_llm.sweep.points import Sweep, product, seeds
from studies.design import COST_RATIO, SUMS

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]
WHOLE_GROUPS = ("agro", "rr", "spo", "vcpo")
# Without the two that need something beside them: another run, a teacher.
LEFT_OUT = ("sapo", "distillation")
RECIPES = [path for path in sorted(pathlib.Path("configs/recipes").glob("*.py")) if path.stem not in LEFT_OUT]


def point(path):
    """A recipe's settings on the study's task, for as many iterations as the budget pays."""
    config = freeze(runpy.run_path(str(path))["get_config"]())
    changed = {field: plain(new) for field, (_, new) in differences(freeze(defaults()), config, whole=True).items()}
    # Single rollouts, as the study has it, but where a recipe's method compares or replays whole groups.
    changed.pop("replay.unit", None)
    if path.stem in WHOLE_GROUPS:
        changed["replay.unit"] = "group"
    batch = changed.setdefault("update.batch_size", config.update.batch_size)
    changed.setdefault("update.micro_batch_size", batch)
    changed.setdefault("rollout.group_size", config.rollout.group_size)
    changed.setdefault("rollout.prompts_per_iteration", config.rollout.prompts_per_iteration)
    trained = batch * config.update.updates_per_iteration
    steps = round(SUMS.budget / (trained + COST_RATIO * config.rollouts_per_iteration))
    if config.algorithm.reward_terms and path.stem == "dapo":
        changed["algorithm.reward_terms.overlong_penalty.buffer"] = 1  # of 4 tokens
    return changed | {"num_iterations": steps, "eval.every_iterations": steps // 10}


def get_sweep():
    points = {path.stem: point(path) for path in RECIPES}
    return Sweep(
        product(seeds(2), list(points.values())),
        label=lambda settings: next(name for name, its in points.items() if its == settings),
        metrics=("eval/pass_rate", "rollout/pass_rate", "update/entropy_nats"),
        x_axis="time/compute_rollouts",
        pareto=(("update/entropy_nats", "eval/pass_rate"),),
    )
