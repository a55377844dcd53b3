"""Tool calls between the OpenAI API and the text of a model. The sampler is a script here."""

import contextlib
import http.client
import json
import os
import resource
import socket
import struct
import threading
import time
import types

import pytest
from support.refusal import ANY, check_refusal, refused

from jaxrl_llm.actor import stop_strings
from jaxrl_llm.config import ConfigError
from jaxrl_llm.conversations import tools
from jaxrl_llm.runtime import chat_client
from jaxrl_llm.serving.http import Server

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHERS = {
    "llama": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]',
    "qwen3.5": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
}
CHAT = "/v1/chat/completions"
THINKING = f"I could begin with {CALL}, or with {CALL.replace('Paris', 'Rome')}.</think>"
DEEP = f"<tool_call>{'[' * 3000}</tool_call>"  # deeper than JSON is read


class Scripted:
    """An engine whose model writes one text, three characters at a time."""

    def __init__(self, text):
        sampling, arch = types.SimpleNamespace(max_completion_tokens=500), types.SimpleNamespace(vocab_size=70_000)
        model = types.SimpleNamespace(arch=arch)
        self.sampler = types.SimpleNamespace(sampling=sampling, model=model, max_prompt_tokens=9999, row_tokens=9)
        self.text, self.error, self.asked = text, None, []

    def submit(self, request):
        self.asked.append(request)
        ids = [ord(x) for x in self.text]
        parts = [ids[i : i + 3] for i in range(0, len(ids), 3)]
        for part in parts:
            request.deltas.put((part, [-1.0] * len(part), "stop" if part is parts[-1] else None))


class Broken(Scripted):
    """An engine that ends in the middle of its text."""

    def submit(self, request):
        self.asked.append(request)
        self.error = RuntimeError("out of memory")
        request.deltas.put(([ord("x")], [-1.0], None))
        request.deltas.put(([], [], "error"))


class Characters:
    """A tokenizer of characters. Its template supports tools and their calls, or does not."""

    byte_ids = frozenset()

    def __init__(self, takes_tools, takes_calls=False):
        self.takes_tools, self.takes_calls, self.seen = takes_tools, takes_calls, []

    def encode_prompt(self, messages, *, chat_template_kwargs, **how):
        if chat_template_kwargs and not self.takes_tools:
            raise ConfigError("no place for tools")
        if any("tool_calls" in message for message in messages) and not self.takes_calls:
            raise ConfigError("no place for calls")
        self.seen.append((messages, chat_template_kwargs))
        return [ord(x) for message in messages for x in message["content"]]

    longest_token = 1

    def decode(self, ids):
        return "".join(map(chr, ids))

    def bytes_of(self, token):
        return chr(token).encode()


@contextlib.contextmanager
def scripted(text, takes_tools=True, takes_calls=False, *, kind=Scripted, host="127.0.0.1", token=""):
    tokenizer = Characters(takes_tools, takes_calls)
    server = Server((host, 0), {"a/m": kind(text)}, tokenizer, 1.0, token, num_requests=300)
    server.activate()
    threading.Thread(target=server.serve_forever, daemon=True).start()
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
        (THINKING + CALL, THINKING, [("weather", {"city": "Paris"})]),
        (THINKING + OTHERS["llama"], THINKING, [("weather", {"city": "Paris"})]),
        (f"{THINKING}No.", f"{THINKING}No.", []),
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
            for text in ('{"name": "Bob"}', '[{"name": "a", "arguments": {}}, 1]', "[]", "[TOOL_CALLS]x", DEEP)
        ),
    ],
)
def test_what_a_text_calls(text, content, calls):
    said, found = tools.calls_in(text, TOOLS)
    assert said == content
    assert [(x["function"]["name"], json.loads(x["function"]["arguments"])) for x in found] == calls
    assert len({x["id"] for x in found}) == len(found) and all(x["type"] == "function" for x in found)


def test_a_parameter_that_is_a_text_by_its_schema_stays_one():
    """Once, a text of digits became a number."""
    parts = {"a": "1", "b": "true", "c": "null", "d": "null", "e": "2", "f": "3"}
    body = "".join(f"<parameter={key}>{text}</parameter>" for key, text in parts.items())
    text, kinds = f"<tool_call><function=x>{body}</function></tool_call>", {"type": ["string", "null"]}
    known = {"a": {"type": "string"}, "b": {"anyOf": [{"type": "string"}]}, "c": kinds, "d": {"type": "string"}}
    known |= {"e": {"type": "integer"}, "f": "?"}
    for parameters, expected in (
        ({"properties": known}, {"a": "1", "b": "true", "c": None, "d": "null", "e": 2, "f": 3}),
        ("?", {"a": 1, "b": True, "c": None, "d": None, "e": 2, "f": 3}),
    ):
        given = [{"type": "function", "function": {"name": "x", "parameters": parameters}}]
        (call,) = tools.message_of(text, given)["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == expected


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        (CALL, None, True),
        (f"I look <t\n{CALL}", "I look <t", True),
        (f"I\n{CALL}\nlook", "I\n\nlook", True),
        ("No <tool_cal at all", "No <tool_cal at all", False),
        *((text, None, True) for text in OTHERS.values()),
        (f"I look {OTHERS['mistral']}", "I look", True),
        (f"{THINKING}\n\nI look\n{CALL}", f"{THINKING}\n\nI look", True),
        (f"{THINKING}\n\n{OTHERS['llama']}", THINKING, True),
        (f"{THINKING} No.", f"{THINKING} No.", False),
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
        assert shown == (content or "")
        told = [call for delta, _ in streamed for call in delta.get("tool_calls", [])]
        assert [call["function"] for call in told] == got and [call["index"] for call in told] == [*range(len(got))]
        assert streamed[-1][1] == ("tool_calls" if called else "stop")


def test_a_stream_goes_on_where_later_bytes_make_of_its_last_character_another():
    """A run of byte tokens is decoded as a whole: an invalid byte also changes the bytes before it."""
    with scripted("ab😀!defgh") as (server, tokenizer):
        tokenizer.decode = lambda ids: "".join(map(chr, ids)).replace("😀!", "\ufffd" * 5)
        said = stream(server, {"messages": [{"role": "user", "content": "hi"}]})
        shown = [delta.get("content") or "" for delta, _ in said]
    assert "".join(shown) == "ab😀" + "\ufffd" * 4 + "defgh"


def ask(server, path, body, method="POST"):
    connection = http.client.HTTPConnection(server.host, server.server_port, timeout=60)
    connection.request(method, path, body if isinstance(body, str) else json.dumps(body))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text, parse_constant=pytest.fail)


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
        assert tools.calls_in(texts[1], TOOLS)[1][0]["function"] == call["function"]


@pytest.mark.parametrize("asked", [{}, {"tools": TOOLS}])
def test_a_template_with_a_place_for_calls_gets_them_by_name(asked):
    """Qwen3-Coder, Llama and Mistral write calls in other forms.

    Once, Mistral's template refused the messages after a tool's answer.
    """
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}, "id": "1"}
    with scripted("No.", takes_calls=True) as (server, tokenizer):
        assert ask(server, CHAT, {"messages": messages} | asked)[0] == 200
        said = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
        assert tokenizer.seen[-1][0] == [messages[0], said, messages[2]]
        function["arguments"] = "Paris"  # no arguments by name
        assert ask(server, CHAT, {"messages": messages} | asked)[0] == 200
        assert tokenizer.seen[-1][0][1]["content"].startswith("I look.\n<tool_call>")
    with scripted("No.", takes_tools=False, takes_calls=True) as (server, tokenizer):
        function["arguments"] = "{}"
        assert ask(server, CHAT, {"messages": messages, "tools": TOOLS})[0] == 200
        assert (
            "<tool_call>" in tokenizer.seen[-1][0][2]["content"]
        )  # as its system's message says that calls are written


def test_arguments_that_are_no_json_come_back_as_they_went():
    text = '<tool_call>\n{"name": "weather", "arguments": "Paris"}\n</tool_call>'
    message = tools.message_of(text, TOOLS)
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": "Paris"}
    assert tools.texts_of([message]) == [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"tools": [{"type": "retrieval"}]}, ("tools", {"type": "retrieval"})),
        ({"tools": "weather"}, ("tools", "weather")),
        ({"tools": TOOLS[0]}, ("tools",)),
        ({"skip_special_tokens": False}, ("skip_special_tokens", False, "True")),
        ({"stop": ["a"] * 17}, ("stop", ANY, "16", "256")),
        ({"stop": "a" * 257}, ("stop", ANY, "16", "256")),
        ({"tools": TOOLS, "tool_choice": "required"}, ("tool_choice", "required", "'auto'", "'none'")),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            ("messages", [{"role": "assistant", "content": None}]),
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}]},
            ("tool_calls", [{"function": {"name": "x"}}]),
        ),
    ],
)
def test_what_cannot_be_read_is_named(body, named):
    with scripted("No.") as (server, _):
        status, answer = ask(server, CHAT, {"messages": [{"role": "user", "content": "?"}]} | body)
        assert status == 400
        check_refusal(answer["error"]["message"], *named)


@pytest.mark.tier("parity")
def test_the_openai_client_gets_tool_calls():
    openai = pytest.importorskip("openai")
    with scripted(f"I look. {CALL}") as (server, _):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "Rain?"}]
        (choice,) = client.chat.completions.create(model="a/m", messages=messages, tools=TOOLS).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "no"}]
        again = client.chat.completions.create(model="a/m", messages=messages, tools=TOOLS)
        assert again.choices[0].message.tool_calls
        parts = [
            part.choices[0]
            for part in client.chat.completions.create(model="a/m", messages=messages, tools=TOOLS, stream=True)
        ]
        assert [x.function.name for part in parts for x in part.delta.tool_calls or []] == ["weather"]


USER = [{"role": "user", "content": "?"}]
GENERATE = "/inference/v1/generate"


def test_what_asks_for_nothing_is_passed_over():
    nothing = {"service_tier": "auto", "modalities": ["text"], "model": None, "stop": [], "parallel_tool_calls": True}
    with scripted("No.") as (server, _):
        assert ask(server, CHAT, {"messages": USER} | nothing)[0] == 200
        nothing = {"stream": False, "sampling_params": None, "ignore_eos": False, "detokenize": True}
        status, answer = ask(server, GENERATE, {"token_ids": [1], "skip_special_tokens": False} | nothing)
        assert status == 200 and answer["model"] == "a/m"


def test_texts_that_are_not_english_are_told_as_they_are():
    """No model has been trained on the tokens of JSON's escapes."""
    function = {"name": "wetter", "description": "Wie warm ist es in Zürich? 天气"}
    call = {"function": {"name": "wetter", "arguments": '{"ort": "Zürich"}'}}
    (system, _) = tools.with_tool_list(USER, [{"type": "function", "function": function}])
    assert "Zürich? 天气" in system["content"]
    (said,) = tools.texts_of([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert '"ort": "Zürich"' in said["content"]
    assert tools.calls_in(said["content"], TOOLS)[1][0]["function"] == call["function"]
    call["function"]["arguments"] = '{"ort": "\\ud800"}'  # half a pair is no text, and stays an escape
    assert '"ort": "\\ud800"' in tools.texts_of([{"role": "assistant", "tool_calls": [call]}])[0]["content"]


def test_an_answer_over_a_connection_that_is_kept_does_not_wait_for_the_last_ones_receipt():
    """Once, the answer came after 40 ms: its second part waited for the client's acknowledgement of the first."""
    with scripted("No.") as (server, _):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        seconds = []
        for _ in range(20):
            begun = time.monotonic()
            connection.request("POST", CHAT, json.dumps({"messages": USER}))
            assert connection.getresponse().read()
            seconds.append(time.monotonic() - begun)
        connection.close()
    assert min(seconds[5:]) < 0.03  # the first ones are not kept waiting


def test_a_connection_of_a_high_number_is_answered():
    """`select` raises for descriptors from 1024 on."""
    with scripted("No.") as (server, _), contextlib.ExitStack() as stack:
        while stack.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        assert ask(server, CHAT, {"messages": USER})[1]["choices"][0]["message"]["content"] == "No."


def test_as_many_connections_as_the_system_allows():
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 500), most))
        with scripted("No."):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_a_stream_that_fails_in_the_middle_says_so_and_has_no_end():
    with scripted("", kind=Broken) as (server, _):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("POST", CHAT, json.dumps({"messages": USER, "stream": True}))
        *parts, last = connection.getresponse().read().decode().removesuffix("\n\n").split("\n\n")
        connection.close()
        assert [json.loads(x.removeprefix("data: "))["choices"][0]["delta"].get("content") for x in parts] == ["", "x"]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == 500 and "out of memory" in error["message"]
        status, answer = ask(server, CHAT, {"messages": USER})
        assert status == 500 and "out of memory" in answer["error"]["message"]


def test_what_nobody_foresaw_is_answered_and_said_on_stderr(capfd):
    with scripted("No.") as (server, tokenizer):
        status, answer = ask(server, CHAT, "[" * 10**5)
        assert status == 400 and "the body" in answer["error"]["message"]
        tokenizer.decode = lambda ids: 1 / 0
        status, answer = ask(server, CHAT, {"messages": USER})
        assert status == 500 and answer["error"]["message"] == "ZeroDivisionError: division by zero"
    assert f"warning: POST {CHAT} failed: ZeroDivisionError: division by zero" in capfd.readouterr().err


def test_a_client_that_goes_before_the_first_event_gives_its_slot_back():
    begun, gone = threading.Event(), threading.Event()

    class Slow(Scripted):
        def submit(self, request):
            self.asked.append(request)
            begun.set()
            gone.wait(60)

    with scripted("", kind=Slow) as (server, _):
        data = json.dumps({"messages": USER, "stream": True})
        plug = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed at once
        plug.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode())
        assert begun.wait(30)
        plug.close()
        gone.set()
        (request,) = server.engines["a/m"].asked
        deadline = time.monotonic() + 30
        while not request.is_cancelled:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_one_model_is_told_of_and_a_servers_health_without_a_token():
    with scripted("No.") as (server, _):
        (listed,) = ask(server, "/v1/models", "", "GET")[1]["data"]
        for path in ("/v1/models/a/m", "/v1/models/a%2Fm"):
            assert ask(server, path, "", "GET") == (200, listed)
        assert ask(server, "/v1/models/b", "", "GET")[0] == 404 and ask(server, "/x", "", "GET")[0] == 404
    with scripted("No.", token="secret") as (server, _):
        assert ask(server, "/health", "", "GET")[0] == 200 and ask(server, "/v1/models", "", "GET")[0] == 401


def test_an_address_of_ip_6_is_listened_at():
    with scripted("No.", host="::1") as (server, _):
        assert ask(server, CHAT, {"messages": USER})[0] == 200


def test_a_client_is_told_why_it_is_refused():
    with scripted("No.") as (server, _):
        with refused("top_p", 0.5, "400", raises=OSError):
            chat_client.reply_to(f"http://127.0.0.1:{server.server_port}/v1", USER, top_p=0.5)
        assert chat_client.reply_to(f"http://127.0.0.1:{server.server_port}/v1", USER) == "No."


def test_stop_strings_are_looked_for_in_the_new_tokens():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    row = [ord(x) for x in "a" * 1000 + "bcde"]
    assert stop_strings.completed_at(["x", "y", "cd"], decode, row, 1002) == 1003
    assert sum(decoded) < 100 + 1003  # the whole row once, where the window has one
    decoded.clear()
    assert stop_strings.completed_at(["x", "y"], decode, row, 1002) is None and sum(decoded) < 100
    decoded.clear()
    assert stop_strings.completed_at([], decode, [1], 0) is None and decoded == []


def test_answers_and_requests_are_json():
    """Once, a log-prob that was not finite was written as `NaN`, and a request could contain one."""

    class Uncertain(Scripted):
        def submit(self, request):
            request.deltas.put(([ord("N"), ord("o")], [float("nan"), float("-inf")], "stop"))

    with scripted("", kind=Uncertain) as (server, _):
        (choice,) = ask(server, CHAT, {"messages": USER, "logprobs": True})[1]["choices"]
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == [None, None]
        (choice,) = ask(server, GENERATE, {"token_ids": [1]})[1]["choices"]
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == [None, None]
        for more in ('"temperature": NaN', '"seed": 1, "seed": 2', '"metadata": {"a": 1e999}'):
            status, answer = ask(server, CHAT, f'{{"messages": {json.dumps(USER)}, {more}}}')
            assert status == 400 and "JSON" in answer["error"]["message"]
