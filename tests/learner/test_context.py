"""Rows split over devices (mesh.context):

the update equals the update of whole rows, and a chip holds less of a row.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import building
from support.building import TINY, gradient, make_update, needs_libtpu
from support.refusal import check_refusal, refused

from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.planning import chips
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import memory

TWO, FOUR = MeshConfig(data=1, context=2), MeshConfig(data=1, context=4)
MIXED = (
    MeshConfig(data=1, context=2, tensor=2),
    MeshConfig(data=1, fsdp=2, context=2),
    MeshConfig(data=2, fsdp=1, context=2, tensor=2),
    MeshConfig(data=1, fsdp=2, context=4),
)
# Rows of 16 tokens, 8 of them completion; groups of 8 + 4 x 8; lines of three rows, and of one group and a half.
LINES = {"micro_batch_tokens": 8 * 48, "pack_width": 48}
ROWS = {
    "padded": ({}, 1),
    "groups": ({}, 4),
    "lines": (LINES, 1),
    "lines of groups": (LINES, 4),
    "critic": (building.CRITICS["critic, clipped value"], 1),
}


@functools.cache
def whole(name):
    config, size = ROWS[name]
    update = make_update({"logp_chunk_tokens": 16, **config}, num_devices=1, group_size=size)
    rows = building.random_experience(with_critic=name == "critic", with_reference=False, group_size=size)
    pad = lambda x: np.pad(x, ((0, 0), (0, 2)) + ((0, 0),) * (x.ndim - 2)) if x.ndim > 1 else x
    return update, jax.tree.map(pad, rows), gradient(update, jax.tree.map(pad, rows))


def check_equal(name, mesh):
    """Compare two updates. Measured: 2e-6 of a gradient's largest entry, 5e-7 of a loss."""
    update, rows, (expected, sums_expected) = whole(name)
    # Two key heads are copied for four devices of attention.
    found, sums = gradient(update, rows, mesh)
    for key, value in sums_expected.named().items():
        np.testing.assert_allclose(sums[key], value, rtol=1e-5, atol=1e-5, err_msg=key)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_an_update_of_rows_in_parts_is_the_one_of_whole_rows():
    check_equal("lines of groups", FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TWO, FOUR, *MIXED], ids=lambda m: f"{m.data} {m.fsdp} {m.context} {m.tensor}")
@pytest.mark.parametrize("name", ROWS)
def test_an_update_of_rows_in_parts_is_the_one_of_whole_rows_on_any_mesh(name, mesh):
    check_equal(name, mesh)


def settings(prompt, completion, mesh, **update):
    rows = sharding.num_data_shards(mesh)
    return freeze(
        {
            "model": {"compute_dtype": "bfloat16"},
            "prompts": {"max_tokens": prompt},
            "sampling": {"max_completion_tokens": completion},
            "rollout": {"prompts_per_iteration": mesh.size, "group_size": 4},
            "replay": {"unit": "rollout"},
            "update": {"batch_size": mesh.size, "micro_batch_size": rows, **update},
        }
    )


def test_lengths_that_do_not_divide_are_named_with_the_nearest_that_do():
    mesh = building.mesh_of(FOUR)
    with refused("prompts.max_tokens", 6, "4 (4 or 8)", "mesh.context=4") as error:
        assemble(settings(6, 9, mesh, pack_width=31, micro_batch_tokens=62), TINY, (5,), mesh)
    check_refusal(str(error.value), "sampling.max_completion_tokens", 9, "4 (8 or 12)")
    check_refusal(str(error.value), "update.pack_width", 31, "4 (28 or 32)")


def test_the_sampler_has_rows_of_its_own_on_each_of_a_rows_devices():
    mesh = building.mesh_of(MeshConfig(data=1, fsdp=2, context=2, tensor=2))
    config = dataclasses.replace(settings(8, 8, mesh), mesh=MeshConfig(data=1, fsdp=2, context=2, tensor=2))
    run = assemble(config, TINY, (5,), mesh)
    assert run.sampler.mesh.devices.shape == (1, 4, 1, 1, 2) and run.sampler.shards == 4
    assert run.sampler.mesh.devices.flatten().tolist() == mesh.devices.flatten().tolist()
    assert run.learner.abstract_ring.inserted_step.shape[0] == 2
    few = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, prompts_per_iteration=6))
    with refused("rollout.prompts_per_iteration", 6, "4 (4 or 8)"):
        assemble(few, TINY, (5,), mesh)


def test_heads_that_do_not_divide_are_refused():
    mesh, arch = building.mesh_of(FOUR), dataclasses.replace(TINY, num_heads=6)
    with refused("mesh.context", 4, "6 heads", "1, 2, 3, 6"):
        assemble(settings(8, 8, mesh), arch, (5,), mesh)


# --- compiled for TPUs ---


LONG = Architecture(
    2048, width=256, num_layers=2, num_heads=4, num_kv_heads=2, head_size=128, ffn=512, tied=False, max_positions=2**15
)


def update_memory(topology, row_tokens, **mesh):
    """Return the memory per chip of the update's program, and its text before XLA.

    There is one line for each number of data-parallel devices.
    """
    devices, _ = chips.devices_of(topology)
    mesh = sharding.make_mesh(MeshConfig(**mesh), devices)
    lines = {"micro_batch_tokens": sharding.num_data_shards(mesh) * row_tokens, "pack_width": row_tokens}
    run = assemble(settings(512, row_tokens - 512, mesh, **lines), LONG, (5,), mesh)
    lowered = run.programs()["update"].lower(mesh)
    return memory(lowered.compile()), lowered.as_text()


@needs_libtpu
@pytest.mark.slow
def test_a_chip_holds_less_of_a_row_the_more_chips_it_is_split_over():
    """The weights are split over four chips in both cases."""
    (one, _), (four, text) = update_memory("v5e:2x2", 16384, fsdp=4), update_memory("v5e:2x2", 16384, context=4)
    assert "splash_mha_dkv" in text and four.temporary < 0.3 * one.temporary  # 0.22; of 8,192 tokens 0.52


@needs_libtpu
@pytest.mark.slow
def test_packed_lines_of_32k_tokens_have_no_mask_of_all_pairs_on_a_v5p_pod():
    found, text = update_memory("v5p:2x2x4", 2**15, fsdp=4, context=4)
    assert "splash_mha_fwd" in text and "32768x32768x" not in text
    assert found.temporary < 2**30  # a mask is that large
