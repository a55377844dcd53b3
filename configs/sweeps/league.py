"""League table of the replay study: every recipe on the study's task, at equal compute.

    python -m jaxrl_llm.sweep --config=configs/sweeps/league.py --workdir=runs/league --workers=2

A recipe keeps its batch, ring and groups. The budget pays for its iterations. The cost of an iteration counts trained
rollouts, generated rollouts, and the forward passes of references. A recipe is reported at the best of four learning
rates. studies/replay_study.md has the results.
"""

import runpy

from jaxrl_llm.config import defaults, freeze
from jaxrl_llm.runtime import package_files
from jaxrl_llm.settings.schema import differences, plain
from studies.costs import FORWARD, forwards
from studies.design import COST_RATIO, RATE, SUMS, sweep_of

get_config = runpy.run_path("configs/study_arithmetic.py")["get_config"]
RATES = (7e-5, 2e-4, 6e-4, 1.8e-3)  # farther apart than the rates of E2
DEFAULTS = freeze(defaults())
RECIPES = {
    name: freeze(runpy.run_path(str(package_files.recipe_file(name)))["get_config"]())
    for name in package_files.recipe_names()
}


def has_the_studys_task(config):
    """Return whether a recipe needs no other reward, environment, run or teacher."""
    has_other_reward = config.rewards.functions != DEFAULTS.rewards.functions
    has_teacher = config.model.reference_path != ""
    return not (has_other_reward or has_teacher or config.environments.factory or config.external.paths)


def point(config):
    """Return the settings of a recipe on the study's task. The budget determines the number of iterations."""
    changed = {field: plain(new) for field, (_, new) in differences(DEFAULTS, config, whole=True).items()}
    changed.pop(RATE, None)
    # The ring has single rollouts as in the study, unless a surrogate compares the rows of a group.
    changed.pop("replay.unit", None)
    if config.algorithm.surrogate.facts.siblings:
        changed["replay.unit"] = "group"
    batch = changed.setdefault("update.batch_size", config.update.batch_size)
    changed.setdefault("update.micro_batch_size", batch)
    changed.setdefault("rollout.group_size", config.rollout.group_size)
    changed.setdefault("rollout.prompts_per_iteration", config.rollout.prompts_per_iteration)
    extra, trained = forwards(config), batch * config.update.updates_per_iteration
    cost = trained * (1 + FORWARD * extra.of_trained)
    cost += config.rollouts_per_iteration * (COST_RATIO + FORWARD * extra.of_generated)
    steps = round(SUMS.budget / cost)
    if any(term.name == "overlong_penalty" for term in config.algorithm.reward_terms):
        changed["algorithm.reward_terms.overlong_penalty.buffer"] = 1  # of 4 tokens
    return changed | {"num_iterations": steps, "eval.every_iterations": max(1, steps // SUMS.evaluations)}


def get_sweep():
    points = {name: point(config) for name, config in RECIPES.items() if has_the_studys_task(config)}
    label = lambda settings: next(name for name, its in points.items() if its == settings)
    return sweep_of(list(points.values()), label, RATES)
