"""Laws of the reward pool: every way a function can fail is counted as what it is, and the run goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from jaxrl_llm.config import ConfigError, RewardsConfig
from jaxrl_llm.rewards import RewardPool
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example

FUNCTIONS = Path(__file__).parent / "fixtures" / "reward_functions.py"
EXAMPLE = Example("2+2=", {"answer": "4"}, "sums.jsonl:7")


def pool(*names, weights=None, num_workers=1, timeout_s=10.0, task_scorer=""):
    config = RewardsConfig(
        functions=names, weights=weights or (1.0,) * len(names), num_workers=num_workers, timeout_s=timeout_s
    )
    return RewardPool(config, task_scorer=task_scorer)


def user(function):
    return f"{FUNCTIONS}:{function}"


def test_every_failure_is_counted_as_what_it_is_and_never_a_zero():
    # completions of one call -> outcomes, totals (None: NaN)
    S, T, E = OUTCOME_SCORE, OUTCOME_TIMEOUT, OUTCOME_ERROR
    cases = [
        (["1", "0", "-2.5"], [S, S, S], [1.0, 0.0, -2.5]),
        (["raise", "1"], [E, E], [None, None]),
        (["hang", "1"], [T, T], [None, None]),
        (["0.5", "nan", "inf", "None", "text", "huge", "object"], [S, E, E, E, E, E, E], [0.5, *[None] * 6]),
        (["true", "0.5"], [S, S], [1.0, 0.5]),
        (["count", "1"], [E, E], [None, None]),
        (["none", "1"], [E, E], [None, None]),
        (["die", "1"], [E, E], [None, None]),
        (["killed", "1"], [E, E], [None, None]),
        (["exit", "1"], [E, E], [None, None]),
        (["slow", "1"], [S, S], [0.25, 0.25]),
        (["hang deaf"], [T], [None]),
        (["print", "1"], [S, S], [0.5, 0.5]),
        (["3"], [S], [3.0]),
    ]
    with pool(user("score"), num_workers=2, timeout_s=1.2) as rewards:
        tickets = [rewards.submit(EXAMPLE, completions) for completions, _, _ in cases]
        for ticket, (completions, outcome, total) in zip(tickets, cases, strict=True):
            got = rewards.collect([ticket])
            expected = np.array([np.nan if t is None else t for t in total], np.float32)
            np.testing.assert_array_equal(got.outcome, np.array(outcome, np.int8), err_msg=str(completions))
            np.testing.assert_array_equal(got.total, expected, err_msg=str(completions))
            assert bool(got.errors) == any(outcome), completions
        everything = rewards.collect(tickets)
        raised = rewards.collect([tickets[1]]).errors[0]
        hung = rewards.collect([tickets[2]]).errors[0]
        counted = rewards.collect([tickets[5]]).errors[0]
    assert everything.outcome.dtype == np.int8 and everything.total.dtype == np.float32
    np.testing.assert_array_equal(everything.outcome, np.concatenate([outcome for _, outcome, _ in cases]))
    assert np.isnan(everything.total[everything.outcome != OUTCOME_SCORE]).all()
    assert "KeyError: 'no such answer'" in raised and "sums.jsonl:7" in raised and "reward_functions.py" in raised
    assert "no answer after 1.2 s" in hung
    assert "returned 3 scores for 2 completions" in counted


def test_collect_keeps_the_order_of_the_tickets_whatever_order_they_finish_in():
    with pool(user("score"), num_workers=2) as rewards:
        slow = rewards.submit(EXAMPLE, ["slow"])
        fast = [rewards.submit(EXAMPLE, [str(i), str(i + 0.5)]) for i in range(5)]
        got = rewards.collect([slow, *fast])
    np.testing.assert_array_equal(got.total, [0.25, 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5])


def test_functions_see_prompt_and_columns_and_are_weighted():
    names = (user("echo"), user("length"))
    with pool(*names, weights=(2.0, -0.5)) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["2+2=4", "2+2=", ""])])
    np.testing.assert_array_equal(got.parts[names[0]], [1, 0, 0])
    np.testing.assert_array_equal(got.parts[names[1]], [5, 4, 0])
    np.testing.assert_array_equal(got.total, [2 * 1 - 0.5 * 5, -0.5 * 4, 0])


def test_outcome_is_the_worst_of_the_functions_and_the_other_part_is_kept():
    names = (user("score"), user("length"))
    with pool(*names, timeout_s=1.0) as rewards:
        hung, odd = rewards.submit(EXAMPLE, ["hang", "1"]), rewards.submit(EXAMPLE, ["1", "nan"])
        got = rewards.collect([hung, odd])
    np.testing.assert_array_equal(got.outcome, [OUTCOME_TIMEOUT, OUTCOME_TIMEOUT, OUTCOME_SCORE, OUTCOME_ERROR])
    np.testing.assert_array_equal(got.total, [np.nan, np.nan, 2, np.nan])
    np.testing.assert_array_equal(got.parts[names[1]], [4, 1, 1, 3])


def test_only_a_worker_that_failed_is_replaced_and_none_imports_jax():
    with pool(user("process_id"), user("score"), user("imported_jax"), user("sigint_twice")) as rewards:

        def parts(word):
            return rewards.collect([rewards.submit(EXAMPLE, [word])]).parts

        before, same = parts("1"), parts("raise")
        parts("killed")
        after = parts("1")
    assert before[user("process_id")] == same[user("process_id")] != after[user("process_id")]
    assert before[user("imported_jax")] == 0.0
    assert before[user("sigint_twice")] == 1.0  # Ctrl-C is the parent's to answer


def test_a_worker_killed_while_idle_is_replaced_without_loss():
    with pool(user("process_id")) as rewards:
        pid = int(rewards.collect([rewards.submit(EXAMPLE, ["1"])]).total[0])
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)
        time.sleep(0.1)
        got = rewards.collect([rewards.submit(EXAMPLE, ["1"])])
    assert got.outcome[0] == OUTCOME_SCORE and int(got.total[0]) != pid


def test_children_of_a_late_function_die_with_it(tmp_path):
    started = tmp_path / "started"
    with pool(user("score"), timeout_s=1.5) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["hang with child", str(started)])])
        wait_until_gone(int(started.read_text()))
    assert got.outcome.tolist() == [OUTCOME_TIMEOUT] * 2


def test_close_ends_a_hanging_worker_and_collect_says_so():
    rewards = pool(user("score"), num_workers=2)
    ticket = rewards.submit(EXAMPLE, ["hang"])
    pids = [worker.process.pid for worker in rewards._workers]
    rewards.close()
    rewards.close()
    for pid in pids:
        wait_until_gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        rewards.collect([ticket])
    with pytest.raises(RuntimeError, match="closed"):
        rewards.submit(EXAMPLE, ["1"])


def test_workers_end_when_the_parent_is_killed():
    program = (
        "import sys, time; sys.stdout.reconfigure(line_buffering=True)\n"
        "from jaxrl_llm.config import RewardsConfig; from jaxrl_llm.rewards import RewardPool\n"
        "from jaxrl_llm.types import Example\n"
        f"pool = RewardPool(RewardsConfig(functions=({user('process_id')!r}, {user('score')!r}), weights=(1.0, 1.0), "
        "num_workers=1, timeout_s=600.0), task_scorer='')\n"
        "ticket = pool.submit(Example('', {}), ['1'])\n"
        f"print(int(pool.collect([ticket]).parts[{user('process_id')!r}][0]))\n"
        "pool.submit(Example('', {}), ['hang']); time.sleep(0.3); print('hanging'); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert parent.stdout.readline() == "hanging\n"
        parent.kill()
    wait_until_gone(worker)


def wait_until_gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return
        if status == psutil.STATUS_ZOMBIE:  # an orphan that nobody reaps, in a container without init
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} lives")


def test_a_function_that_cannot_start_in_a_worker_becomes_an_error_and_not_a_hang(tmp_path):
    # Imports in this process, and nowhere else.
    path = tmp_path / "mine.py"
    path.write_text(f"import os\nif os.getpid() != {os.getpid()}: raise OSError('no licence')\n"
                    "def f(prompts, completions): return [1.0]\n")  # fmt: skip
    with pool(f"{path}:f") as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["1"]), rewards.submit(EXAMPLE, ["1"])])
        later = rewards.collect([rewards.submit(EXAMPLE, ["1"])])
    assert got.outcome.tolist() == [OUTCOME_ERROR] * 2 and later.outcome.tolist() == [OUTCOME_ERROR]
    assert "OSError: no licence" in got.errors[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("task", "no scorer"),
        ("accuracy", "path/to/file.py:function"),
        ("no_such_package.rewards:f", "No module named 'no_such_package'"),
        ("no_such_file.py:f", "no file"),
        (f"{FUNCTIONS}:misspelt", "misspelt"),
        (f"{FUNCTIONS}:not_a_function", "not a function but int"),
    ],
)
def test_a_function_that_cannot_be_found_is_refused_before_any_process_starts(name, words, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=r"rewards\.functions") as error:
        pool(name)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_file_with_a_syntax_error_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match="SyntaxError"):
        pool(f"{tmp_path / 'broken.py'}:f")


def test_task_means_the_scorer_of_the_task():
    with pool("task", task_scorer="jaxrl_llm.tasks.letters:reward") as rewards:
        got = rewards.collect([rewards.submit(Example("Write letters like a:", {"allowed": "ac"}), ["ab", "ca", ""])])
    np.testing.assert_array_equal(got.parts["task"], [0.5, 1.0, 0.0])


GOLDEN = [  # answer, completion, whether they are the same mathematics
    ("1/2", r"So the probability is \boxed{\frac{1}{2}}.", True),
    ("1/2", r"It is $\frac{2}{4}$.", True),
    ("1/2", "The answer is 0.5", True),
    ("1/2", "The answer is 1/3", False),
    ("1/2", "I do not know.", False),
    ("1/2", "", False),
    ("1,000", "There are 1000 of them", True),
    ("-3", "x = -3", True),
    ("-3", "x = 3", False),
    ("7", r"First 3, then \boxed{7}", True),
    ("7", r"First \boxed{7}, no: \boxed{8}", False),
    (r"\sqrt{8}", r"$2\sqrt{2}$", True),
    (r"$x^2+2x+1$", r"$(x+1)^2$", True),
    (r"$x^2+2x+1$", r"$(x-1)^2$", False),
    ("He had 70 and found 2.\n#### 72", "72", True),
    (r"We get \boxed{\frac{3}{4}}", "0.75", True),
    (r"[0,1)", r"$[0, 1)$", True),
    (r"[0,1)", r"$[0, 1]$", False),
]


def test_math_golden_vectors():
    pytest.importorskip("math_verify")
    with pool("math", num_workers=2, timeout_s=60.0) as rewards:
        tickets = [rewards.submit(Example("?", {"answer": answer}), [text]) for answer, text, _ in GOLDEN]
        unusable = rewards.submit(Example("?", {"answer": ""}, "data.jsonl:3"), ["1"])
        number = rewards.submit(Example("?", {"answer": 4}), ["2+2 = 4", "5"])
        got, failed, plain = rewards.collect(tickets), rewards.collect([unusable]), rewards.collect([number])
    assert got.errors == ()
    wrong = [(row, score) for row, score in zip(GOLDEN, got.total, strict=True) if score != float(row[2])]
    assert wrong == []
    assert failed.outcome[0] == OUTCOME_ERROR and "data.jsonl:3" in failed.errors[0]
    assert plain.total.tolist() == [1.0, 0.0]


def test_math_without_its_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "jaxrl_llm.tasks.math_answers", raising=False)
    with pytest.raises(ConfigError, match=r"jaxrl_llm\[math\]"):
        pool("math")


def test_reasoning_gym_scorer_in_the_pool_judges_the_last_integer():
    pytest.importorskip("reasoning_gym")
    entry = {"question": "4 - 7 =", "answer": "-3", "metadata": {}}
    columns = {
        "answer": "-3",
        "entry": entry,
        "dataset": "chain_sum",
        "dataset_arguments": {"min_terms": 2, "max_terms": 2, "seed": 0, "size": 10},
    }
    with pool("task", task_scorer="jaxrl_llm.tasks.reasoning_gym_task:reward") as rewards:
        got = rewards.collect([rewards.submit(Example("4 - 7 =", columns), ["4 - 7 = -3", "3", "-3 or 4", "", "-3."])])
    assert got.total.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0] and got.errors == ()
