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
from studies.arms import DECLARED, Arm, Way, at_mu
from studies.design import COST_RATIO, RATE, SMOLLM2_THRESHOLD, SUMS, THRESHOLD, without_rate

FOLDER = pathlib.Path("studies")
DATA = FOLDER / "data"
SMOLLM2_STUDIES = ("smollm2", "smollm2_products", "smollm2_arms")
CLIP = "y 4, ring of 2 B"  # of SmolLM2's arms: with the clipped ratio; others of such a ring have more in their names
MARK = re.compile(r"(<!-- table: ([a-z0-9_]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@functools.cache
def study(name: str) -> raw.Study | None:
    path = DATA / f"{name}.json.xz"
    return raw.read(path) if path.is_file() else None


@functools.cache
def arms_of(name: str) -> tuple[Arm, ...]:
    """Return the arms of a study, with their times if studies/data has a file of times."""
    times = DATA / f"{name}_times.json"
    return tuple(arms.arms_of(study(name), costs.read_times(times) if times.is_file() else None))


# ---- tables ----------------------------------------------------------------------------------------------------


def table_of(name: str, *, base_of: str = "", threshold: float = THRESHOLD, best_first: bool = False) -> str:
    """Return a table of the arms of a study.

    Savings are relative to the on-policy arm of the study ``base_of``, or by default of the study itself.
    """
    found = list(arms_of(name))
    base = arms.on_policy(arms_of(base_of or name))
    if best_first:
        found.sort(key=lambda arm: -arm.end()[0])
    return arms.table(found, threshold, base=base)


def pretrained_arms(task: str) -> list[Arm]:
    """Return the arms of the SmolLM2 study on one task, the on-policy arm first."""
    names = [name for name in SMOLLM2_STUDIES if study(name)]
    found = [arm for name in names for arm in arms_of(name) if arm.name.startswith(f"{task}: ")]
    return sorted(found, key=lambda arm: not arm.name.startswith(f"{task}: on-policy"))


def without_task(found: Sequence[Arm]) -> dict[str, Arm]:
    """Return arms of one SmolLM2 task by their names without the task and the rate."""
    return {without_rate(arm.name.partition(": ")[2]): arm for arm in found}


def methods(found: Mapping[str, Arm]) -> dict[str, Arm]:
    """Return the arms with the same ring and uses as ``CLIP`` but another method."""
    return {name: arm for name, arm in found.items() if name.startswith(f"{CLIP}, ")}


def pretrained(task: str) -> str:
    """Return a table of the SmolLM2 arms on a task, with pass@k also on the task that no arm trained on."""
    found = pretrained_arms(task)
    base = found[0]
    columns = {}
    for questions in ("held-out", transfer.TASK):
        for k in (1, transfer.SAMPLES):
            columns[f"{questions} pass@{k}"] = _after(f"{questions}/pass@{k}")
    return arms.table(found, SMOLLM2_THRESHOLD, base=base, more=columns)


def _after(name: str) -> Callable[[Arm], str]:
    """Return a function from an arm to a figure that was measured after training, as text."""

    def shown(arm: Arm) -> str:
        return arm.after(name).shown()

    return shown


def by_threshold(tasks: Sequence[Sequence[Arm]], rates: Sequence[float], way: Way) -> str:
    """Return a table of savings by threshold, relative to the first arm of the same task, the on-policy arm."""
    rows = []
    for base, *others in tasks:
        for arm in others:
            savings = [arms.saved(arm, base, rate, way).shown(".0%") for rate in rates]
            rows.append([without_rate(arm.name), *savings])
    return arms.markdown(["arm", *(f"to {rate:.2f}" for rate in rates)], rows)


def rates(*names: str) -> str:
    """Return a table of the mean held-out pass rate of each arm at each learning rate, on the choosing seeds."""
    every = sorted({run.point[RATE] for name in names for run in study(name).runs})
    rows = []
    for name in names:
        chosen = {arm: of.runs[0].point[RATE] for arm, of in by_name(name).items()}
        for arm, scores in arms.tuning(study(name)).items():
            if arm not in chosen:  # the runs of its reported seeds are not finished
                continue
            assert scores[chosen[arm]] == max(scores.values()), f"{name}: {arm} was reported at another rate"
            cells = (f"**{scores[rate]:.3f}**" if rate == chosen[arm] else f"{scores[rate]:.3f}" for rate in every)
            rows.append([arm, *cells])
    return arms.markdown(["arm", *(f"{rate:.2g}" for rate in every)], rows)


def by_name(name: str) -> dict[str, Arm]:
    """Return the arms of a study by their names without the rates."""
    return {without_rate(arm.name): arm for arm in arms_of(name)}


@functools.cache
def filled(name: str) -> dict[tuple[int, int], Arm]:
    """Return the arms whose ring was full when they reached the threshold, by replay ratio and ring."""
    return {key: arm for key, arm in pictures.grid_of(arms_of(name)).items() if arm.filled(THRESHOLD)}


def ranks(name: str, shown: int = 8) -> str:
    """Return a table that ranks arms by cost to the threshold: share of draws as the cheapest, and range of ranks."""
    found = list(filled(name).values())
    ranked = seeds.ranks(np.stack([arm.to(THRESHOLD, DECLARED(arm)) for arm in found]))
    rows = [
        [without_rate(arm.name), f"{rank.first:.0%}", f"{rank.low} to {rank.high}"]
        for rank, arm in sorted(zip(ranked, found, strict=True), key=lambda pair: -pair[0].first)[:shown]
    ]
    return arms.markdown(["arm", "cheapest in", f"rank of {len(found)}"], rows)


def unfilled(name: str) -> str:
    """Return a sentence that lists the arms whose ring is not full when they reach the threshold."""
    grid = pictures.grid_of(arms_of(name))
    some = [f"({y}, {n} B)" for y, n in grid if (y, n) not in filled(name)]
    return f"{len(some)} of {len(grid)} arms (y, N) reach {THRESHOLD:.2f} before their ring is full: {', '.join(some)}."


def stands(name: str) -> str:
    """Return a sentence that lists the significant savings, by paired t tests of seeds with Holm's correction."""
    base = arms.on_policy(arms_of(name))
    found = {arm: seeds.saved(of, base, THRESHOLD, DECLARED) for arm, of in by_name(name).items() if of is not base}
    hold = seeds.holm({arm: of.p if of.mean > 0 else 1.0 for arm, of in found.items()})
    listed = "; ".join(f"{arm} ({of.low:.0%} to {of.high:.0%})" for arm, of in found.items() if arm in hold)
    return f"By paired t tests of four seeds, corrected by Holm for {len(found)} arms, these savings hold: {listed}."


class Comparisons:
    """Table of comparisons: bootstrap intervals, and paired t intervals of the four seeds."""

    def __init__(self) -> None:
        self._rows: list[list[str]] = []

    def _row(self, what: str, draws: Interval, of_seeds: seeds.Paired, form: str) -> None:
        low, high = (format(x, form) for x in (of_seeds.low, of_seeds.high))
        self._rows.append([what, draws.shown(form), f"{low} to {high}"])

    def cost(self, what: str, arm: Arm, base: Arm, way: Way = DECLARED, to: float = THRESHOLD) -> None:
        self._row(what, arms.saved(arm, base, to, way), seeds.saved(arm, base, to, way), ".0%")

    def end(self, what: str, arm: Arm, base: Arm) -> None:
        self._row(what, arms.gained(arm, base), seeds.ends(arm, base), "+.2f")

    def shown(self) -> str:
        return arms.markdown(["comparison", "95 % of draws", "t of four seeds"], self._rows)


def by_seeds() -> str:
    """Return a table of the page's most quoted comparisons of the small model's arms."""
    found = Comparisons()
    cost = found.cost
    end = found.end
    grid = pictures.grid_of(arms_of("e2"))
    for y, n in ((4, 8), (8, 8), (1, 8), (1, 4), (2, 8)):
        cost(f"saved, y {y}, N {n} B", grid[y, n], grid[1, 1])
    for y in (1, 2, 4, 8):
        cost(f"saved at mu 1, y {y}, N 8 B", grid[y, 8], grid[1, 1], at_mu(1.0))
    for y in (2, 4, 8):
        cost(f"seconds saved, y {y}, N 8 B", grid[y, 8], grid[1, 1], Arm.over_seconds)
    sequences = pictures.grid_of(arms_of("e2_sequence"))
    for y in (2, 4):
        cost(f"seconds saved, sequences, y {y}, N 8 B", sequences[y, 8], sequences[1, 1], Arm.over_seconds)
    for y in (1, 2, 4, 8, 16):
        end(f"end, y {y}, N 8 B", grid[y, 8], grid[1, 1])
    e3 = by_name("e3")
    league = by_name("league")

    def asymre(delta: float, share: float) -> Arm:
        return e3[f"AsymRE, delta_V {delta:g}, share {share:g}"]

    for share in (0, 0.2, 0.5):
        end(f"end, AsymRE, -0.3 less -0.1, share {share:g}", asymre(-0.3, share), asymre(-0.1, share))
    for delta in (0, -0.05, -0.1, -0.3):
        for share in (0.2, 0.5):
            end(f"end, AsymRE {delta:g}, share {share:g} less none", asymre(delta, share), asymre(delta, 0))
    cost("saved, AsymRE -0.3, share 0.2", asymre(-0.3, 0.2), grid[1, 1])
    cost("seconds saved, AsymRE -0.3, share 0.2", asymre(-0.3, 0.2), grid[1, 1], Arm.over_seconds)
    plain, sequence, *_ = arms_of("e6")
    end("end, E6, ratio of sequences less of tokens", sequence, plain)
    for other in ("mssr", "ppo_ewma", "grpo"):
        end(f"end, league, replay_positive_bias less {other}", league["replay_positive_bias"], league[other])
    return found.shown()


def smollm2_by_seeds() -> str:
    """Return a table of comparisons of SmolLM2 arms: rings, methods with the ring of ``CLIP``, and the GPU runs."""
    found = Comparisons()
    tasks = {task: without_task(pretrained_arms(task)) for task in ("sums", "products")}
    for task, of in tasks.items():
        base, clip = of["on-policy"], of[CLIP]
        for y in (2, 4):
            small, large = (of[f"y {y}, ring of {n} B"] for n in (2, 8))
            found.end(f"end, {task}, y {y}, ring of 2 B less 8 B", small, large)
        for name, arm in list(of.items())[1:]:
            found.end(f"end, {task}, {name} less on-policy", arm, base)
        for name, arm in methods(of).items():
            found.end(f"end, {task}, {name} less the clip", arm, clip)
    of = tasks["products"]
    for to in (0.5, 0.6):
        for name in ("y 2, ring of 2 B", "ring of 2 B, no reuse"):
            found.cost(f"saved, products, {name}, to {to:.2f}", of[name], of["on-policy"], DECLARED, to)
        for name, arm in methods(of).items():
            found.cost(f"saved of the clip's cost, products, {name}, to {to:.2f}", arm, of[CLIP], DECLARED, to)
    (_, on_policy), *reusing = without_task(arms_of("smollm2_gpu")).items()
    for name, arm in reusing:
        for to in (SMOLLM2_THRESHOLD, 0.4):
            found.cost(f"seconds saved, GPU, {name}, to {to:.2f}", arm, on_policy, Arm.over_seconds, to)
    return found.shown()


def lives(name: str) -> str:
    """How rollouts were used: METHODS of the central paper's 1.3, means over the last tenth of training."""
    columns = {
        "age, iterations": "replay/age_mean_steps",
        "uses in a life": "replay/replay_ratio",
        "steps since last use": "replay/since_last_use_mean_steps",
        "first uses": "replay/first_use_frac",
    }
    ks = (1, 4, 16, 32)
    head = ["arm", *columns, *(f"pass@{k}" for k in ks), "entropy", "train less held-out"]
    rows = []
    for arm in arms_of(name):
        cells = [f"{arm.last_tenth(metric).value:.2f}" for metric in columns.values()]
        cells += [arm.pass_at(k).shown() for k in ks] + [arm.last_tenth("update/entropy_nats").shown()]
        gap = arm.last_tenth("rollout/pass_rate").value - arm.end()[0]
        rows.append([arm.name, *(cell.replace("nan", "-") for cell in cells), f"{gap:+.2f}"])
    return arms.markdown(head, rows)


def against_ring(name: str) -> str:
    """Return a table of the compute to the threshold that reuse alone saves: relative to y = 1 with the same ring."""
    grid = pictures.grid_of(arms_of(name))
    ratios = sorted({y for y, _ in grid})
    rings = sorted({n for _, n in grid})
    rows = []
    for y in ratios[1:]:
        savings = [arms.saved(grid[y, n], grid[1, n], THRESHOLD, DECLARED).shown(".0%") for n in rings]
        rows.append([f"y {y}", *savings])
    return arms.markdown(["uses", *(f"N {n} B" for n in rings)], rows)


def otherwise(name: str, columns: Mapping[str, tuple[float, float]], ring: int = 8) -> str:
    """Return a table of the compute that arms of one ring save relative to the on-policy arm.

    ``columns`` maps column heads to (threshold, cost ratio).
    """
    grid = pictures.grid_of(arms_of(name))
    rows = []
    for (y, n), arm in grid.items():
        if n == ring:
            savings = [arms.saved(arm, grid[1, 1], rate, at_mu(mu)).shown(".0%") for rate, mu in columns.values()]
            rows.append([f"y {y}, N {n} B", *savings])
    return arms.markdown(["arm", *columns], rows)


def at_equal_rate(name: str) -> str:
    """Return a table of entropy and pass@k at the evaluation at which an arm first reaches the threshold."""
    grid = pictures.grid_of(arms_of(name))
    rows = []
    for (y, n), arm in grid.items():
        if (y, n) == (1, 1) or (n in (1, 8, 128) and y > 1):
            i = arm.at_first(THRESHOLD)
            entropy = arm.around("update/entropy_nats", i)
            rows.append([f"y {y}, N {n} B", entropy.shown(), *(arm.pass_at(k, i).shown() for k in (4, 32))])
    return arms.markdown(["arm", "entropy, nats", "pass@4", "pass@32"], rows)


def same_rate(name: str) -> str:
    """Return a table of the savings of one replay ratio relative to another at the same learning rate."""
    found: dict[float, list[Arm]] = {}
    for arm in arms_of(name):
        found.setdefault(arm.runs[0].point[RATE], []).append(arm)
    rows = []
    for rate, (base, arm) in sorted(found.items()):
        ends = [Interval.of(one.end()).shown() for one in (base, arm)]
        batches = [Interval.of(one.to(THRESHOLD, DECLARED(one))).shown(".0f") for one in (base, arm)]
        rows.append([f"{rate:.2g}", *ends, *batches, arms.saved(arm, base, THRESHOLD, DECLARED).shown(".0%")])
    heads = [f"{what}, {who}" for what in ("end", f"batches to {THRESHOLD:.2f}") for who in ("on-policy", "four uses")]
    return arms.markdown(["rate", *heads, "saved"], rows)


def sigmoids(name: str, begun_by: str) -> str:
    """Return a table of sigmoids fitted to the first half of each mean curve, with the error on the second half.

    The highest ceiling comes first.

    Args:
        begun_by: a study whose runs were evaluated before they trained, from the same model, on the same questions.
    """
    runs = [run.name for run in study(begun_by).reported()]
    start = float(np.mean([study(begun_by).before[run] / study(begun_by).samples_of[run] for run in runs]))
    found = []
    for arm in arms_of(name):
        sigmoid = fits.fit(DECLARED(arm)[0], arm.curves[0], start=start)
        if sigmoid:
            found.append((arm.name, sigmoid))
    found.sort(key=lambda pair: -round(pair[1].ceiling, 2))  # sort by the shown digits: machines differ in the others
    head = ("arm", "ceiling A", "middle, batches", "steepness B", "error on the second half")
    rows = [(n, f"{f.ceiling:.2f}", f"{f.middle:.0f}", f"{f.steepness:.1f}", f"{f.error:.3f}") for n, f in found]
    return arms.markdown(head, rows)


def plan(name: str, rho: float = 0.05, alpha: float = 0.1) -> str:
    """Return a table of the recommendations of replay_plan beside the cheapest measured arm.

    There is one row for each cost model and noise: declared noise, and noise fitted to the declared costs. Only arms
    whose ring was full at the threshold count.
    """
    grid = filled(name)
    head = ("cost", "mu", "rho, alpha", "y, predicted", "N, predicted", "least cost measured", "y, times off")
    head += ("N, times off", "nearest arm", "costs more", "arms whose interval holds the least cost")
    rows = []
    ways: list[tuple[str, float, Way]] = [("declared", COST_RATIO, DECLARED)]
    if all(arm.times for arm in grid.values()):
        ways.append(("seconds", costs.line([arm.times for arm in grid.values()]).mu, Arm.over_seconds))
    fitted = noise(name).costs
    for called, mu, way in ways:
        to = {key: Interval.of(arm.to(THRESHOLD, way(arm))) for key, arm in grid.items()}
        best = min(to, key=lambda key: to[key].value)
        alike = " ".join(f"({a}, {n} B)" for (a, n), cost in to.items() if cost.low <= to[best].value <= cost.high)
        for how, of in (("declared", Costs(mu, rho, alpha)), ("fitted", Costs(mu, fitted.rho, fitted.alpha))):
            x, y = of.optimum()
            near = min(grid, key=lambda key: abs(math.log(key[0] / y)) + abs(math.log(key[1] * y / x)))
            measured, nearest = (f"y {a}, N {b} B" for a, b in (best, near))
            more = f"{to[near].value / to[best].value - 1:.0%}"
            its_noise = f"{how}: {of.rho:.2f}, {of.alpha:.3g}"
            off = (f"{max(a / b, b / a):.1f}" for a, b in ((y, best[0]), (x / y, best[1])))
            row = (called, f"{mu:.2f}", its_noise, f"{y:.1f}", f"{x / y:.1f} B", measured, *off, nearest, more)
            rows.append((*row, alike if how == "declared" else "the same"))
    return arms.markdown(head, rows)


def cost_model(name: str) -> str:
    """Return a table of the linear fit of iteration seconds to generated rollouts, beside the measured seconds."""
    grid = filled(name)
    fit = costs.line([arm.times for arm in grid.values()])
    rows = []
    for y in sorted({y for y, _ in grid}):
        times = next(arm.times for (its, _), arm in grid.items() if its == y)
        says = fit.fixed + fit.per_rollout * times.generated
        cells = (f"{1000 * seconds:.1f}" for seconds in (times.generate_s, times.update_s, times.iteration_s, says))
        rows.append([f"y {y}", f"{times.generated:.0f}", *cells, f"{says / times.iteration_s - 1:+.0%}"])
    head = ("arm", "rollouts generated", "generating, ms", "training, ms", "iteration, ms", "the line, ms", "off")
    return arms.markdown(head, rows)


def declared_costs(name: str) -> dict[tuple[int, int], float]:
    """Return the compute to the threshold at the declared mu, for the arms of ``filled``."""
    return {key: float(arm.to(THRESHOLD, DECLARED(arm))[0]) for key, arm in filled(name).items()}


@functools.cache
def noise(name: str) -> costs.Noise:
    """Fit the theory's noise to the costs of the arms to the threshold at the declared mu."""
    return costs.Noise.of(COST_RATIO, declared_costs(name))


def spread(name: str, base: str) -> str:
    """Return a text that compares the spreads of arms and of seeds, and lists the arms that differ from ``base``."""
    found = {arm.name.split(",")[0]: arm for arm in arms_of(name)}
    ends = np.array([arm.end_by_run() for arm in found.values()])
    of_seeds = np.sqrt(ends.var(axis=1, ddof=1).mean())
    of_arms = ends.mean(axis=1).std(ddof=1)
    apart = {arm: arms.gained(a, found[base]) for arm, a in found.items() if arm != base}
    above = [f"`{arm}` ({x.value:+.2f})" for arm, x in apart.items() if x.low > 0]
    below = [f"`{arm}` ({x.value:+.2f})" for arm, x in apart.items() if x.high < 0]
    alike = len(apart) - len(above) - len(below)
    return (
        f"Ends of one recipe's seeds have a standard deviation of {of_seeds:.3f}, the recipes' means one of "
        f"{of_arms:.3f}. Of {len(apart)} recipes {alike} cannot be told from `{base}`: the interval of the difference "
        f"holds 0. Above it end {', '.join(above)}; below it {', '.join(below)}."
    )


def differences(name: str) -> str:
    """Return a table of each arm's end and compute to the threshold, relative to the first arm."""
    base, *others = arms_of(name)
    base_cost = base.to(THRESHOLD, DECLARED(base))
    rows = []
    for arm in others:
        cost = arm.to(THRESHOLD, DECLARED(arm))
        more = Interval.of(cost / base_cost - 1).shown(".0%")
        rows.append([without_rate(arm.name), arms.gained(arm, base).shown("+.2f"), more])
    return arms.markdown(["arm", "end, difference", f"batches to {THRESHOLD:.2f}, more"], rows)


def fit_of_noise(name: str) -> str:
    """Return a sentence about the error of the theory with the fitted noise."""
    found = noise(name)
    costs_to_threshold = list(declared_costs(name).values())
    return (
        f"With rho = {found.costs.rho:.3f}, alpha = {found.costs.alpha:.3f} and a common factor the theory's J is off "
        f"by {found.error:.0%} (root mean square over the arms), and by {found.left_out_error:.0%} for an arm that the "
        f"fit has not seen; one cost for all arms is off by {np.std(np.log(costs_to_threshold)):.0%}."
    )


def _machine(has: Mapping[str, Any]) -> str:
    """Return the name of a machine: its accelerator, or its processor and the number of cores used."""
    cpu = f"{short_cpu(has['cpu'])}, cores: {has['cores']}"
    return cpu if has["accelerator"] == "none" else has["accelerator"]


def files() -> str:
    """Return a table of the files in studies/data: number of runs, commit and machine."""
    rows, total = [], np.zeros(2, int)
    for path in sorted(DATA.glob("*.json.xz")):
        of = study(path.name.removesuffix(".json.xz"))
        made, sweep = of.made_with, pathlib.Path(of.config).name
        counts = np.array([len(of.runs), len(of.runs) - len(of.reported())])
        kinds = collections.Counter(_machine(machine) for machine in of.machines.values()).most_common()
        shown = kinds[0][0] + "".join(f"; {count} runs: {kind}" for kind, count in kinds[1:])
        rows.append([f"`{path.name}`", f"`{sweep}`", f"`{made['commit'][:7]}`", shown, *map(str, counts)])
        total += counts
    head = ("in `studies/data`", "in `configs/sweeps`", "commit", "machine", "runs", "that only chose rates")
    return arms.markdown(head, [*rows, ["all", "", "", "", *map(str, total)]])


def bases() -> str:
    """Return a table of the small model's on-policy arms, and of the savings of E2's arms relative to each."""
    grid = pictures.grid_of(arms_of("e2"))
    found = {"E2's": grid[1, 1], "E4's": arms.on_policy(arms_of("e4"))}
    found["with the ratio of sequences"] = arms.on_policy(arms_of("e2_sequence"))
    shown = ((1, 8), (2, 8), (4, 8), (8, 8))
    rows = []
    for name, base in found.items():
        saved = [arms.saved(grid[key], base, THRESHOLD, DECLARED).shown(".0%") for key in shown]
        to = Interval.of(base.to(THRESHOLD, DECLARED(base))).shown(".0f")
        rows.append([name, Interval.of(base.end()).shown(), to, *saved])
    heads = (f"saved by y {y}, N {n} B" for y, n in shown)
    return arms.markdown(["on-policy arm", "held-out pass rate", f"batches to {THRESHOLD:.2f}", *heads], rows)


TABLES: dict[str, Callable[[], str]] = {
    "files": files,
    "e1": lambda: arms.markdown(bandit.HEAD, bandit.rows()),
    "bases": bases,
    "e2": lambda: table_of("e2"),
    "e2_rates": lambda: rates("e2"),
    "e2_lives": lambda: lives("e2"),
    "e2_ranks": lambda: ranks("e2"),
    "e2_stands": lambda: stands("e2"),
    "e2_unfilled": lambda: unfilled("e2"),
    "e2_small_batches": lambda: table_of("e2_small_batches", base_of="e4"),
    "by_seeds": by_seeds,
    "smollm2_by_seeds": smollm2_by_seeds,
    "e2_fits": lambda: sigmoids("e2", "e4"),
    "e2_ring": lambda: against_ring("e2"),
    "e2_mu": lambda: otherwise("e2", {f"mu {mu:g}": (THRESHOLD, mu) for mu in (0.5, 1.0, 2.0, COST_RATIO, 10.0)}),
    "e2_thresholds": lambda: otherwise("e2", {f"to {rate:.2f}": (rate, COST_RATIO) for rate in (0.35, 0.40, 0.45)}),
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
        [pretrained_arms("sums"), pretrained_arms("products")], (0.3, 0.4, 0.5, 0.6), DECLARED
    ),
    "smollm2_rates": lambda: rates(*filter(study, SMOLLM2_STUDIES)),
    "smollm2_gpu": lambda: table_of("smollm2_gpu", threshold=SMOLLM2_THRESHOLD),
    "smollm2_gpu_thresholds": lambda: by_threshold([arms_of("smollm2_gpu")], (0.2, 0.3, 0.4), Arm.over_seconds),
    "smollm2_gpu_rates": lambda: rates("smollm2_gpu"),
}

# ---- figures ---------------------------------------------------------------------------------------------------


def figures(folder: pathlib.Path) -> None:
    """Write every figure whose runs are in studies/data."""
    grid = pictures.grid_of(arms_of("e2"))
    over = _in_batches(SUMS.batch)
    # The figure of the README.
    shown = {"on-policy": grid[1, 1], "ring of 8 B, no reuse": grid[1, 8], "each rollout used 4 times": grid[4, 8]}
    pictures.curves({"": shown}, folder / "replay_study.svg", over={over: DECLARED}, threshold=THRESHOLD)
    pictures.accuracy(grid, folder / "replay_study_compute.svg", over=DECLARED, x_label=over)
    seconds = "seconds of generating and training"
    if all(arm.times for arm in grid.values()):
        pictures.accuracy(grid, folder / "replay_study_seconds.svg", over=Arm.over_seconds, x_label=seconds)
    pictures.cost_map(grid, folder / "replay_study_map.svg", threshold=THRESHOLD)
    pictures.diversity(grid, folder / "replay_study_diversity.svg")
    if study("league"):
        pictures.ends(arms_of("league"), folder / "replay_study_league.svg")
    smollm2 = {task: pretrained_arms(task) for task in ("sums", "products")}
    smollm2["gpu"] = arms_of("smollm2_gpu") if study("smollm2_gpu") else ()
    for called, found in smollm2.items():
        if found:
            shown = without_task(found)
            over = {_in_batches(found[0].batch): DECLARED}
            over |= {seconds: Arm.over_seconds} if found[0].times else {}
            path = folder / f"replay_study_smollm2_{called}.svg"
            families = {"": shown}
            own = methods(shown)
            if own:
                uses = {name: arm for name, arm in shown.items() if name not in own}
                beside = {name: shown[name] for name in ("on-policy", CLIP)}
                families = {"uses and rings": uses, f"{CLIP}: methods": beside | own}
            pictures.curves(families, path, over=over, threshold=SMOLLM2_THRESHOLD)


def _in_batches(batch: int) -> str:
    """Return the label of the axis of compute."""
    return f"compute: trained + {COST_RATIO:g} generated, in batches of {batch}"


def page(text: str) -> str:
    """Return the text of the page with every table made from studies/data."""
    return MARK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", text)


def differing(folder: pathlib.Path) -> Sequence[str]:
    """Return the names of tables and figures that differ from studies/data. ``folder`` receives the new figures."""
    text = (FOLDER / "replay_study.md").read_text()
    made = {found[2]: found[3] for found in MARK.finditer(page(text))}
    wrong = [f"table {name}" for _, name, shown, _ in MARK.findall(text) if shown != made[name]]
    figures(folder)
    for drawn in sorted(folder.glob("*.svg")):
        stored = FOLDER / drawn.name
        if not stored.is_file() or stored.read_bytes() != drawn.read_bytes():
            wrong.append(drawn.name)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        with tempfile.TemporaryDirectory() as folder:
            wrong = differing(pathlib.Path(folder))
        print("\n".join(wrong) or "every table and figure is what studies/data gives")
        sys.exit(bool(wrong))
    path = FOLDER / "replay_study.md"
    path.write_text(page(path.read_text()))
    figures(FOLDER)


if __name__ == "__main__":
    main()
