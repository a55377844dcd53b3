"""Batch sizes over a mesh: all sizes that do not divide are named at once, with the nearest sizes that do."""

import pytest
from support.building import EIGHT, ONE, mesh_of
from support.refusal import check_refusal, refused

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
    check_refusal(said, "rollout.prompts_per_iteration", 12, "multiple of 8 (8 or 16)", "replay.shards", "replay.unit")
    check_refusal(said, "rollout.slots", 20, "multiple of 8 (16 or 24)")
    check_refusal(said, "update.micro_batch_size", 12, "multiple of 8 (8 or 16)")


def test_a_batch_of_whole_groups_divides_by_devices_and_groups():
    said = complaint(
        rollout={"prompts_per_iteration": 16, "group_size": 4}, update={"batch_size": 48, "micro_batch_size": 16}
    )
    check_refusal(said, "update.batch_size", 48, "multiple of 32 (32 or 64)", "groups of 4", "replay.unit")


def test_a_micro_batch_that_does_not_divide_the_batch_is_not_advised():
    said = complaint(
        rollout={"prompts_per_iteration": 8, "group_size": 5}, update={"batch_size": 40, "micro_batch_size": 10}
    )
    check_refusal(said, "update.micro_batch_size", 10, "multiple of 8 (8)")


def test_a_sampler_split_over_more_devices_than_there_are_is_named():
    config = freeze({"mesh": {"sampler_tensor": 2}})
    with refused("mesh.sampler_tensor", 2, "mesh.tensor=1"):
        sharding.check_divisible(config, mesh_of(ONE))


def test_nothing_is_advised_below_one():
    said = complaint(rollout={"prompts_per_iteration": 4, "group_size": 16})
    check_refusal(said, "rollout.prompts_per_iteration", 4, "multiple of 8 (8)")


def test_more_ring_shards_than_devices_divide_the_rollouts_of_an_iteration():
    said = complaint(
        replay={"shards": 16, "unit": "rollout"},
        rollout={"prompts_per_iteration": 8, "group_size": 3},
        update={"batch_size": 16},
    )
    check_refusal(said, "rollouts of an iteration", 24, "multiple of 16 (16 or 32)", "8 data-parallel")
