"""Sweeps: figures by hand, and which points run, are skipped, continue, fail or are stopped."""

import csv
import dataclasses
import json
import math
import os
import pathlib
import re
import runpy
import shlex
import signal

import numpy as np
import pytest
from support import ghosts
from support import stand_in_training as stand_in
from support.building import ONE, mesh_of, settings_of
from support.command_line import run_command
from support.page import Page
from support.parsing import config_of
from support.refusal import check_words, raises_with, refused
from support.tiers import mostly_in

from jaxrl_llm.commands import sweep as sweep_module
from jaxrl_llm.commands import sweep_worker
from jaxrl_llm.commands.train import train
from jaxrl_llm.config import Config, ConfigError, freeze
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime.run_record import record
from jaxrl_llm.settings.use import use
from jaxrl_llm.sweeps.effects import knobs
from jaxrl_llm.sweeps.page import write_page
from jaxrl_llm.sweeps.points import Sweep, freeze_points, grid, product, seeds
from jaxrl_llm.sweeps.table import (
    THEN,
    Run,
    band,
    best_points,
    curve,
    figures,
    front,
    groups,
    write_table,
)

M = "eval/pass_rate"


def rows(*values, cost=10):
    """Return rows of iterations 1, 2, ... with a pass rate (None: not measured) and an increasing cost."""
    return [{"iteration": i, M: v, "tokens/trained": cost * i} for i, v in enumerate(values, 1)]


RUNS = [
    Run("a0", {"x.lr": 1.0, "seed": 0}, "finished", rows(0.1, None, 0.5, 0.4)),
    Run("a1", {"x.lr": 1.0, "seed": 1}, "unfinished", rows(0.3)),
    Run("b0", {"x.lr": 2.0, "x.name": "<b>"}, "", []),
]
SWEEP = Sweep(
    [run.point for run in RUNS],
    lower_is_better=("tokens/trained",),
    x_axis="tokens/trained",
    thresholds={M: 0.4},
    pareto=(("tokens/trained", M),),
)


def read_table(path):
    return list(csv.DictReader(path.read_text().splitlines()))


# ---- figures ---------------------------------------------------------------------------------------------------


def test_the_table_holds_what_one_computes_by_hand(tmp_path):
    write_table(tmp_path / "table.csv", RUNS, SWEEP)
    columns = ("point", "label", "status", "iterations", "x.lr", "x.name", "seed", f"{M} last", f"{M} best")
    columns += ("tokens/trained last", f"tokens/trained to {M} 0.4")
    expected = [
        ("a0", "lr 1.0", "finished", "4", "1.0", "", "0", "0.4", "0.5", "40.0", "30.0"),
        ("a1", "lr 1.0", "unfinished", "1", "1.0", "", "1", "0.3", "0.3", "10.0", ""),
        ("b0", "lr 2.0, name <b>", "", "0", "2.0", "<b>", "", "", "", "", ""),
    ]
    assert read_table(tmp_path / "table.csv") == [dict(zip(columns, line, strict=True)) for line in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv"]


def test_less_is_better_where_the_sweep_says_so():
    sweep = Sweep([{}], lower_is_better=(M,), thresholds={M: 0.2})
    run = Run("a", {}, "finished", rows(0.3, 0.2, 0.1, 0.25))
    assert figures(run, sweep) == {f"{M} last": 0.25, f"{M} best": 0.1, f"iteration to {M} 0.2": 2.0}
    # A setting's best value is then the one with the lowest mean: 0.2 less 0.5.
    values = ((1, 1, 0.1), (1, 2, 0.3), (2, 1, 0.4), (2, 2, 0.6))
    runs = [Run(f"{x}{z}", {"x.n": z, "x.lr": x}, "finished", rows(y)) for x, z, y in values]
    sweep = Sweep([run.point for run in runs], lower_is_better=(M,))
    for column in (f"{M} last", f"{M} best"):
        found = {knob.field: knob.effect[0] for knob in knobs(runs, sweep, column)}
        assert found == pytest.approx({"x.lr": -0.3, "x.n": -0.2}) and list(found) == ["x.lr", "x.n"]  # most first


def test_a_group_is_a_point_without_its_seed():
    assert [[run.name for run in members] for members in groups(RUNS).values()] == [["a0", "a1"], ["b0"]]
    listed = [Run("c", {"x.w": [1, 2], "seed": s}, "", []) for s in (0, 1)]
    assert [len(members) for members in groups(listed).values()] == [2]
    reported = dataclasses.replace(listed[1], stage=THEN)  # at what the other one chose
    assert [len(members) for members in groups([listed[0], reported]).values()] == [1, 1]


def test_a_curve_has_the_rows_with_both_numbers():
    x, y = curve(RUNS[0], M, "tokens/trained")
    assert (x.tolist(), y.tolist()) == ([10, 30, 40], [0.1, 0.5, 0.4])
    assert len(curve(RUNS[0], M, "absent/metric")[0]) == 0


def test_bands_are_quartiles_over_the_seeds_that_got_that_far():
    one = (np.array([1.0, 3.0]), np.array([0.0, 1.0]))
    two = (np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    b = band([one, two, (np.array([]), np.array([]))])
    # x = 1: {0, 1}; x = 2: {0.5 on the line, 1}; x = 3: {1} alone.
    assert b.x.tolist() == [1, 2, 3]
    assert (
        b.low.tolist() == [0.25, 0.625, 1]
        and b.median.tolist() == [0.5, 0.75, 1]
        and b.high.tolist() == [0.75, 0.875, 1]
    )
    assert band([]) is None


def test_the_front_holds_the_points_that_nothing_beats():
    points = [(1, 1), (2, 3), (3, 2), (2, 1), (4, 3), (2, 3)]
    assert front(points, lower_x=True, lower_y=False) == [0, 1, 5]
    assert front(points, lower_x=False, lower_y=False) == [4]
    assert front(points, lower_x=True, lower_y=True) == [0]


def test_the_page_is_self_contained_and_shows_text_as_text(tmp_path):
    sweep = Sweep([run.point for run in RUNS], x_axis="tokens/trained", facet="x.lr", pareto=SWEEP.pareto)
    more = Run("c", {"x.lr": 3.0, "x.name": "<i>"}, "failed", rows(0.2, 0.9))
    text = write_page(tmp_path / "sweep.html", [*RUNS, more], sweep, {M: "fraction"}).read_text()
    page = Page(text)
    assert page.tags.count("svg") == 2 * 2 + 1  # two values of the facet over two axes, and the trade-off
    assert "script" not in page.tags and "img" not in page.tags
    assert "4 points: 1 finished, 1 unfinished, 1 failed" in page.text and "name <i>" in page.text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    ended = page.text.split("that have ended")[1].split("points")[0]
    assert "0.35" not in page.text and "0.4" in ended  # of the two seeds' last values, that of the one that has ended
    named = dataclasses.replace(sweep, label=lambda point: f"{point.get('x.name', 'plain')} ones")
    page = Page(write_page(tmp_path / "sweep.html", [*RUNS, more], named, {}).read_text())
    assert "lr 1.0 | plain ones" in page.text and "lr 3.0 | <i> ones" in page.text
    empty = Page(write_page(tmp_path / "sweep.html", RUNS[2:], SWEEP, {}).read_text())
    assert "svg" not in empty.tags


def test_the_page_has_sigmoids_and_what_runs_were_made_with(tmp_path):
    x = np.arange(1.0, 21.0)
    learned = 0.1 + 0.5 / (1 + (15.0 / (10 * x)) ** 1.5)  # ceiling 0.6, half way at 15, after one point
    made = [{"commit": commit, "devices": "2 x cpu", "versions": {"jax": "1.2"}} for commit in ("abc", "abc", "def")]
    begun = [{M: 0.2}, {M: 0.1}, {M: 0.05}]  # R0 is their median, and no point of the curves
    runs = [
        Run(f"r{i}", {"seed": i}, "finished", rows(*learned), made_with=record, before=before)
        for i, (record, before) in enumerate(zip(made, begun, strict=True))
    ]
    sweep = Sweep([run.point for run in runs], x_axis="tokens/trained")
    html = write_page(tmp_path / "sweep.html", runs, sweep, {}).read_text()
    assert (
        "<td>2</td><td>commit abc; 2 x cpu; jax 1.2</td>" in html
        and "<td>1</td><td>commit def; 2 x cpu; jax 1.2</td>" in html
    )
    (cells,) = re.findall(r'class="fits">.*?</table>', html, re.DOTALL)
    ceiling, middle, steepness, error = map(float, re.findall(r"<td>([\d.e-]+)</td>", cells))
    assert (ceiling, middle, steepness) == pytest.approx((0.6, 15, 1.5), rel=1e-3) and error < 1e-3


def test_no_sigmoid_is_fitted_where_no_file_says_what_runs_began_with(tmp_path):
    learned = [0.1 + 0.5 / (1 + (60.0 / (10 * i)) ** 2) for i in range(1, 21)]
    runs = [
        Run("a", {"x.lr": 1.0, "seed": 0}, "finished", rows(*learned), before={M: 0.1}),
        Run("b", {"x.lr": 2.0, "seed": 0}, "finished", rows(*learned), before={M: 0.1}),
        Run("c", {"x.lr": 2.0, "seed": 1}, "finished", rows(*learned)),
        Run("d", {"x.lr": 3.0, "seed": 0}, "finished", rows(0.1, 0.2)),  # too short, whatever it began with
    ]
    sweep = Sweep([run.point for run in runs], x_axis="tokens/trained")
    text = write_page(tmp_path / "sweep.html", runs, sweep, {}).read_text()
    fitted = re.search(r'class="fits">.*?</table>(.*?)</section>', text, re.DOTALL)
    assert "lr 1.0" in fitted[0] and "<td>lr 2.0" not in fitted[0]
    assert fitted[1] == "</div><p>Not fitted, because no file has their start value: lr 2.0.</p>"


def test_seeds_whose_points_lie_apart_are_no_longer_curve_than_each(tmp_path):
    """Curves are straight between their points. Once, the union of 3 seeds' 4 points, 12 in number, was fitted."""

    def cells(num_points, field="tokens/trained"):
        runs = []
        for seed in range(3):
            x = 10 * (1 + 0.01 * seed) * np.arange(1.0, num_points + 1)
            learned = 0.1 + 0.5 / (1 + (60.0 / x) ** 2)  # each on the one curve
            own = [row | {field: float(at)} for row, at in zip(rows(*learned), x, strict=True)]
            runs.append(Run(f"r{seed}", {"seed": seed}, "finished", own, before={M: 0.1}))
        sweep = Sweep([run.point for run in runs], x_axis=field)
        html = write_page(tmp_path / "sweep.html", runs, sweep, {}).read_text()
        found = re.findall(r'class="fits">.*?</table>', html, re.DOTALL)
        return [float(x) for table in found for x in re.findall(r"<td>([\d.e-]+)</td>", table)]

    assert cells(4) == []
    ceiling, middle, steepness, error = cells(20)  # of which 19 points of the first seed lie on all three
    assert (ceiling, middle, steepness) == pytest.approx((0.6, 60, 2), rel=0.03) and error < 0.005


def test_what_runs_began_with_is_read_from_the_evaluation_before_them(tmp_path):
    points = make_points(seeds(1), num_iterations=12)
    (name,) = points
    evaluation = {"pass_rate": 0.25, "num_samples": 2, "pass_at_k": {"1": 0.25, "2": 0.4}, "samples": []}
    evaluation["completion_length_tokens"] = 7.5
    (tmp_path / name).mkdir()
    (tmp_path / name / "eval_before.json").write_text(json.dumps(evaluation))
    assert sweep_module.before(tmp_path / name) == {
        "eval/pass_rate": 0.25,
        "eval/pass_any_rate": 0.4,
        "eval/completion_length_tokens": 7.5,
    }
    assert sweep_module.before(tmp_path / "other") == {}
    sweep = Sweep(seeds(1))
    sweep_module.run_sweep(tmp_path, points, sweep, num_workers=1, serve=stand_in.SERVE)
    assert 'class="fits"' in (tmp_path / "sweep.html").read_text()  # of pass rates 0.1 to 1.2
    (tmp_path / name / "eval_before.json").unlink()
    sweep_module.run_sweep(tmp_path, points, sweep, num_workers=0)
    assert 'class="fits"' not in (tmp_path / "sweep.html").read_text()


@pytest.mark.parametrize(("unit", "expected"), [("reward", 2.0), ("fraction", 1.0)])
def test_a_sigmoid_of_rewards_may_go_above_1(tmp_path, unit, expected):
    learned = 0.2 + 1.8 / (1 + (60.0 / (10 * np.arange(1.0, 21.0))) ** 2)  # ceiling 2
    run = Run("a", {"seed": 0}, "finished", rows(*learned), before={M: 0.2})
    sweep = Sweep([run.point], x_axis="tokens/trained")
    html = write_page(tmp_path / "sweep.html", [run], sweep, {M: unit}).read_text()
    (cells,) = re.findall(r'class="fits">.*?</table>', html, re.DOTALL)
    assert float(re.findall(r"<td>([\d.e-]+)</td>", cells)[0]) == pytest.approx(expected, rel=0.05)


def test_the_best_value_has_the_largest_mean_over_runs_of_the_mean_over_a_run():
    runs = [
        Run("a", {"x.lr": 1.0, "x.w": 1, "seed": 0}, "finished", rows(0.1, 0.5)),  # 0.3
        Run("b", {"x.lr": 1.0, "x.w": 1, "seed": 1}, "finished", rows(0.1, None, 0.3)),  # 0.2
        Run("c", {"x.lr": 2.0, "x.w": 1, "seed": 0}, "finished", rows(0.9, 0.0, 0.0)),  # 0.3
        Run("d", {"x.lr": 2.0, "x.w": 1, "seed": 1}, "finished", rows(0.0, 0.3)),  # 0.15
        Run("e", {"x.lr": 2.0, "x.w": 2, "seed": 0}, "finished", rows(0.0)),
    ]
    assert best_points(runs, "x.lr", M) == [{"x.lr": 1.0, "x.w": 1}, {"x.lr": 2.0, "x.w": 2}]
    lost = Run("f", {"x.lr": 3.0, "x.w": 2, "seed": 0}, "finished", rows(None))  # no answer of it got a score
    assert best_points([lost, *runs], "x.lr", M)[0] == {"x.lr": 2.0, "x.w": 2}


def test_runs_that_went_on_on_another_machine_choose_nothing_by_their_end_alone(tmp_path, capfd):
    """The worse rate has a mean of 0.3, but 0.45 in the rows that are left. The better rate has 0.4."""
    good, bad = rows(0.2, 0.4, 0.6), rows(0.1, 0.2, 0.4, 0.5)[2:]
    a = [Run(f"a{i}", {"x.lr": 1.0, "seed": i}, "finished", good) for i in (0, 1)]
    b = [Run(f"b{i}", {"x.lr": 2.0, "seed": i}, "finished", bad, lost_rows=2) for i in (0, 1)]
    assert best_points(a + b, "x.lr", M) == [{"x.lr": 1.0}]
    warning = capfd.readouterr().err
    assert warning.startswith("warning: 2 runs ") and "b0, b1" in warning
    b[0] = dataclasses.replace(b[0], rows=rows(0.5, 0.5, 0.5, 0.5), lost_rows=0)  # of what is whole the best
    assert best_points(a + b, "x.lr", M) == [{"x.lr": 2.0}]
    lost = [dataclasses.replace(run, lost_rows=1) for run in a + b]  # then there is nothing better: 0.4 less 0.475
    assert best_points(lost, "x.lr", M) == [{"x.lr": 2.0}]
    capfd.readouterr()
    assert best_points(a, "x.lr", M) and not capfd.readouterr().err


def test_the_page_and_the_table_say_which_rows_are_lost(tmp_path):
    points = make_points([{"seed": 0}, {"seed": 1}], num_iterations=4)
    sweep = Sweep([point for point, _ in points.values()], thresholds={M: 0.4})
    for name, kept in zip(points, (slice(0, 4), slice(2, 4)), strict=True):
        (tmp_path / name).mkdir()
        lines = [json.dumps(row) + "\n" for row in rows(0.1, 0.4, 0.5, 0.6)[kept]]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        (tmp_path / name / "report.html").touch()
    sweep_module.run_sweep(tmp_path, points, sweep, num_workers=0)
    table = [(line["lost_rows"], line[f"iteration to {M} 0.4"]) for line in read_table(tmp_path / "table.csv")]
    assert table == [("0", "2.0"), ("2", "")]  # it may have been there before: in row 2 it was
    html = (tmp_path / "sweep.html").read_text()
    assert "2 points: 2 finished; 1 without rows" in html and "<td>finished, 2 rows lost</td>" in html


@pytest.mark.parametrize(("field", "metric"), [("x.rate", M), ("x.lr", "eval/passrate")])
def test_a_best_value_of_what_no_run_has_is_refused(field, metric):
    with refused("field", field, f"metric={metric!r}", raises=ValueError):
        best_points(RUNS[:2], field, metric)


# ---- running ---------------------------------------------------------------------------------------------------


def make_points(points, **base):
    return freeze_points({"num_iterations": 3} | base, points)


def turns(folder, name):
    path = folder / name / "turns.txt"
    return path.read_text().split() if path.exists() else []


def run(folder, points, workers=1):
    given = Sweep([point for point, _ in points.values()])
    return sweep_module.run_sweep(folder, points, given, num_workers=workers, serve=stand_in.SERVE)


def test_points_run_once_in_few_processes_and_failures_stop_nothing(tmp_path, capfd):
    rate = "optimizer.learning_rate"
    kinds = [0.1, stand_in.REFUSE, stand_in.RAISE, stand_in.DIE, stand_in.EARLY, 0.2]
    points = make_points(grid({rate: kinds}))
    names = dict(zip(kinds, points, strict=True))
    failed, stopped = run(tmp_path, points)
    assert stopped is None and set(failed) == {names[kind] for kind in kinds[1:5]}
    assert failed[names[stand_in.REFUSE]].splitlines()[-1] == "error: no such thing"
    assert failed[names[stand_in.RAISE]].splitlines()[-1] == "ZeroDivisionError: ours"
    assert failed[names[stand_in.DIE]].endswith("its process ended with status -9")
    assert failed[names[stand_in.EARLY]] == f"training in {names[stand_in.EARLY]}"
    # One process until it dies, another after.
    pids = [turns(tmp_path, name) for name in points]
    assert len({pid for (pid,) in pids}) == 2 and pids[0] == pids[3] and pids[4] == pids[5]

    out = capfd.readouterr().out
    assert f"finished {names[0.1]}" in out and f"FAILED {names[stand_in.RAISE]}" in out
    assert "    ZeroDivisionError: ours" in out and "points 2/6 finished | 0 running | 4 failed" in out
    status = [line["status"] for line in read_table(tmp_path / "table.csv")]
    assert status == ["finished", *["failed"] * 4, "finished"] and (tmp_path / "sweep.html").exists()

    # Again: what is finished is left alone, what broke is tried again, and what had begun goes on.
    run(tmp_path, points)
    assert [len(turns(tmp_path, name)) for name in points] == [1, 2, 2, 2, 2, 1]
    # Longer than before: nothing is lost, two iterations are added.
    run(tmp_path, make_points([{rate: 0.1}], num_iterations=5))
    lines = read_metrics(tmp_path / names[0.1])
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.mark.tier("slow")  # plain: test_points_run_once_in_few_processes_and_failures_stop_nothing
def test_a_point_that_wrote_its_last_row_and_no_report_is_not_finished(tmp_path):
    points = make_points(grid({"optimizer.learning_rate": [stand_in.NO_END]}))
    failed, _ = run(tmp_path, points)
    (name,) = points
    assert set(failed) == {name} and read_table(tmp_path / "table.csv")[0]["status"] == "failed"
    run(tmp_path, points)
    assert len(turns(tmp_path, name)) == 2


def test_what_was_tuned_on_some_seeds_is_run_on_others(tmp_path):
    """The stand-in's pass rate depends only on the seed, so the first of equal rates is taken."""
    rate = "optimizer.learning_rate"
    seen = []

    def then(runs):
        seen.append([run.status for run in runs])
        return product(seeds(2), best_points(runs, rate, M))

    sweep = Sweep(product(seeds(1, first=7), grid({rate: [0.1, 0.2]})), then=then)
    known = lambda: sweep_module.points_of("sweep.py", {"num_iterations": 3}, sweep, tmp_path)
    assert len(known()) == 2 and not seen  # not asked before they are finished
    points, failed, stopped = sweep_module.run_stages(tmp_path, known, sweep, num_workers=1, serve=stand_in.SERVE)
    assert (failed, stopped) == ({}, None) and seen[0] == ["finished"] * 2
    assert [point for point, _ in points.values()][2:] == [{"seed": 0, rate: 0.1}, {"seed": 1, rate: 0.1}]
    assert [line["stage"] for line in read_table(tmp_path / "table.csv")] == ["first", "first", "then", "then"]
    # Pass rates of 0.3 and the seed: what chose a rate is no part of what is reported of it, nor this of what it does.
    html = (tmp_path / "sweep.html").read_text()
    shown, knob = (re.search(f'class="{name}">.*?</table>', html, re.DOTALL)[0] for name in ("groups", "knobs"))
    assert re.findall(r"<td>(\w+): learning_rate (0.\d)</td><td>(\d)</td><td>([\d.]+)", shown) == [
        ("first", "0.1", "1", "7.3"),
        ("first", "0.2", "1", "7.3"),
        ("then", "0.1", "2", "0.8"),
    ]
    assert re.findall(r"<td>(0.\d)</td><td>(\d)</td>", knob) == [("0.1", "1"), ("0.2", "1")]
    sweep_module.run_stages(tmp_path, known, sweep, num_workers=1, serve=stand_in.SERVE)
    assert [len(turns(tmp_path, name)) for name in points] == [1] * 4  # nothing is run again


AFTER = """
def measure(config, workdir):
    if (workdir / "broken").exists():
        raise SystemExit("no luck")
    assert (workdir / "report.html").exists()
    return {"transfer": 0.5 + config.seed}
"""


def test_what_comes_after_a_point_is_in_the_table_and_is_tried_again_where_it_failed(tmp_path):
    (tmp_path / "mine.py").write_text(AFTER)
    points = make_points(seeds(3))
    folder, names = tmp_path / "runs", list(points)
    (folder / names[1]).mkdir(parents=True)
    (folder / names[1] / "broken").touch()
    sweep = Sweep(seeds(3), after=f"{tmp_path}/mine.py:measure")
    command = lambda: sweep_module.run_sweep(folder, points, sweep, num_workers=1, serve=stand_in.SERVE)
    failed, _ = command()
    assert list(failed) == [names[1]] and failed[names[1]].splitlines()[-1] == "SystemExit: no luck"
    lines = read_table(folder / "table.csv")
    assert [(line["status"], line["transfer"]) for line in lines] == [
        ("finished", "0.5"),
        ("failed", ""),
        ("finished", "2.5"),
    ]
    (folder / names[1] / "broken").unlink()
    assert command() == ({}, None)
    assert [len(turns(folder, name)) for name in names] == [1, 2, 1]
    assert [line["transfer"] for line in read_table(folder / "table.csv")] == ["0.5", "1.5", "2.5"]
    assert "<th>transfer" in (folder / "sweep.html").read_text()


@pytest.mark.tier("slow")  # plain: test_what_comes_after_a_point_is_in_the_table_...
def test_what_came_after_a_point_is_gone_once_its_run_goes_on_and_not_before(tmp_path, monkeypatch):
    """A longer run that was refused once lost the result and never ended.

    A launched run kept the result of its earlier end.
    """
    ghosts.haunt(monkeypatch)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the worker is this process
    (tmp_path / "mine.py").write_text("def end(config, workdir):\n    return {'end': config.num_iterations}\n")
    settings = {"eval.num_prompts": 0, "checkpoint.export": False, "metrics.tensorboard": False}
    config = lambda n: freeze(settings_of(FILES[0].parents[1] / "debug.py", settings | {"num_iterations": n}))
    workdir, sweep = tmp_path / "run", Sweep([{}], after=f"{tmp_path}/mine.py:end")
    turn = lambda n: sweep_worker.run_point(config(n), workdir, train, sweep.after)
    assert turn(1) and (workdir / "after.json").read_text() == '{"end": 1.0}'
    (workdir / "checkpoints").rename(tmp_path / "thrown away")
    assert not turn(2) and (workdir / "after.json").read_text() == '{"end": 1.0}'
    assert sweep_module.is_finished(workdir, config(1), sweep)
    (tmp_path / "thrown away").rename(workdir / "checkpoints")
    assert train(config(2), workdir) == 0 and not sweep_module.is_finished(workdir, config(2), sweep)


@pytest.mark.tier("slow")  # plain: test_what_was_tuned_on_some_seeds_is_run_on_others
def test_the_table_has_what_a_second_stage_alone_sets(tmp_path):
    rate = "optimizer.learning_rate"
    sweep = Sweep([{rate: 0.1}], then=lambda runs: [{rate: 0.1, "seed": 3}])
    known = lambda: sweep_module.points_of("sweep.py", {"num_iterations": 3}, sweep, tmp_path)
    sweep_module.run_stages(tmp_path, known, sweep, num_workers=1, serve=stand_in.SERVE)
    assert [line["seed"] for line in read_table(tmp_path / "table.csv")] == ["", "3"]


def test_a_second_stage_that_cannot_be_made_is_named(tmp_path):
    sweep = Sweep([{"seed": 1}], then=lambda runs: runs[5])
    known = lambda: sweep_module.points_of("mine.py", {"num_iterations": 3}, sweep, tmp_path)
    with raises_with(ConfigError, "mine.py", "then", "IndexError"):
        sweep_module.run_stages(tmp_path, known, sweep, num_workers=1, serve=stand_in.SERVE)


def test_a_second_stage_of_no_point_is_none(tmp_path):
    sweep = Sweep([{"seed": 1}], then=lambda runs: [])
    known = lambda: sweep_module.points_of("mine.py", {"num_iterations": 3}, sweep, tmp_path)
    points, *ended = sweep_module.run_stages(tmp_path, known, sweep, num_workers=1, serve=stand_in.SERVE)
    assert len(points) == 1 and ended == [{}, None] and list(known()) == list(points)
    assert read_table(tmp_path / "table.csv")[0]["status"] == "finished"


def test_a_label_that_raises_stops_no_point(tmp_path, capfd):
    points = make_points(seeds(2))
    given = Sweep(seeds(2), label=lambda point: point["nowhere"])
    with pytest.raises(KeyError, match="nowhere"):  # at the end, where nothing is lost by it
        sweep_module.run_sweep(tmp_path, points, given, num_workers=1, serve=stand_in.SERVE)
    assert all(sweep_module.is_finished(tmp_path / name, config, given) for name, (_, config) in points.items())
    assert "KeyError: 'nowhere'" in capfd.readouterr().out


def test_a_label_is_tried_on_points_as_the_page_has_them(tmp_path):
    """In the points of a page, functions are dictionaries."""
    points = [{"algorithm.divergence": use("reference", coefficient=0.1)}]
    points_of = lambda **given: sweep_module.points_of(
        "mine.py", {"num_iterations": 3}, Sweep(points, **given), tmp_path
    )
    assert points_of(label=json.dumps, thresholds={M: np.float32(0.5)})
    with raises_with(ConfigError, "label", "AttributeError", "'name'"):
        points_of(label=lambda point: point["algorithm.divergence"].name)


def test_what_a_power_cut_has_left_half_written_stops_no_table(tmp_path):
    points = make_points(seeds(1))
    (name,) = points
    run(tmp_path, points)
    for file in ("config.json", "after.json", "eval_before.json"):
        (tmp_path / name / file).write_text('{"a"')
    (found,) = sweep_module.runs_of(tmp_path, points, Sweep(seeds(1)), {})
    assert (found.status, found.made_with, found.after, found.before) == ("finished", {}, {}, {})
    sweep_module.check_folders(tmp_path, points)  # as a run's own start does


def test_a_point_that_another_sweep_has_finished_is_not_run_again(tmp_path):
    points = make_points(seeds(2))
    first, second = points

    def elsewhere(running, failed):
        if running == [first] and not (tmp_path / second).exists():
            (tmp_path / second).mkdir()
            stand_in.write(tmp_path / second, points[second][1], 3)
            (tmp_path / second / "report.html").touch()

    configs = {name: config for name, (_, config) in points.items()}
    how = {"num_workers": 1, "on_change": elsewhere, "serve": stand_in.SERVE}
    assert sweep_module.run_points(tmp_path, configs, Sweep(seeds(2)), **how) == ({}, None)
    assert (len(turns(tmp_path, first)), turns(tmp_path, second)) == (1, [])


@pytest.mark.tier("slow")  # plain: test_points_run_once_in_few_processes_and_failures_stop_nothing
def test_two_workers_run_side_by_side_and_a_signal_lets_them_end(tmp_path, monkeypatch):
    points = make_points(product(grid({"optimizer.learning_rate": [stand_in.WAIT]}), seeds(3)))
    first = [tmp_path / name / "metrics.jsonl" for name in points]
    calls = []

    def on_change(running, failed):
        calls.append(running)
        if first[0].exists() and first[1].exists() and first[1].read_text():
            os.kill(os.getpid(), signal.SIGTERM)

    configs = {name: config for name, (_, config) in points.items()}
    failed, stopped = sweep_module.run_points(
        tmp_path, configs, Sweep([]), num_workers=2, on_change=on_change, serve=stand_in.SERVE
    )
    assert (failed, stopped) == ({}, "SIGTERM")
    assert calls[0] == list(points)[:2] and calls[-1] == []
    assert not (tmp_path / list(points)[2]).exists()  # not begun after the signal
    pids = [turns(tmp_path, name)[0] for name in list(points)[:2]]
    assert len(set(pids)) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_workers_divide_the_cores_of_a_cpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert sweep_module.cores_of_workers(1) == [set()]
    assert sweep_module.cores_of_workers(2) == [{0, 2}, {1, 5}]
    assert sweep_module.cores_of_workers(5) == [{0}, {1}, {2}, {5}, {0}]
    monkeypatch.delenv("JAX_PLATFORMS")
    assert sweep_module.cores_of_workers(2) == [set(), set()]


def test_runs_of_another_reward_file_or_that_were_longer_are_refused(tmp_path):
    """Otherwise the old runs would be rows of the same table as the new runs."""
    (tmp_path / "mine.py").write_text("def reward(completions, **columns):\n    return [0.0] * len(completions)\n")
    spec, folder = f"{tmp_path}/mine.py:reward", tmp_path / "runs"
    points = lambda: make_points([{"seed": 1}], rewards={"functions": [spec]})
    ((name, (_, config)),) = points().items()
    (folder / name).mkdir(parents=True)
    stand_in.write(folder / name, config, 3)
    (folder / name / "config.json").write_text(record(config, mesh_of(ONE)))
    sweep_module.check_folders(folder, points())
    with refused("num_iterations", 2, name, "3 iterations"):
        sweep_module.check_folders(folder, make_points([{"seed": 1}], num_iterations=2, rewards={"functions": [spec]}))
    (tmp_path / "mine.py").write_text("def reward(completions, **columns):\n    return [1.0] * len(completions)\n")
    with raises_with(ConfigError, name, spec):
        sweep_module.check_folders(folder, points())


def test_runs_with_other_settings_are_refused(tmp_path):
    run(tmp_path, make_points([{"seed": 1}]))
    (name,) = make_points([{"seed": 1}])
    sweep_module.check_folders(tmp_path, make_points([{"seed": 1}], num_iterations=9))
    for surrogate, changed in (
        ({"low": 0.1}, "algorithm.surrogate.low 0.2 -> 0.1"),
        ({"name": "reinforce"}, "algorithm.surrogate 'clipped' -> 'reinforce'"),
        ({"name": "cispo", "low": 0.2, "high": 0.2}, "algorithm.surrogate 'clipped' -> 'cispo'"),
    ):
        with raises_with(ConfigError, name, changed):
            sweep_module.check_folders(tmp_path, make_points([{"seed": 1}], algorithm={"surrogate": surrogate}))


# ---- elsewhere, and the command -----------------------------------------------------------------------------------

FILE = """
from jaxrl_llm.config import defaults
from jaxrl_llm.sweeps.points import Sweep, grid, product, seeds


def get_config():
    config = defaults()
    config.num_iterations = 3
    config.prompts.arguments = {"min_terms": 2, "max_terms": 2}
    return config


def get_sweep():
    return Sweep(product(grid({"optimizer.learning_rate": [1e-5, 3e-4]}), seeds(2)))
"""


FILES = sorted((pathlib.Path(__file__).parents[2] / "configs" / "sweeps").glob("*.py"))


@pytest.mark.parametrize("path", mostly_in("slow", FILES, plain=2), ids=lambda path: path.stem)
def test_every_sweep_file_has_points_that_can_be(path):
    sweep = sweep_module.read_sweep(str(path))
    module = runpy.run_path(str(path))
    assert len(freeze_points(module["get_config"]().to_dict(), sweep.points)) >= 2
    assert f"--config=configs/sweeps/{path.name}" in module["__doc__"]


@pytest.fixture
def sweep_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def launched(file, base, point, folder):
    """Return the config of a point, and the words of the command that runs it."""
    ((_, config),) = freeze_points(base, [point]).values()
    return config, shlex.split(sweep_module.train_command(str(file), freeze(base), config, folder))


def test_a_launched_command_gives_the_config_of_its_point(sweep_file, tmp_path, monkeypatch):
    point = {
        "optimizer.learning_rate": 3e-05,
        "replay.skip_tied": True,
        "sampling.stop_strings": ("a'b", "\n"),
        "rewards.functions": ("my file.py:f",),
        "prompts.arguments.max_terms": 4,
        "prompts.system_prompt": "Be kind; 'now'.",
        "prompts.source": "reasoning_gym",
        "prompts.name": "chain_sum",
    }
    base = {"prompts": {"arguments": {"min_terms": 2, "max_terms": 2}}, "num_iterations": 3}
    base["checkpoint"] = {"bucket": "gs://mine/sweep"}
    sweep_file.write_text(FILE.replace("    return", "    config.checkpoint.bucket = 'gs://mine/sweep'\n    return", 1))
    config, words = launched(sweep_file, base, point, tmp_path / "w")
    assert f"--config.checkpoint.bucket={config.checkpoint.bucket}" in words
    assert words[:3] == ["python", "-m", "jaxrl_llm.train"] and f"--workdir={tmp_path / 'w'}" in words
    assert config_of(*words[3:], monkeypatch=monkeypatch) == config
    with refused("prompts.arguments", {"x": 1}, "--launch"):
        sweep_module.train_command("f.py", Config(), freeze({"prompts": {"arguments": {"x": 1}}}), tmp_path)


@pytest.mark.parametrize("text", ["4", "True", "None", "[1]", "'a'", "a'b", ""])
def test_a_launched_command_gives_a_text_that_looks_like_something_else(text, sweep_file, tmp_path, monkeypatch):
    sweep_file.write_text(FILE.replace('{"min_terms": 2, "max_terms": 2}', '{"name": "sums"}'))
    base = {"prompts": {"arguments": {"name": "sums"}}, "num_iterations": 3}
    config, words = launched(sweep_file, base, {"prompts.arguments.name": text}, tmp_path)
    assert config_of(*words[3:], monkeypatch=monkeypatch) == config


METHOD = """
from jaxrl_llm.settings.use import use
from jaxrl_llm.config import defaults

def get_config():
    config = defaults()
    config.algorithm.surrogate = use("clipped", high=0.4)
    config.algorithm.divergence = use("ewma", coefficient=0.2)
    config.algorithm.reward_terms = [use("length_reward", weight=0.3), use("overlong_penalty", buffer=2)]
    return config
"""


@pytest.mark.parametrize(
    "point",
    [
        {"algorithm.surrogate.low": 0.1},
        {"algorithm.surrogate": "cispo"},
        {"algorithm.surrogate": "clipped"},
        {"algorithm.surrogate": "reinforce"},
        # The same value as of the function before, which is not the default of the new one.
        {"algorithm.surrogate": "remix_centred", "algorithm.surrogate.high": 0.4, "algorithm.old_policy": "start"},
        {"algorithm.surrogate": {"name": "remix_centred", "low": 0.2}, "algorithm.old_policy": "start"},
        {"algorithm.divergence": {"name": "convex", "coefficient": 0.2}},
        {"algorithm.divergence": "none"},
        {"algorithm.divergence": "reference"},
        {"algorithm.reward_terms": []},
        {"algorithm.reward_terms": ["length_reward"]},
        {"algorithm.reward_terms": [{"name": "length_reward", "weight": 0.3}]},
        {"algorithm.reward_terms": ["short_answer", {"name": "overlong_penalty", "buffer": 2}]},
        {"algorithm.reward_terms.length_reward.weight": 0.1},
        {"algorithm.reward_terms.short_answer.tokens": 2},
        {"algorithm.reshaping": ["duration_factor", "amplify_positive"]},
        {"algorithm.critic": {"bins": 8}, "algorithm.advantage": "gae"},
        {"replay.draw": {"name": "age", "scale_iterations": 2.0}},
        {"replay.draw": {"name": "priority", "exponent": 2.0}, "replay.priority": "reward"},
        {"algorithm.surrogate": "OWN:tempered"},
        {"algorithm.reward_terms": ["length_reward", {"name": "OWN:halved", "weight": 0.2}]},
    ],
)
def test_a_launched_command_gives_the_functions_of_its_point(point, tmp_path, monkeypatch):
    (tmp_path / "my own.py").write_text(
        "def tempered(x, *, power: float = 0.5):\n    return -power * x.advantage * x.policy_logp\n"
        "def halved(x, *, weight: float = 0.5):\n    return weight * x.reward\n"
    )
    point = json.loads(json.dumps(point).replace("OWN", str(tmp_path / "my own.py")))
    file = tmp_path / "method.py"
    file.write_text(METHOD)
    base = runpy.run_path(str(file))["get_config"]()
    config, words = launched(file, base, point, tmp_path / "w")
    assert not any(word.endswith("=None") for word in words), words  # of a setting that is gone
    assert config_of(*words[3:], monkeypatch=monkeypatch) == config


@pytest.mark.parametrize(
    ("failed", "stopped", "status"),
    [({}, None, 0), ({"a": "why"}, None, 1), ({}, "SIGTERM", 143), ({}, "SIGINT", 130), ({"a": "why"}, "SIGTERM", 143)],
)
def test_a_sweep_that_was_stopped_is_to_be_started_again(failed, stopped, status):
    assert sweep_module.exit_status(failed, stopped) == status


def test_settings_with_one_last_name_are_called_by_the_whole_of_it(tmp_path):
    points = grid({"sampling.temperature": [0.5]}) + grid({"eval.temperature": [0.5]})
    runs = [Run(name, point, "finished", rows(0.1)) for name, (point, _) in make_points(points).items()]
    write_table(tmp_path / "table.csv", runs, Sweep(points))
    labels = [line["label"] for line in read_table(tmp_path / "table.csv")]
    assert labels == ["sampling.temperature 0.5", "eval.temperature 0.5"]


def test_a_table_shows_functions_and_groups_points_by_them(tmp_path):
    choices = ["clipped", {"name": "cispo", "high": 3.0}]
    points = product(grid({"algorithm.surrogate": choices}), seeds(2))
    runs = [Run(name, point, "finished", rows(0.1)) for name, (point, _) in make_points(points).items()]
    sweep = Sweep(points)
    write_table(tmp_path / "table.csv", runs, sweep)
    lines = read_table(tmp_path / "table.csv")
    assert [line["algorithm.surrogate"] for line in lines] == [str(choice) for choice in choices for _ in range(2)]
    assert [line["label"] for line in lines][::2] == [f"surrogate {choice}" for choice in choices]
    assert [len(members) for members in groups(runs).values()] == [2, 2]
    assert "{'name': 'cispo', 'high': 3.0}" in Page(write_page(tmp_path / "s.html", runs, sweep, {}).read_text()).text


def test_the_command_launches_prints_and_writes_what_is_there(sweep_file, tmp_path, monkeypatch, capfd):
    def command(*arguments):
        return run_command("sweep", f"--config={sweep_file}", *arguments, monkeypatch=monkeypatch, capfd=capfd)

    folder = tmp_path / "runs"
    points = freeze_points(
        {"num_iterations": 3, "prompts": {"arguments": {"min_terms": 2, "max_terms": 2}}},
        grid({"optimizer.learning_rate": [1e-5], "seed": [0, 1]}),
    )
    run(folder, points)  # half of the sweep's points
    done = command(f"--workdir={folder}", "--launch=print")
    assert (
        done.status == 0 and len(done.out.splitlines()) == 2 and "--config.optimizer.learning_rate=0.0003" in done.out
    )
    done = command(f"--workdir={folder}", f"--launch=echo {{command}} >> {tmp_path}/asked; test {{name}} != x")
    assert done.status == 0 and len((tmp_path / "asked").read_text().splitlines()) == 2
    assert command(f"--workdir={folder}", "--launch=false").status == 1

    done = command(f"--workdir={folder}", "--workers=0")
    assert done.status == 0 and str(folder / "table.csv") in done.out
    assert [line["status"] for line in read_table(folder / "table.csv")] == ["finished", "finished", "", ""]
    assert "4 points: 2 finished" in (folder / "sweep.html").read_text()


@pytest.mark.parametrize(
    ("old", "new", "arguments", "named"),
    [
        ("get_sweep", "sweep", [], ["get_sweep()", "NoneType"]),
        ("return Sweep(", "return list(", [], ["get_sweep()", "list"]),
        ("seeds(2)))", "seeds(2)), metrics=('eval/pass',))", [], ["'eval/pass'"]),
        ("seeds(2)))", "seeds(2)), then=5)", [], ["then=5"]),
        ("seeds(2)))", "seeds(2)), after='mine:f')", [], ["after='mine:f'", "ModuleNotFoundError"]),
        ("seeds(2)))", "seeds(2)), after='leaves.py:f')", [], ["after='leaves.py:f'", "SystemExit: 0"]),
        ("seeds(2)))", "seeds(2)), facet='replay.capacity')", [], ["facet='replay.capacity'"]),
        ("seeds(2)))", "seeds(2)), thresholds={'rollout/pass_rate': '0.5'})", [], ["['rollout/pass_rate']='0.5'"]),
        ("seeds(2)))", "seeds(2)), label=lambda p: p['seed'])", [], ["label", "KeyError: 'seed'", "{"]),
        ("seeds(2)))", "seeds(2)), label=len)", [], ["label", "1", "{'optimizer.learn"]),
        ("seeds(2)))", "seeds(2)) + ['seed=1'])", [], ["point='seed=1'"]),
        ("1e-5", "1e-5 / 0", [], ["mine.py:14:", "ZeroDivisionError"]),
        ("1e-5", "-1.0", [], ["'seed': 0}", "optimizer.learning_rate=-1.0"]),
        ("", "", ["--workers=-1"], ["--workers=-1"]),
        ("", "", ["--launch={nmae}"], ["--launch='{nmae}'", "{command}, {name}, {workdir}"]),
        ("", "", ["--config.sede=1"], ["sede='1'", "seed"]),
        ("", "", ["--config.seed=7"], ["'seed': 0}", "--config.seed"]),
        ("", "", ["-config.optimizer.learning_rate", "1"], ["--config.optimizer.learning_rate"]),
    ],
)
def test_bad_input_is_one_line_and_nothing_runs(sweep_file, tmp_path, monkeypatch, capfd, old, new, arguments, named):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    sweep_file.write_text(FILE.replace(old, new, 1) if old else FILE)
    words = [f"--config={sweep_file}", f"--workdir={tmp_path / 'runs'}", *arguments]
    done = run_command("sweep", *words, monkeypatch=monkeypatch, capfd=capfd)
    assert done.status == 2 and done.err.count("\n") == 1, done
    check_words(done.err, *named)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_worker_trains_and_says_why_it_cannot(tmp_path):
    """The real worker, as far as a run gets whose model does not exist."""
    points = make_points([{"model.path": "/nowhere"}])
    given = Sweep([point for point, _ in points.values()])
    failed, _ = sweep_module.run_sweep(tmp_path, points, given, num_workers=1)
    assert list(failed) == list(points) and "error: model.path='/nowhere' does not exist" in failed[next(iter(points))]


def test_what_each_setting_does_is_found_with_bounds_that_hold_it():
    """600 random runs:

    the rate adds 0.3 from its lowest to its highest third, the clip 0.1, the third setting nothing.
    """
    rng = np.random.default_rng(0)
    runs = []
    for i in range(600):
        point = {"optimizer.learning_rate": float(rng.uniform(0, 1)), "algorithm.surrogate.high": 0.2 + 0.1 * (i % 2)}
        point |= {"algorithm.divergence.estimator": str(rng.choice(["k1", "k2", "k3"])), "seed": i}
        y = 0.45 * point["optimizer.learning_rate"] + 0.1 * (i % 2) + rng.normal(0, 0.1)
        runs.append(Run(str(i), point, "finished", rows(y)))
    sweep = Sweep([run.point for run in runs])
    found = knobs(runs, sweep, "eval/pass_rate last")
    assert [knob.field for knob in found] == [
        "optimizer.learning_rate",
        "algorithm.surrogate.high",
        "algorithm.divergence.estimator",
    ]
    for knob, effect in zip(found, (0.3, 0.1, 0.0), strict=True):
        _, low, high = knob.effect
        # Of three values that are alike the best one is somewhat better by chance.
        assert low < effect + 0.02 and effect - 0.02 < high and (low > 0.02) == (effect > 0)
        assert sum(count for _, count, *_ in knob.rows) == 600
        for name, count, mean, low, high in knob.rows:
            # The bootstrap's interval of a mean is the normal one's, here to a fifth of its width.
            mine = [figures(r, sweep)["eval/pass_rate last"] for r in runs if name in (str(r.point[knob.field]), "")]
            if mine:
                half = 1.96 * np.std(mine) / np.sqrt(count)
                assert abs((high - low) / 2 - half) < 0.2 * half and mean == pytest.approx(np.mean(mine))
    assert len(found[0].rows) == 3  # thirds of 600 different rates
    base = Run("base", {}, "finished", rows(0.5))
    (rate,) = (k for k in knobs([*runs, base], sweep, "eval/pass_rate last") if k.field == "optimizer.learning_rate")
    assert {name: n for name, n, *_ in rate.rows}["None"] == 1
    assert sorted(n for _, n, *_ in rate.rows) == [1, 200, 200, 200]
    assert knobs(runs[:1], sweep, "eval/pass_rate last") == []


def test_of_fewer_than_three_runs_no_interval_is_told(tmp_path):
    """Resampling the only run of a value always gives this run, so the interval would have no width."""
    values = {1.0: [0.1, 0.2, 0.4], 2.0: [0.5, 0.6], 3.0: [0.9]}
    runs = [Run(f"{x}{y}", {"x.lr": x}, "finished", rows(y)) for x, ys in values.items() for y in ys]
    sweep = Sweep([run.point for run in runs])
    (knob,) = knobs(runs, sweep, f"{M} last")
    assert [(name, count, math.isfinite(low)) for name, count, _, low, _ in knob.rows] == [
        ("1.0", 3, True),
        ("2.0", 2, False),
        ("3.0", 1, False),
    ]
    effect, low, high = knob.effect
    assert effect == pytest.approx(0.9 - 0.7 / 3) and math.isnan(low) and math.isnan(high)
    text = write_page(tmp_path / "sweep.html", runs, sweep, {}).read_text()
    assert text.count("<small>too few runs</small>") == 3 and "nan" not in text


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", '{"pass_rate": "x"}', '{"made_with": 7}', '{"a": "x"}'])
def test_damaged_files_of_a_run_are_left_out_of_the_table(text, tmp_path):
    for name in ("eval_before.json", "config.json"):
        (tmp_path / name).write_text(text)
    assert sweep_module.before(tmp_path) == {}
    assert sweep_module.made_with_of(tmp_path) == {}
