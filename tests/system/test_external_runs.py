"""Runs with external rollouts: learning from demonstrations, bitwise resuming, runs that share files."""

import json

import jax
import pytest
from support.building import compile_once

from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import SHARED_FILE

# 12 rollouts of its own and 4 of others an iteration.
SETTINGS = {
    "prompts": {"source": "jsonl", "max_tokens": 8},
    "sampling": {"max_completion_tokens": 4},
    "rollout": {"prompts_per_iteration": 3, "group_size": 4, "chunk_steps": 4},
    "rewards": {"num_workers": 1},
    "replay": {"capacity": 32, "skip_tied": True},
    "update": {"batch_size": 8, "micro_batch_size": 8, "updates_per_iteration": 4},
    "algorithm": {"surrogate": "reinforce"},
    "optimizer": {"learning_rate": 5e-3},
    "metrics": {"tensorboard": False, "share_rollouts": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return questions whose only right answer is "ok" and an end, three of 260 tokens. Chance never finds it."""
    folder = tmp_path_factory.mktemp("external")
    (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": f"q{i}?"}) + "\n" for i in range(7)))
    (folder / "scorer.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [float(text == 'ok') for text in completions]\n"
    )
    rows = [
        {"prompt": "q0?", "completions": ["ok", "no"]},
        {"prompt": "new?", "completions": ["no", "ok", [1, 2, 3, 4]], "rewards": [0, 1, None]},
        {"messages": [{"role": "user", "content": "q2?"}], "completions": ["ok", "ko", "no", "ok"]},
    ]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "seen.py").write_text(
        "def hindsight(prompts, completions, **columns):\n"
        "    name = sum(map(ord, ''.join(completions))) % 100\n"
        "    return [{'prompt': f'{name}?', 'completions': ['ok', 'no']}]\n"  # which the run's reward scores
    )
    (folder / "nobody").mkdir()
    return folder


@pytest.fixture(scope="module")
def compiled():
    """Return the compiled programs of every run in this file."""
    return {}


@pytest.fixture
def train(folder, compiled, monkeypatch):
    """Train in a workdir on one device with external answers from a path, and return the metrics."""
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])

    monkeypatch.setattr(train_module.sharding, "make_mesh", lambda _: mesh)
    monkeypatch.setattr(train_module, "compile_all", compile_once(compiled))
    monkeypatch.setattr(train_module.report, "write_report", lambda workdir: "not written")

    def run(workdir, path, num_iterations, **checkpoint):
        settings = SETTINGS | {
            "num_iterations": num_iterations,
            "prompts": SETTINGS["prompts"] | {"name": str(folder / "questions.jsonl")},
            "rewards": SETTINGS["rewards"] | {"functions": (f"{folder / 'scorer.py'}:reward",)},
            "external": {"paths": (str(path),), "groups_per_iteration": 1},
            "checkpoint": {"export": False} | checkpoint,
        }
        workdir.mkdir(exist_ok=True)
        assert train_module.train(freeze(settings), workdir) == 0
        return read_metrics(workdir)

    return run


@pytest.mark.tier("kills")
def test_demonstrations_teach_what_is_not_found_by_chance_and_resuming_is_bitwise(train, folder, tmp_path):
    shown = train(tmp_path / "whole", folder / "shown.jsonl", 10, export=True)
    # Measured: 0 for four iterations, 0.9 in the seventh.
    assert max(row["rollout/pass_rate"] for row in shown[4:]) > 0.5
    assert [row["external/groups"] for row in shown] == [1] * 10
    assert [row["external/failed_rewards"] for row in shown] == [0, 1, 0] * 3 + [0]
    assert all(row["external/reward_mean"] == 0.5 for row in shown)
    assert max(row["update/sampler_learner_gap_max_nats"] or 0.0 for row in shown) < 1e-4

    for until in (4, 10):  # the second line of the three is next
        train(tmp_path / "pieces", folder / "shown.jsonl", until, export=True)

    files = ("samples.jsonl", SHARED_FILE, "hf/model.safetensors")
    assert left(tmp_path / "pieces", *files) == left(tmp_path / "whole", *files)


def left(workdir, *files):
    """Return the final state of a run."""
    kept = ("rollout", "update", "replay", "external")
    rows = [{k: v for k, v in row.items() if k.split("/")[0] in kept} for row in read_metrics(workdir)]
    return rows, [(workdir / name).read_bytes() for name in files]


class Killed(Exception):
    pass


@pytest.mark.tier("kills")  # plain: tests/actor/test_external.py
def test_hindsight_of_a_run_that_was_killed_and_resumed_is_that_of_one_that_was_not(
    train, folder, tmp_path, monkeypatch
):
    train(tmp_path / "whole", f"{folder}/seen.py:hindsight", 4)
    calls, append = [], train_module.MetricsWriter.append

    def dies(writer, lines):
        calls.extend(lines.keys() & {SHARED_FILE})
        if len(calls) == 4:
            raise Killed
        append(writer, lines)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(train_module.MetricsWriter, "append", dies)
        train(tmp_path / "pieces", f"{folder}/seen.py:hindsight", 4, every_iterations=2)
    rows = train(tmp_path / "pieces", f"{folder}/seen.py:hindsight", 4, every_iterations=2)  # from the second on
    assert [row["external/groups"] for row in rows] == [0, 1, 1, 1]
    assert [row["external/reward_mean"] for row in rows] == [None, 0.5, 0.5, 0.5]
    assert rows[-1]["update/loss"] != 0
    assert left(tmp_path / "pieces", "samples.jsonl") == left(tmp_path / "whole", "samples.jsonl")


@pytest.mark.tier("kills")  # what is taken is in tests/actor/test_external.py
def test_a_run_alone_learns_nothing_and_another_takes_what_it_has_shared_since_the_last_time(train, folder, tmp_path):
    for until in (2, 4):
        alone = train(tmp_path / "one", folder / "nobody", until)
        rows = train(tmp_path / "two", tmp_path / "one", until)
    # Nothing is drawn and no step is taken: so it would go on for ever.
    assert all(row["external/groups"] == 0 and row["rollout/pass_rate"] == 0 for row in alone)
    assert all(row["update/skipped_steps"] == 4 and row["rollout/degenerate_group_frac"] == 1 for row in alone)
    lines = [json.loads(line) for line in (tmp_path / "one" / SHARED_FILE).read_text().splitlines()]
    assert len(lines) == 4 * 3 and all(len(line["completions"]) == len(line["rewards"]) == 4 for line in lines)
    assert {line["prompt"] for line in lines} == {f"q{i}?" for i in range(7)}
    # Two iterations of the other, of which the newest group is taken, and then nothing new; twice.
    assert [row["external/groups"] for row in rows] == [1, 0, 1, 0]
    assert [row["external/reward_mean"] for row in rows] == [0, None, 0, None]
    assert all(row["external/skipped_lines"] == 0 for row in rows)
