"""Environments in their own processes: the answers to turns, and the treatment of environments that fail."""

import concurrent.futures
import dataclasses
import json
import pathlib
import signal
import types
import typing

import numpy as np
import pytest
from support.echo import echo
from support.refusal import check_row, raises_with, refused, refused_row
from support.replies import by, text

from jaxrl_llm.actor import evaluation
from jaxrl_llm.actor.episodes import Played
from jaxrl_llm.actor.external_sources import HindsightSource
from jaxrl_llm.config import Config, ConfigError, EnvironmentsConfig, EvalConfig, PromptsConfig, RewardsConfig
from jaxrl_llm.conversations import environment_worker
from jaxrl_llm.conversations.environment import Environment, _is_reply, opened, shown
from jaxrl_llm.scoring.rewards import RewardPool
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example

FILE = pathlib.Path(__file__).parents[1] / "fixtures" / "environments.py"
ONE = Example("p", {"start": 2}, "here.jsonl:1")


def config(name, **settings):
    settings = {"timeout_s": 5.0, "num_workers": 1} | settings
    return dataclasses.replace(Config(), environments=EnvironmentsConfig(factory=f"{FILE}:{name}", **settings))


def call(name, **arguments):
    return (
        f'I call <tool_call>{{"name": "{name}", "arguments": {str(arguments).replace(chr(39), chr(34))}}}</tool_call>'
    )


def play(environment, turns, *, episode=0, example=ONE):
    """Return the replies to all turns, one after another."""
    replies, answers = [], []
    for i in range(len(turns)):
        replies.append(environment.ask(episode, example, turns[: i + 1], answers).result(30))
        answers.append(replies[-1].answer)
    return replies


def test_a_function_answers_the_newest_turn_and_ends_with_none():
    with Environment(config("count_down"), [ONE]) as environment:
        replies = play(environment, ["a", "b"])
        assert environment.role == "user" and not environment.has_reward and not environment.is_shown
    assert [reply.answer for reply in replies] == [by("user", "p: 1 left after a"), None]
    assert all(reply.outcome == OUTCOME_SCORE and reply.reward is None for reply in replies)


def test_a_reply_has_the_seconds_that_the_environment_took_and_a_group_those_of_its_turns():
    with Environment(config("slow"), [ONE]) as environment:  # 0.3 s a turn
        first, second = play(environment, ["a", "b"])
    assert 0.3 <= first.seconds < 10 and 0.3 <= second.seconds < 10
    there = concurrent.futures.Future(), concurrent.futures.Future()
    for future, reply in zip(there, (first, second), strict=True):
        future.set_result(reply)
    said = [[{"role": "assistant", "content": "a"}] * 2, [{"role": "assistant", "content": "a"}]]
    played = Played(said, [list(there), [there[0]]], 3)
    expected = np.float32([[first.seconds, second.seconds, 0], [first.seconds, 0, 0]])
    np.testing.assert_array_equal(played.seconds(), expected)
    np.testing.assert_array_equal(played.columns({"turn_seconds"})["turn_seconds"], expected)
    assert played.columns({"reward_mask"}) == {}


def test_a_class_keeps_its_state_and_its_public_methods_are_tools():
    with Environment(config("Counter", num_workers=2), [ONE]) as environment:
        assert environment.role == "tool" and environment.has_reward
        turns = [call("add", number=3), f"{call('later', number=4)} then {call('read')}", "That is all."]
        for episode in (0, 1, 2):  # each has an instance of its own
            replies = play(environment, turns, episode=episode)
            assert [reply.answer for reply in replies] == [by("tool", "total 5"), by("tool", "total 9", "9"), None]
            assert [reply.reward for reply in replies] == [3.0, 7.0, 7.0]
        begun = environment.ask(3, ONE, (), ()).result(30)
        assert (begun.answer, begun.reward) == (None, 0.0)


def test_what_an_asynchronous_reset_opens_its_tools_use_later():
    with echo() as (port, callers), Environment(config("Telephone")) as environment:
        replies = play(
            environment, [call("say", text="a"), call("say", text="b")], example=Example("p", {"port": port})
        )
    assert [text(reply) for reply in replies] == ["a", "b"] and len(callers) == 1


def test_reset_is_told_the_prompt_of_the_row_where_it_takes_it():
    """Also if the text that ``reset`` returned was appended to the prompt."""
    messages = [{"role": "user", "content": "Find it."}]
    for name in ("Greeting", "GreetingOfAny"):
        for prompt, seen in (("Find it.", "Find it."), (messages, str(messages))):
            _, ((example,),), _ = shown(with_prompts(name), Template(False), [Example(prompt, {"start": 2}, "a")])
            last = example.prompt if isinstance(prompt, str) else example.prompt[0]["content"]
            assert last == f"Find it. You said {seen}"
            with Environment(config(name), [example]) as environment:
                assert play(environment, [call("again")], example=example)[0].answer == by(
                    "tool", f"You said {seen}, 2"
                )
    with Environment(config("Counter"), [ONE]) as environment:  # and nothing else changes for one with more arguments
        assert play(environment, [call("read")])[0].answer == by("tool", "2")


def test_what_an_instance_shows_in_the_end_is_given_to_reward_functions_that_ask():
    """Public attributes, also of the class, and properties that JSON can hold.

    Also of an episode whose process died.
    """
    settings = config("Open")
    settings = dataclasses.replace(settings, rewards=RewardsConfig(functions=(f"{FILE}:seen_totals",)))
    turns, answers = [call("add", number=3), "Done."], [by("tool", "total 5"), None]
    with Environment(settings, [ONE]) as environment, RewardPool(settings.rewards, task_scorer="") as pool:
        assert environment.is_shown
        play(environment, turns)
        known = [environment.shown(0, ONE, turns, answers)]
        wanted = {"total": 5, "start": 2, "notes": [["a", 1]], "twice": 10, "unit": "apples"}
        assert known[0].result(30).answer == wanted
        environment._workers[0].process.kill()
        environment._workers[0].process.wait()
        known += [
            environment.shown(0, ONE, turns, answers),
            environment.shown(1, ONE, turns, [by("tool", "total 6"), None]),
        ]
        assert known[1].result(30).answer == known[0].result(30).answer
        assert known[2].result(30).answer is None and "in the replay" in known[2].result(30).reason
        messages = [[{"role": "assistant", "content": "Done."}]] * 3
        played = Played(messages, [[known[0]]] * 3, 2, known)
        got = pool.collect([pool.submit(ONE, ["Done."] * 2, Played(messages[:2], [[known[0]]] * 2, 2, known[:2]))])
        assert got.total.tolist() == [5.0, 5.0]
        failed = pool.collect([pool.submit(ONE, ["Done."] * 3, played)])
        assert "'NoneType' object has no attribute 'total'" in failed.errors[0]


def test_what_is_wrong_with_a_call_is_told_to_the_policy():
    turns = {
        "<tool_call>add 3</tool_call>": "error: JSONDecodeError",
        call("subtract", number=3): "error: ValueError: there is no tool 'subtract', but add, later, read",
        call("not_a_tool"): "error: ValueError: there is no tool 'not_a_tool'",
        call("reset"): "error: ValueError: there is no tool 'reset'",
        call("add", digits=3): "error: TypeError",
        "<tool_call>[1]</tool_call>": "error: TypeError",
        call("add", **{"\ud83d": 3}): "error: TypeError",  # half an emoji, as a token may end: no tokenizer takes it
        '<tool_call>{"name": "add", "arguments": "{\\"number\\": 3}"}</tool_call>': "total 5",
    }
    with Environment(config("Counter"), [ONE]) as environment:
        replies = play(environment, list(turns))
    for reply, expected in zip(replies, turns.values(), strict=True):
        assert text(reply).startswith(expected) and reply.outcome == OUTCOME_SCORE
        text(reply).encode()
    assert replies[-1].reward == 3.0


def test_calls_are_read_as_the_families_of_models_write_them():
    """Once, only the first form was recognised as a call, and the others ended the episode. The total begins at 2."""
    turns = {
        '<tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call>': "total 3",
        '{"name": "add", "parameters": {"number": 1}}': "total 4",  # Llama 3
        '[TOOL_CALLS][{"name": "add", "arguments": {"number": 1}}]': "total 5",  # Mistral
        '[{"name": "add", "arguments": {"number": 1}}]': "total 6",  # where its mark is a special token
        "<tool_call>\n<function=add>\n<parameter=number>\n1\n</parameter>\n</function>\n</tool_call>": "total 7",
        '<tool_call>[{"name": "add", "arguments": {"number": 1}}, {"name": "add", "arguments": {"number": 1}}]'
        "</tool_call>": "total 8\ntotal 9",  # SmolLM2
        '<think>Or <tool_call>{"name": "add", "arguments": {"number": 5}}</tool_call>?</think>\n\n'
        '{"name": "add", "parameters": {"number": 1}}': "total 10",  # what is thought is no call
        '{"total": 9}': None,
    }
    with Environment(config("Counter"), [ONE]) as environment:
        assert [text(reply) for reply in play(environment, list(turns))] == list(turns.values())


class Guess:
    def reset(self):
        pass

    def guess(self, word: str, hint: str | None = None, kind: typing.Literal["1"] = "1", size: float = 0, more=None):
        """Says what it was given."""
        return [word, hint, kind, size, more]

    def unknown(self, word: str, other: "NotThere" = None):  # noqa: F821
        """Of what it takes nothing can be found out."""
        return [word]


def test_a_parameter_that_is_a_text_stays_one():
    """Once, a text of digits became a number, and `true` and `null` became values that are not texts."""
    parameters = lambda given: "".join(f"<parameter={key}>\n{text}\n</parameter>" for key, text in given.items())
    written = lambda name, given: f"<tool_call><function={name}>{parameters(given)}</function></tool_call>"
    episode = environment_worker.Episode(Guess, {})
    for name, given, expected in (
        ("guess", {"word": "1234", "hint": "null", "size": "7", "more": "[2]"}, ["1234", None, "1", 7, [2]]),
        ("guess", {"word": "null", "hint": "true", "kind": "1"}, ["null", "true", "1", 0, None]),
        ("guess", {"word": '"a"', "size": "x", "more": "y"}, ['"a"', None, "1", "x", "y"]),
        ("unknown", {"word": "1234"}, [1234]),
    ):
        assert episode.answer(written(name, given)) == by("tool", str(expected))


def test_an_episode_whose_process_died_is_played_again_and_must_answer_as_before():
    turns = [call("add", number=3), call("add", number=4)]
    for name, goes_on in (("Counter", True), ("Forgetful", False)):
        with Environment(config(name), [ONE]) as environment:
            (first,) = play(environment, turns[:1])
            environment._workers[0].process.send_signal(signal.SIGKILL)
            environment._workers[0].process.wait()
            second = environment.ask(0, ONE, turns, [first.answer]).result(30)
        assert (text(second) == "total 9") == goes_on
        if not goes_on:
            assert second.outcome == OUTCOME_ERROR and "in the replay the answer is" in second.reason


def test_what_is_played_again_has_the_time_of_each_turn():
    """Once, the replay of all turns had the deadline of one turn.

    Turns that had been answered in time failed in a resumed run.
    """
    turns = [call("add", number=i) for i in range(3)]
    with Environment(config("SlowTool", timeout_s=2.0), [ONE]) as environment:
        replies = play(environment, turns[:2])
        environment._workers[0].process.send_signal(signal.SIGKILL)
        environment._workers[0].process.wait()
        third = environment.ask(0, ONE, turns, [reply.answer for reply in replies]).result(30)
        assert (third.outcome, text(third)) == (OUTCOME_SCORE, "total 5"), third.reason


def test_a_class_that_can_be_saved_goes_on_from_its_state_and_is_not_played_again():
    """The environment answers differently each time, so a replay fails."""
    turns = [call("add", number=3), call("add", number=1), call("read")]
    for name, is_saved in (("Saved", True), ("Forgetful", False)):
        with Environment(config(name), [ONE]) as environment:
            first = environment.ask(0, ONE, turns[:1], []).result(30)
            assert (first.state is not None) == is_saved and first.outcome == OUTCOME_SCORE
            assert environment.ask(1, ONE, (), ()).result(30).outcome == OUTCOME_SCORE  # which begins, as ever
            environment._workers[0].process.kill()
            environment._workers[0].process.wait()
            second = environment.ask(0, ONE, turns[:2], [first.answer], first.state).result(30)
            assert (second.outcome == OUTCOME_SCORE) == is_saved
            if is_saved:
                total = first.state["total"]
                assert text(second) == f"total {second.state['total']}" and second.state["total"] > total
                # The instance of then, not a new one: 2 at the start, and what was added since.
                assert second.reward == second.state["total"] - 2 and second.state["restored"] == 1
                last = environment.ask(0, ONE, turns, [first.answer, second.answer], second.state).result(30)
                assert text(last) == str(second.state["total"]) and last.state["restored"] == 1
            else:
                assert "in the replay" in second.reason
    with Environment(config("SavesNoJson"), [ONE]) as environment:
        assert "state must return plain JSON" in environment.ask(0, ONE, turns[:1], []).result(30).reason


def test_an_episode_that_is_over_is_no_longer_kept():
    with Environment(config("Forgetful"), [ONE]) as environment:
        (first,) = play(environment, [call("add", number=3)])
        environment.forget(0)
        again = environment.ask(0, ONE, [call("add", number=3)] * 2, [first.answer]).result(30)
    assert "in the replay" in again.reason


def test_an_episode_is_over_when_what_was_asked_before_is_answered():
    with Environment(config("Forgetful"), [ONE]) as environment:
        turns = [call("add", number=3)]
        first = environment.ask(0, ONE, turns, [])
        second = environment.ask(0, ONE, turns * 2, [first.result(30).answer])
        third = environment.ask(1, ONE, turns, [])  # of another, and waits
        last = environment.shown(0, ONE, turns * 2, [first.result(30).answer])
        environment.forget(0)
        assert [x.result(30).outcome for x in (second, third, last)] == [OUTCOME_SCORE] * 3
        assert "in the replay" in environment.ask(0, ONE, turns * 2, [first.result().answer]).result(30).reason


BAD = {
    "RaisesInConstructor": (OUTCOME_ERROR, "OSError: no licence"),
    "RaisesInReset": (OUTCOME_ERROR, "KeyError: 'board'"),
    "ReturnsBytes": (OUTCOME_ERROR, "the tool add returned bytes, not text"),
    "ReturnsTooMuch": (OUTCOME_ERROR, "the tool add returned 10000000 characters, more than 1048576"),
    "RewardIsNotANumber": (OUTCOME_ERROR, "get_reward returned nan"),
    "RewardIsHuge": (OUTCOME_ERROR, "get_reward returned 1e+39 for a score"),
    "ResetReturnsADict": (OUTCOME_ERROR, "reset returned dict, not text or None"),
    "returns_a_pair": (OUTCOME_ERROR, "the environment returned tuple, not text or None"),
    "NeverReturns": (OUTCOME_TIMEOUT, "no answer after 1 s"),
    "ExitsTheProcess": (OUTCOME_ERROR, "its process died"),
    "CallsExit": (OUTCOME_ERROR, "SystemExit: 0"),
}


ALWAYS = (
    "RaisesInConstructor",
    "RaisesInReset",
    "RewardIsNotANumber",
    "RewardIsHuge",
    "ResetReturnsADict",
    "returns_a_pair",
)


@pytest.mark.parametrize("name", BAD)
def test_one_that_cannot_answer_is_counted_and_the_next_episode_is_answered(name):
    outcome, said = BAD[name]
    with Environment(config(name, timeout_s=1.0), [ONE]) as environment:
        reply = environment.ask(0, ONE, [call("add", number=1)], ()).result(30)
        assert (reply.answer, reply.reward, reply.outcome) == (None, None, outcome)
        assert reply.reason.startswith("environment on here.jsonl:1: ") and said in reply.reason
        if name not in ALWAYS:
            assert environment.ask(1, ONE, [call("read")], ()).result(30).answer == by("tool", "2")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("RaisesInTool", "error: ValueError: Game over."),
        ("ReturnsNothing", ""),
        ("Prints", "total 3"),
        ("ReturnsAFunction", "<function"),
    ],
)
def test_one_that_is_only_odd_answers(name, answer, capfd):
    with Environment(config(name), [ONE]) as environment:
        reply = environment.ask(0, ONE, [call("add", number=1)], ()).result(30)
    assert reply.outcome == OUTCOME_SCORE and text(reply).startswith(answer)
    assert ("ready" in capfd.readouterr().err) == (name == "Prints")  # and no protocol takes it for an answer


def test_a_tool_that_raises_is_said_once_and_what_a_policy_gives_it_is_not(capfd):
    """Once, a tool with a bug failed in every call, and only the policy received the error."""
    line = FILE.read_text().splitlines().index('        raise ValueError("Game over.")') + 1
    turns = [call("add", digits=1), call("none"), call("add", number=1), call("add", number=1)]
    with Environment(config("RaisesInTool"), [ONE]) as environment:
        replies = play(environment, turns)
    assert all(text(reply).startswith("error: ") for reply in replies)
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"warning: the tool add raised ValueError: Game over. (environments.py:{line})")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing_there", ["AttributeError"]),
        ("NoTools", ["docstring"]),
        ("WantsArguments", ["here.jsonl:1", "'board'"]),
        ("WantsAColumn", ["here.jsonl:1", "'answer'"]),
    ],
)
def test_one_that_does_not_fit_is_refused_before_any_process_starts(name, words, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with refused("environments.factory", f"{FILE}:{name}", *words):
        Environment(config(name), [ONE])


def test_its_reward_counts_only_where_it_has_one():
    with refused("rewards.functions", "environment", f"{FILE}:Plain", "get_reward"):
        rewards = RewardsConfig(functions=("environment",))
        Environment(dataclasses.replace(config("Plain"), rewards=rewards), [ONE])


def test_an_answer_must_have_room_for_what_the_template_puts_around_it():
    # Token 2 ends turns but is not an end token of the template, so the template adds one token after it.
    encode = lambda said, last, **how: [said[0]["role"]] * (6 + (last == 5))
    tokenizer = types.SimpleNamespace(encode_answer=encode, eos_ids=(5, 2))
    with opened(Config(), [ONE], tokenizer) as environment:
        assert environment is None
    with opened(config("slow", max_answer_tokens=8), [ONE], tokenizer) as environment:
        assert environment.role == "user"
    with (
        refused("environments.max_answer_tokens", 7, "8", "7 tokens"),
        opened(config("slow", max_answer_tokens=7), [ONE], tokenizer),
    ):
        pass


class Template:
    """A tokenizer whose template supports tools, or does not."""

    def __init__(self, has_tools):
        self.has_tools = has_tools

    def encode_prompt(self, prompt, *, chat_template_kwargs, **how):
        if not self.has_tools:
            raise ConfigError("no tools")
        return [0]


def with_prompts(name, **settings):
    return dataclasses.replace(config(name), prompts=PromptsConfig(**settings))


def test_what_reset_says_follows_the_prompt_and_the_template_is_told_the_tools():
    talk = Example([{"role": "system", "content": "s"}, {"role": "user", "content": "Find it."}], {"start": 3}, "b")
    examples = [Example("Find it.", {"start": 2}, "a"), talk, Example("Nothing.", {"start": 0}, "c")]
    prompts, (kept,), bad = shown(with_prompts("Riddle"), Template(True), examples)
    assert [example.prompt for example in kept] == [
        "Find it. It is 2.",
        [{"role": "system", "content": "s"}, {"role": "user", "content": "Find it. It is 3."}],
        "Nothing.",
    ]
    assert bad == [] and talk.prompt[-1]["content"] == "Find it."
    (told,) = prompts.chat_template_kwargs["tools"]
    assert told["function"]["name"] == "guess" and told["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "description": "The guess."},
            "why": {"type": "string", "description": "What it is for."},
        },
        "required": ["number"],
    }


def test_tools_are_told_to_no_template_without_a_place_for_them_and_not_in_place_of_others():
    for settings, has_tools in (
        ({}, False),
        ({"chat_template": False}, True),
        ({"chat_template_kwargs": {"tools": []}}, True),
    ):
        given = with_prompts("Riddle", **settings)
        assert shown(given, Template(has_tools), [ONE])[0] == given.prompts
    given = with_prompts("slow")  # a function has none
    assert shown(given, Template(True), [ONE], []) == (given.prompts, [[ONE], []], [])


def test_a_tool_that_a_template_cannot_be_told_of_and_a_question_that_cannot_be_begun_are_named():
    with raises_with(ConfigError, "Counter", "'number'"):
        shown(with_prompts("Counter"), Template(True), [ONE])
    examples = [ONE, Example("p", {"start": 13}, "here.jsonl:2")]
    with refused_row("here.jsonl", 2, "ValueError: not that one"):
        shown(with_prompts("Riddle"), Template(True), examples)
    _, kept, bad = shown(with_prompts("Riddle", bad_row="skip"), Template(True), examples, [ONE])
    assert [[example.prompt for example in questions] for questions in kept] == [["p It is 2."]] * 2
    assert len(bad) == 1
    check_row(bad[0], "here.jsonl", 2, "ValueError: not that one")


def test_where_no_question_can_be_begun_the_first_reason_is_told(tmp_path):
    for name, start in (("all", 13), ("one", 1)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "Find it.", "start": start}) + "\n")
    prompts = PromptsConfig(source="jsonl", name=str(tmp_path / "all.jsonl"), bad_row="skip")
    given = dataclasses.replace(config("Riddle"), prompts=prompts)
    reason = "ValueError: not that one"
    with refused_row(tmp_path / "all.jsonl", 1, "train", reason):
        evaluation.questions(dataclasses.replace(given, eval=EvalConfig(num_prompts=0)), Template(True))
    prompts = dataclasses.replace(prompts, name=str(tmp_path / "one.jsonl"))
    held_out = EvalConfig(num_prompts=1, name=str(tmp_path / "all.jsonl"))
    with refused_row(tmp_path / "all.jsonl", 1, "held out", reason):
        evaluation.questions(dataclasses.replace(given, prompts=prompts, eval=held_out), Template(True))


STRAY = """
import os, stat

def write_stray(line):
    for descriptor in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, line)
        except OSError:
            pass

def echo(prompt, turns, **columns):
    if turns[-1] == "stray":
        write_stray(b'[[{"role": "user", "content": "another\\'s"}], 1.0, null, null, null]\\\\n')
    return turns[-1]

def hindsight(prompts, completions, **columns):
    if completions == ["stray"]:
        write_stray(b'[["{}"], ""]\\\\n')
    return [{"said": text} for text in completions]
"""


def test_a_stray_line_fails_one_turn_and_answers_no_other(tmp_path):
    (tmp_path / "stray.py").write_text(STRAY)
    own = EnvironmentsConfig(factory=f"{tmp_path}/stray.py:echo", num_workers=1, timeout_s=5.0)
    with Environment(dataclasses.replace(Config(), environments=own), [ONE]) as environment:
        replies = [environment.ask(i, ONE, [said], []).result(30) for i, said in enumerate(("a", "stray", "b", "c"))]
    assert [reply.outcome for reply in replies] == [OUTCOME_SCORE, OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_SCORE]
    assert [replies[i].answer for i in (0, 2, 3)] == [by("user", said) for said in ("a", "b", "c")]


def test_a_stray_line_fails_one_call_of_a_hindsight_function(tmp_path):
    (tmp_path / "stray.py").write_text(STRAY)
    name, run = f"{tmp_path}/stray.py:hindsight", dataclasses.replace(Config(), rewards=RewardsConfig(timeout_s=5.0))
    source = HindsightSource(name, types.SimpleNamespace(config=run))
    try:
        made = [source._call(ONE, [said]) for said in ("a", "stray", "b", "c")]
    finally:
        source.close()
    assert [lines for lines, _ in made] == [[b'{"said": "a"}'], [], [b'{"said": "b"}'], [b'{"said": "c"}']]
    assert [bool(reason) for _, reason in made] == [False, True, False, False]


@pytest.mark.parametrize(
    ("answer", "is_reply"),
    [
        ([[{"role": "user", "content": "a"}], None, None, None, None], True),
        ([None, 1.0, None, {"a": 1}, []], True),
        ([None, None, "it raised", None, None], True),
        ([None, float("nan"), None, None, None], False),
        ([None, "1", None, None, None], False),
        ([None, True, None, None, None], False),
        ([None, 1e13, None, None, None], False),
        ([None, None, 3, None, None], False),
        ([None] * 4, False),
        ("reply", False),
        (None, False),
    ],
)
def test_only_what_has_the_form_of_a_reply_is_one(answer, is_reply):
    assert _is_reply(answer) == is_reply
