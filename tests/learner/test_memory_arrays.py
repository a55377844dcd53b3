"""Arrays in a method's memory are arrays of the checkpoint: the same bits after a resume, and no large JSON."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import building
from support.building import EIGHT, ONE, TINY, mesh_of

from jaxrl_llm.config import ConfigError, freeze
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime.checkpoint import Checkpointer
from jaxrl_llm.types import Rewards

WIDTH = 576
WIDE = dataclasses.replace(TINY, width=WIDTH)
NO_REWARDS = Rewards(np.zeros(0), {}, np.zeros(0, np.int8))
SETTINGS = {
    "num_iterations": 3,
    "prompts": {"max_tokens": building.PROMPT_TOKENS},
    "sampling": {"max_completion_tokens": building.COMPLETION_TOKENS},
    "rollout": {"prompts_per_iteration": 8, "group_size": 4},
    "replay": {"capacity": 64},
    "update": {"batch_size": 32},
}


def run_of(advantage="poise", mesh=ONE):
    return assemble(freeze(SETTINGS | {"algorithm": {"advantage": advantage}}), WIDE, building.EOS_IDS, mesh_of(mesh))


def learner_of(run):
    """Return a learner whose state is a single number."""
    learner = Learner(run.learner, {}, Ledger())
    learner.state = jnp.zeros((), jnp.int32)
    learner.ring = None
    return learner


def observe(learner, seed):
    for name, x in learner.memory.arrays().items():
        assert name == "poise" and x.nbytes > 1e6
        sums = np.random.default_rng(seed).normal(size=x.shape).astype(np.float32)
        learner.memory.observe(NO_REWARDS, (), {"regression": sums})


def save(workdir, run, iteration, arrays, host):
    checkpoints = Checkpointer(workdir, run.config.checkpoint)
    checkpoints.save(iteration, arrays, host, run.config, pass_rate=None)
    checkpoints.close()


def resume(workdir, run, allow=False):
    """Return a learner that continued from the newest undamaged checkpoint, and the iteration of that checkpoint."""
    abstract = {"train": jax.ShapeDtypeStruct((), jnp.int32), "ring": None} | run.learner.abstract_memory
    checkpoints, learner = Checkpointer(workdir, run.config.checkpoint), learner_of(run)
    try:
        checkpoints.check_config(run.config, abstract, allow_changes=allow)
        restored = checkpoints.restore(abstract, run.config, allow_config_changes=allow)
    finally:
        checkpoints.close()
    learner.restore(restored.host_state, restored.device_state)
    return learner, restored.iteration


def same_memory(one, other):
    assert one.memory.state() == other.memory.state()
    np.testing.assert_equal(one.memory.arrays(), other.memory.arrays())
    assert {name: x.dtype for name, x in one.memory.arrays().items()} == {"poise": np.float32}


@pytest.fixture
def observed(tmp_path):
    """Return a learner with two checkpoints, after one and after two iterations."""
    run = run_of()
    learner = learner_of(run)
    for seed in (1, 2):
        observe(learner, seed)
        save(tmp_path, run, seed, learner.arrays(), learner.host_state())
    return learner


@pytest.mark.parametrize("mesh", [ONE, EIGHT], ids=["one device", "eight devices"])
def test_a_resumed_memory_has_the_same_bits_and_learns_the_same(observed, mesh, tmp_path):
    resumed, iteration = resume(tmp_path, run_of(mesh=mesh))
    assert iteration == 2
    same_memory(resumed, observed)
    for learner in (resumed, observed):
        observe(learner, 3)
    same_memory(resumed, observed)


def test_the_json_of_a_checkpoint_is_small(observed, tmp_path):
    sizes = [path.stat().st_size for path in tmp_path.glob("checkpoints/*/*/metadata")]
    assert len(sizes) == 4 and max(sizes) < 100_000  # host/ and config/ of two


def test_a_run_has_the_array_in_its_checkpoint_and_a_program_for_its_checksum():
    run = run_of()
    arrays = learner_of(run).memory.arrays()
    assert {part: x.shape for part, x in run.abstract_checkpoint.items() if part.startswith("memory")} == {
        f"memory_{name}": x.shape for name, x in arrays.items()
    }
    assert "checksums_memory_poise" in run.programs()
    assert not [name for name in run_of("grpo").programs() if "memory" in name]


def test_a_damaged_array_is_refused(observed, tmp_path):
    raw = observed.memory.arrays()["poise"].tobytes()
    files = [(path, path.read_bytes()) for path in tmp_path.glob("checkpoints/2/state/**/d/*")]
    (path, data), = [file for file in files if raw in file[1]]  # fmt: skip
    damaged = bytearray(data)
    damaged[data.index(raw) + len(raw) // 3] ^= 1
    path.write_bytes(damaged)
    assert resume(tmp_path, run_of())[1] == 1
    path.unlink()
    assert resume(tmp_path, run_of())[1] == 1


def test_a_checkpoint_of_an_earlier_version_has_it_as_json(observed, tmp_path):
    sums = observed.memory.arrays()["poise"].astype(float)
    host = observed.host_state() | {"memory": {"poise": sums.tolist()}}
    save(tmp_path, run_of(), 3, {"train": observed.state}, host)
    resumed, iteration = resume(tmp_path, run_of())
    assert iteration == 3
    same_memory(resumed, observed)


def test_a_run_that_may_change_its_method_ignores_the_array_and_a_new_array_begins_empty(observed, tmp_path):
    plain = run_of("grpo")
    with pytest.raises(ConfigError):
        resume(tmp_path, plain)
    learner, iteration = resume(tmp_path, plain, allow=True)
    assert iteration == 2 and learner.memory.arrays() == {}
    save(tmp_path, plain, 3, learner.arrays(), learner.host_state())
    resumed, iteration = resume(tmp_path, run_of(), allow=True)
    assert iteration == 3
    same_memory(resumed, learner_of(run_of()))
