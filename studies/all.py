"""Tables and figures of studies/replay_study.md, made from studies/data.

    python -m studies.all            writes the tables into the page and the figures beside it
    python -m studies.all --check    prints the tables and figures that differ from studies/data

A table stands in the page between the lines <!-- table: e2 --> and <!-- end -->, where e2 is a key of ``TABLES``. The
raw metrics of the runs are in studies/data (studies.raw). The times of an iteration are in studies/data/*_times.json
(studies.timing).

Owns: the list of tables and figures. Does not know: how they are made (arms, pictures).
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.machine import short_cpu
from jaxrl_llm.commands.replay_plan import Costs
from jaxrl_llm.sweeps import fits
from jaxrl_llm.sweeps.intervals import Interval
from studies import arms, bandit, costs, pictures, raw, seeds, transfer
from studies.arms import DECLARED, Arm, CostCurve, at_mu
from studies.costs import Times
from studies.design import COST_RATIO, RATE, SMOLLM2_THRESHOLD, SUMS, THRESHOLD, without_rate

FOLDER = pathlib.Path("studies")
DATA = FOLDER / "data"
SMOLLM2_STUDIES = ("smollm2", "smollm2_products", "smollm2_arms")
# SmolLM2's arm with the clipped ratio. The names of other methods with this ring and these uses are longer.
CLIP = "y 4, ring of 2 B"
SECONDS = "seconds of generating and training"
MARK = re.compile(r"(<!-- table: ([a-z0-9_]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@functools.cache
def study(name: str) -> raw.Study | None:
    """Return a study, or None if its raw file is missing."""
    path = DATA / f"{name}.json.xz"
    return raw.read(path) if path.is_file() else None


@functools.cache
def arms_of(name: str) -> tuple[Arm, ...]:
    """Return the arms of a study, with their times if studies/data has a file of times."""
    path = DATA / f"{name}_times.json"
    times = costs.read_times(path) if path.is_file() else None
    return tuple(arms.arms_of(study(name), times))


# ---- tables ----------------------------------------------------------------------------------------------------


def table_of(
    name: str,
    *,
    base_of: str = "",
    threshold: float = THRESHOLD,
    best_first: bool = False,
) -> str:
    """Return a table of the arms of a study.

    Savings are relative to the on-policy arm of the study ``base_of``, or by default of the study itself.
    """
    arms_of_table = list(arms_of(name))
    base = arms.on_policy(arms_of(base_of or name))
    if best_first:
        arms_of_table.sort(key=lambda arm: -arm.end()[0])
    return arms.table(arms_of_table, threshold, base=base)


def pretrained_arms(task: str) -> list[Arm]:
    """Return the arms of the SmolLM2 study on one task, the on-policy arm first."""
    arms_of_task = []
    for name in SMOLLM2_STUDIES:
        if study(name):
            arms_of_task += [arm for arm in arms_of(name) if arm.name.startswith(f"{task}: ")]
    return sorted(arms_of_task, key=lambda arm: not arm.name.startswith(f"{task}: on-policy"))


def without_task(arms_of_task: Sequence[Arm]) -> dict[str, Arm]:
    """Return arms of one SmolLM2 task by their names without the task and the rate."""
    by_short_name = {}
    for arm in arms_of_task:
        _, _, name = arm.name.partition(": ")
        by_short_name[without_rate(name)] = arm
    return by_short_name


def methods(arms_of_task: Mapping[str, Arm]) -> dict[str, Arm]:
    """Return the arms with the same ring and uses as ``CLIP`` but another method."""
    return {name: arm for name, arm in arms_of_task.items() if name.startswith(f"{CLIP}, ")}


def pretrained(task: str) -> str:
    """Return a table of the SmolLM2 arms on a task, with pass@k also on the task that no arm trained on."""
    arms_of_task = pretrained_arms(task)
    columns = {}
    for questions in ("held-out", transfer.TASK):
        for k in (1, transfer.SAMPLES):
            columns[f"{questions} pass@{k}"] = _after(f"{questions}/pass@{k}")
    return arms.table(arms_of_task, SMOLLM2_THRESHOLD, base=arms_of_task[0], more=columns)


def _after(name: str) -> Callable[[Arm], str]:
    """Return a function from an arm to a figure that was measured after training, as text."""

    def text_of(arm: Arm) -> str:
        return arm.after(name).text()

    return text_of


def by_threshold(tasks: Sequence[Sequence[Arm]], rates: Sequence[float], cost_curve: CostCurve) -> str:
    """Return a table of savings by threshold, relative to the first arm of the same task, the on-policy arm."""
    rows = []
    for base, *others in tasks:
        for arm in others:
            savings = [arms.saving(arm, base, rate, cost_curve).text(".0%") for rate in rates]
            rows.append([without_rate(arm.name), *savings])
    head = ["arm", *(f"to {rate:.2f}" for rate in rates)]
    return arms.markdown(head, rows)


def rates(*names: str) -> str:
    """Return a table of the mean held-out pass rate of each arm at each learning rate, on the choosing seeds."""
    all_rates: set[float] = set()
    for name in names:
        all_rates |= {run.point[RATE] for run in study(name).runs}
    ordered_rates = sorted(all_rates)
    rows = []
    for name in names:
        reported = by_name(name)
        for arm_name, scores in arms.tuning(study(name)).items():
            if arm_name not in reported:  # the runs of its reported seeds are not finished
                continue
            best_rate = reported[arm_name].runs[0].point[RATE]
            assert scores[best_rate] == max(scores.values()), f"{name}: {arm_name} was reported at another rate"
            cells = []
            for rate in ordered_rates:
                score = f"{scores[rate]:.3f}"
                cells.append(f"**{score}**" if rate == best_rate else score)
            rows.append([arm_name, *cells])
    head = ["arm", *(f"{rate:.2g}" for rate in ordered_rates)]
    return arms.markdown(head, rows)


def by_name(name: str) -> dict[str, Arm]:
    """Return the arms of a study by their names without the rates."""
    return {without_rate(arm.name): arm for arm in arms_of(name)}


@functools.cache
def arms_with_full_ring(name: str) -> dict[tuple[int, int], Arm]:
    """Return the arms whose ring was full when they reached the threshold, by replay ratio and ring."""
    grid = pictures.grid_of(arms_of(name))
    return {key: arm for key, arm in grid.items() if arm.has_full_ring_at(THRESHOLD)}


def ranks(name: str, num_rows: int = 8) -> str:
    """Return a table that ranks arms by cost to the threshold: share of draws as the cheapest, and range of ranks."""
    compared = list(arms_with_full_ring(name).values())
    costs_to_threshold = np.stack([arm.cost_to(THRESHOLD, DECLARED(arm)) for arm in compared])
    ranked = list(zip(seeds.ranks(costs_to_threshold), compared, strict=True))
    ranked.sort(key=lambda pair: -pair[0].first)
    rows = []
    for rank, arm in ranked[:num_rows]:
        rows.append([without_rate(arm.name), f"{rank.first:.0%}", f"{rank.low} to {rank.high}"])
    return arms.markdown(["arm", "cheapest in", f"rank of {len(compared)}"], rows)


def unfilled(name: str) -> str:
    """Return a sentence that lists the arms whose ring is not full when they reach the threshold."""
    grid = pictures.grid_of(arms_of(name))
    full = arms_with_full_ring(name)
    not_full = [f"({y}, {n} B)" for y, n in grid if (y, n) not in full]
    count = f"{len(not_full)} of {len(grid)}"
    return f"{count} arms (y, N) reach {THRESHOLD:.2f} before their ring is full: {', '.join(not_full)}."


def significant_savings(name: str) -> str:
    """Return a sentence that lists the significant savings, by paired t tests of seeds with Holm's correction."""
    base = arms.on_policy(arms_of(name))
    savings = {}
    p_values = {}
    for arm_name, arm in by_name(name).items():
        if arm is not base:
            saving = seeds.saving(arm, base, THRESHOLD, DECLARED)
            savings[arm_name] = saving
            p_values[arm_name] = saving.p if saving.mean > 0 else 1.0
    significant = seeds.holm(p_values)
    parts = []
    for arm_name, saving in savings.items():
        if arm_name in significant:
            parts.append(f"{arm_name} ({saving.low:.0%} to {saving.high:.0%})")
    tests = f"By paired t tests of four seeds, corrected by Holm for {len(savings)} arms"
    return f"{tests}, these savings hold: {'; '.join(parts)}."


class Comparisons:
    """Table of comparisons: bootstrap intervals, and paired t intervals of the four seeds."""

    def __init__(self) -> None:
        self._rows: list[list[str]] = []

    def _add(self, name: str, draws: Interval, paired: seeds.Paired, form: str) -> None:
        low = format(paired.low, form)
        high = format(paired.high, form)
        self._rows.append([name, draws.text(form), f"{low} to {high}"])

    def cost(
        self,
        name: str,
        arm: Arm,
        base: Arm,
        cost_curve: CostCurve = DECLARED,
        threshold: float = THRESHOLD,
    ) -> None:
        """Add the share of the base's cost to the threshold that an arm saves."""
        draws = arms.saving(arm, base, threshold, cost_curve)
        paired = seeds.saving(arm, base, threshold, cost_curve)
        self._add(name, draws, paired, ".0%")

    def end(self, name: str, arm: Arm, base: Arm) -> None:
        """Add the pass rate of an arm at the end minus the rate of the base."""
        self._add(name, arms.gain(arm, base), seeds.ends(arm, base), "+.2f")

    def table(self) -> str:
        """Return the table as Markdown."""
        return arms.markdown(["comparison", "95 % of draws", "t of four seeds"], self._rows)


def by_seeds() -> str:
    """Return a table of the page's most quoted comparisons of the small model's arms."""
    comparisons = Comparisons()
    _add_replay_ratios(comparisons)
    _add_advantages(comparisons)
    end = comparisons.end
    plain, sequence, *_ = arms_of("e6")
    end("end, E6, ratio of sequences less of tokens", sequence, plain)
    league = by_name("league")
    for other in ("mssr", "ppo_ewma", "grpo"):
        end(
            f"end, league, replay_positive_bias less {other}",
            league["replay_positive_bias"],
            league[other],
        )
    return comparisons.table()


def _add_replay_ratios(comparisons: Comparisons) -> None:
    """Add replay ratios and rings (E2), relative to the on-policy arm."""
    cost = comparisons.cost
    grid = pictures.grid_of(arms_of("e2"))
    for y, n in ((4, 8), (8, 8), (1, 8), (1, 4), (2, 8)):
        cost(f"saved, y {y}, N {n} B", grid[y, n], grid[1, 1])
    for y in (1, 2, 4, 8):
        cost(f"saved at mu 1, y {y}, N 8 B", grid[y, 8], grid[1, 1], at_mu(1.0))
    for y in (2, 4, 8):
        cost(f"seconds saved, y {y}, N 8 B", grid[y, 8], grid[1, 1], Arm.seconds)
    sequences = pictures.grid_of(arms_of("e2_sequence"))
    for y in (2, 4):
        cost(
            f"seconds saved, sequences, y {y}, N 8 B",
            sequences[y, 8],
            sequences[1, 1],
            Arm.seconds,
        )
    for y in (1, 2, 4, 8, 16):
        comparisons.end(f"end, y {y}, N 8 B", grid[y, 8], grid[1, 1])


def _add_advantages(comparisons: Comparisons) -> None:
    """Add the AsymRE arms by delta_V and by share of correct rollouts (E3)."""
    cost = comparisons.cost
    end = comparisons.end
    base = pictures.grid_of(arms_of("e2"))[1, 1]
    e3 = by_name("e3")

    def asymre(delta: float, share: float) -> Arm:
        return e3[f"AsymRE, delta_V {delta:g}, share {share:g}"]

    for share in (0, 0.2, 0.5):
        end(
            f"end, AsymRE, -0.3 less -0.1, share {share:g}",
            asymre(-0.3, share),
            asymre(-0.1, share),
        )
    for delta in (0, -0.05, -0.1, -0.3):
        for share in (0.2, 0.5):
            end(
                f"end, AsymRE {delta:g}, share {share:g} less none",
                asymre(delta, share),
                asymre(delta, 0),
            )
    cost("saved, AsymRE -0.3, share 0.2", asymre(-0.3, 0.2), base)
    cost("seconds saved, AsymRE -0.3, share 0.2", asymre(-0.3, 0.2), base, Arm.seconds)


def smollm2_by_seeds() -> str:
    """Return a table of comparisons of SmolLM2 arms: rings, methods with the ring of ``CLIP``, and the GPU runs."""
    comparisons = Comparisons()
    end = comparisons.end
    cost = comparisons.cost
    tasks = {task: without_task(pretrained_arms(task)) for task in ("sums", "products")}
    for task, task_arms in tasks.items():
        for y in (2, 4):
            small = task_arms[f"y {y}, ring of 2 B"]
            large = task_arms[f"y {y}, ring of 8 B"]
            end(f"end, {task}, y {y}, ring of 2 B less 8 B", small, large)
        _, *others = task_arms.items()
        for name, arm in others:
            end(f"end, {task}, {name} less on-policy", arm, task_arms["on-policy"])
        for name, arm in methods(task_arms).items():
            end(f"end, {task}, {name} less the clip", arm, task_arms[CLIP])
    products = tasks["products"]
    for threshold in (0.5, 0.6):
        suffix = f"to {threshold:.2f}"
        for name in ("y 2, ring of 2 B", "ring of 2 B, no reuse"):
            cost(
                f"saved, products, {name}, {suffix}",
                products[name],
                products["on-policy"],
                DECLARED,
                threshold,
            )
        for name, arm in methods(products).items():
            cost(
                f"saved of the clip's cost, products, {name}, {suffix}",
                arm,
                products[CLIP],
                DECLARED,
                threshold,
            )
    (_, on_policy), *others = without_task(arms_of("smollm2_gpu")).items()
    for name, arm in others:
        for threshold in (SMOLLM2_THRESHOLD, 0.4):
            cost(
                f"seconds saved, GPU, {name}, to {threshold:.2f}",
                arm,
                on_policy,
                Arm.seconds,
                threshold,
            )
    return comparisons.table()


def lives(name: str) -> str:
    """Return a table of how rollouts were used (METHODS of the central paper's 1.3): means over the last tenth."""
    columns = {
        "age, iterations": "replay/age_mean_steps",
        "uses in a life": "replay/replay_ratio",
        "steps since last use": "replay/since_last_use_mean_steps",
        "first uses": "replay/first_use_frac",
    }
    ks = (1, 4, 16, 32)
    head = [
        "arm",
        *columns,
        *(f"pass@{k}" for k in ks),
        "entropy",
        "train less held-out",
    ]
    rows = []
    for arm in arms_of(name):
        cells = [f"{arm.last_tenth(metric).value:.2f}" for metric in columns.values()]
        cells += [arm.pass_at(k).text() for k in ks]
        cells.append(arm.last_tenth("update/entropy_nats").text())
        gap = arm.last_tenth("rollout/pass_rate").value - arm.end()[0]
        cells = [cell.replace("nan", "-") for cell in cells]
        rows.append([arm.name, *cells, f"{gap:+.2f}"])
    return arms.markdown(head, rows)


def against_ring(name: str) -> str:
    """Return a table of the compute to the threshold that reuse alone saves: relative to y = 1 with the same ring."""
    grid = pictures.grid_of(arms_of(name))
    ratios = sorted({y for y, _ in grid})
    rings = sorted({n for _, n in grid})
    rows = []
    for y in ratios[1:]:
        savings = [arms.saving(grid[y, n], grid[1, n], THRESHOLD, DECLARED) for n in rings]
        rows.append([f"y {y}", *(saving.text(".0%") for saving in savings)])
    return arms.markdown(["uses", *(f"N {n} B" for n in rings)], rows)


def by_threshold_and_mu(name: str, columns: Mapping[str, tuple[float, float]], ring: int = 8) -> str:
    """Return a table of the compute that arms of one ring save relative to the on-policy arm.

    ``columns`` maps column heads to (threshold, cost ratio).
    """
    grid = pictures.grid_of(arms_of(name))
    rows = []
    for (y, n), arm in grid.items():
        if n != ring:
            continue
        cells = [f"y {y}, N {n} B"]
        for threshold, mu in columns.values():
            saving = arms.saving(arm, grid[1, 1], threshold, at_mu(mu))
            cells.append(saving.text(".0%"))
        rows.append(cells)
    return arms.markdown(["arm", *columns], rows)


def at_equal_rate(name: str) -> str:
    """Return a table of entropy and pass@k at the evaluation at which an arm first reaches the threshold."""
    grid = pictures.grid_of(arms_of(name))
    rows = []
    for (y, n), arm in grid.items():
        is_on_policy = (y, n) == (1, 1)
        has_reuse = y > 1 and n in (1, 8, 128)
        if is_on_policy or has_reuse:
            evaluation = arm.first_evaluation_at(THRESHOLD)
            entropy = arm.mean_around("update/entropy_nats", evaluation)
            pass_at_4 = arm.pass_at(4, evaluation)
            pass_at_32 = arm.pass_at(32, evaluation)
            rows.append([f"y {y}, N {n} B", entropy.text(), pass_at_4.text(), pass_at_32.text()])
    return arms.markdown(["arm", "entropy, nats", "pass@4", "pass@32"], rows)


def same_rate(name: str) -> str:
    """Return a table of the savings of one replay ratio relative to another at the same learning rate."""
    by_rate: dict[float, list[Arm]] = {}
    for arm in arms_of(name):
        by_rate.setdefault(arm.runs[0].point[RATE], []).append(arm)
    rows = []
    for rate, pair in sorted(by_rate.items()):
        on_policy, reusing = pair
        ends = [Interval.of(arm.end()).text() for arm in pair]
        batches = [Interval.of(arm.cost_to(THRESHOLD, DECLARED(arm))).text(".0f") for arm in pair]
        saving = arms.saving(reusing, on_policy, THRESHOLD, DECLARED)
        rows.append([f"{rate:.2g}", *ends, *batches, saving.text(".0%")])
    to_threshold = f"batches to {THRESHOLD:.2f}"
    head = ["rate", "end, on-policy", "end, four uses"]
    head += [f"{to_threshold}, on-policy", f"{to_threshold}, four uses", "saved"]
    return arms.markdown(head, rows)


def sigmoids(name: str, begun_by: str) -> str:
    """Return a table of sigmoids fitted to the first half of each mean curve, with the error on the second half.

    The highest ceiling comes first.

    Args:
        begun_by: a study whose runs were evaluated before they trained, from the same model, on the same questions.
    """
    evaluated = study(begun_by)
    scores = [evaluated.before[run.name] / evaluated.samples_of[run.name] for run in evaluated.reported()]
    start = float(np.mean(scores))
    sigmoids = []
    for arm in arms_of(name):
        sigmoid = fits.fit(DECLARED(arm)[0], arm.curves[0], start=start)
        if sigmoid:
            sigmoids.append((arm.name, sigmoid))
    # Sort by the digits in the table, because the others differ between machines.
    sigmoids.sort(key=lambda pair: -round(pair[1].ceiling, 2))
    rows = []
    for arm_name, f in sigmoids:
        rows.append(
            (
                arm_name,
                f"{f.ceiling:.2f}",
                f"{f.middle:.0f}",
                f"{f.steepness:.1f}",
                f"{f.error:.3f}",
            )
        )
    head = ("arm", "ceiling A", "middle, batches", "steepness B", "error on the second half")
    return arms.markdown(head, rows)


def plan(name: str, rho: float = 0.05, alpha: float = 0.1) -> str:
    """Return a table of the recommendations of replay_plan beside the cheapest measured arm.

    There is one row for each cost model and noise: declared noise, and noise fitted to the declared costs. Only arms
    whose ring was full at the threshold count.
    """
    grid = arms_with_full_ring(name)
    head = ("cost", "mu", "rho, alpha", "y, predicted", "N, predicted", "least cost measured", "y, times off")
    head += ("N, times off", "nearest arm", "costs more", "arms whose interval holds the least cost")
    cost_curves: list[tuple[str, float, CostCurve]] = [("declared", COST_RATIO, DECLARED)]
    times = _times_of(grid)
    if times:
        cost_curves.append(("seconds", costs.line(times).mu, Arm.seconds))
    fitted = noise(name).costs
    rows = []
    for cost_name, mu, cost_curve in cost_curves:
        measured = {key: Interval.of(arm.cost_to(THRESHOLD, cost_curve(arm))) for key, arm in grid.items()}
        least = min(cost.value for cost in measured.values())
        alike = [f"({y}, {n} B)" for (y, n), cost in measured.items() if cost.low <= least <= cost.high]
        declared = _plan_cells("declared", Costs(mu, rho, alpha), measured)
        rows.append([cost_name, f"{mu:.2f}", *declared, " ".join(alike)])
        with_fitted_noise = _plan_cells("fitted", Costs(mu, fitted.rho, fitted.alpha), measured)
        rows.append([cost_name, f"{mu:.2f}", *with_fitted_noise, "the same"])
    return arms.markdown(head, rows)


def _plan_cells(noise_name: str, theory: Costs, measured: Mapping[tuple[int, int], Interval]) -> list[str]:
    """Return the cells that compare the optimum of the theory with the cheapest measured arm.

    Args:
        measured: cost to the threshold by replay ratio and ring in batches.
    """
    x, y = theory.optimum()
    n = x / y

    def distance(key: tuple[int, int]) -> float:
        """Return the distance of an arm to the optimum in logarithms."""
        ratio, ring = key
        return abs(math.log(ratio / y)) + abs(math.log(ring * y / x))

    best = min(measured, key=lambda key: measured[key].value)
    nearest = min(measured, key=distance)
    best_ratio, best_ring = best
    nearest_ratio, nearest_ring = nearest
    more = measured[nearest].value / measured[best].value - 1
    return [
        f"{noise_name}: {theory.rho:.2f}, {theory.alpha:.3g}",
        f"{y:.1f}",
        f"{n:.1f} B",
        f"y {best_ratio}, N {best_ring} B",
        f"{_times_off(y, best_ratio):.1f}",
        f"{_times_off(n, best_ring):.1f}",
        f"y {nearest_ratio}, N {nearest_ring} B",
        f"{more:.0%}",
    ]


def _times_off(predicted: float, measured: float) -> float:
    """Return the ratio of two numbers, the larger over the smaller."""
    return max(predicted / measured, measured / predicted)


def _times_of(grid: Mapping[tuple[int, int], Arm]) -> list[Times]:
    """Return the times of all arms, or [] if some arm was not timed."""
    times = [arm.times for arm in grid.values() if arm.times is not None]
    return times if len(times) == len(grid) else []


def cost_model(name: str) -> str:
    """Return a table of the linear fit of iteration seconds to generated rollouts, beside the measured seconds."""
    grid = arms_with_full_ring(name)
    fit = costs.line(_times_of(grid))
    first_times: dict[int, Times] = {}
    for (y, _), arm in grid.items():
        first_times.setdefault(y, arm.times)
    rows = []
    for y, times in sorted(first_times.items()):
        fitted_s = fit.fixed + fit.per_rollout * times.generated
        seconds = (times.generate_s, times.update_s, times.iteration_s, fitted_s)
        milliseconds = [f"{1000 * value:.1f}" for value in seconds]
        error = fitted_s / times.iteration_s - 1
        rows.append([f"y {y}", f"{times.generated:.0f}", *milliseconds, f"{error:+.0%}"])
    head = ("arm", "rollouts generated", "generating, ms", "training, ms", "iteration, ms", "the line, ms", "off")
    return arms.markdown(head, rows)


def declared_costs(name: str) -> dict[tuple[int, int], float]:
    """Return the compute to the threshold at the declared mu, for the arms of ``arms_with_full_ring``."""
    declared = {}
    for key, arm in arms_with_full_ring(name).items():
        cost = arm.cost_to(THRESHOLD, DECLARED(arm))
        declared[key] = float(cost[0])
    return declared


@functools.cache
def noise(name: str) -> costs.Noise:
    """Fit the theory's noise to the costs of the arms to the threshold at the declared mu."""
    return costs.Noise.of(COST_RATIO, declared_costs(name))


def spread(name: str, base: str) -> str:
    """Return a text that compares the spreads of arms and of seeds, and lists the arms that differ from ``base``."""
    recipes = {arm.name.split(",")[0]: arm for arm in arms_of(name)}
    ends = np.array([arm.end_by_run() for arm in recipes.values()])
    spread_of_seeds = np.sqrt(ends.var(axis=1, ddof=1).mean())
    spread_of_arms = ends.mean(axis=1).std(ddof=1)
    above = []
    below = []
    for recipe, arm in recipes.items():
        if recipe == base:
            continue
        gain = arms.gain(arm, recipes[base])
        if gain.low > 0:
            above.append(f"`{recipe}` ({gain.value:+.2f})")
        if gain.high < 0:
            below.append(f"`{recipe}` ({gain.value:+.2f})")
    num_others = len(recipes) - 1
    alike = num_others - len(above) - len(below)
    return (
        f"Ends of one recipe's seeds have a standard deviation of {spread_of_seeds:.3f}, the recipes' means one of "
        f"{spread_of_arms:.3f}. Of {num_others} recipes {alike} cannot be told from `{base}`: the interval of the "
        f"difference holds 0. Above it end {', '.join(above)}; below it {', '.join(below)}."
    )


def differences(name: str) -> str:
    """Return a table of each arm's end and compute to the threshold, relative to the first arm."""
    base, *others = arms_of(name)
    base_cost = base.cost_to(THRESHOLD, DECLARED(base))
    rows = []
    for arm in others:
        cost = arm.cost_to(THRESHOLD, DECLARED(arm))
        more = Interval.of(cost / base_cost - 1)
        gain = arms.gain(arm, base)
        rows.append([without_rate(arm.name), gain.text("+.2f"), more.text(".0%")])
    return arms.markdown(["arm", "end, difference", f"batches to {THRESHOLD:.2f}, more"], rows)


def fit_of_noise(name: str) -> str:
    """Return a sentence about the error of the theory with the fitted noise."""
    fitted = noise(name)
    costs_to_threshold = list(declared_costs(name).values())
    error_of_one_cost = np.std(np.log(costs_to_threshold))
    return (
        f"With rho = {fitted.costs.rho:.3f}, alpha = {fitted.costs.alpha:.3f} and a common factor the theory's J is "
        f"off by {fitted.error:.0%} (root mean square over the arms), and by {fitted.left_out_error:.0%} for an arm "
        f"that the fit has not seen; one cost for all arms is off by {error_of_one_cost:.0%}."
    )


def _machine(hardware: Mapping[str, Any]) -> str:
    """Return the name of a machine: its accelerator, or its processor and the number of cores used."""
    if hardware["accelerator"] != "none":
        return hardware["accelerator"]
    return f"{short_cpu(hardware['cpu'])}, cores: {hardware['cores']}"


def files() -> str:
    """Return a table of the files in studies/data: number of runs, commit and machine."""
    rows = []
    total_runs = 0
    total_choosing = 0
    for path in sorted(DATA.glob("*.json.xz")):
        content = study(path.name.removesuffix(".json.xz"))
        sweep = pathlib.Path(content.config).name
        commit = content.made_with["commit"][:7]
        num_runs = len(content.runs)
        num_choosing = num_runs - len(content.reported())
        counts = [str(num_runs), str(num_choosing)]
        rows.append([f"`{path.name}`", f"`{sweep}`", f"`{commit}`", _machines(content), *counts])
        total_runs += num_runs
        total_choosing += num_choosing
    rows.append(["all", "", "", "", str(total_runs), str(total_choosing)])
    head = ("in `studies/data`", "in `configs/sweeps`", "commit", "machine", "runs", "that only chose rates")
    return arms.markdown(head, rows)


def _machines(content: raw.Study) -> str:
    """Return the machine of most runs of a study, then the others with their numbers of runs."""
    counts = collections.Counter(_machine(machine) for machine in content.machines.values())
    (most_common, _), *others = counts.most_common()
    text = most_common
    for machine, count in others:
        text += f"; {count} runs: {machine}"
    return text


def bases() -> str:
    """Return a table of the small model's on-policy arms, and of the savings of E2's arms relative to each."""
    grid = pictures.grid_of(arms_of("e2"))
    bases_by_name = {
        "E2's": grid[1, 1],
        "E4's": arms.on_policy(arms_of("e4")),
        "with the ratio of sequences": arms.on_policy(arms_of("e2_sequence")),
    }
    compared = ((1, 8), (2, 8), (4, 8), (8, 8))
    rows = []
    for name, base in bases_by_name.items():
        end = Interval.of(base.end())
        batches = Interval.of(base.cost_to(THRESHOLD, DECLARED(base)))
        cells = [name, end.text(), batches.text(".0f")]
        for key in compared:
            saving = arms.saving(grid[key], base, THRESHOLD, DECLARED)
            cells.append(saving.text(".0%"))
        rows.append(cells)
    head = ["on-policy arm", "held-out pass rate", f"batches to {THRESHOLD:.2f}"]
    head += [f"saved by y {y}, N {n} B" for y, n in compared]
    return arms.markdown(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "files": files,
    "e1": lambda: arms.markdown(bandit.HEAD, bandit.rows()),
    "bases": bases,
    "e2": lambda: table_of("e2"),
    "e2_rates": lambda: rates("e2"),
    "e2_lives": lambda: lives("e2"),
    "e2_ranks": lambda: ranks("e2"),
    "e2_stands": lambda: significant_savings("e2"),
    "e2_unfilled": lambda: unfilled("e2"),
    "e2_small_batches": lambda: table_of("e2_small_batches", base_of="e4"),
    "by_seeds": by_seeds,
    "smollm2_by_seeds": smollm2_by_seeds,
    "e2_fits": lambda: sigmoids("e2", "e4"),
    "e2_ring": lambda: against_ring("e2"),
    "e2_mu": lambda: by_threshold_and_mu(
        "e2",
        {f"mu {mu:g}": (THRESHOLD, mu) for mu in (0.5, 1.0, 2.0, COST_RATIO, 10.0)},
    ),
    "e2_thresholds": lambda: by_threshold_and_mu(
        "e2", {f"to {rate:.2f}": (rate, COST_RATIO) for rate in (0.35, 0.40, 0.45)}
    ),
    "e2_equal": lambda: at_equal_rate("e2"),
    "plan": lambda: plan("e2"),
    "cost_model": lambda: cost_model("e2"),
    "noise": lambda: fit_of_noise("e2"),
    "e2_sequence": lambda: table_of("e2_sequence"),
    "e2_sequence_rates": lambda: rates("e2_sequence"),
    "e3": lambda: table_of("e3", base_of="e2"),
    "e3_rates": lambda: rates("e3"),
    "e4": lambda: table_of("e4"),
    "e4_rates": lambda: rates("e4"),
    "e5": lambda: table_of("e5"),
    "e5_rates": lambda: same_rate("e5"),
    "e6": lambda: table_of("e6", base_of="e2"),
    "e6_ends": lambda: differences("e6"),
    "e6_rates": lambda: rates("e6"),
    "league": lambda: table_of("league", base_of="e4", best_first=True),
    "league_rates": lambda: rates("league"),
    "league_spread": lambda: spread("league", "grpo"),
    "smollm2_sums": lambda: pretrained("sums"),
    "smollm2_products": lambda: pretrained("products"),
    "smollm2_thresholds": lambda: by_threshold(
        [pretrained_arms("sums"), pretrained_arms("products")],
        (0.3, 0.4, 0.5, 0.6),
        DECLARED,
    ),
    "smollm2_rates": lambda: rates(*filter(study, SMOLLM2_STUDIES)),
    "smollm2_gpu": lambda: table_of("smollm2_gpu", threshold=SMOLLM2_THRESHOLD),
    "smollm2_gpu_thresholds": lambda: by_threshold([arms_of("smollm2_gpu")], (0.2, 0.3, 0.4), Arm.seconds),
    "smollm2_gpu_rates": lambda: rates("smollm2_gpu"),
}

# ---- figures ---------------------------------------------------------------------------------------------------


def figures(folder: pathlib.Path) -> None:
    """Write every figure whose runs are in studies/data."""
    grid = pictures.grid_of(arms_of("e2"))
    batches = _in_batches(SUMS.batch)
    # The figure of the README.
    readme_arms = {
        "on-policy": grid[1, 1],
        "ring of 8 B, no reuse": grid[1, 8],
        "each rollout used 4 times": grid[4, 8],
    }
    pictures.curves(
        {"": readme_arms},
        folder / "replay_study.svg",
        over={batches: DECLARED},
        threshold=THRESHOLD,
    )
    pictures.accuracy(grid, folder / "replay_study_compute.svg", over=DECLARED, x_label=batches)
    if _times_of(grid):
        pictures.accuracy(grid, folder / "replay_study_seconds.svg", over=Arm.seconds, x_label=SECONDS)
    pictures.cost_map(grid, folder / "replay_study_map.svg", threshold=THRESHOLD)
    pictures.diversity(grid, folder / "replay_study_diversity.svg")
    if study("league"):
        pictures.ends(arms_of("league"), folder / "replay_study_league.svg")
    for task in ("sums", "products"):
        _smollm2_figure(pretrained_arms(task), folder / f"replay_study_smollm2_{task}.svg")
    if study("smollm2_gpu"):
        _smollm2_figure(arms_of("smollm2_gpu"), folder / "replay_study_smollm2_gpu.svg")


def _smollm2_figure(arms_of_task: Sequence[Arm], path: pathlib.Path) -> None:
    """Write the curves of the SmolLM2 arms of one task, if there are any. Methods have panels below the other arms."""
    if not arms_of_task:
        return
    base = arms_of_task[0]
    over: dict[str, CostCurve] = {_in_batches(base.batch): DECLARED}
    if base.times:
        over[SECONDS] = Arm.seconds
    by_short_name = without_task(arms_of_task)
    method_arms = methods(by_short_name)
    families = {"": by_short_name}
    if method_arms:
        other_arms = {name: arm for name, arm in by_short_name.items() if name not in method_arms}
        references = {name: by_short_name[name] for name in ("on-policy", CLIP)}
        families = {
            "uses and rings": other_arms,
            f"{CLIP}: methods": references | method_arms,
        }
    pictures.curves(families, path, over=over, threshold=SMOLLM2_THRESHOLD)


def _in_batches(batch: int) -> str:
    """Return the label of the axis of compute."""
    return f"compute: trained + {COST_RATIO:g} generated, in batches of {batch}"


def page(text: str) -> str:
    """Return the text of the page with every table made from studies/data."""

    def with_table(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        return f"{begin}{TABLES[name]()}\n{end}"

    return MARK.sub(with_table, text)


def differing(folder: pathlib.Path) -> Sequence[str]:
    """Return the names of tables and figures that differ from studies/data. ``folder`` receives the new figures."""
    text = (FOLDER / "replay_study.md").read_text()
    new_tables = {name: table for _, name, table, _ in MARK.findall(page(text))}
    different = []
    for _, name, table, _ in MARK.findall(text):
        if table != new_tables[name]:
            different.append(f"table {name}")
    figures(folder)
    for new_figure in sorted(folder.glob("*.svg")):
        stored = FOLDER / new_figure.name
        if not stored.is_file() or stored.read_bytes() != new_figure.read_bytes():
            different.append(new_figure.name)
    return different


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        with tempfile.TemporaryDirectory() as folder:
            different = differing(pathlib.Path(folder))
        print("\n".join(different) or "every table and figure is what studies/data gives")
        sys.exit(1 if different else 0)
    path = FOLDER / "replay_study.md"
    path.write_text(page(path.read_text()))
    figures(FOLDER)


if __name__ == "__main__":
    main()
