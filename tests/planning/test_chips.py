"""Chips: Cloud's names mean the shapes on Google's pages."""

import pytest
from support.building import needs_libtpu
from support.refusal import refused

from jaxrl_llm.planning import chips


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v4-32", "v4:2x2x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-128", "v5p:4x4x4"),  # 128 cores
        ("v5litepod-256", "v5e:16x16"),
        ("v5e-8", "v5e:2x4"),
        ("v6e-256", "v6e:16x16"),
        ("v5p:2x2x4", "v5p:2x2x4"),
        ("h100:8", "h100:8"),
    ],
)
def test_a_cloud_name_stands_for_its_shape(name, shape):
    assert chips.shape_of(name) == shape


@pytest.mark.parametrize(
    ("name", "words"),
    [("v5p-12", ["cores", "v5p-8, v5p-16"]), ("v6e-3", ["chips", "v6e-1, v6e-4"])],
)
def test_a_slice_that_cloud_has_not_is_refused_with_those_it_has(name, words):
    with refused("--topology", name, *words):
        chips.shape_of(name)


def test_a_bound_of_links_is_that_of_all_that_a_chip_has():
    """Gbit/s as on Cloud's pages. A collective over several dimensions of a torus uses all of their links at once."""
    published = {"v4": 2400, "v5e": 1600, "v5p": 4800, "v6e": 3200}
    assert {name: 8 * chip.link_gb for name, chip in chips.CHIPS.items()} == published
    assert chips.CHIPS["v6e"].hbm_gb == 1638
    # PCIe, each way: 16 GB/s of generation 4 in eight lanes, twice that with each generation and with twice the lanes.
    hosts = {name: chip.host_gb for name, chip in (chips.CHIPS | chips.GPUS).items()}
    assert hosts == {"v4": 16, "v5e": 16, "v5p": 16, "v6e": 64, "a100": 32, "h100": 64, "h200": 64}


@pytest.mark.parametrize("name", ["h100:16", "a100:9"])
def test_more_gpus_than_a_host_has_are_refused_with_how_many_may_be(name):
    """The GPUs of one host share an NVLink."""
    with refused("--topology", name, f"{name[:4]}:8"):
        chips.devices_of(name)


@needs_libtpu
@pytest.mark.parametrize(("name", "number"), [("v4-16", 8), ("v5p-32", 16), ("v5litepod-16", 16), ("v6e-8", 8)])
def test_the_compiler_knows_as_many_chips_as_the_name_says(name, number):
    devices, _ = chips.devices_of(name)
    assert len(devices) == number
