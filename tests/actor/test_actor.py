"""The record that an actor passes to the learner marks the values on which all hosts of a job must agree."""

import dataclasses
import json
import types
import typing
from unittest import mock

import numpy as np
import pytest

from jaxrl_llm.actor import actor as actor_module
from jaxrl_llm.actor.actor import Acted, Actor
from jaxrl_llm.actor.generator import FinishedGroup
from jaxrl_llm.actor.resampling import Sampled
from jaxrl_llm.config import Config
from jaxrl_llm.runtime.stop import Stopped
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


def actor_of(clock, monkeypatch):
    """Return an actor built from stand-ins. Its external functions take 1000 s to observe the sampled groups."""
    monkeypatch.setattr(actor_module, "sharding", mock.MagicMock())
    monkeypatch.setattr(actor_module, "Generator", mock.MagicMock())
    monkeypatch.setattr(
        actor_module.redistribution, "redistribute", lambda _, arrays, state, shapes: (arrays, state, [])
    )
    monkeypatch.setattr(actor_module, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    external = mock.MagicMock()
    external.next_groups.return_value = None
    external.state.return_value = []
    external.observe = lambda *_: clock.__setitem__(0, clock[0] + 1000.0)
    run = types.SimpleNamespace(config=Config(), mesh=None, sampler=None)
    one = Actor(run, mock.MagicMock(), mock.MagicMock(), mock.MagicMock(), mock.MagicMock(), external, None)
    one.generator.draws, one.generator.conversations = [], None
    one.generator.opened.return_value = []
    return one


def test_where_answers_of_others_stand_is_saved_as_it_was_restored_though_none_was_taken_since(monkeypatch):
    """The run is stopped twice in an evaluation. Once, this reset the reading position of the file to its beginning."""
    one = actor_of([0.0], monkeypatch)
    one._external.restore = lambda state: one._external.configure_mock(**{"state.return_value": state})
    saved = one.state() | {"stream": 0, "ledger": 0, "external": [7]}
    one.restore(saved, {"sampler": None, "rounds": None}, {})
    assert one.state()["external"] == [7]


def test_an_iteration_that_was_stopped_has_the_seconds_of_before_and_none_of_what_others_functions_take(monkeypatch):
    """Computed by hand:

    One process takes 7 s, and 2 s of them are waiting. Another then takes 5 s, and 1 s of them is waiting. Together
    they take 9 s without waiting, and wait 3 s.
    """
    clock, stops = [50.0], [True]
    group = FinishedGroup(0, None, [1], [1])
    sampled = Sampled(None, np.arange(1), [group], Rewards(np.ones(1), {}, np.zeros(1, np.int8)), waited_s=2.0)

    def sample(*_, rounds, **__):
        if stops.pop():
            rounds.append(sampled)
            clock[0] += 7.0
            raise Stopped
        clock[0] += 5.0
        return dataclasses.replace(sampled, waited_s=rounds.pop().waited_s + 1.0 if rounds else 1.0)

    monkeypatch.setattr(actor_module, "sample", sample)
    first = actor_of(clock, monkeypatch)
    with pytest.raises(Stopped):
        first.act(None, None, 0)
    kept = json.dumps(first.state() | {"stream": 0, "ledger": 0})
    clock[0] = 3.0
    second = actor_of(clock, monkeypatch)
    second.restore(json.loads(kept), {"sampler": None, "rounds": None}, {})
    assert second.state()["spent_s"] == 7.0  # where it is stopped again before it goes on
    stops.append(False)
    acted = second.act(None, None, 0)
    assert (acted.generate_s, acted.sampled.waited_s) == (9.0, 3.0)
    stops.append(False)
    assert second.act(None, None, 1).generate_s == 4.0 and second.state()["spent_s"] == 0.0
