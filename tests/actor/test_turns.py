"""Completions of several turns: the expected rows follow from the environment's definition and the model alone."""

import concurrent.futures
import dataclasses
import functools
import json
import threading
import types

import jax
import numpy as np
import pytest
from reference import transformer
from support import building, moving
from support.building import (
    CUBE,
    EIGHT,
    EOS_IDS,
    Sampling,
    interrupt,
    letters,
    make_prompts,
    make_sampler,
)
from support.replies import by
from support.tiers import mostly_in

from jaxrl_llm.actor import redistribution
from jaxrl_llm.actor import turns as turns_of_rows
from jaxrl_llm.actor.episodes import Conversations, Turn
from jaxrl_llm.config import Config, EnvironmentsConfig, MeshConfig, SamplingConfig
from jaxrl_llm.conversations.environment import Reply
from jaxrl_llm.models import moe
from jaxrl_llm.models.architecture import Layer
from jaxrl_llm.models.row_logp import row_logp
from jaxrl_llm.reports.metrics import draw_values
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.runtime.stop import Stopped
from jaxrl_llm.types import OUTCOME_SCORE, OUTCOME_TIMEOUT, STOP_EOS, STOP_LENGTH, STOP_TURNS

WIDTH, MAX_TURNS, ANSWER_TOKENS = 40, 3, 4
SETTINGS = EnvironmentsConfig(factory="here", max_turns=MAX_TURNS, max_answer_tokens=ANSWER_TOKENS)
CONFIG = dataclasses.replace(
    Config(), environments=SETTINGS, sampling=SamplingConfig(max_completion_tokens=WIDTH), seed=0
)


def test_a_run_that_is_to_stop_waits_for_no_environment():
    """An environment that hangs must not delay a stop.

    Once, each row waited for environments.timeout_s, and the host was killed.
    """
    place = types.SimpleNamespace(begin=lambda: 0, is_agent=False)
    talk = Conversations(place, types.SimpleNamespace(decode=letters), CONFIG)
    turn = Turn("a", 1, concurrent.futures.Future())
    talk._rows[0, 0, 0], talk._waiting = (0, [turn]), {(0, 0, 0)}
    sampler, asked = types.SimpleNamespace(shards=1, entries=1, group_size=1), []

    def check():
        asked.append(turn.verdict)
        if len(asked) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        talk.answers(sampler, check)
    assert asked == [0, 0] and talk.state() == []  # it is asked again by the run that goes on


def answer_of(turns):
    """Return the environment's answer to the newest of these turns (letters), or None at the end of the episode."""
    size = len(turns[-1])
    return None if size % 5 == 4 else f"{size % 7}{len(turns)}" * (1 + size % 2)


def tokens_of(answer, last):
    """Return the tokens of an answer after the last token ``last`` of a turn. An answer may contain such tokens too."""
    return [220 + int(x) if i % 2 else last for i, x in enumerate(answer)]


class Here:
    """An environment in this process that records the turns that it receives."""

    role, is_agent, has_reward, is_shown = "user", False, False, False

    def __init__(self):
        self.asked, self.gone, self.begun = [], [], 0

    def begin(self):
        self.begun += 1
        return self.begun

    def ask(self, episode, example, turns, answers, state):
        assert [by("user", answer_of(turns[: i + 1])) for i in range(len(turns) - 1)] == list(answers)
        self.asked.append((example.prompt, tuple(turns)))
        future = concurrent.futures.Future()
        future.set_result(Reply(by("user", answer_of(turns)), seconds=0.25 * len(turns)))
        return future

    def forget(self, episode):
        self.gone.append(episode)


@functools.cache
def programs(sampler):
    made = sampler.programs(building.abstract_sampler_params(sampler))
    if sampler != (plain := dataclasses.replace(sampler, branches=(0, 0))):
        return programs(plain) | compile_all({"decode": made["decode"]}, sampler.mesh)
    return compile_all(made, sampler.mesh)


class Talking(Sampling):
    """A generator whose completions have several turns."""

    def __init__(self, environment=None, **settings):
        sampler = make_sampler(
            **{"num_slots": 24, "chunk_steps": 16, "sampling": {"max_completion_tokens": WIDTH}} | settings,
            answer_tokens=ANSWER_TOKENS,
        )
        self.environment = environment or Here()
        encode = lambda said, last, **how: tokens_of(said[0]["content"], last)
        tokenizer = types.SimpleNamespace(
            decode=letters, encode_answer=encode, vocab_size=sampler.model.arch.vocab_size
        )
        talk = Conversations(self.environment, tokenizer, CONFIG)
        super().__init__(sampler, compiled=programs(sampler), conversations=talk)


@functools.cache
def base():
    """Return rollouts of prompts 0 to 7. Every row has a slot, and a chunk is longer than any completion."""
    return Talking()(make_prompts(range(8)))


def walked(rollout, row):
    """Return the turns of a row by the environment's definition, after checking that the row consists of them."""
    tokens, version = rollout.tokens[row], rollout.policy_version[row]
    place, end = int(rollout.prompt_length[row]), int(rollout.length[row])
    first, turns, expected = place, [], np.full(len(tokens), -1)
    while True:
        begin = place
        while place < end and (place == begin or tokens[place - 1] not in EOS_IDS):
            expected[place] = 0
            place += 1
        turns.append(letters(tokens[begin:place]))
        if tokens[place - 1] not in EOS_IDS:
            assert place - first == WIDTH and rollout.stop_reason[row] == STOP_LENGTH
            break
        if (answer := answer_of(turns)) is None:
            assert place == end and rollout.stop_reason[row] == STOP_EOS
            break
        if len(turns) == MAX_TURNS:
            assert place == end and rollout.stop_reason[row] == STOP_TURNS
            break
        if place - first + len(answer) >= WIDTH:
            assert place == end and rollout.stop_reason[row] == STOP_LENGTH
            break
        assert tokens[place : place + len(answer)].tolist() == tokens_of(answer, tokens[place - 1])
        place += len(answer)
    np.testing.assert_array_equal(version, expected)
    return turns


def test_rows_are_turns_and_the_answers_that_the_environment_is_defined_by():
    rollout, groups = base()
    turns = [walked(rollout, row) for row in range(24)]
    assert [len(x) for x in turns] == [count for group in groups for count in group.turns]
    assert {*rollout.stop_reason.tolist()} >= {STOP_EOS, STOP_TURNS} and max(map(len, turns)) == MAX_TURNS
    said = [message["content"] for group in groups for row in group.played.messages for message in row[::2]]
    assert said == [text for row in turns for text in row]
    roles = {tuple(message["role"] for message in row) for group in groups for row in group.played.messages}
    assert ("assistant", "user", "assistant") in roles


def test_what_an_environment_wrote_is_not_counted_as_sampled():
    talking = Talking()
    rollout, groups = talking(make_prompts(range(8)))
    sampled, whole = (rollout.policy_version >= 0).sum(), sum(sum(group.lengths) for group in groups)
    values = draw_values(CONFIG, talking.generator.take_draws())
    assert values["tokens/generated"] == sampled < whole


class Late(Here):
    """Environment whose first answer takes 0.3 s."""

    def ask(self, *given):
        future, said = concurrent.futures.Future(), super().ask(*given).result()
        if len(self.asked) > 1:
            future.set_result(said)
        else:
            threading.Timer(0.3, future.set_result, [said]).start()
        return future


def test_what_the_decode_waits_for_an_environment_is_measured():
    talking = Talking(Late())
    rollout, _ = talking(make_prompts(range(8)))
    np.testing.assert_array_equal(rollout.tokens, base()[0].tokens)
    assert (
        0.2 < talking.generator.conversations.take_waited_s() < 10
        and talking.generator.conversations.take_waited_s() == 0.0
    )


class InTokens(Here):
    """Environment that answers in token ids, like an agent that uses token ids, and records the data of each turn."""

    def __init__(self):
        super().__init__()
        self.drawn = {}

    def ask(self, episode, example, turns, answers, state, drawn):
        answer = answer_of(turns)
        self.drawn[episode] = drawn
        future = concurrent.futures.Future()
        future.set_result(Reply(answer if answer is None else tokens_of(answer, drawn[-1][0][-1])))
        return future


def test_an_agent_of_token_ids_is_told_the_tokens_and_log_probs_that_its_rows_have():
    """The rows equal the rows of an environment that gives the same answers as text."""
    prompts = make_prompts(range(8))
    ids = [dataclasses.replace(example, prompt=[1, 2]) for example in prompts.examples]
    talking = Talking(InTokens())
    rollout, groups = talking(dataclasses.replace(prompts, examples=tuple(ids)))
    np.testing.assert_array_equal(rollout.tokens, base()[0].tokens)
    told = {json.dumps(drawn) for drawn in talking.environment.drawn.values()}
    for row, count in enumerate(count for group in groups for count in group.turns):
        drawn, places = rollout.policy_version[row] >= 0, np.arange(rollout.tokens.shape[1])
        ends = np.flatnonzero(drawn & ~np.append(drawn[1:], False))
        begins = np.flatnonzero(drawn & ~np.append(False, drawn[:-1]))
        own = [(places >= a) & (places <= b) for a, b in zip(begins, ends, strict=True)]
        own = own[: None if rollout.tokens[row, ends[-1]] in EOS_IDS else -1]  # the last was cut short
        if own:
            wanted = [[rollout.tokens[row, x].tolist(), rollout.behaviour_logp[row, x].tolist()] for x in own]
            assert json.dumps(wanted) in told and len(begins) == count


class Shown(Here):
    is_shown = True

    def shown(self, episode, example, turns, answers, state):
        future = concurrent.futures.Future()
        future.set_result(Reply({"turns": list(turns), "answers": list(answers)}))
        return future


def test_instances_are_asked_for_what_they_show_after_their_last_turn():
    _, groups = Talking(Shown())(make_prompts(range(8)))
    for group in groups:
        for row, seen, reason in zip(group.played.messages, group.played.shown(), group.stop_reasons, strict=True):
            turns = [message["content"] for message in row[::2]]
            # A turn that was cut short has not come to it.
            assert seen["turns"] == (
                turns[:-1] if reason == STOP_LENGTH and len(turns) != len(seen["turns"]) else turns
            )
            assert seen["answers"] == [by("user", answer_of(turns[: i + 1])) for i in range(len(seen["turns"]))]
    assert base()[1][0].played.shown() == [None] * 3


def test_a_turn_that_is_longer_than_it_may_be_ends_its_row_there():
    """Before that turn the rows equal the rows without a limit, because a draw depends only on the token's position."""
    limit, cut = 5, 0
    rollout, groups = Talking(turn_tokens=limit)(make_prompts(range(8)))
    free, _ = base()
    for row in range(24):
        first, end = int(free.prompt_length[row]), int(free.length[row])
        run = 0
        for place in range(first, end):
            run = run + 1 if free.policy_version[row, place] >= 0 else 0
            if run == limit and free.tokens[row, place] not in EOS_IDS:
                end, cut = place + 1, cut + 1
                assert rollout.stop_reason[row] == STOP_LENGTH
                break
            run = 0 if free.tokens[row, place] in EOS_IDS and run else run
        else:
            assert rollout.stop_reason[row] == free.stop_reason[row]
        assert rollout.length[row] == end
        np.testing.assert_array_equal(rollout.tokens[row, :end], free.tokens[row, :end])
    assert 3 < cut < 24 and max(count for group in groups for count in group.turns) > 1


@pytest.mark.tier("slow")  # plain: advantages of branches in test_turn_credit.py
def test_rows_of_a_branch_draw_the_same_turns_first_and_then_each_its_own():
    """Of three rows the first two share one or two turns.

    The first and the last row are the same as without branches.
    """
    rollout, _ = Talking(num_slots=7, chunk_steps=1, branches=(2, 2))(make_prompts(range(8)))
    before, _ = base()
    parted = []
    for row, twin in zip(range(0, 24, 3), range(1, 24, 3), strict=True):
        for same in (row, row + 2):
            end = before.length[same]
            np.testing.assert_array_equal(rollout.tokens[same, :end], before.tokens[same, :end])
        turns, others, shared = walked(rollout, row), walked(rollout, twin), 1 + rollout.group_id[row] % 2
        assert others[:shared] == turns[:shared]
        if len(turns) > shared:
            parted.append(turns[shared] != others[shared])
    # Of a vocabulary of letters two turns are seldom the same.
    assert len(parted) >= 4 and all(parted)


def test_log_probs_of_drawn_tokens_are_the_learners_and_a_float64_models_and_answers_have_none():
    talking = Talking(num_slots=5, chunk_steps=3)
    rollout, _ = talking(make_prompts(range(8)))
    assert building.completions(rollout) == building.completions(base()[0])
    rows, drawn = (rollout.tokens, rollout.prompt_length, rollout.length), rollout.policy_version >= 0
    sampler = talking.sampler
    how = {"sampling": sampler.sampling, "completion_width": WIDTH, "chunk_positions": 3}
    learner_logp = jax.jit(functools.partial(row_logp, sampler.model, **how))(talking.params, *rows).logp
    # Measured: 2.9e-6 nats at most.
    np.testing.assert_allclose(np.where(drawn, rollout.behaviour_logp - learner_logp, 0.0), 0.0, atol=1e-5)
    assert not rollout.behaviour_logp[~drawn].any() and rollout.behaviour_logp[drawn].all()
    params = building.host_params(sampler.model)
    for row in range(0, 24, 3):
        oracle = transformer.completion_logp(params, sampler.model.arch, *(x[row] for x in rows))
        np.testing.assert_allclose(rollout.behaviour_logp[row], np.where(drawn[row], oracle, 0.0), atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_slots": 7, "chunk_steps": 1},
        pytest.param({"mesh": EIGHT, "num_slots": 8, "chunk_steps": 3}, marks=pytest.mark.tier("slow")),
        pytest.param({"mesh": CUBE, "num_slots": 16, "chunk_steps": 5}, marks=pytest.mark.tier("slow")),
    ],
    ids=["7 slots, 1 step", "data 8", "data 2 x fsdp 2 x tensor 2"],
)
def test_rows_do_not_depend_on_slots_chunks_or_the_mesh(settings):
    rollout, _ = Talking(**settings)(make_prompts(range(8)))
    assert building.completions(rollout) == building.completions(base()[0])
    np.testing.assert_allclose(rollout.behaviour_logp, base()[0].behaviour_logp[: len(rollout.tokens)], atol=1e-5)


@pytest.mark.tier("slow")  # plain: test_log_probs_of_drawn_tokens_are_the_learners_...
def test_rows_of_windows_states_and_experts_are_the_learners(monkeypatch):
    """The slots of these models store different kinds of state. Longer answers are read in two parts."""
    monkeypatch.setattr(turns_of_rows, "READ_TOKENS", 3)
    of = functools.partial(dataclasses.replace, building.TINY)
    window = {"arch": of(layers=(Layer(window=5), Layer()))}
    states = {"arch": building.TINY_DELTA}
    experts = {"arch": of(num_experts=5, experts_per_token=2, ffn=8, sinks=True), "keeps_experts": True}
    experts["sampling"] = {"max_completion_tokens": WIDTH, "top_k": 50}
    for settings in (window, states, experts):
        talking = Talking(**settings, num_slots=5, chunk_steps=3)
        rollout, _ = talking(make_prompts(range(8)))
        drawn, place = rollout.policy_version >= 0, np.arange(rollout.tokens.shape[1])
        said = ~drawn & (place >= rollout.prompt_length[:, None]) & (place < rollout.length[:, None])
        assert said.any()
        model, rows = talking.sampler.model, (rollout.tokens, rollout.prompt_length, rollout.length)
        how = {"sampling": talking.sampler.sampling, "completion_width": WIDTH, "chunk_positions": 3}
        learner, support = jax.jit(functools.partial(row_logp, model, **how)), rollout.columns.get("support")
        logp = learner(talking.params, *rows, support).logp
        # A float32 state accumulates the rounding of all earlier tokens. Measured: 1.4e-5 with jax 0.10.2 on a Xeon
        # with AVX-512, 2.05e-5 with jax 0.12.0.1.
        gap = np.where(drawn, rollout.behaviour_logp - logp, 0.0)
        np.testing.assert_allclose(gap, 0.0, atol=3e-5 if settings is states else 1e-5)
        if "experts" not in rollout.columns:
            continue
        np.testing.assert_array_equal(np.ptp(support[said], axis=1), 0)
        np.testing.assert_array_equal(support[said][:, 0], rollout.tokens[said])
        # Each token has the choice that a forward of the whole row makes at the one before it.
        positions = np.broadcast_to(place, rollout.tokens.shape)
        _, chosen = moe.by_token(*jax.jit(model.forward)(talking.params, rollout.tokens, positions))
        known = (place[1:] < rollout.length[:, None])[..., None]
        np.testing.assert_array_equal(rollout.columns["experts"][:, 1:] * known, chosen[:, :-1] * known)


@pytest.mark.parametrize("stale_cache", [pytest.param("keep", marks=pytest.mark.tier("slow")), "recompute"])
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(building.TINY, id="attention"),
        pytest.param(building.TINY_DELTA, id="delta rule", marks=pytest.mark.tier("slow")),
    ],
)
def test_turns_under_new_weights_have_the_probabilities_of_those_weights(arch, stale_cache, monkeypatch):
    """Rows wait for their environment while the weights change.

    They continue with answers from before and after the change.
    """
    monkeypatch.setattr(turns_of_rows, "REREAD_TOKENS", 5)
    talking = Talking(
        arch=arch, num_prompts=4, lookahead=8, num_slots=14, chunk_steps=2, stale_cache=stale_cache, slack=0
    )
    rollout = moving.generated(talking, 5)
    drawn, is_one = rollout.policy_version >= 0, moving.has_one_version(rollout)
    is_answered = np.array([(np.diff(row.astype(int)) > 0).any() for row in drawn[:, rollout.prompt_length.max() :]])
    assert (is_answered & ~is_one).sum() > 4 and (rollout.policy_version[is_one] > 0).any()
    gap = moving.gaps(talking.sampler, rollout)
    at_most = 1e-5 if arch is building.TINY else 3e-5  # as under one version, see above
    assert gap[is_one].max() <= at_most
    if stale_cache == "recompute":
        assert gap.max() <= at_most
    else:
        assert np.median(gap[~is_one].max(axis=1)) > 0.01


@pytest.mark.parametrize("chunk", mostly_in("slow", [2, 3, 5, 6]))
def test_a_run_that_stops_inside_a_generation_goes_on_bit_by_bit_with_episodes_in_flight(chunk):
    """The resumed run has a new environment, which has never seen the episodes."""
    settings = {"num_slots": 7, "chunk_steps": 3, "lookahead": 8}

    def whole(talking, first):
        prompts = make_prompts(range(first, first + talking.generator.prompts_wanted()))
        return talking(prompts)[0]

    straight = Talking(**settings)
    expected = [whole(straight, 0), whole(straight, 16)]

    stopped = Talking(**settings)
    interrupt(stopped, make_prompts(range(stopped.generator.prompts_wanted())), after=chunk - 1)
    assert stopped.environment.asked
    saved = jax.device_get(stopped.generator.state), json.loads(json.dumps(stopped.generator.conversations.state()))
    resumed = Talking(**settings)
    resumed.generator.state = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), saved[0], stopped.sampler.abstract_state()
    )
    for shard, entry, lag, group_id in stopped.generator.opened():
        example, ids = stopped.generator.open_prompts[shard, entry][1:3]
        resumed.generator.adopt(shard, entry, lag, group_id, example, ids)
    resumed.generator.conversations.restore(saved[1])
    # What a turn's environment took was measured once.
    taken = [
        [turn.reply.result().seconds for turn in turns] for _, turns in resumed.generator.conversations._rows.values()
    ]
    assert all(seconds == [0.25 * (k + 1) for k in range(len(seconds))] for seconds in taken)
    assert any(taken) or chunk == 2  # no turn has been answered before the third chunk
    nothing = make_prompts(range(0))
    for want, got in zip(expected, [resumed(nothing)[0], whole(resumed, 16)], strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not resumed.generator.conversations._rows.keys() - {
        (m, e, g) for m, e in resumed.generator.open_prompts for g in range(3)
    }


@pytest.mark.slow
def test_on_more_devices_episodes_whose_rows_begin_again_do_so_too():
    """How a checkpoint is read is tested in test_redistribution.py."""
    on = lambda shards: Talking(mesh=MeshConfig(data=shards), num_slots=8, chunk_steps=3)
    expected, _ = on(2)(make_prompts(range(8)))
    stopped, resumed = on(2), on(4)
    interrupt(stopped, make_prompts(range(8)), after=5)
    put = lambda x, like: jax.device_put(np.resize(x, like.shape), like.sharding)
    state = jax.tree.map(put, jax.device_get(stopped.generator.state), resumed.sampler.abstract_state())
    host = {
        "open_prompts": stopped.generator.opened(),
        "conversations": stopped.generator.conversations.state(),
        "draws": [],
    }
    begun = len(host["conversations"])
    resumed.generator.state, host, (words,) = redistribution.redistribute(
        resumed.generator, state, host, {"sampler/length": [2, 4, 3]}
    )
    assert "of them restart" in words and 0 < len(host["conversations"]) < begun
    prompts = {name: (example, ids) for name, example, ids, _ in stopped.generator.open_prompts.values()}
    for *where, group_id in host["open_prompts"]:
        resumed.generator.adopt(*where, group_id, *prompts[group_id])
    resumed.generator.conversations.restore(host["conversations"])
    rollout, _ = resumed(make_prompts(range(0)))
    for name in ("tokens", "length", "group_id", "policy_version", "stop_reason"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))


def test_episodes_that_are_over_are_forgotten_and_no_two_who_ask_one_environment_share_any():
    """The training and the evaluation of a run ask the same environment."""
    talking = Talking(num_slots=7, chunk_steps=3)
    other = Talking(talking.environment, num_slots=7, chunk_steps=3)
    for one in (talking, other):
        one(make_prompts(range(8)))
        assert not one.generator.conversations._rows
    assert sorted(talking.environment.gone) == list(range(1, 49))


class Failing(Here):
    """Environment that ends some first turns, gives too long an answer to others, and does not answer a second turn."""

    def ask(self, episode, example, turns, answers, state):
        future = concurrent.futures.Future()
        if len(turns) == 2:
            future.set_result(Reply(None, None, OUTCOME_TIMEOUT, "environment on a prompt: no answer after 1 s"))
        else:
            future.set_result(Reply(by("user", (None, "123", "12345")[len(turns[0]) % 3])))
        return future


def test_rows_whose_environment_fails_end_and_have_no_score():
    rollout, groups = Talking(Failing())(make_prompts(range(8)))
    scores = [group.played.failures_in((np.ones(3), np.zeros(3, np.int8), [], [[]] * 3)) for group in groups]
    value, outcome = (np.concatenate([score[i] for score in scores]) for i in (0, 1))
    reasons = {reason for score in scores for reason in score.reasons}
    too_long = f"environment: an answer of 5 tokens; environments.max_answer_tokens={ANSWER_TOKENS}"
    assert reasons == {"environment on a prompt: no answer after 1 s", too_long}
    np.testing.assert_array_equal(np.isnan(value), outcome != OUTCOME_SCORE)
    assert 0 < np.isnan(value).sum() < 24
    assert (rollout.stop_reason[np.isnan(value)] == STOP_EOS).all()
