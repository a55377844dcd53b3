"""Agents: programs that request the policy's turns over HTTP. The policy is a script here."""

import contextlib
import dataclasses
import http.client
import importlib.util
import json
import pathlib
import re
import types
import urllib.parse

import pytest
from conversations.test_environment import ONE, Template, call, config, play
from support.refusal import check_refusal, raises_with, refused, refused_row
from support.replies import by

from jaxrl_llm.actor.episodes import Played
from jaxrl_llm.config import Config, ConfigError, EnvironmentsConfig, PromptsConfig
from jaxrl_llm.conversations import agents, tools
from jaxrl_llm.conversations.environment import Environment, shown
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example


def question(name, example, **settings):
    """Return the question as the policy will see it, or the error message."""
    tokenizer = types.SimpleNamespace(vocab_size=50_000)
    _, ((one,), _), _ = shown(config(name, **settings), tokenizer, [example], [])
    return one


def test_an_agent_is_answered_by_the_policy_and_its_first_request_is_the_prompt():
    given = Example("Say three letters.", {"answer": 3}, "here.jsonl:1")
    one = question("two_letters", given)
    assert one.prompt == [{"role": "system", "content": "Play."}, {"role": "user", "content": "Say three letters."}]
    assert (one.given, one.columns) == ((given.prompt, []), given.columns)
    with Environment(config("two_letters", num_workers=2), [one]) as environment:
        assert environment.has_reward and not environment.is_shown
        for episode, (second, reward) in enumerate((("a1b2c", 0.6), ("", 0.0), ("xy", 1.0))):  # side by side in two
            replies = play(environment, ["abcdefghijkl", second], episode=episode, example=one)
            assert [x.answer for x in replies] == [by("user", "2"), None]
            assert [x.reward for x in replies] == [0.0, reward] and {x.outcome for x in replies} == {OUTCOME_SCORE}
        assert environment.ask(7, one, (), ()).result(30).reward == 0.0  # a row without a whole turn


def test_an_agent_whose_process_died_begins_anew_and_must_say_the_same():
    one = question("two_letters", Example("p", {}))
    other = [{"role": "user", "content": "else"}]
    with Environment(config("two_letters"), [one]) as environment:
        play(environment, ["abc"], example=one)
        environment._workers[0].process.kill()
        environment._workers[0].process.wait()
        assert environment.ask(0, one, ["abc", "d4"], [by("user", "3")]).result(30).reward == 0.5
        again = environment.ask(1, one, ["abc", "de"], [by("user", "4")]).result(30)
        assert (
            again.outcome == OUTCOME_ERROR
            and "in the replay the answer is [{'role': 'user', 'content': '3'}], not [" in again.reason
        )
        changed = environment.ask(2, Example(other, {}, given=("p", [])), ["abc"], []).result(30)
        assert changed.outcome == OUTCOME_ERROR and "but it was [{'role': 'user', 'content': 'el" in changed.reason


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("forgets", "request 2 of the agent does not continue the conversation so far"),
        ("rewrites", "request 2 of the agent does not continue"),
        ("repeats", "request 2 of the agent does not continue"),
        ("preaches", "request 2 of the agent must add messages of role user or tool"),
        ("words", "the agent returned 'much', not a number or None"),
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
    ("start", "words"),
    [("silent", []), ("cold", ["400", "temperature="]), ("lost", ["404", "POST"])],
)
def test_an_agent_that_cannot_begin_stops_the_run_before_it_begins(start, words):
    with refused_row("q.jsonl", 2, *words):
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
        scores = Played([[{"role": "assistant", "content": "a"}]], [[reply]], 2).own_scores()
    assert scores.outcome == [OUTCOME_ERROR] and scores.reasons == ["environment: an agent returned no reward"]
    with refused_row("a.jsonl", 1, "prompt, base_url, number"):
        Environment(config("two_letters_alone"), [Example("p", {"number": 1}, "a.jsonl:1")])


def test_an_agent_may_speak_in_token_ids_and_is_told_what_they_were_drawn_with():
    one = question("in_tokens", Example("p", {}))
    assert one.prompt == [5, 6] and one.given == ("p", [])
    drawn = [[[7, 8], [-0.5, -1.0]], [[9], [-0.25]]]
    with Environment(config("in_tokens"), [one]) as environment:
        first = environment.ask(0, one, ["a"], [], drawn=drawn[:1]).result(30)
        assert (first.answer, first.reward, first.outcome) == ([8], 0.0, OUTCOME_SCORE)
        environment._workers[0].process.kill()
        environment._workers[0].process.wait()
        last = environment.ask(0, one, ["a", "b"], [[8]], drawn=drawn).result(30)
        assert (last.answer, last.reward, last.reason) == (None, -1.75, "")
        wrong = environment.ask(1, Example([5], {}, given=("p", [])), ["a"], [], drawn=drawn[:1]).result(30)
        assert "the agent's prompt is [5, 6], but it was [5] before" in wrong.reason
    with Environment(config("in_tokens"), [one]) as environment:  # tokens are sent once, not with each later turn again
        sent, ask = [], environment._workers[0].ask
        environment._workers[0].ask = lambda given, *how: sent.append(given[-1]["drawn"]) or ask(given, *how)
        environment.ask(0, one, ["a"], [], drawn=drawn[:1]).result(30)
        last = environment.ask(0, one, ["a", "b"], [[8]], drawn=drawn).result(30)
        assert (last.reward, last.reason) == (-1.75, "") and sent == [drawn[:1], drawn[1:]]
    tokenizer = types.SimpleNamespace(vocab_size=6)
    with raises_with(ConfigError, "token_ids", "0 to 5", "5 to 6"):
        shown(config("in_tokens"), tokenizer, [Example("p", {})], [])
    with refused("token_ids", ["a"], "400"):
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
    settings, example = config("by_openai", timeout_s=60.0), Example("p", {"start": 2})
    _, ((one,),), _ = shown(settings, Template(has_tools=False), [example])
    system, user = one.prompt
    assert system["role"] == "system" and '"name": "add"' in system["content"] and user["content"] == "p"
    turns = [f"{call('add', number=3)}{call('add', number=4)}", "It is 9.", "Yes."]
    with Environment(config("by_openai", timeout_s=60.0), [one]) as environment:
        replies = play(environment, turns, example=one)
    assert [x.reason for x in replies] == [""] * 3
    assert [x.answer for x in replies[:2]] == [by("tool", "total 5", "total 9"), by("user", "Sure?")]
    assert replies[-1].answer is None and replies[-1].reward == 10.0


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": "p"}]


class Client:
    """HTTP client of an agent."""

    def __init__(self, base_url):
        self.address = urllib.parse.urlsplit(base_url)

    def ask(self, messages, **more):
        """Return (status, text of the answer)."""
        body = messages if isinstance(messages, str) else json.dumps({"messages": messages, **more})
        with contextlib.closing(http.client.HTTPConnection(self.address.netloc, timeout=30)) as connection:
            connection.request("POST", f"{self.address.path}/chat/completions", body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def said(self, messages, **more):
        """Return the assistant's message."""
        status, text = self.ask(messages, **more)
        assert status == 200, text
        return json.loads(text)["choices"][0]["message"]


@pytest.mark.parametrize("roles", [("tool", "tool"), ("tool", "user")])
def test_each_message_that_a_request_adds_is_one(roles):
    """Once, the results of two tools became one message, and a user message after a tool's result was a failure."""
    added = [{"role": role, "content": role} for role in roles]

    def play(base_url):
        client = Client(base_url)
        first = client.said(USER, tools=TOOLS)
        return float(client.said([*USER, first, *added], tools=TOOLS)["content"] == "Good.")

    episode = agents.Episode(play, {})
    assert (episode.opening, episode.tools) == (USER, TOOLS)
    assert episode.answer(call("add", number=1)) == added
    assert episode.answer("Good.") is None and episode.reward() == 1.0


def test_an_agent_is_told_how_many_tokens_there_were():
    def play(base_url):
        client = Client(base_url)
        whole = json.loads(client.ask(USER)[1])
        messages = [*USER, whole["choices"][0]["message"], *USER]
        told, options = [whole["usage"]], {"stream": True, "stream_options": {"include_usage": True}}
        events = client.ask(messages, **options)[1].split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        *parts, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert last["choices"] == [] and not any("usage" in part for part in parts)
        told.append(last["usage"])
        return float(json.dumps(told) == json.dumps([usage(5, 2, 7), usage(11, 3, 14)]))

    usage = lambda *counts: dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True))
    episode = agents.Episode(play, {})
    episode.sizes = [[5, 2]]
    assert episode.answer("a") == USER
    episode.sizes = [[5, 2], [11, 3]]
    assert episode.answer("b") is None and episode.reward() == 1.0


def test_what_an_agent_says_that_asks_for_nothing_is_passed_over_and_what_cannot_be_read_is_refused():
    nothing = {"top_p": 1, "seed": 3, "metadata": {}, "parallel_tool_calls": True, "presence_penalty": 0, "stop": []}
    nothing |= {"response_format": {"type": "text"}, "service_tier": "auto", "logprobs": False, "temperature": None}

    def play(base_url):
        client, refused = Client(base_url), []
        client.said(USER, **nothing)
        for more in ({"top_p": 0.5}, {"tools": TOOLS[0]}, {"max_tokens": 3}):
            refused.append(client.ask(USER, **more))
        refused.append(client.ask("[" * 10**5))
        assert [status for status, _ in refused] == [400] * 4
        said = [json.loads(text)["error"]["message"] for _, text in refused]
        check_refusal(said[0], "top_p", 0.5, "1")
        check_refusal(said[1], "tools")
        check_refusal(said[2], "max_tokens", 3)
        check_refusal(said[3], "the body")
        return 1.0

    episode = agents.Episode(play, {})
    assert episode.answer("a") is None and episode.reward() == 1.0


def test_a_template_with_a_place_for_tools_is_told_those_that_every_question_of_an_agent_has():
    """As in ``serve``, tools that differ between questions are listed in the system message."""
    told = tools.with_tool_list(USER, TOOLS)
    examples = [Example("p", {"number": 1}), Example("p", {"number": 2})]
    for name, takes, wanted in (
        ("with_tools", True, ([USER] * 2, TOOLS)),
        ("with_tools", False, ([told] * 2, [])),
        ("with_some_tools", True, ([USER, told], [])),
    ):
        settings = config(name)
        prompts, (kept,), bad = shown(settings, Template(takes), examples)
        assert ([one.prompt for one in kept], prompts.chat_template_kwargs.get("tools", [])) == wanted and bad == []
        with Environment(settings, kept) as environment:
            for episode, one in enumerate(kept):
                assert [x.reason for x in play(environment, ["a"], episode=episode, example=one)] == [""]
            asked = dataclasses.replace(kept[1], given=("p", [{"other": 1}]))
            assert "but it was" in play(environment, ["a"], episode=2, example=asked)[0].reason or wanted[1] == []


def test_tools_in_the_system_s_message_stand_behind_the_system_prompt():
    """Once, the list of tools was a separate system message of the agent.

    `prompts.system_prompt` was then not added.
    """
    settings = dataclasses.replace(config("with_tools"), prompts=PromptsConfig(system_prompt="Be brief."))
    whole = tools.with_tool_list([{"role": "system", "content": "Be brief."}, *USER], TOOLS)
    assert whole[0]["content"].startswith("Be brief.\n\nYou may call these functions") and whole[1:] == USER
    for takes, wanted in ((True, USER), (False, whole)):
        _, ((one,),), _ = shown(settings, Template(takes), [Example("p", {"number": 1})])
        assert one.prompt == wanted
        with Environment(settings, [one]) as environment:  # played, and played again
            assert [x.reason for x in play(environment, ["a"], example=one)] == [""]
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Play."}, *USER]
        assert agents.prompt_of(own, TOOLS, [], "Be brief.") == tools.with_tool_list(own, TOOLS)


@pytest.mark.torch
@pytest.mark.skipif(not importlib.util.find_spec("openai"), reason="the openai package is not installed")
def test_the_documented_agent_plays(tmp_path):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "train_an_agent.md").read_text()
    text = re.search(r"```python\n(from openai.*?)```", page, re.DOTALL)[1]
    (tmp_path / "agent.py").write_text(text)
    own = EnvironmentsConfig(factory=f"{tmp_path}/agent.py:play", num_workers=1, timeout_s=60.0)
    settings = dataclasses.replace(Config(), environments=own)
    _, ((one,), _), _ = shown(settings, None, [Example("6 * 7?", {"answer": "42"})], [])
    with Environment(settings, [one]) as environment:
        replies = play(environment, ["It is 42.", "42, yes."], example=one)
    assert [x.answer for x in replies] == [by("user", "Are you sure? Say your answer again."), None]
    assert [x.reward for x in replies] == [0.0, 1.0]
