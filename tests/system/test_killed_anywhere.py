"""SIGKILL while a run is not training: while it compiles, exports or writes its report; and SIGKILL to its workers."""

import time

import psutil
import pytest
import safetensors.numpy
from test_resume import ENVIRONMENTS, SETTINGS, Process, assert_same_run

from jaxrl_llm.reports.metrics import read_metrics

pytestmark = pytest.mark.tier("kills")
EXPORTING = SETTINGS | {"checkpoint.export": True}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compilation_cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """Return the workdir of a run that exports, and that nobody disturbs."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    status, _, err = Process(workdir, cache, EXPORTING).finish()
    assert status == 0, err
    return workdir


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("line", ["", "checkpoint  ", "model  "], ids=["compile", "export", "report"])
def test_a_run_that_is_killed_beside_its_iterations_ends_as_if_it_had_not_been(
    line, seconds, tmp_path, cache, undisturbed
):
    process = Process(tmp_path / "run", cache, EXPORTING)
    process.until(line)
    time.sleep(seconds)
    process.process.kill()
    process.finish()
    status, _, err = Process(tmp_path / "run", cache, EXPORTING).finish()
    assert status == 0, err
    assert "Traceback" not in err
    assert_same_run(tmp_path / "run", undisturbed, same_steps=False)
    folders = (tmp_path / "run", undisturbed)
    exported = [safetensors.numpy.load_file(folder / "hf" / "model.safetensors") for folder in folders]
    assert exported[0].keys() == exported[1].keys()
    assert all((exported[0][name] == exported[1][name]).all() for name in exported[0])
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("environment", ["", f"{ENVIRONMENTS}:brief"], ids=["rewards", "environment"])
def test_a_run_whose_workers_are_killed_counts_failures_and_makes_no_reward_of_them(environment, tmp_path, cache):
    settings = dict(SETTINGS)
    if environment:
        settings |= {"environments.factory": environment, "prompts.chat_template": False}
        settings |= {"environments.max_answer_tokens": 2, "sampling.max_completion_tokens": 24}
        settings |= {"sampling.stop_tokens": tuple("abcdefgh"), "replay.capacity_tokens": 0}
    process = Process(tmp_path / "run", cache, settings)
    num_killed = 0
    while process.until("iteration "):
        for child in psutil.Process(process.process.pid).children(recursive=True):
            child.kill()
            num_killed += 1
    status, _, err = process.finish()
    assert num_killed > 0
    assert "Traceback" not in err
    assert status in (0, 1), err
    assert status == 0 or "error: " in err
    rows = read_metrics(tmp_path / "run")
    assert rows and all(row["rollout/reward_mean"] is None or row["rollout/reward_mean"] >= 0 for row in rows)
