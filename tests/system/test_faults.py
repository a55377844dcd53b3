"""A run whose updates stop being finite ends with its last batch in a file that shows the cause, and loses nothing."""

import re

import jax
import numpy as np
import pytest
from support.building import compile_once
from support.refusal import check_refusal, refused

from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.learner import faults
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.weights import restore_params

METHOD = """
import jax.numpy as jnp

def bursting(advantage, x):
    return jnp.where(x.mask & (x.reward > 0.1)[:, None], jnp.inf, advantage)
"""
UPDATES = 2


def settings(folder, **update):
    (folder / "method.py").write_text(METHOD)
    return {
        "num_iterations": 4,
        "model": {"path": "random:debug"},
        "prompts": {"size": 16},
        "sampling": {"max_completion_tokens": 8},
        "rollout": {"prompts_per_iteration": 4, "group_size": 4},
        "replay": {"capacity": 32, "capacity_tokens": 32 * 40, "max_uses": 1, "skip_tied": False},
        "update": {"batch_size": 8, "micro_batch_size": 4, "updates_per_iteration": UPDATES, **update},
        "algorithm": {"reshaping": [f"{folder / 'method.py'}:bursting"]},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"export": False},
        "metrics": {"tensorboard": False},
    }


@pytest.fixture(params=[pytest.param(1, id="one device"), pytest.param(2, id="two devices", marks=pytest.mark.slow)])
def mesh(request, monkeypatch):
    made = sharding.make_mesh(MeshConfig(), jax.devices()[: request.param])
    monkeypatch.setattr(sharding, "make_mesh", lambda _: made)
    return made


@pytest.mark.tier("slow")  # plain: tests/learner/test_update.py skips updates that are not finite
def test_too_many_updates_that_are_not_finite_end_a_run_with_their_batch(mesh, tmp_path, capfd, monkeypatch):
    """An iteration has two updates and three may fail, so the run ends at the second iteration's last update."""
    monkeypatch.setattr(train_module, "compile_all", compile_once({}))
    config = freeze(settings(tmp_path))
    workdir = tmp_path / "run"
    assert train_module.train(config, workdir) == 1
    printed = capfd.readouterr()
    (error,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert re.search(r"^checkpoint  \d\.\d\d GB$", printed.out, re.MULTILINE)
    path = workdir / "nonfinite_2.npz"
    check_refusal(error, "update.max_nonfinite_steps", 3, "4 updates", "update 2", "iteration 2", str(path))
    metrics = read_metrics(workdir)
    assert [row["update/nonfinite_steps"] for row in metrics] == [2, 2]
    assert [row["update/skipped_steps"] for row in metrics] == [2, 2]
    assert all(row[f"update/{name}"] is None for row in metrics for name in ("loss", "grad_norm", "entropy_nats"))

    # The weights are those it began with, bit by bit.
    source = pretrained.resolve(config.model.path)
    run = assemble(config, source.architecture(), source.tokenizer().eos_ids, mesh, source.architecture())
    began = source.load_params(run.model, mesh, seed=config.seed)
    params, _ = restore_params(workdir, run.learner.params)
    jax.tree.map(np.testing.assert_array_equal, params, began)

    # The file's batch is not finite under them, and is without the infinite advantages.
    rows = faults.read(path)
    assert rows.reward.shape == (8,) and rows.rollout.tokens.shape == (8, config.row_tokens)
    infinite = np.isinf(rows.advantage).any(axis=1)
    np.testing.assert_array_equal(infinite, (rows.reward > 0.1) & (rows.rollout.length > rows.rollout.prompt_length))
    assert infinite.any() and rows.trainable.all()

    def sums(rows):
        state = jax.eval_shape(run.learner._init_state, run.learner.params)
        state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state).replace(params={"policy": params})
        shards = sharding.num_ring_shards(config, mesh)
        rows = jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]), rows)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(run.learner.update.apply_batch)(state, rows, 0)[1]

    assert sums(rows)["nonfinite_count"] == 1
    found = sums(rows.replace(advantage=np.nan_to_num(rows.advantage, posinf=1.0)))
    assert found["nonfinite_count"] == 0 and found["grad_norm_sum"] > 0

    # The count goes on where the run does.
    assert train_module.train(config, workdir) == 1
    printed = capfd.readouterr()
    assert "6 updates" in printed.err and (workdir / "nonfinite_3.npz").is_file()
    written = r"^checkpoint  \d\.\d\d GB; the last was written in \d\.\d s, within checkpoint\.grace_s=30$"
    assert re.search(written, printed.out, re.MULTILINE)


@pytest.mark.slow
def test_fewer_are_skipped_and_the_run_goes_on(mesh, tmp_path):
    config = freeze(settings(tmp_path, max_nonfinite_steps=9))
    assert train_module.train(config, tmp_path / "run") == 0
    assert sum(row["update/nonfinite_steps"] for row in read_metrics(tmp_path / "run")) == 4 * UPDATES
    assert not list((tmp_path / "run").glob("*.npz"))


@pytest.mark.parametrize("limit", [0, -1])
def test_the_limit_is_checked(limit, tmp_path):
    with refused("update.max_nonfinite_steps", limit):
        freeze(settings(tmp_path, max_nonfinite_steps=limit))
