"""Batch numbers over a mesh: all that do not divide are named at once, with the nearest that do."""

import pytest
from support.building import EIGHT, ONE, mesh_of

from jaxrl_llm.config import ConfigError, freeze
from jaxrl_llm.runtime import sharding


def complaint(**settings):
    with pytest.raises(ConfigError) as error:
        sharding.check_divisible(freeze(settings), mesh_of(EIGHT))
    return str(error.value)


def test_all_numbers_that_do_not_divide_are_named_with_the_nearest_that_do():
    said = complaint(
        rollout={"prompts_per_iteration": 12, "group_size": 4, "slots": 20},
        update={"batch_size": 48, "micro_batch_size": 12},
        replay={"capacity": 96, "unit": "rollout"},
    )
    assert said == (
        "rollout.prompts_per_iteration=12 must be a multiple of 8 (8 or 16); "
        "rollout.slots=20 must be a multiple of 8 (16 or 24); "
        "update.micro_batch_size=12 must be a multiple of 8 (8 or 16): "
        "over 8 data-parallel devices, 8 ring shards (replay.shards), groups of 1 (replay.unit)"
    )


def test_a_batch_of_whole_groups_divides_by_devices_and_groups():
    said = complaint(
        rollout={"prompts_per_iteration": 16, "group_size": 4}, update={"batch_size": 48, "micro_batch_size": 16}
    )
    assert said.startswith("update.batch_size=48 must be a multiple of 32 (32 or 64): over 8")
    assert said.endswith("groups of 4 (replay.unit)")


def test_a_micro_batch_that_does_not_divide_the_batch_is_not_advised():
    said = complaint(
        rollout={"prompts_per_iteration": 8, "group_size": 5}, update={"batch_size": 40, "micro_batch_size": 10}
    )
    assert said.startswith("update.micro_batch_size=10 must be a multiple of 8 (8): over")


def test_a_sampler_split_over_more_devices_than_there_are_is_named():
    config = freeze({"mesh": {"sampler_tensor": 2}})
    with pytest.raises(ConfigError, match=r"mesh.sampler_tensor=2 must be 0, or a multiple of mesh.tensor=1 that"):
        sharding.check_divisible(config, mesh_of(ONE))


def test_nothing_is_advised_below_one():
    said = complaint(rollout={"prompts_per_iteration": 4, "group_size": 16})
    assert said.startswith("rollout.prompts_per_iteration=4 must be a multiple of 8 (8); ")


def test_more_ring_shards_than_devices_divide_the_rollouts_of_an_iteration():
    said = complaint(
        replay={"shards": 16, "unit": "rollout"},
        rollout={"prompts_per_iteration": 8, "group_size": 3},
        update={"batch_size": 16},
    )
    assert said.startswith("rollouts of an iteration=24 must be a multiple of 16 (16 or 32): over 8 data-parallel")
