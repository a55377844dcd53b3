"""Arrays kept in the host's memory: not a bit differs, a checkpoint fits either way, devices without it are refused."""

import functools
import types

import jax
import numpy as np
import pytest
from building import COMPLETION_TOKENS, EOS_IDS, ONE, PROMPT_TOKENS, TINY, learner_params, mesh_of, random_experience

from jaxrl_llm import rng
from jaxrl_llm.assembly import assemble
from jaxrl_llm.checkpoint import Checkpointer
from jaxrl_llm.config import CheckpointConfig, ConfigError, freeze
from jaxrl_llm.programs import compile_all
from jaxrl_llm.types import Scores

# 16 rollouts of 8 prompts, a ring of two iterations, two updates of two micro-batches each.
SETTINGS = {
    "prompts": {"max_tokens": PROMPT_TOKENS},
    "sampling": {"max_completion_tokens": COMPLETION_TOKENS},
    "rollout": {"prompts_per_iteration": 8, "group_size": 2},
    "replay": {"capacity": 32},
    "update": {"batch_size": 16, "micro_batch_size": 8, "updates_per_iteration": 2},
    "optimizer": {"learning_rate": 0.01},
}


def config_of(on_host):
    settings = {group: dict(values) for group, values in SETTINGS.items()}
    settings["optimizer"]["offload"] = on_host
    return freeze(settings)


class Learner:
    """The learner's programs of a run, compiled, with what they need."""

    def __init__(self, on_host):
        self.run = assemble(config_of(on_host), TINY, EOS_IDS, mesh_of(ONE))
        programs = self.run.programs()
        self.programs = compile_all(
            {k: programs[k] for k in ("init_state", "init_ring", "insert", "update")}, mesh_of(ONE)
        )

    def start(self):
        params = learner_params(self.run.model, self.run.mesh)
        return self.programs["init_state"](params), self.programs["init_ring"]()

    def iterate(self, state, ring, iteration):
        rows = random_experience(seed=iteration, with_reference=False)
        put = lambda tree, like: jax.device_put(tree, jax.tree.map(lambda x: x.sharding, like))  # noqa: E731
        scores = put(Scores(rows.reward, rows.trainable), self.run.abstract_scores)
        rollout = put(rows.rollout, self.run.abstract_rollout)
        now, key = put((np.int32(iteration), rng.stream(0, "draw")), (self.run.whole(np.int32),) * 2)
        ring, _ = self.programs["insert"](ring, rollout, scores, None, now)
        return self.programs["update"](state, ring, now, key)


learner = functools.cache(Learner)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.fixture(scope="module")
def plain():
    """State, ring and sums of two iterations without any of it."""
    state, ring = learner(False).start()
    first = jax.device_get(learner(False).iterate(state, ring, 0))
    state, ring = jax.device_put(first[:2])
    return first, jax.device_get(learner(False).iterate(state, ring, 1))


def test_not_a_bit_of_an_iteration_differs(plain):
    state, ring = learner(True).start()
    for iteration, expected in enumerate(plain):
        state, ring, sums = learner(True).iterate(state, ring, iteration)
        assert_same((state, ring, sums), expected)
        assert kinds(state.opt_state) == {"pinned_host"}
        assert kinds(state.params) == {"device"}


@pytest.mark.parametrize("on_host", [True, False])
def test_a_checkpoint_of_one_kind_is_resumed_as_the_other(plain, on_host, tmp_path):
    saver, reader = learner(on_host), learner(not on_host)
    state, ring, _ = saver.iterate(*saver.start(), 0)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.save(1, {"train": state, "ring": ring}, {}, saver.run.config, pass_rate=None)
    checkpointer.wait()
    abstract = {"train": reader.run.abstract_state, "ring": reader.run.abstract_ring}
    restored = checkpointer.restore(abstract, reader.run.config, allow_config_changes=False).device_state
    checkpointer.close()
    assert kinds(restored["train"].opt_state) == {"device" if on_host else "pinned_host"}
    assert_same(reader.iterate(restored["train"], restored["ring"], 1), plain[1])


def test_devices_without_such_memory_are_refused():
    device = types.SimpleNamespace(
        platform="cpu", device_kind="abacus", addressable_memories=lambda: [types.SimpleNamespace(kind="beads")]
    )
    mesh = types.SimpleNamespace(shape=mesh_of(ONE).shape, devices=np.array([device]))
    message = "optimizer.offload=True must be False on abacus: it has no memory 'pinned_host', only 'beads'"
    with pytest.raises(ConfigError, match=message):
        assemble(config_of(True), TINY, EOS_IDS, mesh)
