"""What passes from actor to learner says which of it all hosts of a job must agree on."""

import dataclasses
import typing

import pytest

from jaxrl_llm.actor.actor import Acted
from jaxrl_llm.types import Agreed, PerHost, Rewards, Rollout, ScoredRollouts


def kind(cls, name):
    return getattr(typing.get_type_hints(cls, include_extras=True)[name], "__metadata__", "unmarked")


@pytest.mark.parametrize("cls", [ScoredRollouts, Acted])
def test_every_field_says_whether_hosts_agree_on_it(cls):
    hints = typing.get_type_hints(cls)
    kinds = {kind(cls, field.name) for field in dataclasses.fields(cls) if hints[field.name] is not ScoredRollouts}
    assert kinds <= {Agreed.__metadata__, PerHost.__metadata__}


def test_device_arrays_and_rewards_are_agreed_on():
    by_type = {Rollout: Agreed, Rewards: Agreed}
    for field, plain in typing.get_type_hints(ScoredRollouts).items():
        if plain in by_type:
            assert kind(ScoredRollouts, field) == by_type[plain].__metadata__
