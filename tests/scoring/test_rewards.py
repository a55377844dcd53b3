"""Properties of the reward pool: every kind of failure of a function is counted as that kind, and the run continues."""

import functools
import os
import runpy
import signal
import subprocess
import sys
import time
import typing
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.building import needs_reasoning_gym
from support.echo import echo
from support.refusal import check_row, refused, refused_row
from support.tiers import mostly_in

from jaxrl_llm.actor.episodes import Played
from jaxrl_llm.algorithms.inputs import COLUMNS, ROW, TURN, Column
from jaxrl_llm.config import PromptsConfig, RewardsConfig
from jaxrl_llm.conversations.environment import Reply
from jaxrl_llm.questions import tasks
from jaxrl_llm.scoring.reward_columns import ColumnRequest
from jaxrl_llm.scoring.reward_worker import unpacked
from jaxrl_llm.scoring.rewards import MATH_SCORER, RewardPool
from jaxrl_llm.scoring.worker_processes import Printer
from jaxrl_llm.settings.functions import named
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example

FUNCTIONS = Path(__file__).parents[1] / "fixtures" / "reward_functions.py"
EXAMPLE = Example("2+2=", {"answer": "4"}, "sums.jsonl:7")


def pool(*names, weights=None, num_workers=1, timeout_s=10.0, task_scorer="", examples=()):
    config = RewardsConfig(
        functions=names, weights=weights or (1.0,) * len(names), num_workers=num_workers, timeout_s=timeout_s
    )
    return RewardPool(config, task_scorer=task_scorer, examples=examples)


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


def test_the_first_failures_of_a_run_are_said_and_others_only_counted(capfd):
    with pool(user("score")) as rewards:
        for _ in range(4):
            tickets = [rewards.submit(EXAMPLE, [text]) for text in ("nan", "1", "text")]
            assert (rewards.collect(tickets).outcome == [OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_ERROR]).all()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: a reward failed: ")]
    assert len(said) == 5 and all(f"{FUNCTIONS}:score on " in line for line in said)


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


def test_scorers_of_tasks_do_not_import_jax():
    """With jax a worker would start in a second instead of a twentieth of a second, and take 130 MB more."""
    sources = typing.get_args(typing.get_type_hints(PromptsConfig)["source"])
    names = {tasks.MODULES.get(source, f"{tasks.__name__}.{source}") for source in sources}
    modules = [MATH_SCORER.partition(":")[0], *sorted(names - {tasks.MODULES["reasoning_gym"]})]
    program = f"import sys, {', '.join(modules)}; print('flax' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n" and len(modules) > 8


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


@pytest.mark.tier("kills")  # plain: test_what_a_function_starts_ends_with_its_worker_...
def test_workers_end_when_the_parent_is_killed():
    program = (
        "import sys, time; sys.stdout.reconfigure(line_buffering=True)\n"
        "from jaxrl_llm.config import RewardsConfig; from jaxrl_llm.scoring.rewards import RewardPool\n"
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
        ("task", "scorer"),
        ("accuracy", "path/to/file.py:function"),
        ("no_such_package.rewards:f", "No module named 'no_such_package'"),
        ("no_such_file.py:f", "no file"),
        (f"{FUNCTIONS}:misspelt", "misspelt"),
        (f"{FUNCTIONS}:not_a_function", "int"),
    ],
)
def test_a_function_that_cannot_be_found_is_refused_before_any_process_starts(name, words, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with refused("rewards.functions", name, words) as error:
        pool(name)
    assert "\n" not in str(error.value)


def test_a_file_with_a_syntax_error_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    name = f"{tmp_path / 'broken.py'}:f"
    with refused("rewards.functions", name, "SyntaxError"):
        pool(name)


def test_task_means_the_scorer_of_the_task():
    with pool("task", task_scorer="jaxrl_llm.questions.tasks.letters:reward") as rewards:
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
    monkeypatch.delitem(sys.modules, "jaxrl_llm.scoring.math_answers", raising=False)
    with refused("rewards.functions", "math", "jaxrl_llm[math]"):
        pool("math")


def test_reasoning_gym_scorer_in_the_pool_judges_the_last_integer():
    needs_reasoning_gym()
    entry = {"question": "4 - 7 =", "answer": "-3", "metadata": {}}
    columns = {
        "answer": "-3",
        "entry": entry,
        "dataset": "chain_sum",
        "dataset_arguments": {"min_terms": 2, "max_terms": 2, "seed": 0, "size": 10},
    }
    with pool("task", task_scorer="jaxrl_llm.questions.tasks.reasoning_gym_task:reward") as rewards:
        got = rewards.collect([rewards.submit(Example("4 - 7 =", columns), ["4 - 7 = -3", "3", "-3 or 4", "", "-3."])])
    assert got.total.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0] and got.errors == ()


# ---- hostile and unlucky functions -------------------------------------------------------------------------------

S, T, E, NAN = OUTCOME_SCORE, OUTCOME_TIMEOUT, OUTCOME_ERROR, np.nan
BOTH, NEITHER = ([S, S], [0.25, 1.0]), ([E, E], [NAN, NAN])


def test_only_numbers_in_their_order_are_scores_and_anything_else_is_an_error_and_no_luck():
    # what is returned for two completions -> outcomes, scores, words of the message
    cases = {
        "list": (*BOTH, ""),
        "tuple": (*BOTH, ""),
        "decimals": ([S, E], [0.25, NAN], "returned Decimal for a score"),
        "fractions": ([S, E], [0.25, NAN], "returned Fraction for a score"),
        "numpy scalars": (*BOTH, ""),
        "booleans": ([S, S], [1.0, 0.0], ""),
        "array [n]": (*BOTH, ""),
        "arrays []": (*BOTH, ""),
        "array [n, 1]": (*NEITHER, "returned ndarray for a score"),
        "arrays [1]": ([E, S], [NAN, 1.0], "returned ndarray for a score"),
        "array []": (*NEITHER, "0-d array"),
        "number": (*NEITHER, "'float' object is not iterable"),
        "tensors": ([S, E], [0.25, NAN], "returned nan for a score"),
        "tensors that raise": ([S, E], [0.25, NAN], "returned Number for a score"),
        "infinities": (*NEITHER, "returned inf for a score"),
        "NaN": (*NEITHER, "returned nan for a score"),
        "too large": ([E, S], [NAN, -1e12], "returned 1100000000000.0 for a score"),
        "None": ([E, S], [NAN, 1.0], "returned NoneType for a score"),
        "complex": (*NEITHER, "returned complex for a score"),
        "numpy complex": (*NEITHER, "returned complex64 for a score"),
        "int without end": ([E, S], [NAN, 1.0], "returned int for a score"),
        "texts": (*NEITHER, "returned str for a score"),
        "bytes": (*NEITHER, "returned bytes for a score"),
        "huge texts": (*NEITHER, "returned str for a score"),
        "text": (*NEITHER, "returned str, not a list of scores"),
        "huge text": (*NEITHER, "returned str, not a list of scores"),
        "byte string": (*NEITHER, "returned bytes, not a list of scores"),
        "dict": (*NEITHER, "returned dict, not a list of scores"),
        "set": (*NEITHER, "returned set, not a list of scores"),
        "values of a dict": (*BOTH, ""),
        "generator": (*BOTH, ""),
        "short generator": (*NEITHER, "returned 1 scores for 2 completions"),
        "generator without end": (*NEITHER, "returned 3 scores for 2 completions"),
        "repeat": (*NEITHER, "returned 3 scores for 2 completions"),
        "generator that raises": (*NEITHER, "OSError: no more after the first (reward_functions.py:"),
    }
    assert set(cases) == set(runpy.run_path(str(FUNCTIONS))["RETURNED"])
    with pool(user("returned"), user("process_id")) as rewards:
        processes = set()
        for name, (outcome, scores, words) in cases.items():
            got = rewards.collect([rewards.submit(EXAMPLE, [name, "1"])])
            np.testing.assert_array_equal(got.outcome, outcome, err_msg=name)
            expected = np.array(scores, np.float32)
            np.testing.assert_array_equal(got.parts[user("returned")], expected, err_msg=name)
            assert words in "".join(got.errors) and bool(words) == bool(got.errors), (name, got.errors)
            processes |= set(got.parts[user("process_id")])
    assert len(processes) == 1  # none of it costs a worker


def test_what_a_function_does_to_its_process_is_mended_before_the_next(monkeypatch, capfd):
    monkeypatch.chdir(FUNCTIONS.parents[2])
    deeds = ["chdir", *["close the streams", "close 0 to 2"] * 2, "low recursion limit", "leave an alarm", "own alarm",
             "signal handlers", "thread", "print bytes", "processes", "event loop",
             "fork and come back", "C fork and come back", "environment", "eat memory", "float"]  # fmt: skip
    functions = user("misbehaves"), user("upright")
    with pool(*functions) as rewards:
        capfd.readouterr()
        calls = [rewards.submit(EXAMPLE, [deed, "1"]) for deed in deeds]
        got = rewards.collect(calls)
        assert "MemoryError" in rewards.collect([calls[-2]]).errors[0]
    failed = ["eat memory", "float"]  # of those two nothing is a score, least of all 0
    expected = np.repeat([NAN if deed in failed else 1.0 for deed in deeds], 2)
    np.testing.assert_array_equal(got.parts[functions[0]], expected)
    assert len(set(got.parts[functions[1]])) == 1 and not np.isnan(got.parts[functions[1]]).any(), got.errors
    printed = capfd.readouterr()
    assert printed.out == "" and "\x1b" not in printed.err
    assert printed.err.count("upright on stdout") == printed.err.count("upright on stderr") == len(deeds)


def test_whatever_is_raised_is_one_line_and_costs_no_worker(monkeypatch):
    monkeypatch.chdir(FUNCTIONS.parents[2])
    deeds = {
        "KeyboardInterrupt": "KeyboardInterrupt (reward_functions.py:",
        "GeneratorExit": "GeneratorExit (reward_functions.py:",
        "BaseException": "Plain: of the user's own (reward_functions.py:",
        "missing package": "No module named 'no_such_package' (reward_functions.py:",
        "deep": "RecursionError: ",
        "huge error": "ValueError: x x x",
        "odd error": "ValueError: one two [2J (reward_functions.py:",
        "error whose text raises": "Text: its text cannot be read (reward_functions.py:",
        "error of huge text": "Text: y y y",
    }
    with pool(user("misbehaves"), user("upright")) as rewards:
        calls = {deed: rewards.submit(EXAMPLE, [deed, "1"]) for deed in deeds}
        for deed, words in deeds.items():
            got = rewards.collect([calls[deed]])
            assert got.outcome.tolist() == [E, E] and np.isnan(got.total).all(), deed
            (line,) = got.errors
            assert words in line and len(line) < 600 and line.isprintable(), line
        processes = set(rewards.collect(list(calls.values())).parts[user("upright")])
    assert len(processes) == 1 and not np.isnan(list(processes)).any()


@pytest.mark.tier("slow")  # plain: test_every_failure_is_counted_as_what_it_is_and_never_a_zero
def test_what_cannot_be_mended_is_counted_and_the_next_call_has_another_process(monkeypatch):
    monkeypatch.chdir(FUNCTIONS.parents[2])
    deeds = {
        "close all": (E, "its process died"),
        "reopen all": (T, "no answer after 1 s"),
        "builtins": (E, "its process died"),
        "junk": (E, "its process wrote a line that is not one line of JSON"),
        "stop": (T, "no answer after 1 s"),
        "fork and die": (E, "its process died"),
        "crash": (E, "its process died"),
        "stuck in C": (T, "no answer after 1 s"),
        "error whose text hangs": (T, "no answer after 1 s"),
    }
    with pool(user("misbehaves"), user("upright"), timeout_s=1.0) as rewards:
        calls = {deed: rewards.submit(EXAMPLE, [deed, "1"]) for deed in deeds}
        for deed, (outcome, words) in deeds.items():
            got = rewards.collect([calls[deed]])
            assert got.outcome.tolist() == [outcome] * 2 and np.isnan(got.total).all(), deed
            (line,) = got.errors
            assert line.endswith(words), line
        processes = set(rewards.collect(list(calls.values())).parts[user("upright")])
    assert len(processes) == len(deeds) and not np.isnan(list(processes)).any()


def test_an_answer_after_the_deadline_is_nobodys():
    with pool(user("late"), timeout_s=1.0) as rewards:
        calls = [rewards.submit(EXAMPLE, completions) for completions in (["1.05", "9"], ["0", "2"])]
        got = rewards.collect(calls)
    np.testing.assert_array_equal(got.outcome, [T, T, S, S])
    np.testing.assert_array_equal(got.total, [NAN, NAN, 0, 2])


def test_a_worker_that_is_stopped_while_idle_does_not_stop_the_pool():
    # More than a socket takes unread: who hands that to a process that does not read waits.
    huge = Example("2+2=", {"answer": "4" * 2**24})
    with pool(user("stops_itself_later"), timeout_s=1.0) as rewards:
        assert rewards.collect([rewards.submit(EXAMPLE, ["1"] * 2)]).outcome.tolist() == [S, S]
        time.sleep(0.5)
        began = time.monotonic()
        got = rewards.collect([rewards.submit(huge, ["1"] * 2), rewards.submit(huge, ["1"] * 2)])
    assert got.outcome.tolist() == [T, T, S, S] and got.errors == (
        f"{user('stops_itself_later')} on a prompt: no answer after 1 s",
    )
    assert time.monotonic() - began < 5


def test_arguments_that_a_function_spoils_or_keeps_are_whole_for_the_next():
    columns = {"answer": ["4", ["four"]]}
    example, completions = Example([{"role": "user", "content": "2+2="}], columns), ["4", "5"]
    with pool(user("spoils"), user("upright"), user("spoils"), user("upright")) as rewards:
        got = rewards.collect([rewards.submit(example, completions) for _ in range(2)])
    assert got.outcome.tolist() == [S] * 4, got.errors
    assert (example.prompt, columns, completions) == (
        [{"role": "user", "content": "2+2="}],
        {"answer": ["4", ["four"]]},
        ["4", "5"],
    )


def test_completions_of_a_call_share_no_prompt_and_no_column():
    """Once, a judge that appended a completion to its prompt also saw the earlier completions."""
    example = Example([{"role": "user", "content": "2+2="}], {"answer": ["4", "four"]})
    with pool(user("uses_up")) as rewards:
        got = rewards.collect([rewards.submit(example, ["4", "5", "6"])])
    assert got.total.tolist() == [12.0] * 3 and got.errors == ()


def test_a_stream_that_a_function_has_replaced_costs_no_worker():
    with pool(user("tees")) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["1"]) for _ in range(3)])
    assert got.errors == () and len(set(got.total)) == 1


def test_what_a_decorator_passes_on_is_given():
    def decorator(function):
        @functools.wraps(function)
        def passes_on(*given, **named):
            return function(*given, **named)

        @functools.wraps(function)
        def keeps_to_itself(prompts, completions):
            return function(prompts, completions, None)

        return passes_on, keeps_to_itself

    def reward(prompts, completions, messages, **columns):
        """Return rewards with the given arguments of the pool."""

    more = ("messages", "environments")
    assert [named(function, more) for function in (reward, *decorator(reward), len)] == [more[:1], more[:1], (), ()]


def test_columns_that_cannot_be_handed_over_are_errors_and_huge_ones_are_handed_over():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    columns = [{"answer": lambda: 4}, {"answer": nested}, {"answer": "4" * 10**8}, {"answer": "4"}]
    with pool(user("length"), timeout_s=30.0) as rewards:
        got = rewards.collect([rewards.submit(Example("2+2=", c, "sums.jsonl:7"), ["four"]) for c in columns])
    assert got.outcome.tolist() == [E, E, S, S]
    assert "local object" in got.errors[0] and "RecursionError" in got.errors[1] and len(got.errors) == 2
    assert all("on sums.jsonl:7: " in line and "\n" not in line for line in got.errors)


SLOW = {("group", "hangs"), ("session", "hangs")}  # which wait as long as the others that hang


@pytest.mark.parametrize(
    ("how", "end"),
    [
        pytest.param(how, end, marks=[pytest.mark.slow] * ((how, end) in SLOW), id=f"{end}-{how}")
        for end in ("close", "hangs", "dies")
        for how in ("child", "group", "session", "daemon")
    ],
)
def test_what_a_function_starts_ends_with_its_worker_wherever_it_went(how, end, tmp_path):
    started = tmp_path / "started"
    with pool(user("starts"), timeout_s=1.5) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, [f"{how} {end}", str(started)])])
        assert got.outcome.tolist() == [{"close": S, "hangs": T, "dies": E}[end]] * 2
        if end == "close":
            assert psutil.pid_exists(int(started.read_text()))  # it has the worker's life, not the call's
            rewards.close()
        wait_until_gone(int(started.read_text()))


def test_what_is_printed_without_end_is_cut_and_blocks_nothing():
    program = (
        "from jaxrl_llm.config import RewardsConfig; from jaxrl_llm.scoring.rewards import RewardPool\n"
        "from jaxrl_llm.types import Example\n"
        f"config = RewardsConfig(functions=({user('misbehaves')!r},), weights=(1.0,), num_workers=1)\n"
        "with RewardPool(config, task_scorer='') as pool:\n"
        "    for words in (['huge print', ''], ['event loop', '']):\n"
        "        print(pool.collect([pool.submit(Example('', {}), words)]).total.tolist())\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"  # getrusage counts who started it
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *scores, most_kib = done.stdout.splitlines()
    assert scores == ["[1.0, 1.0]"] * 2
    assert done.stderr.startswith("about to: huge print\nxxx") and done.stderr.endswith("...\nabout to: event loop\n")
    assert 2**16 <= len(done.stderr) < 2**16 + 100
    assert int(most_kib) < 2**20


@pytest.mark.tier("slow")  # plain: test_what_is_printed_without_end_is_cut_and_blocks_nothing
def test_output_that_nobody_reads_holds_up_a_call_until_its_deadline_and_no_longer():
    # The error stream is a pipe that is full: whoever writes into it waits.
    program = (
        "import os, time\n"
        "from jaxrl_llm.config import RewardsConfig\n"
        "from jaxrl_llm.scoring.rewards import RewardPool\n"
        "from jaxrl_llm.types import Example\n"
        "os.set_blocking(2, False)\n"
        "try:\n"
        "    while True: os.write(2, b'x' * 4096)\n"
        "except BlockingIOError: os.set_blocking(2, True)\n"
        f"config = RewardsConfig(functions=({user('misbehaves')!r},), weights=(1.0,), num_workers=1, timeout_s=1.0)\n"
        "with RewardPool(config, task_scorer='') as pool:\n"
        "    for words in (['huge print', ''], ['event loop', '']):\n"
        "        print(pool.collect([pool.submit(Example('', {}), words)]).outcome.tolist())\n"
        "os._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.read().splitlines()[0] == str([T, T])
        process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/oom_score_adj"), reason="Linux alone has it")
def test_out_of_memory_the_kernel_kills_a_worker_and_its_children_first():
    with pool(user("first_to_be_killed")) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["1", "1"])])
    assert got.total.tolist() == [1000.0, 1000.0]
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000


def test_a_process_that_cannot_be_started_is_an_error_until_one_can(monkeypatch):
    with pool(user("score")) as rewards:
        assert rewards.collect([rewards.submit(EXAMPLE, ["1"])]).total.tolist() == [1.0]

        def none_left(*_, **__):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(subprocess, "Popen", none_left)
        failed = rewards.collect([rewards.submit(EXAMPLE, ["die"]), rewards.submit(EXAMPLE, ["1"])])
        monkeypatch.undo()
        got = rewards.collect([rewards.submit(EXAMPLE, ["1"])])
    assert failed.outcome.tolist() == [E, E] and "Resource temporarily unavailable" in failed.errors[1]
    assert got.total.tolist() == [1.0]


@pytest.mark.parametrize("name", ["coroutine", "instance", "part", "of_trl", "wrapped"])
def test_any_callable_that_takes_the_arguments_by_name_is_a_reward_function(name):
    with pool(user(name), examples=[EXAMPLE]) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["4", "5"])])
    assert got.total.tolist() == [1.0, 0.0] and got.errors == ()


def test_what_an_asynchronous_function_keeps_open_is_there_at_the_next_call():
    with echo() as (port, callers), pool(user("connected"), timeout_s=2.0) as rewards:
        example = Example("p", {"port": port}, "here")
        ask = lambda *texts: rewards.collect([rewards.submit(example, list(texts))])
        assert [ask("4", "5").total.tolist(), ask("6").total.tolist()] == [[4.0, 5.0], [6.0]]
        assert len(callers) == 1
        assert ask("hang").outcome.tolist() == [OUTCOME_TIMEOUT]  # and the process of it is gone
        assert [ask("7").total.tolist(), ask("8").total.tolist()] == [[7.0], [8.0]]
        assert len(callers) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_columns", "'answer'"),
        ("only_completions", "'prompts'"),
        ("other_names", "'questions'"),
        ("wants_solution", "'solution'"),
        ("not_a_function", "int"),
    ],
)
def test_a_function_that_cannot_take_the_columns_is_refused_before_any_process_starts(name, words, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with refused("rewards.functions", user(name), words) as error:
        pool(user(name), examples=[EXAMPLE])
    assert "\n" not in str(error.value)
    if name != "not_a_function":
        check_row(str(error.value), "sums.jsonl", 7, "prompts, completions, answer")


def test_a_column_that_some_rows_lack_is_refused_with_the_first_of_them():
    rows = [Example("2+2=", {"answer": "4"} if i < 3 else {}, f"sums.jsonl:{i}") for i in range(9)]
    with refused_row("sums.jsonl", 3, "'answer'"):
        pool(user("echo"), examples=rows)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0 (mine.py:1)"),
        ("raise type('Odd', (BaseException,), {})('no licence')", "Odd: no licence (mine.py:1)"),
        ("raise ValueError('x ' * 10**6)", "ValueError: x x x"),
        ("import os; os.chdir('/')", ""),
        ("print('loading')", ""),
    ],
)
def test_a_file_that_ends_moves_or_speaks_for_the_process_when_imported_does_not(text, words, tmp_path, capfd):
    path, before = tmp_path / "mine.py", os.getcwd()
    path.write_text(f"{text}\nimport os\ndef f(prompts, completions, **columns): return [len(os.getcwd())]\n")
    if words:
        with refused("rewards.functions", f"{path}:f", words) as error:
            pool(f"{path}:f")
        assert "\n" not in str(error.value) and len(str(error.value)) < 600
    else:
        with pool(f"{path}:f") as rewards:
            assert rewards.collect([rewards.submit(EXAMPLE, ["1"])]).total.tolist() == [len(before)]
    printed = capfd.readouterr()  # commands print their results on stdout
    assert os.getcwd() == before and printed.out == "" and ("loading\n" in printed.err) == ("loading" in text)


def test_what_a_worker_prints_before_its_first_call_is_not_half_shown(capfd):
    printer = Printer()
    os.write(printer.descriptor, b"loading\n")
    printer.make_room()
    os.write(printer.descriptor, b"called\n")
    printer.close()
    assert capfd.readouterr().err == "called\n"


# ---- functions that score completions one by one -----------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_in("slow", ["alone", "alone_by_class"]))
def test_of_a_function_that_scores_one_by_one_a_completion_fails_alone(name):
    texts = ["1", "hang", "0.5", "raise", "die", "nan", "count", "killed", "exit", "-2"]
    with pool(user(name), timeout_s=4.0) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, texts)])
        after = rewards.collect([rewards.submit(EXAMPLE, ["3"])])
    np.testing.assert_array_equal(got.outcome, [S, T, S, E, E, E, E, E, E, S])
    np.testing.assert_array_equal(got.total, [1, NAN, 0.5, NAN, NAN, NAN, NAN, NAN, NAN, -2])
    assert len(got.errors) == 5 and after.total.tolist() == [3.0]


@pytest.mark.tier("slow")  # plain: test_siblings_of_completions_that_hang_keep_their_scores
def test_completions_that_all_hang_take_the_time_of_one_call():
    with pool(user("alone"), timeout_s=1.6) as rewards:
        assert rewards.collect([rewards.submit(EXAMPLE, ["1"])]).total.tolist() == [1.0]
        began = time.monotonic()
        got = rewards.collect([rewards.submit(EXAMPLE, ["hang"] * 8)])
        took = time.monotonic() - began
    assert got.outcome.tolist() == [T] * 8
    assert 1.5 < took < 1.6 + 8 * 1.5  # and eight starts of a process


def test_siblings_of_completions_that_hang_keep_their_scores():
    texts = ["hang"] * 6 + ["1", "2"]
    with pool(user("alone"), timeout_s=4.0) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, texts)])
    np.testing.assert_array_equal(got.total, [NAN] * 6 + [1, 2])
    assert got.outcome.tolist() == [T] * 6 + [S] * 2


def test_a_slow_completion_is_tried_again_with_the_time_that_the_others_left():
    with pool(user("alone"), timeout_s=4.0) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["late 1.5 7", "1", "2", "3"])])
    assert got.total.tolist() == [7.0, 1.0, 2.0, 3.0] and got.errors == ()


def test_a_process_that_does_not_start_fails_the_completions_that_are_left_at_once(monkeypatch):
    with pool(user("alone"), timeout_s=10.0) as rewards:
        assert rewards.collect([rewards.submit(EXAMPLE, ["1"])]).total.tolist() == [1.0]

        def none_left(*_, **__):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(subprocess, "Popen", none_left)
        got = rewards.collect([rewards.submit(EXAMPLE, ["1", "die", "2", "3"])])
        monkeypatch.undo()
        after = rewards.collect([rewards.submit(EXAMPLE, ["4"])])
    np.testing.assert_array_equal(got.total, [1, NAN, NAN, NAN])
    assert got.outcome.tolist() == [S, E, E, E] and after.total.tolist() == [4.0]


def test_messages_and_turns_of_completions_that_are_scored_one_by_one():
    with pool(user("alone_by_turn")) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["", ""], played("a x bb", "ccc"))])
    np.testing.assert_array_equal(got.columns["turn_reward"], [[1, 2, 0, 0], [3, 0, 0, 0]])


@pytest.mark.tier("slow")  # plain: test_of_a_function_that_scores_one_by_one_a_completion_fails_alone
def test_of_math_one_formula_fails_alone():
    """A polynomial in three unknowns is within the bounds of a formula, but takes minutes to expand."""
    pytest.importorskip("math_verify")
    with pool("math", timeout_s=8.0) as rewards:
        texts = [r"\boxed{5}", r"\boxed{(x+y+z)^{90}}", r"\boxed{4}", r"\boxed{9^{9^{9}}}"]
        got = rewards.collect([rewards.submit(Example("?", {"answer": "5"}), texts)])
    np.testing.assert_array_equal(got.total, [1, NAN, 0, 0])
    assert got.outcome.tolist() == [S, T, S, S]


# ---- lines on the socket that answer no call ---------------------------------------------------------------------


@pytest.mark.tier("slow")  # plain: test_an_answer_of_another_form_is_an_error_of_its_call
def test_a_stray_line_is_an_error_of_its_call_and_shifts_no_answer():
    strays = runpy.run_path(str(FUNCTIONS))["STRAYS"]
    with pool(user("strays"), timeout_s=3.0) as rewards:
        for kind in strays:
            for text in ("a", kind, "bb", "ccc"):
                got = rewards.collect([rewards.submit(EXAMPLE, [text])])
                if text == kind:
                    assert got.outcome.tolist() == [E] and np.isnan(got.total).all(), kind
                else:
                    assert got.total.tolist() == [len(text)], kind


@pytest.mark.tier("slow")  # plain: test_what_is_printed_without_end_is_cut_and_blocks_nothing
@pytest.mark.parametrize("kind", ["an answer", "no JSON", "without an end"])
def test_a_line_that_comes_between_two_calls_fails_neither(kind):
    with pool(user("strays"), timeout_s=3.0) as rewards:
        got = []
        for text in ("a", f"{kind}; later", "bb", "ccc"):
            got += rewards.collect([rewards.submit(EXAMPLE, [text])]).total.tolist()
            time.sleep(0.5)
    assert got == [1, len(kind) + 7, 2, 3]


@pytest.mark.parametrize(
    "answer",
    mostly_in(
        "slow",
        [
            "null",
            "[]",
            "[[], [], []]",
            "[[1.0, 1.0], [], [[], []]]",
            "[[NaN], [], [[]]]",
            "[[1e999], [], [[]]]",
            "[[1e13], [], [[]]]",
            "[[true], [], [[]]]",
            '[["1.0"], [], [[]]]',
            "[[{}], [], [[]]]",
            "[[[[1.0]]], [], [[]]]",
            "[[1.0], [1], [[]]]",
            '[[1.0], "", [[]]]',
            "[[1.0], [], [0]]",
            "[[1.0], [], [[0]]]",
            "[[1.0], [], [[[0]]]]",
            '[[1.0], [], [[["a", 1]]]]',
            '{"scores": [1.0]}',
        ],
        plain=4,
    ),
)
def test_an_answer_of_another_form_is_an_error_of_its_call(answer):
    with pool(user("forges"), user("process_id"), timeout_s=5.0) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, [answer])])
    assert got.outcome.tolist() == [E] and np.isnan(got.parts[user("forges")]).all(), got
    assert not np.isnan(got.parts[user("process_id")]).any()


def there(reward, outcome=OUTCOME_SCORE, seconds=0.0):
    future = Future()
    reason = "" if outcome == OUTCOME_SCORE else "it broke"
    future.set_result(Reply("", reward, outcome, reason, seconds=seconds))
    return future


def played(*rows, worth=None):
    """Return rows of turns. "7 x" means that the policy says 7 and the environment x.

    Values are the episode's reward after each turn.
    """
    messages = []
    for row in rows:
        roles = (("assistant", "user")[i % 2] for i in range(len(row.split())))
        messages.append([{"role": role, "content": text} for role, text in zip(roles, row.split(), strict=True)])
    return Played(messages, [[there(x) for x in row] for row in worth or [[0.0]] * len(rows)], 4)


def test_a_score_for_each_turn_is_kept_by_turn_and_adds_up():
    rows = played("1 x 2 x 4", "8", "1 x whole", "1 x short", "2 x nan")
    with pool(user("by_turn"), user("length"), weights=(2.0, 0.5)) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, [""] * 5, rows)])
    # The second function's one number is the last turn's: lengths of the last turns are 1, 1, 5, 5 and 3.
    np.testing.assert_array_equal(got.columns["turn_reward"][:3], [[2, 4, 8.5, 0], [16.5, 0, 0, 0], [0, 4.5, 0, 0]])
    np.testing.assert_array_equal(got.total[[0, 1, 2, 4]], [14.5, 16.5, 4.5, 5.5])
    np.testing.assert_array_equal(got.parts[user("by_turn")][[0, 1, 2, 4]], [7, 8, 1, 2])
    assert got.outcome.tolist() == [OUTCOME_SCORE] * 3 + [OUTCOME_ERROR, OUTCOME_SCORE] and np.isnan(got.total[3])
    assert "returned 1 scores for 2 turns" in got.errors[0]


def test_without_an_environment_there_is_one_turn():
    with pool(user("by_turn")) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, ["3", "whole", "short"])])
    np.testing.assert_array_equal(got.total, [3, 0, np.nan])
    assert got.columns == {} and "returned 0 scores for 1 turns" in got.errors[0]


def test_the_seconds_of_an_environment_come_with_the_scores_of_several_groups():
    groups = [played("1 x 2", "8"), played("3", "4 x 5")]
    for k, row in enumerate(row for group in groups for row in group.replies):
        row[0] = there(None, seconds=0.5 + k)
    with pool(user("by_turn")) as rewards:
        request = ColumnRequest({"turn_seconds": (4,)}, None)
        got = rewards.collect([rewards.submit(EXAMPLE, [""] * 2, group, request) for group in groups])
    seconds = got.columns["turn_seconds"]
    assert seconds.shape == got.columns["turn_reward"].shape and seconds.dtype == np.float32
    np.testing.assert_array_equal(seconds[:, 0], [0.5, 1.5, 2.5, 3.5])


def test_a_turn_has_what_an_episode_is_worth_more_after_it():
    rows = played("1 x 2 x 3", "1 x 2", "1 x 2", "1", worth=[[0.5, 0.25, 1.0], [0.5], [0.5, None], [-0.25]])
    rows.replies[2][-1] = there(None, OUTCOME_TIMEOUT)
    with pool("environment") as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, [""] * 4, rows)])
    # The second row's last turn was cut short: nothing was said to it.
    np.testing.assert_array_equal(got.columns["turn_reward"][:2], [[0.5, -0.25, 0.75, 0], [0.5, 0, 0, 0]])
    np.testing.assert_array_equal(got.total, [1.0, 0.5, np.nan, -0.25])
    assert got.outcome.tolist() == [OUTCOME_SCORE, OUTCOME_SCORE, OUTCOME_TIMEOUT, OUTCOME_SCORE]


def test_what_functions_mask_comes_as_tokens_of_all_of_them():
    texts = ["a12", "7b", "odd", "none"]
    every_character = lambda i, spans: [place for start, stop in spans for place in range(start, stop)]
    with pool(user("masks"), user("masks_first"), user("length")) as rewards:
        request = ColumnRequest({"reward_mask": (8,)}, every_character)
        got = rewards.collect([rewards.submit(EXAMPLE, texts, None, request)])
        nobody = rewards.collect([rewards.submit(EXAMPLE, texts)])
    masked = got.columns["reward_mask"]
    assert masked.shape == (4, 8) and [np.flatnonzero(row).tolist() for row in masked] == [[0, 1, 2], [0], [0], [0]]
    np.testing.assert_array_equal(got.parts[user("masks")], [3, 2, np.nan, 4])
    assert got.outcome.tolist() == [OUTCOME_SCORE, OUTCOME_SCORE, OUTCOME_ERROR, OUTCOME_SCORE]
    assert "returned dict for a score" in got.errors[0]
    assert nobody.columns == {}
    np.testing.assert_array_equal(nobody.total, got.total)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"reward": 0.5, "masked": [[1, 4], (6, 9)]}, (0.5, {"masked": [[1, 4], [6, 9]]})),
        ({"reward": 0.5, "masked": np.array([[1, 4]])}, (0.5, {"masked": [[1, 4]]})),
        ({"reward": [0.5, 1.0], "masked": []}, ([0.5, 1.0], {"masked": []})),
        ({"reward": 1.0, "level": np.float32(0.5), "steps": (1, 2)}, (1.0, {"level": 0.5, "steps": [1, 2]})),
        (0.25, (0.25, {})),
        (None, (None, {})),
    ],
)
def test_a_score_may_come_with_columns(value, expected):
    assert unpacked(value) == expected


@pytest.mark.parametrize(
    "value",
    [{"reward": 1.0}, {"reward": 1.0, "masked": 3 + 1j}, {"reward": 1.0, "masked": "3"}, {"score": 1.0, "masked": []}],
)
def test_a_value_of_another_form_is_no_score(value):
    assert unpacked(value) == (value, {})


def test_columns_of_functions_are_joined_and_a_wrong_column_fails_its_completion(monkeypatch):
    monkeypatch.setitem(COLUMNS, "level", Column(False, True, "", ROW))
    monkeypatch.setitem(COLUMNS, "steps", Column(False, True, "", TURN))
    request = ColumnRequest({"level": (), "steps": (2,)}, None)
    texts = ["1", "-2", "many", "unknown", "nan", "ignored"]
    with pool(user("with_columns"), user("length")) as rewards:
        got = rewards.collect([rewards.submit(EXAMPLE, texts, None, request)])
    np.testing.assert_array_equal(got.columns["level"][[0, 1]], [1, -2])
    np.testing.assert_array_equal(got.columns["steps"][[0, 1]], [[1, 0], [-2, 0]])
    assert got.outcome.tolist() == [OUTCOME_SCORE] * 2 + [OUTCOME_ERROR] * 3 + [OUTCOME_SCORE]
    assert [name for name in ("steps", "unknown", "level") if any(f"{name!r}" in x for x in got.errors)] == [
        "steps",
        "unknown",
        "level",
    ]


def test_a_column_with_the_name_of_what_a_function_is_given_is_refused():
    """Otherwise the function would receive the environments instead of the column."""
    row = Example("p", {"environments": 3}, "a.jsonl:1")
    with refused_row("a.jsonl", 1, "'environments'"):
        pool(user("of_environments"), examples=[row])
