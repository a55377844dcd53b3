"""Runs with answers of others: learning from demonstrations, resumed bitwise, and runs that share by files."""

import json

import jax
import pytest

from jaxrl_llm import sharding
from jaxrl_llm import train as train_module
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.metrics import read_metrics
from jaxrl_llm.programs import compile_all
from jaxrl_llm.types import SHARED_FILE

# 12 rollouts of its own and 4 of others an iteration.
SETTINGS = {
    "prompts": {"source": "jsonl", "max_tokens": 8},
    "sampling": {"max_completion_tokens": 4},
    "rollout": {"prompts_per_iteration": 3, "group_size": 4, "chunk_steps": 4},
    "rewards": {"num_workers": 1},
    "replay": {"capacity": 32, "skip_tied": True},
    "update": {"batch_size": 8, "micro_batch_size": 8, "updates_per_iteration": 4},
    "objective": {"surrogate": "reinforce"},
    "optimizer": {"learning_rate": 5e-3},
    "metrics": {"tensorboard": False, "share_rollouts": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Questions whose only right answer is "ok" and an end, three of 260 tokens: nobody finds it by chance."""
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
    (folder / "nobody").mkdir()
    return folder


@pytest.fixture(scope="module")
def compiled():
    """The programs of every run here."""
    return {}


@pytest.fixture
def train(folder, compiled, monkeypatch):
    """Trains in a workdir on one device with answers from a path; its metrics."""
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])

    def compile_once(programs, mesh):
        if not compiled:
            compiled.update(compile_all(programs, mesh))
        return compiled

    monkeypatch.setattr(train_module.sharding, "make_mesh", lambda _: mesh)
    monkeypatch.setattr(train_module, "compile_all", compile_once)

    def run(workdir, path, num_iterations, **changes):
        settings = SETTINGS | {
            "num_iterations": num_iterations,
            "prompts": SETTINGS["prompts"] | {"name": str(folder / "questions.jsonl")},
            "rewards": SETTINGS["rewards"] | {"functions": (f"{folder / 'scorer.py'}:reward",)},
            "external": {"paths": (str(path),), "groups_per_iteration": 1},
            "checkpoint": {"export": changes.pop("export", False)},
        }
        workdir.mkdir(exist_ok=True)
        assert train_module.train(freeze(settings | changes), workdir) == 0
        return read_metrics(workdir)

    return run


def test_demonstrations_teach_what_own_rollouts_never_find(train, folder, tmp_path):
    alone = train(tmp_path / "alone", folder / "nobody", 16)
    shown = train(tmp_path / "shown", folder / "shown.jsonl", 16)
    print([r["rollout/pass_rate"] for r in alone])
    print([r["rollout/pass_rate"] for r in shown])
    for r in shown:
        print(
            {
                k: v
                for k, v in r.items()
                if k.startswith("external")
                or k in ("replay/drawn_rows", "update/sampler_learner_gap_max_nats", "update/entropy_nats")
            }
        )
    assert 0
