"""Calls of tools between the OpenAI API and the text of a model; the sampler is a script here."""

import contextlib
import http.client
import json
import queue
import threading
import types

import pytest

from jaxrl_llm.actor import tools
from jaxrl_llm.config import ConfigError
from jaxrl_llm.serving.http import Server

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHERS = {
    "llama": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]',
    "qwen3.5": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
}
CHAT = "/v1/chat/completions"


class Scripted:
    """An engine whose model says one text, three characters at a time."""

    def __init__(self, text):
        sampling, arch = types.SimpleNamespace(max_completion_tokens=500), types.SimpleNamespace(vocab_size=70_000)
        model = types.SimpleNamespace(arch=arch)
        self.sampler = types.SimpleNamespace(sampling=sampling, model=model, max_prompt_tokens=9999, row_tokens=9)
        self.text, self.error = text, None

    def submit(self, request):
        request.deltas = queue.SimpleQueue()
        ids = [ord(x) for x in self.text]
        parts = [ids[i : i + 3] for i in range(0, len(ids), 3)]
        for part in parts:
            request.deltas.put((part, [-1.0] * len(part), "stop" if part is parts[-1] else None))


class Characters:
    """A tokenizer of characters, whose template has a place for tools or has none."""

    def __init__(self, takes_tools):
        self.takes_tools, self.seen = takes_tools, []

    def encode_prompt(self, messages, *, chat_template_kwargs, **how):
        if chat_template_kwargs and not self.takes_tools:
            raise ConfigError("no place for tools")
        self.seen.append((messages, chat_template_kwargs))
        return [ord(x) for message in messages for x in message["content"]]

    def decode(self, ids):
        return "".join(map(chr, ids))


@contextlib.contextmanager
def scripted(text, takes_tools=True):
    tokenizer = Characters(takes_tools)
    server = Server(("127.0.0.1", 0), {"m": Scripted(text)}, tokenizer, 1.0, "")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server, tokenizer
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, [("weather", {"city": "Paris"})]),
        (f"I look.\n{CALL}", "I look.", [("weather", {"city": "Paris"})]),
        (
            '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>',
            None,
            [("a", {}), ("b", {})],
        ),
        ("No call.", "No call.", []),
        ("<tool_call>{no JSON}</tool_call>", "<tool_call>{no JSON}</tool_call>", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("<tool_call>3</tool_call>", "<tool_call>3</tool_call>", []),
        ('<tool_call>{"name": "a", "arguments": 3}</tool_call>',) * 2 + ([],),
        (f"{CALL} <tool_call>", "<tool_call>", [("weather", {"city": "Paris"})]),
        *((text, None, [("weather", {"city": "Paris"})]) for text in OTHERS.values()),
        (f"I look. {OTHERS['mistral']}", "I look.", [("weather", {"city": "Paris"})]),
        (
            '[{"name": "a", "arguments": {}}, {"name": "b", "parameters": {"x": 1}}]',
            None,
            [("a", {}), ("b", {"x": 1})],
        ),
        (
            "<tool_call><function=a>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\na\nb</parameter></function>"
            "</tool_call>",
            None,
            [("a", {"n": 3, "s": "a\nb"})],
        ),
        *(
            (text, text, [])
            for text in ('{"name": "Bob"}', '[{"name": "a", "arguments": {}}, 1]', "[]", "[TOOL_CALLS]x")
        ),
    ],
)
def test_what_a_text_calls(text, content, calls):
    said, found = tools.calls_in(text)
    assert said == content
    assert [(x["function"]["name"], json.loads(x["function"]["arguments"])) for x in found] == calls
    assert len({x["id"] for x in found}) == len(found) and all(x["type"] == "function" for x in found)


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        (CALL, None, True),
        (f"I look <t\n{CALL}", "I look <t", True),
        (f"I\n{CALL}\nlook", "I\n\nlook", True),
        ("No <tool_cal at all", "No <tool_cal at all", False),
        *((text, None, True) for text in OTHERS.values()),
        (f"I look {OTHERS['mistral']}", "I look", True),
        ('{"rain": "no"}', '{"rain": "no"}', False),
    ],
)
def test_calls_come_as_calls_whole_and_streamed(text, content, called):
    messages = [{"role": "user", "content": "Rain?"}]
    with scripted(text) as (server, tokenizer):
        status, answer = ask(server, CHAT, {"messages": messages, "tools": TOOLS})
        assert status == 200 and tokenizer.seen[-1] == (messages, {"tools": TOOLS})
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == content
        assert choice["finish_reason"] == ("tool_calls" if called else "stop")
        got = [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert got == called * [{"name": "weather", "arguments": '{"city": "Paris"}'}]
        # Without tools a call is but a text.
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = ask(server, CHAT, {"messages": messages, **more})[1]["choices"]
            assert choice["message"] == {"role": "assistant", "content": text}
        streamed = stream(server, {"messages": messages, "tools": TOOLS})
        shown = "".join(delta.get("content") or "" for delta, _ in streamed)
        assert shown.strip() == (content or "")
        told = [call for delta, _ in streamed for call in delta.get("tool_calls", [])]
        assert [call["function"] for call in told] == got and [call["index"] for call in told] == [*range(len(got))]
        assert streamed[-1][1] == ("tool_calls" if called else "stop")


def ask(server, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


def stream(server, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST", CHAT, json.dumps(body | {"stream": True}))
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [(choice["delta"], choice["finish_reason"]) for event in events for choice in event["choices"]]


def test_a_template_without_a_place_for_tools_is_told_by_the_systems_message():
    with scripted("Yes.", takes_tools=False) as (server, tokenizer):
        for messages, begin in (
            ([{"role": "user", "content": "Rain?"}], "You may call"),
            (
                [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}],
                "Be brief.\n\nYou may",
            ),
        ):
            assert ask(server, CHAT, {"messages": messages, "tools": TOOLS})[0] == 200
            (first, last), told = tokenizer.seen[-1]
            assert not told and first["role"] == "system" and last == messages[-1]
            assert first["content"].startswith(begin) and '{"name": "weather"' in first["content"]


def test_an_assistants_calls_and_a_tools_answer_are_read_back():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ]
    with scripted("No.") as (server, tokenizer):
        assert ask(server, CHAT, {"messages": messages, "tools": TOOLS, "parallel_tool_calls": True})[0] == 200
        texts = [message["content"] for message in tokenizer.seen[-1][0]]
        assert texts == ["Rain?", CALL, "no"]
        assert tools.calls_in(texts[1])[1][0]["function"] == call["function"]


def test_arguments_that_are_no_json_come_back_as_they_went():
    text = '<tool_call>\n{"name": "weather", "arguments": "Paris"}\n</tool_call>'
    message = tools.message_of(text, has_tools=True)
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": "Paris"}
    assert tools.texts_of([message]) == [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools={'type': 'retrieval'} must be a list of"),
        ({"tools": "weather"}, "tools='weather' must be"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice='required' must be 'auto' or 'none'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "must be a list of objects with a role and a content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}]},
            "must have functions with",
        ),
    ],
)
def test_what_cannot_be_read_is_named(body, said):
    with scripted("No.") as (server, _):
        status, answer = ask(server, CHAT, {"messages": [{"role": "user", "content": "?"}]} | body)
        assert status == 400 and said in answer["error"]["message"]


def test_the_openai_client_gets_tool_calls():
    openai = pytest.importorskip("openai")
    with scripted(f"I look. {CALL}") as (server, _):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "Rain?"}]
        (choice,) = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "no"}]
        again = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert again.choices[0].message.tool_calls
        parts = [
            part.choices[0]
            for part in client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)
        ]
        assert [x.function.name for part in parts for x in part.delta.tool_calls or []] == ["weather"]
