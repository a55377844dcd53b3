"""Unfinished rollouts continue on another number of data shards, with the same results as without the change."""

import contextlib

import jax
import numpy as np
import pytest
from support.building import Sampling, interrupt, make_prompts, make_sampler
from support.refusal import raises_with, refused

from jaxrl_llm.actor import redistribution
from jaxrl_llm.config import CheckpointConfig, Config, ConfigError, MeshConfig, freeze
from jaxrl_llm.runtime.checkpoint import Checkpointer
from jaxrl_llm.runtime.checkpoint_files import check_arrays


def sampling_on(shards):
    """Return a sampling run with fewer slots than rows. Slots are refilled in the order of the prompts."""
    return Sampling(make_sampler(mesh=MeshConfig(data=shards), num_slots=8, chunk_steps=3))


def gone_on(workdir, stopped, shards):
    """Return a sampling run on this many shards that continues from the saved state, and the messages to the user."""
    checkpoints, resumed = Checkpointer(workdir, CheckpointConfig()), sampling_on(shards)
    before, entries, size = stopped.generator.state.length.shape
    rows = [[m, e, g, (m * entries + e) * size + g] for m, e, g in np.ndindex(before, entries, size)]
    host = {"open_prompts": stopped.generator.opened(), "conversations": rows, "draws": [[[1.0] * before]]}
    checkpoints.save(1, {"sampler": stopped.generator.state}, host, Config(), pass_rate=None)
    abstract = {"sampler": resumed.sampler.abstract_state()}
    restored = checkpoints.restore(abstract, Config(), allow_config_changes=False)
    checkpoints.close()
    resumed.generator.state, host, words = redistribution.redistribute(
        resumed.generator, restored.device_state["sampler"], restored.host_state, restored.shapes
    )
    assert host["draws"] == [[[float(before), *[0.0] * (shards - 1)]]]
    texts = {name: (example, ids) for name, example, ids, _ in stopped.generator.open_prompts.values()}
    for *where, group_id in host["open_prompts"]:
        resumed.generator.adopt(*where, group_id, *texts[group_id])
    return resumed, host["conversations"], words


@pytest.mark.tier("slow")  # plain: test_turns resumes inside a generation; test_checkpoint changes the mesh
@pytest.mark.parametrize(("before", "now"), [pytest.param(4, 2, marks=pytest.mark.tier("slow")), (2, 4)])
def test_what_was_begun_comes_out_as_it_would_have_in_the_same_order(tmp_path, before, now):
    expected, groups = sampling_on(before)(make_prompts(range(8)))
    stopped = sampling_on(before)
    interrupt(stopped, make_prompts(range(8)), after=2)
    table = jax.device_get(stopped.generator.state)
    # By hand: rows whose slot is, of all 8, one of another shard's than theirs, of all 24.
    slot, row = np.arange(8).reshape(before, -1), np.arange(before)[:, None] * (24 // before) + table.slot_row
    strays = (table.slot_row >= 0) & (slot // (8 // now) != row // (24 // now))
    assert strays.any() == (now > before) and (table.stop_reason > 0).any()
    resumed, conversations, (words,) = gone_on(tmp_path, stopped, now)
    places = [[m, e, g] for m, e, g in np.ndindex(now, 8 // now, 3)]
    assert conversations == [[*places[i], i] for i in range(24) if i not in row[strays]]
    assert words == f"unfinished rollouts from {before} data-parallel devices continue on {now}" + (
        f"; {strays.sum()} of them restart" if strays.any() else ""
    )
    assert resumed.generator.state.started.sum() == table.started.sum() - strays.sum()
    rollout, others = resumed(make_prompts(range(0)))
    assert [group.group_id for group in others] == [group.group_id for group in groups] == list(range(8))
    for name in ("tokens", "length", "group_id", "policy_version", "stop_reason"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))
    np.testing.assert_allclose(rollout.behaviour_logp, expected.behaviour_logp, atol=1e-5)
    sizes = (table.length - table.prompt_length).reshape(before, -1)
    again = np.take_along_axis(sizes, table.slot_row, axis=1)[strays].sum()  # drawn twice, and counted so
    assert resumed.generator.take_draws().tokens == (expected.length - expected.prompt_length).sum() + again


def test_shards_that_are_split_cannot_keep_a_bound_on_the_lag_and_say_so_before_anything_is_compiled(tmp_path):
    config = freeze({"rollout": {"lookahead_prompts": 8, "max_lag_iterations": 2}, "replay": {"shards": 2}})
    table = lambda shards: {"sampler": {"length": np.zeros((shards, 8 // shards, 3), np.int32)}}
    with contextlib.closing(Checkpointer(tmp_path, CheckpointConfig())) as checkpoints:
        checkpoints.save(1, table(2), {}, config, pass_rate=None)
        checkpoints.wait()
        for shards in (2, 1):
            checkpoints.check_config(config, table(shards), allow_changes=False)
        with refused("rollout.max_lag_iterations", 2, "2 data-parallel devices", "not on 4"):
            checkpoints.check_config(config, table(4), allow_changes=False)


def test_a_table_of_other_rows_does_not_fit(tmp_path):
    saved = {"sampler/length": ["int32", [4, 2, 8], 0], "train/x": ["int32", [4, 2], 0]}
    shapes = {"sampler/length": (2, 4, 8), "train/x": (4, 2)}
    now = {name: jax.ShapeDtypeStruct(shape, np.int32) for name, shape in shapes.items()}
    check_arrays(saved, now, tmp_path, same_dtype=True)
    for name, shape in (("sampler/length", (2, 5, 8)), ("sampler/length", (2, 4, 9)), ("train/x", (2, 4))):
        with raises_with(ConfigError, f"{name} is int32", str(tmp_path)):
            check_arrays(saved, now | {name: jax.ShapeDtypeStruct(shape, np.int32)}, tmp_path, same_dtype=True)
