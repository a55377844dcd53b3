"""Rows in parts (mesh.context): the update is the one of whole rows, and a chip holds less of a row."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import building
from support.building import NUM_ROWS, TINY, gradient, make_update, needs_libtpu

from jaxrl_llm.config import ConfigError, MeshConfig, freeze
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
    """Measured: 1e-6 of a gradient's largest entry, 5e-7 of a loss."""
    update, rows, (expected, sums_expected) = whole(name)
    # Two key heads are copied for four devices of attention.
    found, sums = gradient(update, rows, mesh)
    for key, value in sums_expected.items():
        np.testing.assert_allclose(sums[key], value, rtol=1e-5, atol=1e-5, err_msg=key)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("name", ROWS)
def test_an_update_of_rows_in_parts_is_the_one_of_whole_rows(name):
    check_equal(name, FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TWO, *MIXED], ids=lambda m: f"{m.data} {m.fsdp} {m.context} {m.tensor}")
@pytest.mark.parametrize("name", ROWS)
def test_an_update_of_rows_in_parts_is_the_one_of_whole_rows_on_any_mesh(name, mesh):
    check_equal(name, mesh)
