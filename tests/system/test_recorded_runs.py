"""The config.json of a run is a config. A run of it equals the recorded run, or is refused by name."""

import json
import re

import grain  # noqa: F401, whose flags outlive a command
import pytest
from support import ghosts
from support.building import ONE, mesh_of
from support.command_line import DEBUG_CONFIG, run_command
from support.refusal import check_refusal

from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import machine, sharding

REWARDS = """
def score(completions, **columns):
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]
"""
METHODS = """
def plain(x, *, scale: float = 1.0):
    return -scale * x.advantage * x.policy_logp
"""
SETTINGS = (
    *("--config.num_iterations=2", "--config.eval.num_prompts=0", "--config.checkpoint.export=False"),
    *("--config.metrics.tensorboard=False", "--config.replay.capacity=128", "--config.seed=3"),
    *("--config.rewards.functions=('rewards.py:score',)", "--config.algorithm.surrogate=methods.py:plain"),
    "--config.algorithm.surrogate.scale=2",
)


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Run ``train`` in a folder with two files of functions, to which paths are relative."""
    mesh = mesh_of(ONE)
    monkeypatch.setattr(sharding, "make_mesh", lambda *_: mesh)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "methods.py").write_text(METHODS)
    return lambda *words: run_command("train", *words, monkeypatch=monkeypatch, capfd=capfd)


@pytest.fixture
def haunted(monkeypatch):
    ghosts.haunt(monkeypatch)


def record_of(workdir):
    return json.loads((workdir / "config.json").read_text())


def untimed(workdir):
    timed = ("time/", "throughput/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_metrics(workdir)]


@pytest.mark.slow
def test_a_run_of_a_record_is_the_same_run(train, tmp_path):
    assert train(f"--config={DEBUG_CONFIG}", "--workdir=first", *SETTINGS).status == 0
    assert train("--config=first/config.json", "--workdir=again").status == 0
    assert record_of(tmp_path / "again") == record_of(tmp_path / "first")
    assert untimed(tmp_path / "again") == untimed(tmp_path / "first")
    # It is a config like any other: settings of the command line come over it.
    assert train("--config=first", "--workdir=other", "--config.seed=4").status == 0
    other = record_of(tmp_path / "other")
    assert other.pop("seed") == 4 and other == {k: v for k, v in record_of(tmp_path / "first").items() if k != "seed"}
    assert untimed(tmp_path / "other") != untimed(tmp_path / "first")


def test_a_record_has_every_setting_the_processor_and_the_files(train, haunted, tmp_path):
    assert train(f"--config={DEBUG_CONFIG}", "--workdir=first", *SETTINGS).status == 0
    for words in (("--config=first/config.json",), ("--config", "first"), (f"--config={tmp_path}/first",)):
        workdir = tmp_path / f"again{len(words)}{len(words[0])}"
        done = train(*words, f"--workdir={workdir}")
        assert done.status == 0, done.err
        assert record_of(workdir) == record_of(tmp_path / "first")
    made_with = record_of(workdir)["made_with"]
    assert made_with["processor"] == machine.processor() and re.fullmatch(r"\d+ x .*\S", made_with["processor"])
    assert set(made_with["files"]) == {"rewards.py:score"}


def test_what_a_record_names_and_is_not_there_is_refused_by_name(train, haunted, tmp_path, monkeypatch):
    assert train(f"--config={DEBUG_CONFIG}", "--workdir=first", *SETTINGS).status == 0
    whole = record_of(tmp_path / "first")

    def refused(*words, **changes):
        (tmp_path / "record.json").write_text(json.dumps(whole | changes))
        done = train("--config=record.json", "--workdir=again", *words)
        assert done.status == 2 and done.err.startswith("error: ") and len(done.err.splitlines()) == 1
        assert not (tmp_path / "again" / "config.json").exists()
        return done.err

    for spec in ("__main__:score", "notebook:make.<locals>.score"):
        said = refused(rewards=whole["rewards"] | {"functions": [spec]})
        assert repr(spec) in said and "rewards.functions" in said
    environment = whole["environments"] | {"factory": "__main__:Game"}
    assert "environments.factory names '__main__:Game'" in refused(environments=environment)
    absent = whole["prompts"] | {"source": "jsonl", "name": "questions.jsonl"}
    assert "questions.jsonl" in refused(prompts=absent)
    (tmp_path / "rewards.py").write_text(REWARDS.replace("islower", "isupper"))
    assert "'rewards.py:score'" in refused()
    (tmp_path / "rewards.py").unlink()
    assert "'rewards.py:score'" in refused()
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "methods.py").write_text(METHODS.replace("-scale", "-2 * scale"))
    assert "algorithm.surrogate='methods.py:plain'" in refused()
    (tmp_path / "methods.py").unlink()
    assert "algorithm.surrogate='methods.py:plain'" in refused()
    # Another function in its place is taken.
    words = ("--config=record.json", "--config.algorithm.surrogate=reinforce")
    assert train(*words, "--workdir=other").status == 0


@pytest.mark.parametrize(
    "text", ["{}", "[1]", "{", "null", '{"seed": 1}', '{"made_with": 3}', '{"made_with": {"files": 3}}', "[" * 100_000]
)
def test_what_is_no_record_is_refused_by_the_files_name(text, train, tmp_path):
    (tmp_path / "x.json").write_text(text)
    done = train("--config=x.json", "--workdir=again")
    assert done.status == 2 and len(done.err.splitlines()) == 1
    check_refusal(done.err, "--config", "x.json")


def test_a_record_that_is_not_there_or_has_unknown_settings_is_refused(train, tmp_path):
    assert "nowhere.json" in train("--config=nowhere.json", "--workdir=again").err
    assert "config.json" in train("--config=.", "--workdir=again").err
    (tmp_path / "x.json").write_text(json.dumps({"sede": 1, "made_with": {}}))
    check_refusal(train("--config=x.json", "--workdir=again").err, "sede", 1, "seed")
