"""The replay study: its bandit; costs, tables and choices by hand; and that its page matches studies/data."""

import dataclasses
import json
import math
import re
import runpy

import numpy as np
import pytest
from support.refusal import raises_with, refused

from jaxrl_llm.commands.sweep import read_sweep
from jaxrl_llm.config import defaults, freeze, from_json, to_json
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.stream import split_held_out
from jaxrl_llm.settings.use import use
from jaxrl_llm.sweeps.points import freeze_points, with_point
from jaxrl_llm.sweeps.table import Run
from studies import all as everything
from studies import arms, costs, design, raw, seeds, timing, transfer
from studies.bandit import REWARDS, gradient, limit, run, softmax, summary


def test_the_gradient_is_that_of_finite_differences():
    draw = np.random.default_rng(0)
    logits, behaviour = draw.normal(size=8), softmax(draw.normal(size=8))

    def objective(x):
        return behaviour @ ((REWARDS - behaviour @ REWARDS - 0.2) * np.log(softmax(x)))

    found = gradient(softmax(logits), behaviour, REWARDS, 0.2)
    for i, step in enumerate(1e-6 * np.eye(8)):
        np.testing.assert_allclose(found[i], (objective(logits + step) - objective(logits - step)) / 2e-6, atol=1e-8)


@pytest.mark.parametrize("delta_v", [-0.6, -0.2])
def test_below_zero_a_fixed_behaviour_leads_to_the_derived_limit(delta_v):
    behaviour = softmax(np.random.default_rng(1).normal(size=8))
    expected = limit(behaviour, REWARDS, delta_v)
    np.testing.assert_allclose(expected.sum(), 1, atol=1e-9)
    np.testing.assert_allclose(run(behaviour, REWARDS, delta_v, steps=20_000), expected, atol=2e-3)
    assert (expected > 0.01).sum() > 1


def test_stale_data_keep_several_arms_below_zero_and_leave_one_above():
    behaviour = softmax(np.random.default_rng(2).normal(size=8))
    assert summary(run(behaviour, REWARDS, -0.3), REWARDS)[2] >= 2
    assert run(behaviour, REWARDS, 0.1).max() > 0.999


# ---- costs -----------------------------------------------------------------------------------------------------


def config_with(**functions):
    config = defaults()
    for name, function in functions.items():
        setattr(config.algorithm, name, function)
    return freeze(config)


@pytest.mark.parametrize(
    ("functions", "of_trained", "of_generated"),
    [
        ({}, 0, 0),
        ({"divergence": use("reference")}, 0, 1),
        ({"old_policy": use("generation")}, 0, 1),
        ({"old_policy": use("ewma")}, 1, 0),
        ({"correction": use("second_moment")}, 1, 0),  # the limit is of the whole batch
        ({"correction": use("second_moment"), "old_policy": use("ewma")}, 2, 0),
    ],
)
def test_forwards_beside_the_updates_are_counted(functions, of_trained, of_generated):
    assert costs.forwards(config_with(**functions)) == (of_trained, of_generated)


def rows_of(generated, trained):
    return [{costs.GENERATED: g, costs.TRAINED: t} for g, t in zip(generated, trained, strict=True)]


def test_compute_counts_what_was_generated_trained_and_only_looked_at():
    run = Run("a", {}, "finished", rows_of([8, 16, 8], [4, 4, 0]))
    # 4 + 5 * 8, + 4 + 5 * 16, + 5 * 8; and with forwards 4 / 3 * 2 + 8 / 3 more, 4 / 3 * 2 + 16 / 3, 8 / 3.
    assert costs.compute(run, costs.Forwards(0, 0), 5.0).tolist() == [44, 128, 168]
    assert costs.compute(run, costs.Forwards(2, 1), 5.0) == pytest.approx([44 + 16 / 3, 128 + 40 / 3, 168 + 16])


def test_seconds_grow_with_what_was_resampled():
    times = costs.Times(generate_s=0.2, update_s=0.3, iteration_s=0.6, generated=8.0, trained=4.0)
    run = Run("a", {}, "finished", rows_of([8, 16], [4, 4]))
    assert costs.seconds(run, times) == pytest.approx([0.6, 1.4])
    assert times.mu == pytest.approx((0.2 / 8) / (0.3 / 4))


def test_the_marginal_mu_is_that_of_a_straight_line():
    """2 s + 0.1 s R at B = 20 gives mu = 0.1 * 20 / 2."""
    times = [costs.Times(0.0, 0.0, 2 + 0.1 * r, r, 20.0) for r in (5.0, 10.0, 20.0)]
    assert costs.line(times).mu == pytest.approx(1.0)


def test_noise_is_found_from_what_arms_cost():
    """The costs are seven times J with rho = 10^-1.5 and alpha = 0.1 at mu = 4.

    One more arm has twice that, which does not affect the others.
    """
    j = lambda x, y: x**0.2 * (1 + y / 4) * (1 / y + 1 / x + 10**-1.5)
    measured = {(y, n): 7 * j(n * y, y) for y in (1, 2, 4, 8) for n in (1, 3, 16)}
    found = costs.Noise.of(4.0, measured)
    assert (found.costs.mu, found.costs.rho, found.costs.alpha) == pytest.approx((4.0, 10**-1.5, 0.1))
    assert found.error < 1e-9 > found.left_out_error
    off = costs.Noise.of(4.0, measured | {(2, 3): 14 * j(6, 2)})
    assert off.left_out_error >= math.log(2) / math.sqrt(12) * 0.999 > off.error


def test_arms_that_differ_in_rate_and_seed_alone_are_timed_once():
    held_out = {"eval": {"num_prompts": 4, "name": "test"}, "prompts": {"source": "arithmetic"}}
    configs = [freeze(held_out) for _ in range(4)]
    configs[1] = dataclasses.replace(
        configs[1], seed=3, optimizer=dataclasses.replace(configs[1].optimizer, learning_rate=1e-3)
    )
    configs[2] = dataclasses.replace(configs[2], replay=dataclasses.replace(configs[2].replay, delay_iterations=3))
    one, same, late, _ = (timing.timed(config, 5) for config in configs)
    assert one == same and one.num_iterations == 5 and one.eval.num_prompts == 0
    assert from_json(to_json(one)) == one  # a run reads what it has written
    assert late.num_iterations == 8  # three train on nothing


# ---- raw metrics and tables ------------------------------------------------------------------------------------

CONFIG = "configs/sweeps/e2_replay_ratio.py"


def record(arm, seed, rate, passed, **more):
    """Return a run of ``arm`` with one iteration per evaluation.

    Each of two questions has 4 answers, of which some pass.
    """
    point = {"seed": seed, **arm, "optimizer.learning_rate": rate}
    ratio = 16 // arm["rollout.prompts_per_iteration"]
    columns = {"iteration": list(range(1, len(passed) + 1))} | {name: [0.5] * len(passed) for name in raw.METRICS}
    columns |= {costs.GENERATED: [128 // ratio] * len(passed), costs.TRAINED: [128] * len(passed), **more}
    about = {
        "name": f"{ratio} {seed} {rate}",
        "label": f"{everything.SUMS.label(arm)}, rate {rate:.2g}",
        "point": point,
    }
    return about | {"samples": 4, "passed": passed, "metrics": columns}


def written(folder, records):
    made_with = {"commit": "abc", "machine": {"cpu": "x"}}
    raw.write({"config": CONFIG, "made_with": made_with, "runs": records}, folder / "raw.json.xz")
    return raw.read(folder / "raw.json.xz")


def test_an_arm_may_generate_at_once_what_several_steps_want():
    study = design.Design(batch=128, on_policy_steps=96, evaluations=48)
    # The budget is 96 x 128 x 6.28; an iteration costs 4 x 128 + 5.28 x 128: 64.97 of them.
    assert study.arm(4, 8, at_once=True) == {
        "rollout.prompts_per_iteration": 16,
        "replay.capacity": 1024,
        "num_iterations": 65,
        "eval.every_iterations": 1,
        "update.updates_per_iteration": 4,
    }
    one_by_one = study.arm(4, 8)  # a step costs 128 + 5.28 x 32: 259.88 of them
    assert one_by_one["rollout.prompts_per_iteration"] == 4 and one_by_one["num_iterations"] == 260


ON_POLICY, REUSED = everything.SUMS.arm(1, 1), everything.SUMS.arm(4, 8)
SLOW, FAST = [[0, 0], [1, 1], [1, 2], [2, 2], [2, 2]], [[1, 0], [2, 2], [3, 3], [3, 3], [3, 3]]


def test_runs_of_a_seed_that_were_asked_other_questions_are_refused(tmp_path):
    """Runs are compared question by question. They may draw different numbers of answers to a question."""
    for name, prompts in {"a": ["1", "1", "2", "2"], "b": ["1", "2"], "c": ["2", "1"]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval_before.json").write_text(json.dumps({"samples": [{"prompt": x} for x in prompts]}))
    twice, once = (freeze(with_point({}, {"eval.num_samples": n})) for n in (2, 1))
    another_seed = dataclasses.replace(once, seed=1)
    raw.refuse_other_questions([(tmp_path / "a", twice), (tmp_path / "b", once), (tmp_path / "c", another_seed)])
    with raises_with(SystemExit, str(tmp_path / "c"), str(tmp_path / "a")):
        raw.refuse_other_questions([(tmp_path / "a", twice), (tmp_path / "c", once)])


def test_raw_metrics_come_back_as_they_were_written(tmp_path):
    arm = ON_POLICY | {"algorithm.reference_reset_iterations": (3,)}
    after = {"after": {"gcd/pass@1": 0.25}}
    study = written(tmp_path, [record(arm, 1, 2e-4, SLOW) | after, record(arm, 100, 2e-4, FAST)])
    assert [run.name for run in study.runs] == ["1 1 0.0002", "1 100 0.0002"]
    assert [run.name for run in study.reported()] == ["1 1 0.0002"]  # 100 chose the rate
    assert study.runs[0].point["algorithm.reference_reset_iterations"] == (3,)
    assert [dict(run.after) for run in study.runs] == [{"gcd/pass@1": 0.25}, {}]
    assert study.passed["1 1 0.0002"].tolist() == SLOW and study.runs[0].rows[1]["iteration"] == 2


def test_the_answers_that_passed_are_counted_by_question_and_failed_rewards_refused(tmp_path):
    path = tmp_path / "eval_8.json"

    def counted(*rewards):
        path.write_text(json.dumps({"num_samples": 3, "samples": [{"reward": x} for x in rewards]}))
        return raw._passed(path, 0.5)

    assert counted(1.0, 0.5, 0.4, 1.0, 0.0, 0.2) == [2, 1]
    with raises_with(SystemExit, str(path), "1 answers"):
        counted(1.0, 0.5, None, 1.0, 0.0, 0.2)


def finished(folder, sweep, only):
    """Make the folders of runs of some arms, each with one row and two answered questions, for ``then`` and ``raw``."""
    base = runpy.run_path(CONFIG)["get_config"]()
    arm_of = lambda point: sweep.name_of({field: value for field, value in point.items() if field != "seed"})
    points = [point for point in sweep.points if arm_of(point).startswith(f"{only}, rate")]
    for name, (_, config) in freeze_points(base, points).items():
        (folder / name).mkdir(parents=True)
        row = {"iteration": config.num_iterations, "eval/pass_rate": config.optimizer.learning_rate, design.COMPUTE: 1}
        asked = {"num_samples": 1, "samples": [{"prompt": x, "reward": 1.0} for x in "ab"]}
        files = {"metrics.jsonl": row, "config.json": {"made_with": {"commit": "abc"}}, "report.html": ""}
        for file, content in (files | dict.fromkeys(("eval_before.json", "eval_after.json"), asked)).items():
            (folder / name / file).write_text(json.dumps(content) + "\n")


def test_arms_of_a_sweep_are_put_into_its_file_one_after_another(tmp_path):
    """Two of the thirty arms run on different machines. Each arm runs all rates, then its best rate is reported."""
    sweep, out = read_sweep(CONFIG), tmp_path / "raw.json.xz"
    for folder, only in (("here", "y 1, N 8 B"), ("there", "y 4, N 8 B")):
        finished(tmp_path / folder, sweep, only)
        content = raw.collect(CONFIG, tmp_path / folder, [only])
        raw.write(raw.added(content, out), out)
    labels = raw.read(out).labels.values()
    assert len(labels) == 12 and {design.without_rate(label) for label in labels} == {"y 1, N 8 B", "y 4, N 8 B"}
    raw.write(raw.added(content, out), out)
    assert len(raw.read(out).runs) == 12  # not 18
    with raises_with(SystemExit, "made_with", str(out)):
        raw.added(content | {"made_with": content["made_with"] | {"commit": "def"}}, out)
    with refused("--only", "y 3", raises=SystemExit):
        raw.collect(CONFIG, tmp_path / "here", ["y 3"])


def test_seeds_of_an_arm_are_put_into_its_file_one_after_another(tmp_path):
    """The second seed runs on another machine. An arm is shown when all of its seeds are there."""
    content_of = lambda runs, cpu: {"config": CONFIG, "made_with": {"machine": {"cpu": cpu}}, "runs": runs}
    whole, out = [record(ON_POLICY, s, 4e-4, SLOW) for s in (0, 1)], tmp_path / "raw.json.xz"
    first, second, another = (record(REUSED, s, rate, FAST) for s, rate in ((0, 2e-4), (1, 2e-4), (1, 4e-4)))
    shown = lambda: [arm.name for arm in arms.arms_of(raw.read(out))]
    raw.write(content_of([*whole, first], "a"), out)
    assert shown() == ["y 1, N 1 B, rate 0.0004"]
    raw.write(raw.added(content_of([second], "b"), out), out)
    assert shown() == ["y 1, N 1 B, rate 0.0004", "y 4, N 8 B, rate 0.0002"]
    assert raw.content_of(out) == content_of([*whole, first, second | {"machine": {"cpu": "b"}}], "a")
    assert [machine["cpu"] for machine in raw.read(out).machines.values()] == ["a", "a", "a", "b"]
    with raises_with(SystemExit, "'y 4, N 8 B'", "0.0002", "0.0004"):
        raw.added(content_of([another], "a"), out)


def test_between_evaluations_counts_are_added_and_the_rest_is_averaged():
    rows = [{"iteration": i, costs.GENERATED: 8, "update/entropy_nats": 0.1 * i} for i in (1, 2, 3, 4)]
    rows[1]["eval/pass_rate"], rows[3]["eval/pass_rate"] = 0.2, 0.4
    found = raw._between(rows, [2, 4])
    assert [row[costs.GENERATED] for row in found] == [16, 16]
    assert [row["update/entropy_nats"] for row in found] == pytest.approx([0.15, 0.35])
    assert [row["eval/pass_rate"] for row in found] == [0.2, 0.4]


def test_what_lies_beyond_the_budget_is_left_out_and_the_last_evaluation_counts_once(tmp_path):
    """A step of on-policy training costs 128 * 6.28; the budget is 200 steps."""
    every = [*range(40, 201, 40)]
    evaluated = [None if i not in every else 0.5 for i in range(1, 241)]
    long = {"iteration": [*range(1, 241)], "eval/pass_rate": evaluated} | {
        name: [0.5] * 240 for name in raw.METRICS if name != "eval/pass_rate"
    }
    long |= {costs.GENERATED: [128] * 240, costs.TRAINED: [128] * 240}
    passed = [[i, i] for i in range(1, 6)]
    end = dict(long, **{"eval/pass_rate": [*evaluated[:200], *[None] * 39, 0.5]})
    runs = [record(ON_POLICY, s, 4e-4, [*passed, [9, 9]], **end) for s in (0, 1)]
    (arm,) = arms.arms_of(written(tmp_path, runs))
    assert len(arm.runs[0].rows) == 200 and arm.passed.tolist() == [passed] * 2
    close = dict(long, **{"eval/pass_rate": [0.5 if i in (40, 80, 120, 159, 160) else None for i in range(1, 241)]})
    (arm,) = arms.arms_of(written(tmp_path, [record(ON_POLICY, s, 4e-4, passed, **close) for s in (0, 1)]))
    assert arm.evaluation_rows.tolist() == [[39, 79, 119, 159]] * 2 and arm.passed[0].tolist() == [
        [1, 1],
        [2, 2],
        [3, 3],
        [5, 5],
    ]


def test_the_table_of_arms_by_hand(tmp_path):
    """Two equal seeds: only the two questions change the figures."""
    runs = [record(ON_POLICY, s, 4e-4, SLOW) for s in (0, 1)] + [record(REUSED, s, 2e-4, FAST) for s in (0, 1)]
    base, fast = arms.arms_of(written(tmp_path, runs))
    # Shares [0, .25, .375, .5, .5], smoothed .125, .2083, .375, .4583, .5: 0.4 lies 0.3 of the way from 3 to 4.
    assert base.compute(5.28)[0] == pytest.approx([6.28 * i for i in range(1, 6)])
    assert base.cost_to(0.4, base.compute(5.28))[0] == pytest.approx(6.28 * 3.3)
    # [.125, .5, .75, .75, .75] smoothed .3125, .4583: 0.4 lies 0.6 of the way from 1 to 2, at 1 + 5.28 / 4 each.
    assert fast.cost_to(0.4, fast.compute(5.28))[0] == pytest.approx(2.32 * 1.6)
    found = arms.saving(fast, base, 0.4, lambda arm: arm.compute(5.28))
    assert found.value == pytest.approx(1 - 2.32 * 1.6 / (6.28 * 3.3))
    # 0.5 is reached by the base at the end alone, at 5 * 6.28; 0.6 never: it is charged what it spent, the same.
    late, never = (arms.saving(fast, base, rate, lambda arm: arm.compute(5.28)).value for rate in (0.5, 0.6))
    assert late == pytest.approx(1 - 2.32 * (2 + (0.5 - 11 / 24) / (2 / 3 - 11 / 24)) / 31.4)
    assert never == pytest.approx(1 - 2.32 * (2 + (0.6 - 11 / 24) / (2 / 3 - 11 / 24)) / 31.4)
    # The first evaluation at 0.4 or more of the smoothed curve, and a metric between its neighbours.
    assert (base.first_evaluation_at(0.4), fast.first_evaluation_at(0.4), base.first_evaluation_at(0.6)) == (3, 1, 4)
    rows = [{"x": value} for value in (1.0, 2.0, None, 4.0, 5.0)]
    other = dataclasses.replace(base, runs=[dataclasses.replace(run, rows=rows) for run in base.runs])
    assert [other.mean_around("x", i).value for i in (0, 1, 3)] == [1.5, 2.0, 4.5]
    lines = arms.table([base, fast], 0.4, base=base).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == [
        *("arm", "held-out pass rate", "more", "pass@4", "batches to 0.40", "saved", "entropy"),
    ]
    assert cells[2][:3] == ["y 1, N 1 B, rate 0.0004", "0.46 (0.42-0.50)", ""] and cells[2][5:] == [
        "",
        "0.50 (0.50-0.50)",
    ]
    assert cells[3][0] == "y 4, N 8 B, rate 0.0002" and cells[3][1] == "0.75 (0.75-0.75)"
    assert (
        cells[3][2] == "+0.29 (+0.25 to +0.33)"
        and cells[3][5].startswith("82% (")
        and cells[3][6] == "0.50 (0.50-0.50)"
    )
    # A ring of 8 batches of 128, of which a step generates 32: 1.6 steps do not fill it; one batch is full by 3.3.
    assert base.has_full_ring_at(0.4) and not fast.has_full_ring_at(0.4)
    # Each seed by itself has the mean's cost, for they are alike.
    assert [one.cost_to(0.4, one.compute(5.28)).tolist() for one in seeds.by_seed(base)] == [
        [pytest.approx(6.28 * 3.3)]
    ] * 2
    alike = seeds.saving(fast, base, 0.4, arms.DECLARED)
    assert (alike.mean, alike.low, alike.high) == pytest.approx([found.value] * 3)
    assert seeds.ends(fast, base)[:3] == pytest.approx([0.75 - 11 / 24] * 3)
    never = seeds.saving(base, fast, 0.7, arms.DECLARED)
    assert math.isnan(never.low) and never.p == 1.0


def test_arms_that_do_the_same_work_share_what_was_measured_of_them():
    ring = lambda batches, **more: Run(
        "", everything.SUMS.arm(4, batches) | {design.RATE: 1e-4 * batches, **more}, "", []
    )
    arms_by_name = {"a": ring(1), "b": ring(2), "c": ring(8), "other": ring(2, **{"algorithm.surrogate": "cispo"})}
    times = {
        name: costs.Times(0.1, x, 2 * x, 32.0, 128.0)
        for name, x in zip(arms_by_name, (1.0, 5.0, 2.0, 7.0), strict=True)
    }
    found = arms.times_of_work(arms_by_name, times)
    assert found["a"] == found["b"] == found["c"] == costs.Times(0.1, 2.0, 4.0, 32.0, 128.0)
    assert found["other"] == times["other"]
    some = arms.times_of_work(arms_by_name, {name: times[name] for name in ("a", "b")})
    assert "other" not in some and some["c"] == costs.Times(0.1, 3.0, 6.0, 32.0, 128.0)  # as those that do its work


def test_t_intervals_and_holm_by_hand():
    """Values 1, 2, 3, 4: s = sqrt(5/3), t(0.975, 3) = 3.18245; p by the closed form for three degrees of freedom."""
    found = seeds.paired([1.0, 2.0, 3.0, 4.0])
    reach = 3.18245 * math.sqrt(5 / 3) / 2
    assert (found.mean, found.low, found.high) == pytest.approx((2.5, 2.5 - reach, 2.5 + reach), rel=1e-5)
    t = 2.5 / (math.sqrt(5 / 3) / 2)
    z = t / math.sqrt(3)
    assert found.p == pytest.approx(1 - 2 / math.pi * (math.atan(z) + z / (1 + z * z)))
    assert seeds.paired([1.0, math.inf, 3.0, 4.0]).p == 1.0
    # 0.05 / 3, / 2, / 1: the first fails the second's bar.
    assert seeds.holm({"a": 0.03, "b": 0.016, "c": 0.04}) == ["b"]
    assert seeds.holm({"a": 0.024, "b": 0.016, "c": 0.04}) == ["b", "a", "c"]


def test_ranks_of_costs_by_hand():
    """Four draws follow the figures themselves, which do not count."""
    first, second, third = seeds.ranks(np.array([[9, 1, 1, 3, 1], [1, 2, 2, 2, 2], [1, 3, 3, 1, np.inf]], float))
    assert (first, second, third) == ((0.75, 1, 3), (0.0, 2, 2), (0.25, 1, 3))


def test_what_a_run_does_beyond_the_budget_chooses_no_rate():
    """1e-3 would win by its last evaluation, which is beyond the budget."""
    sweep = design.sweep_of([{"x": 1, design.EVERY: 10}], str, (1e-4, 1e-3), choosing=[{"seed": 100}], budget=30.0)
    assert [point[design.SAMPLES] for point in sweep.points] == [16, 16]

    def run(point, rates):
        rows = [{"iteration": i + 1, design.COMPUTE: 15.0 * (i + 1), design.METRICS[0]: x} for i, x in enumerate(rates)]
        return Run(str(point), point, "finished", rows)

    slow, fast = ([0.1, 0.3, 0.3], [0.1, 0.2, 0.9])
    chosen = sweep.then([run(point, rates) for point, rates in zip(sweep.points, (slow, fast), strict=True)])
    assert [point["seed"] for point in chosen] == [0, 1, 2, 3]
    assert chosen[0] == {"seed": 0, "x": 1, design.EVERY: 10, design.RATE: 1e-4}


def test_compute_at_an_arms_own_mu_is_seconds_over_those_of_the_base(tmp_path):
    """An iteration has 0.2 s of update and 0.3 s of generation. The base trains on a batch of 128 in 0.1 s: 5 each."""
    runs = [record(REUSED, s, 2e-4, FAST) for s in (0, 1)]
    (arm,) = arms.arms_of(written(tmp_path, runs))
    arm = dataclasses.replace(arm, times=costs.Times(0.3, 0.2, 0.6, generated=32.0, trained=128.0))
    base = dataclasses.replace(arm, times=costs.Times(9.0, 0.1, 9.9, generated=128.0, trained=128.0))
    assert arm.compute_at_own_mu(base)[0] == pytest.approx([5.0 * i for i in range(1, 6)])
    # With itself as the base: trained + mu generated, mu = (0.3 / 32) / (0.2 / 128), in batches.
    assert arm.compute_at_own_mu(arm)[0] == pytest.approx([1 + 6 / 4] * np.arange(1, 6))
    assert arm.seconds()[0] == pytest.approx([0.6 * i for i in range(1, 6)])


def test_both_tasks_are_asked_after_a_reported_run_and_its_checkpoint_goes(tmp_path, monkeypatch):
    asked = []

    def command(config, model, checkpoint, num_samples):
        assert (tmp_path / "checkpoints").is_dir()
        asked.append(config)
        return {"pass_at_k": {"1": 0.1 * len(asked)}}

    monkeypatch.setattr(transfer, "evaluate", command)
    sweep = read_sweep("configs/sweeps/smollm2.py")
    assert sweep.after == "studies.transfer:measure"
    trained = freeze_points(runpy.run_path("configs/sweeps/smollm2.py")["get_config"](), [sweep.points[0]])
    ((_, config),) = trained.values()
    assert config.seed == 100  # it only chooses a learning rate
    (tmp_path / "checkpoints").mkdir()
    assert transfer.measure(config, tmp_path) == {} and not asked and not (tmp_path / "checkpoints").exists()
    for seed in (0, 3):
        (tmp_path / "checkpoints").mkdir()
        found = transfer.measure(dataclasses.replace(config, seed=seed), tmp_path)
        assert list(found) == ["held-out/pass@1", "gcd/pass@1"] and not (tmp_path / "checkpoints").exists()
    assert found == pytest.approx({"held-out/pass@1": 0.3, "gcd/pass@1": 0.4})
    assert [one.seed for one in asked] == [0, 0, 3, 0] and asked[1] == asked[3]  # the same questions for every run
    assert asked[0].prompts == config.prompts and asked[1].prompts.name == "gcd"
    examples = tasks.load(asked[1].prompts, seed=0).examples
    assert len(split_held_out(examples, asked[1].eval.num_prompts, seed=0)[1]) == 32


def test_a_table_takes_what_came_after_the_runs(tmp_path):
    runs = [record(ON_POLICY, s, 4e-4, SLOW) | {"after": {"gcd/pass@1": 0.1 + 0.2 * s}} for s in (0, 1)]
    (arm,) = arms.arms_of(written(tmp_path, runs))
    lines = arms.table([arm], 0.4, more={"gcd": lambda arm: arm.after("gcd/pass@1").text()}).splitlines()
    assert lines[0].endswith("| entropy | gcd |") and lines[2].endswith("| 0.50 (0.50-0.50) | 0.20 (0.10-0.30) |")


# ---- the page --------------------------------------------------------------------------------------------------


# Plain: the tables by hand, above; test_every_table_of_arms_has_a_mark.
@pytest.mark.tier("slow")
def test_every_table_and_figure_of_the_page_is_what_the_raw_metrics_give(tmp_path):
    """``python -m studies.all`` makes them. Run it after a change of raw metrics or of a table."""
    assert everything.differing(tmp_path) == []


def test_every_table_of_arms_has_a_mark():
    text = (everything.FOLDER / "replay_study.md").read_text()
    assert {name for _, name, _, _ in everything.MARK.findall(text)} <= set(everything.TABLES)
    unmarked = everything.MARK.sub("", text)
    assert not re.findall(r"^\| arm \| held", unmarked, re.MULTILINE)
