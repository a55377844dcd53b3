"""The closed forms of the replay plan, compared with the paper's figures and with a minimiser of J alone."""

import itertools
import json
import math

import numpy as np
import pytest
from support.command_line import run_command
from support.refusal import ANY, refused, refused_row

from jaxrl_llm.commands.replay_plan import Costs, fitted, measured_alpha, measured_mu, table
from jaxrl_llm.reports.metrics import read_metrics

SETTINGS = list(itertools.product((0.5, 2.0, 5.28, 20.0), (0.0, 0.01, 0.05, 0.3, 1.0), (0.05, 0.1, 0.25, 0.4)))


def j(mu, rho, alpha, x, y):
    """METHODS 1.4, theorem 4.5, with sigma(x) = x^alpha."""
    return (x**alpha) ** 2 * (1 + y / mu) * (1 / y + 1 / x + rho)


def minimum(function, dims):
    """Return the least value of a function with one minimum, and its place, by narrowing a logarithmic grid."""
    low, high = np.full(dims, -9.0), np.full(dims, 14.0)
    for _ in range(30):
        axes = [np.linspace(a, b, 33) for a, b in zip(low, high, strict=True)]
        values = function(*(np.exp(t) for t in np.meshgrid(*axes, indexing="ij")))
        best = np.unravel_index(np.argmin(values), values.shape)
        centre = np.array([t[i] for t, i in zip(axes, best, strict=True)])
        low, high = centre - (high - low) / 5, centre + (high - low) / 5
    return np.exp(centre), values.min()


@pytest.mark.parametrize(
    ("alpha", "x", "y", "cost"), [(0.1, 21.6, 7.4, 1.03), (0.25, 3.2, 3.8, 1.93)], ids=["slow noise", "fast noise"]
)
def test_the_examples_of_the_theory(alpha, x, y, cost):
    costs = Costs(5.28, 0.05, alpha)
    found = costs.unconstrained()
    assert found == (pytest.approx(x, abs=0.05), pytest.approx(y, abs=0.05))
    assert costs.relative_cost(*costs.optimum()) == pytest.approx(cost, abs=0.005)  # x >= y
    assert costs.relative_cost(1, 1) == pytest.approx(2.44, abs=0.005)


def test_both_optima_are_those_of_a_numeric_minimiser():
    constrained = []
    for mu, rho, alpha in SETTINGS:
        costs = Costs(mu, rho, alpha)
        for (x, y), function in (
            (costs.unconstrained(), lambda x, y: j(mu, rho, alpha, x, y)),  # noqa: B023
            (costs.optimum(), lambda x, y: j(mu, rho, alpha, np.maximum(np.maximum(x, y), 1), y)),  # noqa: B023
        ):
            at, least = minimum(function, 2)
            assert j(mu, rho, alpha, x, y) == pytest.approx(least, rel=1e-9)
            assert y == pytest.approx(at[1], rel=1e-3)
        assert x >= y and x >= 1
        constrained.append("as long as a batch" if x == y else "one iteration" if x == 1 else "free")
    assert len(set(constrained)) == 3  # all cases are there


def test_without_noise_growth_the_ring_has_no_limit_and_the_ratio_is_the_square_root():
    assert Costs(5.0, 0.05, 0.0).optimum() == (math.inf, pytest.approx(10.0))
    assert Costs(5.0, 0.0, 0.0).optimum() == (math.inf, math.inf)
    assert "no limit" in table(Costs(5.0, 0.0, 0.0), 64)


def test_the_best_horizon_of_a_ratio_is_that_of_a_minimiser():
    for y in (1.0, 4.0, 16.0):
        costs = Costs(5.28, 0.05, 0.1)
        _, least = minimum(lambda x: j(5.28, 0.05, 0.1, np.maximum(x, y), y), 1)  # noqa: B023
        assert costs.relative_cost(costs.best_horizon(y), y) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "named"),
    [((0, 0.1, 0.1), ("--mu", 0)), ((1, -0.1, 0.1), ("--rho", -0.1)), ((1, 0.1, 0.5), ("--alpha", 0.5))],
)
def test_values_without_an_optimum_are_refused(values, named):
    with refused(*named):
        Costs(*values)


@pytest.fixture
def command(monkeypatch, capfd):
    """Return the output of the command, or its error."""

    def run(*given, alpha=("--alpha=0.1",)):
        done = run_command("replay_plan", *alpha, *given, monkeypatch=monkeypatch, capfd=capfd)
        assert done.status == (2 if done.err else 0)
        return done.err or done.out

    return run


def test_what_a_run_measured_is_taken_from_its_metrics(command, tmp_path):
    sizes = {"rollout/generated_rows": 64, "replay/drawn_rows": 64}
    rows = [
        {"iteration": i + 1, "time/cost_ratio": value, **sizes} for i, value in enumerate((90.0, 3.0, None, 5.0, 4.0))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command(f"--workdir={tmp_path}") == f"mu 4\n{table(Costs(4.0, 0.05, 0.1))}\n"
    assert command(f"--workdir={tmp_path}", "--rho=0.2") == f"mu 4\n{table(Costs(4.0, 0.2, 0.1))}\n"
    assert "give --mu, or with --workdir a run" in command()
    assert "--mu=5.0 and --alpha=0.1" in command("--mu=5", f"--workdir={tmp_path}")


def test_the_price_of_a_run_that_reuses_is_said_to_be_that(command, tmp_path):
    lines = command(f"--workdir={write_run(tmp_path / 'y4', 16, 7)}").splitlines()
    assert lines[0].startswith("mu is of a run that trains 4 times on a rollout") and lines[1] == "mu 1"
    assert command(f"--workdir={write_run(tmp_path / 'y1', 64, 7)}").splitlines()[0] == "mu 1"


def test_a_declared_price_goes_with_the_ageing_that_a_run_measured(command, tmp_path):
    runs = write_ages(tmp_path, 0.2)
    lines = command("--mu=5.28", f"--workdir={runs[0]}", alpha=()).splitlines()
    assert lines[0].startswith("alpha 0.2") and lines[1] == "mu 5.28"
    assert "\n".join(lines[2:]) == table(Costs(5.28, 0.05, measured_alpha(runs[:1]).alpha))


def write_run(folder, rollouts, seconds, batch=64):
    """Write a run of three iterations. The first warms up, the others have about these seconds."""
    folder.mkdir()
    times = [50.0, 0.9 * seconds, 1.1 * seconds]
    names = {"time/generate_s": 0.5, "time/reward_s": 0.1, "time/update_s": 0.4}
    idle = {"iteration": 0, "rollout/generated_rows": rollouts, "replay/drawn_rows": 0, "time/cost_ratio": None}
    rows = [
        {"iteration": i, "rollout/generated_rows": rollouts, "replay/drawn_rows": batch, "time/cost_ratio": 1.0}
        | {name: share * time for name, share in names.items()}
        for i, time in enumerate(times, 1)
    ]
    rows = [idle | dict.fromkeys(names, 0.0)] * 5 + rows  # trained on nothing, as with a delay
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_of_several_runs_what_does_not_depend_on_generation_counts_as_training(command, tmp_path):
    """3 s + 0.25 s R at B = 64 is 3 / 64 (B + mu R) with mu = 0.25 * 64 / 3, at every R."""
    runs = [write_run(tmp_path / f"r{r}", r, 3 + 0.25 * r) for r in (16, 32, 64)]
    seconds = fitted(runs)
    assert seconds[:3] == pytest.approx((3.0, 0.25, 64.0)) and seconds.mu == pytest.approx(16 / 3)
    for rollouts, measured in seconds.measured:
        assert 3 / 64 * (64 + seconds.mu * rollouts) == pytest.approx(measured)
    lines = command(f"--workdir={','.join(runs)}").splitlines()
    assert lines[0] == "an iteration takes 3 s + 0.25 s for each rollout it generates"
    assert lines[1] == "  16 generated, 64 trained: 7 s measured, 7 s fitted"
    assert lines[4] == "mu 5.33" and "\n".join(lines[5:]) == table(Costs(16 / 3, 0.05, 0.1))


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (((16, 7.0, 64), (16, 8.0, 64)), ["16 rollouts"]),
        (((16, 7.0, 64), (32, 8.0, 32)), ["r0 64", "r1 32"]),
        (((16, 8.0, 64), (32, 7.0, 64)), ["above 0"]),
    ],
)
def test_runs_that_say_nothing_of_the_cost_of_generation_are_refused(tmp_path, runs, words):
    workdirs = [write_run(tmp_path / f"r{i}", *run) for i, run in enumerate(runs)]
    with refused(f"--workdir={','.join(workdirs)}", ANY, *words):
        fitted(workdirs)


def test_a_run_that_measured_no_cost_and_a_file_of_no_run_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "update/loss": 1.0}\n')
    with refused(f"--workdir={tmp_path}"):
        measured_mu(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with refused_row("metrics.jsonl", 1, "`iteration`"):
        measured_mu(str(tmp_path))
    assert Costs(5.28, 0.0, 1e-160).unconstrained()[0] == math.inf


def write_ages(folder, alpha, buckets=5, batch=64, fresh=1.1):
    """Write two runs of two iterations with a known noise of the ring.

    The noise, the mean of 1 / ess over ages below x, is fresh x^(2 alpha).
    """
    bounds, labels = (0, 1, 2, 4, 8, 16), ("0", "1", "2-3", "4-7", "8-15")
    total = [fresh * x ** (1 + 2 * alpha) for x in bounds]
    of_bucket = [(total[i + 1] - total[i]) / (bounds[i + 1] - bounds[i]) for i in range(buckets)]
    runs = []
    for r, rollouts in enumerate((16, 32)):
        runs.append(write_run(folder / f"r{r}", rollouts, 3 + 0.25 * rollouts, batch))
        rows = read_metrics(folder / f"r{r}")
        for share, row in zip((1, 0.9, 1.1), rows[-3:], strict=True):  # the first is left out; then their mean is right
            for label, noise in zip(labels, of_bucket, strict=False):
                row[f"update/ess_frac_age_{label}"] = 1 / (noise * share)
        (folder / f"r{r}" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return runs


@pytest.mark.parametrize("buckets", [2, 5])
def test_alpha_is_that_of_the_power_law_that_ratios_follow(command, tmp_path, buckets):
    runs = write_ages(tmp_path, 0.2, buckets)
    ageing = measured_alpha(runs)
    assert ageing.alpha == pytest.approx(0.2)
    assert ageing.noise == tuple((x, pytest.approx(x**0.4)) for x in (2, 4, 8, 16)[: buckets - 1])
    lines = command(f"--workdir={runs[0]}", alpha=()).splitlines()[1:]  # the first is of its price
    assert lines[0].startswith("alpha 0.2: a ring of 2") and "is 1.32" in lines[0]
    assert lines[1] == "mu 1" and "\n".join(lines[2:]) == table(Costs(1.0, 0.05, measured_alpha(runs[:1]).alpha))
    of_both = command(f"--workdir={','.join(runs)}", alpha=()).splitlines()
    assert of_both[3] == lines[0]


@pytest.mark.parametrize("buckets", [1, 2])
def test_a_run_that_replays_less_and_whose_fresh_rollouts_are_noisier_changes_no_alpha(tmp_path, buckets):
    """Once, its fresh rollouts were in the denominator and none of its rollouts in the numerator.

    With one age bucket it is on-policy.
    """
    for name in ("replay", "less"):
        (tmp_path / name).mkdir()
    runs, others = write_ages(tmp_path / "replay", 0.2), write_ages(tmp_path / "less", 0.2, buckets, fresh=3.0)
    ageing = measured_alpha([*others, *runs])
    assert ageing.alpha == pytest.approx(0.2)
    assert ageing.noise == tuple((x, pytest.approx(x**0.4)) for x in (2, 4, 8, 16))


def test_an_alpha_that_is_nowhere_is_asked_for(command, tmp_path):
    assert "needs --alpha" in command("--mu=1", alpha=())
    for name, alpha, buckets, said in (
        ("on_policy", 0.2, 1, "has no run that trained on rollouts of age 0 and of age 1: give --alpha"),
        ("fast", 0.7, 5, "the theory requires less than 0.5"),
    ):
        (tmp_path / name).mkdir()
        assert said in command(f"--workdir={write_ages(tmp_path / name, alpha, buckets)[0]}", alpha=())


def test_the_command_prints_the_sizes(command):
    best = command("--mu=5.28", "--rollouts=64").splitlines()[-2].split()
    assert best[:6] == ["best", "7.41", "21.62", "2.92", "1.028", "42%"]
    assert [int(size) for size in best[6:]] == pytest.approx([7.41 * 64, 21.62 * 64], abs=1)
