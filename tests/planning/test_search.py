"""The search: which meshes a model can use, the memory of a micro-batch, the order of layouts."""

import dataclasses
import itertools

import pytest
from support.building import TINY, needs_libtpu

from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.models import presets
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.planning import chips, search

MIXTURE = dataclasses.replace(TINY, num_experts=6, experts_per_token=2)  # 4 heads, 2 key heads


@pytest.mark.parametrize(("arch", "of_experts"), [(TINY, {1}), (MIXTURE, {1, 2, 3, 6})])
def test_all_meshes_of_twelve_devices_that_a_model_can_use(arch, of_experts):
    """tensor divides key heads, tensor and context together divide heads, expert divides experts."""
    can = lambda data, fsdp, expert, context, tensor: (
        data * fsdp * expert * context * tensor == 12
        and expert in of_experts
        and tensor in (1, 2)
        and (context == 1 or context * tensor in (2, 4))
    )
    expected = {axes for axes in itertools.product(range(1, 13), repeat=5) if can(*axes)}
    found = [tuple(dataclasses.astuple(mesh)[:5]) for mesh in search.meshes(MeshConfig(data=5), arch, 12)]
    assert len(found) == len(expected) and set(found) == expected


def test_of_a_micro_batch_inputs_of_layers_and_what_their_mlps_keep():
    """2 rows of 32 tokens on two devices: 2 layers of width 64; six, two or no arrays of the MLP's width 128."""
    config = freeze(
        {
            "model": {"path": "random:debug"},
            "sampling": {"max_completion_tokens": 32},
            "update": {"batch_size": 2, "micro_batch_size": 2},
            "mesh": {"data": 1, "context": 2},
        }
    )
    for remat, arrays in (("none", 6), ("dots", 2), ("full", 0)):
        of = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
        assert search.kept_for_backward(of, PRESETS["debug"]) == 4 * 2 * 32 * (64 + arrays * 128)


@needs_libtpu
def test_experts_are_split_where_a_chip_cannot_hold_or_read_them_all():
    """Four chips of 95 GiB:

    30 billion parameters take 57 GiB for the sampler alone, in addition to 57 GiB of the learner.
    """
    settings = {
        "model": {"compute_dtype": "bfloat16", "param_dtype": "bfloat16"},
        "rollout": {"prompts_per_iteration": 4, "group_size": 2},
        "update": {"batch_size": 8, "micro_batch_size": 4, "micro_batch_tokens": 512},
        "optimizer": {"moment_dtype": "bfloat16"},
    }
    found = candidates("qwen3-30b-a3b", "v5p:2x2x1", settings)
    assert {layout.mesh.expert for layout in found if layout.mesh.tensor == 1} == {2, 4}
    assert "mesh.expert=4 mesh.context=1 mesh.tensor=1" in " ".join(map(str, found))


@needs_libtpu
@pytest.mark.parametrize(("prompt", "parts"), [(1024, {1, 2, 4}), (1026, {1, 2}), (1023, {1})])
def test_rows_are_split_in_parts_that_their_lengths_have(prompt, parts):
    settings = {
        "prompts": {"max_tokens": prompt},
        "sampling": {"max_completion_tokens": 1024},
        "rollout": {"prompts_per_iteration": 4, "group_size": 2},
        "update": {"batch_size": 8, "micro_batch_size": 8, "micro_batch_tokens": 4 * (prompt + 2 * 1024)},
    }
    assert {layout.mesh.context for layout in candidates("llama-3.2-1b", "v5p:2x2x1", settings)} == parts


def candidates(preset, topology, settings):
    config = freeze(settings)
    devices, chip = chips.devices_of(topology)
    return search.candidates(config, presets.model_of(config, preset), devices, chip)[0]
