"""Arrays in the host's memory:

no bit differs, a checkpoint fits both settings, devices without host memory are refused.
"""

import functools
import types

import jax
import numpy as np
import pytest
from reference import checksum as oracle
from support.building import (
    COMPLETION_TOKENS,
    EIGHT,
    EOS_IDS,
    ONE,
    PROMPT_TOKENS,
    ROW_TOKENS,
    TINY,
    learner_params,
    mesh_of,
    random_experience,
    replay_config,
)
from support.comparing import assert_same
from support.refusal import refused
from support.tiers import mostly_in

from jaxrl_llm.config import CheckpointConfig, freeze
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import rng, sharding
from jaxrl_llm.runtime.checkpoint import Checkpointer
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.types import Scores

# 16 rollouts of 8 prompts, a ring of two iterations, two updates of two micro-batches each.
SETTINGS = {
    "model": {"remat": "none"},
    "prompts": {"max_tokens": PROMPT_TOKENS},
    "sampling": {"max_completion_tokens": COMPLETION_TOKENS},
    "rollout": {"prompts_per_iteration": 8, "group_size": 2},
    "replay": {"capacity": 32},
    "update": {"batch_size": 16, "micro_batch_size": 8, "updates_per_iteration": 2},
    "optimizer": {"learning_rate": 0.01},
}


def config_of(on_host):
    settings = {group: dict(values) for group, values in SETTINGS.items()}
    if on_host:
        settings["optimizer"]["offload"], settings["replay"]["memory"] = True, "host"
    return freeze(settings)


class Learner:
    """The compiled programs of a run's learner, with their inputs."""

    def __init__(self, on_host):
        self.run = assemble(config_of(on_host), TINY, EOS_IDS, mesh_of(ONE))
        programs = self.run.programs()
        self.programs = compile_all(
            {
                k: programs[k]
                for k in ("init_state", "init_ring", "insert", "update", "checksums_train", "checksums_ring")
            },
            mesh_of(ONE),
        )

    def start(self):
        params = learner_params(self.run.model, self.run.mesh)
        return self.programs["init_state"](params), self.programs["init_ring"]()

    def iterate(self, state, ring, iteration):
        rows = random_experience(seed=iteration, with_reference=False)
        put = lambda tree, like: jax.device_put(tree, jax.tree.map(lambda x: x.sharding, like))
        scores = Scores(rows.reward, rows.trainable, rows.rollout.group_id, parts=(), columns={}, memory={})
        scores = put(scores, self.run.learner.abstract_scores)
        rollout = put(rows.rollout, self.run.learner.abstract_rollout)
        now, key = put((np.int32(iteration), rng.stream(0, "draw")), (sharding.undivided(self.run.mesh, np.int32),) * 2)
        ring, _ = self.programs["insert"](ring, rollout, scores, {}, now)
        return self.programs["update"](state, ring, now, key)


learner = functools.cache(Learner)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.fixture(scope="module")
def plain():
    """Return state, ring and sums of two iterations without host memory."""
    state, ring = learner(False).start()
    first = jax.device_get(learner(False).iterate(state, ring, 0))
    state, ring = jax.device_put(first[:2])
    return first, jax.device_get(learner(False).iterate(state, ring, 1))


@pytest.mark.tier("slow")  # plain: test_a_ring_on_the_host_keeps_and_draws_the_same_rows
def test_not_a_bit_of_an_iteration_differs(plain):
    state, ring = learner(True).start()
    for iteration, expected in enumerate(plain):
        state, ring, sums = learner(True).iterate(state, ring, iteration)
        assert_same((state, ring, sums), expected)
        assert kinds(state.opt_state) == {"pinned_host"}
        assert kinds(ring.slots) == {"pinned_host"}
        assert kinds(state.params) == kinds(ring.replace(slots=None)) == {"device"}
        for part, arrays in {"train": state, "ring": ring}.items():
            abstract = learner(False).run.abstract_checkpoint[part]
            on_device = jax.device_put(arrays, jax.tree.map(lambda x: x.sharding, abstract))
            places = (learner(True), arrays), (learner(False), on_device)
            sums = [each.programs[f"checksums_{part}"](x) for each, x in places]
            assert_same(*sums)
            assert sums[0].tolist() == [oracle.checksum(np.asarray(x)) for x in jax.tree.leaves(arrays)]


@pytest.mark.tier("slow")  # plain: test_a_ring_on_the_host_keeps_and_draws_the_same_rows
@pytest.mark.parametrize("on_host", [True, False])
def test_a_checkpoint_of_one_kind_is_resumed_as_the_other(plain, on_host, tmp_path):
    saver, reader = learner(on_host), learner(not on_host)
    state, ring, _ = saver.iterate(*saver.start(), 0)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.save(1, {"train": state, "ring": ring}, {}, saver.run.config, pass_rate=None)
    checkpointer.wait()
    abstract = {"train": reader.run.learner.abstract_state, "ring": reader.run.learner.abstract_ring}
    restored = checkpointer.restore(abstract, reader.run.config, allow_config_changes=False).device_state
    checkpointer.close()
    moved = (restored["train"].opt_state, restored["ring"].slots)
    assert kinds(moved) == {"device" if on_host else "pinned_host"}
    assert_same(reader.iterate(restored["train"], restored["ring"], 1), plain[1])


def rings(on_host, config):
    """Return five iterations of a ring on eight devices: the ring and the drawn rows after each."""
    mesh = mesh_of(EIGHT)
    rows = random_experience(with_reference=False)
    rows = rows.with_columns(question_id=rows.rollout.group_id)
    sizes = {"capacity": 48, "num_shards": 8, "capacity_tokens": config.capacity_tokens}
    init = functools.partial(replay.init, rows, on_host=on_host, **sizes)
    layout = sharding.leading(mesh, jax.eval_shape(init))
    if on_host:
        layout = layout.replace(slots=sharding.on_host(layout.slots))
    insert = functools.partial(replay.insert, config=config, pass_threshold=0.0)
    draw = functools.partial(replay.draw, config=config, batch_size=16, row_tokens=ROW_TOKENS)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        insert = jax.jit(insert, out_shardings=layout, donate_argnums=0)
        draw = jax.jit(draw, out_shardings=(layout, None, None), donate_argnums=0)
        ring, seen = jax.jit(init, out_shardings=layout)(), []
        for iteration in range(5):
            rows = random_experience(seed=iteration, with_reference=False)
            rows = rows.with_columns(question_id=rows.rollout.group_id)
            ring = insert(ring, jax.device_put(rows, sharding.leading(mesh, rows)), np.int32(iteration))
            ring, batch, info = draw(ring, jax.random.key(iteration), np.int32(iteration))
            assert kinds(ring.slots) == {"pinned_host" if on_host else "device"} and kinds(batch) == {"device"}
            seen.append(jax.device_get((ring, batch, info)))
    return seen


# Two lanes; pages for little more than the rows of an iteration.
@pytest.mark.parametrize(
    "setting", mostly_in("slow", [{"positive_fraction": 1 / 3}, {"capacity_tokens": 18 * ROW_TOKENS}])
)
def test_a_ring_on_the_host_keeps_and_draws_the_same_rows(setting):
    config = replay_config(capacity=48, draw="priority", **setting)
    on_device, on_host = rings(False, config), rings(True, config)
    last = on_device[-1][0]
    is_kept = last.inserted_step[:, 4:] >= 0
    is_gone = lambda pages: pages["first"].min(1) < pages["oldest"]
    assert is_kept.any(1).all() if config.positive_fraction else is_gone(last.pages).all()
    assert_same(on_host, on_device)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optimizer": {"offload": True}}, ("optimizer.offload", True, "False")),
        ({"replay": {"memory": "host"}}, ("replay.memory", "host", "'device'")),
    ],
)
def test_devices_without_such_memory_are_refused(settings, named):
    kinds = [types.SimpleNamespace(kind="beads")]
    device = types.SimpleNamespace(platform="cpu", device_kind="abacus", addressable_memories=lambda: kinds)
    mesh = types.SimpleNamespace(shape=mesh_of(ONE).shape, size=1, devices=np.array([device]))
    with refused(*named, "abacus", "'pinned_host'", "'beads'"):
        assemble(freeze(settings), TINY, EOS_IDS, mesh)
