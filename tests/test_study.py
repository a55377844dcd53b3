"""The replay study: its bandit, its figures, and that the tables of its page are what their commands print."""

import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.sweep.table import Run
from studies import arms, raw
from studies.bandit import REWARDS, gradient, limit, run, softmax, summary

ROOT = pathlib.Path(__file__).parents[1]


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


def study_run(name, *passed, entropy=0.5):
    rows = [
        {
            "iteration": i,
            "time/compute_rollouts": 128.0 * i,
            "eval/pass_rate": rate,
            "update/entropy_nats": entropy,
            "rollout/pass_rate": 0.5,
        }
        for i, rate in enumerate(passed, 1)
    ]
    return Run(name, {}, "finished", rows)


def test_the_table_of_arms_has_medians_over_seeds():
    slow = [study_run("a", 0.1, 0.2, 0.3, 0.4)]  # ends at (0.2 + 0.3 + 0.4) / 3
    fast = [study_run("b", 0.2, 0.52, 0.6, 0.7), study_run("c", 0.1, 0.2, 0.3, 0.4, entropy=0.7)]
    lines = arms.table([("fast", fast), ("slow", slow)], {"a": 0.5, "b": 1.0, "c": 0.5}, 0.48).splitlines()
    # 0.48 lies at 7 / 8 of the way from the first evaluation, at 1 batch, to the second.
    assert lines[2:] == [
        "| fast | 2 | 0.45 (0.30-0.61) | 0.55 | 0.75 | 2 (1 of 2) | 4 | 0.60 | 0.50 |",
        "| slow | 1 | 0.30 | 0.40 | 0.50 | never | 4 | 0.50 | 0.50 |",
    ]
    assert arms.compute_to(fast[0], 0.48) == pytest.approx(1.875)


def test_raw_metrics_come_back_as_they_were_written(tmp_path):
    point = {"seed": 1, "algorithm.reference_reset_iterations": (3,)}
    columns = {name: [0.25, None] for name in raw.METRICS}
    record = {"name": "a", "point": point, "metrics": columns, "pass_at_k": {"32": 0.5}}
    raw.write({"config": "x.py", "made_with": {}, "runs": [record]}, tmp_path / "raw.json.xz")
    (run,), pass_at_k = raw.read(tmp_path / "raw.json.xz")
    assert run.point == point and pass_at_k == {"a": {"32": 0.5}}
    assert [row["iteration"] for row in run.rows] == [1, 2]
    assert [row["eval/pass_rate"] for row in run.rows] == [0.25, None]


PAGE = (ROOT / "docs" / "replay_study.md").read_text()
PRINTED = re.findall(r"```\n(python -m studies\.arms .*?)\n```\n\n(.*?)\n\n", PAGE, re.DOTALL)


@pytest.mark.parametrize("command", [command for command, _ in PRINTED])
def test_a_table_of_the_page_is_what_its_command_prints(command):
    words = [sys.executable, *shlex.split(command)[1:]]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == dict(PRINTED)[command].strip()


def test_every_table_of_arms_is_printed_by_a_command():
    assert (
        len(PRINTED) == len(re.findall(r"^\|---\|---\|---\|---\|---\|---\|---\|---\|---\|$", PAGE, re.MULTILINE)) >= 5
    )
