"""Agents: programs that ask for the policy's turns over HTTP; the policy is a script here."""

import dataclasses
import importlib.util
import pathlib
import re
import types

import pytest
from actor.test_environment import ONE, call, config, play

from jaxrl_llm.actor.conversation import Played
from jaxrl_llm.actor.environment import Environment, shown
from jaxrl_llm.config import Config, ConfigError, EnvironmentsConfig
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example


def question(name, example, **settings):
    """The question as the policy is to see it, or what is wrong with it."""
    tokenizer = types.SimpleNamespace(vocab_size=50_000)
    _, ((one,), _), _ = shown(config(name, **settings), tokenizer, [example], [])
    return one


def test_an_agent_is_answered_by_the_policy_and_its_first_request_is_the_prompt():
    given = Example("Say three letters.", {"answer": 3}, "here.jsonl:1")
    one = question("two_letters", given)
    assert one.prompt == [{"role": "system", "content": "Play."}, {"role": "user", "content": "Say three letters."}]
    assert (one.given, one.columns) == (given.prompt, given.columns)
    with Environment(config("two_letters", num_workers=2), [one]) as environment:
        assert environment.has_reward and not environment.is_shown
        for episode, (second, reward) in enumerate((("a1b2c", 0.6), ("", 0.0), ("xy", 1.0))):  # side by side in two
            replies = play(environment, ["abcdefghijkl", second], episode=episode, example=one)
            assert [(x.answer, x.role) for x in replies] == [("2", "user"), (None, "user")]
            assert [x.reward for x in replies] == [0.0, reward] and {x.outcome for x in replies} == {OUTCOME_SCORE}
        assert environment.ask(7, one, (), ()).result(30).reward == 0.0  # a row without a whole turn


def test_an_agent_whose_process_died_begins_anew_and_must_say_the_same():
    one = question("two_letters", Example("p", {}))
    other = [{"role": "user", "content": "else"}]
    with Environment(config("two_letters"), [one]) as environment:
        play(environment, ["abc"], example=one)
        environment._workers[0].process.kill()
        environment._workers[0].process.wait()
        assert environment.ask(0, one, ["abc", "d4"], ["3"]).result(30).reward == 0.5
        again = environment.ask(1, one, ["abc", "de"], ["4"]).result(30)
        assert again.outcome == OUTCOME_ERROR and "played again it answers '3', not '4'" in again.reason
        changed = environment.ask(2, Example(other, {}, given="p"), ["abc"], []).result(30)
        assert (
            changed.outcome == OUTCOME_ERROR and "not as before with [{'role': 'user', 'content': 'el" in changed.reason
        )


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("forgets", "request 2 of the agent does not go on from what was said before it"),
        ("rewrites", "request 2 of the agent does not go on from"),
        ("repeats", "request 2 of the agent does not go on from"),
        ("preaches", "request 2 of the agent must add messages of the user's or of tools'"),
        ("words", "the agent returned 'much', which is no reward"),
        ("infinite", "the agent returned inf"),
        ("hangs", "no answer after 1 s"),
    ],
)
def test_what_an_agent_does_wrong_is_a_failure_that_says_so(start, said):
    one = question("bad_agent", Example("p", {"start": start}, "q.jsonl:2"))
    with Environment(config("bad_agent", timeout_s=1.0), [one]) as environment:
        (reply,) = play(environment, ["a"], example=one)
        assert reply.outcome == (OUTCOME_TIMEOUT if start == "hangs" else OUTCOME_ERROR)
        assert said in reply.reason and reply.reward is None and reply.answer is None
        assert environment.ask(1, one, (), ()).result(30).outcome == OUTCOME_SCORE  # others go on


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("silent", "the agent returned before it asked the policy for anything"),
        ("cold", "400: temperature is not an agent's to say: the run's sampling settings hold"),
        ("lost", "404: no route POST"),
    ],
)
def test_an_agent_that_cannot_begin_stops_the_run_before_it_begins(start, said):
    with pytest.raises(ConfigError, match=said):
        question("bad_agent", Example("p", {"start": start}, "q.jsonl:2"))


def test_a_number_of_numpys_is_a_reward():
    one = question("bad_agent", Example("p", {"start": "numpy"}))
    with Environment(config("bad_agent"), [one]) as environment:
        (reply,) = play(environment, ["a"], example=one)
    assert (reply.reward, reply.outcome) == (1.0, OUTCOME_SCORE)


def test_a_failed_episode_is_not_one_of_an_agent_without_a_reward():
    with Environment(config("RaisesInTool"), [ONE]) as environment:
        reply = environment.ask(0, ONE, [call("add", number=1)], [])
        played = Played([[{"role": "assistant", "content": "a"}]], [[reply]], 2)
        assert played.own_scores()[2] == []


def test_an_agent_without_a_reward_of_its_own_leaves_it_to_reward_functions():
    one = question("bad_agent", Example("p", {"start": "none"}))
    with Environment(config("bad_agent"), [one]) as environment:
        reply = environment.ask(0, one, ["a"], [])
        assert reply.result(30).outcome == OUTCOME_SCORE
        _, (outcome,), reasons, _ = Played([[{"role": "assistant", "content": "a"}]], [[reply]], 2).own_scores()
    assert outcome == OUTCOME_ERROR and reasons == ["environment: an agent returned no reward"]
    with pytest.raises(ConfigError, match=r"cannot play a\.jsonl:1.*given: prompt, base_url, number"):
        Environment(config("two_letters_alone"), [Example("p", {"number": 1}, "a.jsonl:1")])


def test_an_agent_may_speak_in_token_ids_and_is_told_what_they_were_drawn_with():
    one = question("in_tokens", Example("p", {}))
    assert one.prompt == [5, 6] and one.given == "p"
    drawn = [[[7, 8], [-0.5, -1.0]], [[9], [-0.25]]]
    with Environment(config("in_tokens"), [one]) as environment:
        first = environment.ask(0, one, ["a"], [], drawn=drawn[:1]).result(30)
        assert (first.answer, first.reward, first.outcome) == ([8], 0.0, OUTCOME_SCORE)
        environment._workers[0].process.kill()
        environment._workers[0].process.wait()
        last = environment.ask(0, one, ["a", "b"], [[8]], drawn=drawn).result(30)
        assert (last.answer, last.reward, last.reason) == (None, -1.75, "")
        wrong = environment.ask(1, Example([5], {}, given="p"), ["a"], [], drawn=drawn[:1]).result(30)
        assert "the agent begins with [5, 6], not as before with [5]" in wrong.reason
    tokenizer = types.SimpleNamespace(vocab_size=6)
    with pytest.raises(ConfigError, match="an agent's token_ids must be from 0 to 5, and are 5 to 6"):
        shown(config("in_tokens"), tokenizer, [Example("p", {})], [])
    with pytest.raises(ConfigError, match=r"400: token_ids=\['a'\] must be a list of whole numbers"):
        question("in_tokens", Example("p", {"start": ["a"]}))


@pytest.mark.torch
@pytest.mark.skipif(not importlib.util.find_spec("verifiers"), reason="verifiers is not installed")
def test_verifiers_train_client_is_answered_by_the_policy(tmp_path):
    tokenizer = pretrained.resolve("random:debug").tokenizer()
    tokenizer.save(tmp_path)
    settings = {"timeout_s": 120.0}
    one = question("by_train_client", Example("What is 2 + 2?", {"folder": str(tmp_path)}), **settings)
    assert one.prompt == tokenizer.encode_prompt("What is 2 + 2?", chat_template=True, system_prompt="")
    ids = [*tokenizer.encode("It is 4."), tokenizer.end_id]
    logps = [-0.5 * i for i in range(len(ids))]
    with Environment(config("by_train_client", **settings), [one]) as environment:
        reply = environment.ask(0, one, ["It is 4."], [], drawn=[[ids, logps]]).result(120)
    assert reply.reason == "" and reply.answer is None and reply.reward == pytest.approx(sum(logps))


@pytest.mark.torch
@pytest.mark.skipif(not importlib.util.find_spec("openai"), reason="the openai package is not installed")
def test_an_agent_by_the_openai_package_calls_tools_and_streams():
    one = question("by_openai", Example("p", {"start": 2}), timeout_s=60.0)
    system, user = one.prompt
    assert system["role"] == "system" and '"name": "add"' in system["content"] and user["content"] == "p"
    turns = [f"{call('add', number=3)}{call('add', number=4)}", "It is 9.", "Yes."]
    with Environment(config("by_openai", timeout_s=60.0), [one]) as environment:
        replies = play(environment, turns, example=one)
    assert [x.reason for x in replies] == [""] * 3
    assert [(x.answer, x.role) for x in replies[:2]] == [("total 5\ntotal 9", "tool"), ("Sure?", "user")]
    assert replies[-1].answer is None and replies[-1].reward == 10.0


@pytest.mark.torch
@pytest.mark.skipif(not importlib.util.find_spec("openai"), reason="the openai package is not installed")
def test_the_documented_agent_plays(tmp_path):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "questions.md").read_text()
    text = re.search(r"```python\n(from openai.*?)```", page, re.DOTALL)[1]
    (tmp_path / "agent.py").write_text(text)
    own = EnvironmentsConfig(factory=f"{tmp_path}/agent.py:play", num_workers=1, timeout_s=60.0)
    settings = dataclasses.replace(Config(), environments=own)
    _, ((one,), _), _ = shown(settings, None, [Example("6 * 7?", {"answer": "42"})], [])
    with Environment(settings, [one]) as environment:
        replies = play(environment, ["It is 42.", "42, yes."], example=one)
    assert [x.answer for x in replies] == ["Are you sure? Say your answer again.", None]
    assert [x.reward for x in replies] == [0.0, 1.0]
