"""The position of each device in the mesh: JAX's order, except along a TPU's torus and between slices."""

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from support.building import CUBE, needs_libtpu
from support.refusal import refused

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.planning import chips
from jaxrl_llm.runtime import sharding


def test_devices_without_a_torus_stand_as_listed():
    assert sharding.make_mesh(CUBE).devices.flatten().tolist() == jax.devices()


@pytest.mark.parametrize("axes", [[["fsdp"]], ("fsdp", "fsdp"), {"fsdp": 1}])
def test_a_rule_of_no_axes_or_of_one_twice_is_refused(axes):
    with refused("mesh.rules", {"embed": axes}, "data", "fsdp"):
        sharding.rules_of(MeshConfig(rules={"embed": axes}))


@needs_libtpu
def test_neighbours_on_the_tensor_axis_are_neighbours_on_the_torus():
    size = np.array([8, 8, 4])
    devices, _ = chips.devices_of("v5p:8x8x4")
    mesh = sharding.make_mesh(MeshConfig(fsdp=64, tensor=4), devices)
    at = np.array([device.coords for device in mesh.devices.flat]).reshape(64, 4, 3)
    apart = np.abs(at - np.roll(at, -1, axis=1))
    assert (np.minimum(apart, size - apart).sum(-1) == 1).all()


@needs_libtpu
def test_slices_are_split_by_data_and_then_by_fsdp():
    chips.devices_of("v5e:2x2")  # sets the environment that libtpu wants
    devices = list(topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu", num_slices=4).devices)

    def slices(**mesh):
        devices_DFT = sharding.make_mesh(MeshConfig(**mesh), devices).devices
        return np.vectorize(lambda device: device.slice_index)(devices_DFT)

    # One slice for each of data's places, whose weights need no other.
    by_data = slices(data=4, fsdp=2, tensor=2)
    assert (by_data == by_data[:, :1, :1]).all() and len(np.unique(by_data)) == 4
    # Two of data, each in two halves of fsdp.
    by_both = slices(data=2, fsdp=4, tensor=2)
    assert (by_both[:, :2] == by_both[:, :1, :1]).all() and (by_both[:, 2:] == by_both[:, 2:3, :1]).all()
    assert len(np.unique(by_both)) == 4
    with refused("mesh.data", 1, "mesh.fsdp=2", "4 TPU slices"):
        slices(data=1, fsdp=2, tensor=8)
