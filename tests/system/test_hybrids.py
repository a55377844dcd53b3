"""The properties of a whole step for a model with the gated delta rule and attention in alternation."""

import dataclasses

import jax
import numpy as np
import pytest
from support import building, hybrids
from support.building import CUBE, EIGHT
from support.refusal import refused

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models.kernels import context
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import sharding

SETTINGS = building.LOSSES["token mean, k3"]


def update(settings, **how):
    made = building.make_update(settings, **how)
    return dataclasses.replace(made, model=dataclasses.replace(made.model, arch=hybrids.tiny(building.TINY)))


def assert_same(actual, expected):
    """Assert that sums and gradients agree to 2e-5 of their size. Measured: 3e-6."""
    for name, value in expected[1].named().items():
        np.testing.assert_allclose(actual[1][name], value, rtol=2e-5, err_msg=name)
    flat = lambda tree: np.concatenate([np.ravel(tree["blocks"][name]) for name in sorted(tree["blocks"])])
    one, other = flat(actual[0]).astype(np.float64), flat(expected[0]).astype(np.float64)
    assert np.linalg.norm(one - other) <= 2e-5 * np.linalg.norm(other)


@pytest.fixture(scope="module")
def rows():
    return building.random_experience()


@pytest.fixture(scope="module")
def expected(rows):
    found = building.gradient(update(SETTINGS), rows)
    assert all(np.any(x != 0) for name, x in found[0]["blocks"].items() if "bias" not in name)
    return found


@pytest.mark.slow
def test_micro_batches_and_rematerialisation_change_nothing(rows, expected):
    micro = update(SETTINGS | {"micro_batch_size": 4, "logp_chunk_tokens": 12}, remat="full")
    assert_same(building.gradient(micro, rows), expected)


@pytest.mark.tier("slow")  # plain: test_invariance.py, with attention alone
def test_packing_changes_nothing(rows, expected):
    width = 2 * rows.rollout.tokens.shape[1]
    packed = SETTINGS | {"pack_width": width, "micro_batch_tokens": 2 * width, "logp_chunk_tokens": 8}
    assert_same(building.gradient(update(packed, remat="full"), rows), expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [EIGHT, CUBE])
def test_devices_change_nothing(rows, expected, mesh):
    width, devices = 2 * rows.rollout.tokens.shape[1], 8 if mesh == EIGHT else 4
    apart = update(SETTINGS | {"micro_batch_size": 8}, num_devices=devices)
    assert_same(building.gradient(apart, rows, mesh=mesh), expected)
    packed = SETTINGS | {"pack_width": width, "micro_batch_tokens": 8 * width, "logp_chunk_tokens": 8}
    assert_same(building.gradient(update(packed, num_devices=devices), rows, mesh=mesh), expected)


@pytest.mark.parametrize(
    ("mesh", "is_packed"),
    [
        pytest.param(MeshConfig(data=1, context=2), False, marks=pytest.mark.tier("slow")),  # plain: test_context.py
        pytest.param(MeshConfig(data=1, context=4), True, marks=pytest.mark.tier("slow")),
        pytest.param(MeshConfig(data=1, context=2, tensor=2), True, marks=pytest.mark.tier("slow")),
        pytest.param(MeshConfig(data=1, fsdp=2, context=2), False, marks=pytest.mark.tier("slow")),
    ],
    ids=str,
)
def test_rows_in_parts_change_nothing(rows, expected, mesh, is_packed):
    width, devices = 4 * rows.rollout.tokens.shape[1], mesh.fsdp
    packed = {"pack_width": width, "micro_batch_tokens": 4 * width, "logp_chunk_tokens": 8} if is_packed else {}
    apart = update(SETTINGS | packed, num_devices=devices)
    assert_same(building.gradient(apart, rows, mesh=mesh), expected)


def test_rows_in_more_parts_than_there_are_value_heads_are_refused():
    arch = dataclasses.replace(hybrids.tiny(building.TINY), num_heads=8)
    mesh = sharding.make_mesh(MeshConfig(data=1, context=8), jax.devices())
    with refused("mesh.context", 8, "4 value heads", "mesh.tensor=1"):
        context.check(arch, mesh)


def test_of_each_layer_the_sampler_has_its_own_parameters():
    model = Model(hybrids.tiny(building.TINY))
    sampler = building.make_sampler(arch=model.arch)
    layers = building.abstract_sampler_params(sampler)["layers"]
    assert [("q" in layer, "delta_in" in layer) for layer in layers] == [(False, True), (False, True), (True, False)]
    state = sampler.abstract_state()
    assert [x[0].shape[1:] for x in state.cache_k][:2] == [(4, 8, 6)] * 2  # a head's state, whatever the row's length
    assert [x[0].shape[1:] for x in state.cache_v][:2] == [(3, 56)] * 2
