"""Calls of tools in the OpenAI API's form, and in the text of models:

    <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>   Hermes, Qwen, SmolLM2: one or a list
    <tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>   Qwen3-Coder, Qwen3.5
    {"name": "weather", "parameters": {"city": "Paris"}}   Llama 3: the whole text, one or a list
    [TOOL_CALLS][{"name": "weather", "arguments": {..}}]   Mistral; where its mark is a special token it is not there

Owns: how messages with calls become texts, and texts calls. Does not know: routes, chat templates.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
BEGIN, MISTRAL = "<tool_call>", "[TOOL_CALLS]"
THOUGHT = "</think>"  # ends what the model thinks, whose beginning may stand in the prompt

Kinds = Mapping[str, Collection[str]]  # JSON schema's types of what a tool takes, by parameter


def functions_of(tools: Any) -> list[dict[str, Any]]:
    """What a request's ``tools`` are; ValueError where they are none."""
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        is_one = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not is_one or not isinstance(tools, list):
            raise ValueError(
                f'tools={tool!r:.200} must be a list of {{"type": "function", "function": {{"name": ..}}}}'
            )
    return tools


def _json(value: Any) -> str:
    """As a model's text has it: characters as they are, but for halves of surrogate pairs, which are no text."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def told(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Messages whose first one, the system's, tells of tools: for a chat template without a place for them."""
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    text = f"You may call these functions, which are given as JSON:\n<tools>\n{lines}\n</tools>\nTo call one write "
    text += '<tool_call>{"name": NAME, "arguments": {..}}</tool_call> and nothing after it.'
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
    return [{"role": "system", "content": f"{first['content']}\n\n{text}" if first else text}, *rest]


def texts_of(messages: Any, *, apart: bool = False) -> list[dict[str, Any]]:
    """A request's messages as roles and texts; calls that the assistant made are in its text.

    A content that is a list of parts is their texts, a line break between.

    Args:
        apart: calls stay beside the text, as chat templates take them: arguments by name, and ids that are texts, in
            tools' answers too. Those of others are in it.

    Raises:
        ValueError: there is none, or one is no message, or has a part that is no text.
    """
    said = []
    for message in messages if isinstance(messages, list) and messages else [messages]:
        role, content = (message.get(x) for x in ("role", "content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list):
            content = "\n".join(map(_text_of_part, content))
        calls = message.get("tool_calls") or [] if isinstance(message, dict) else []
        try:
            functions = [_function(call["function"]) for call in calls]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"tool_calls={calls!r:.200} must have functions with a name and arguments") from None
        if not isinstance(role, str) or not (isinstance(content, str) or (functions and content is None)):
            raise ValueError(f"messages={messages!r:.200} must be a list of objects with a role and a content, texts")
        if apart and functions and all(isinstance(function["arguments"], dict) for function in functions):
            named = [
                {"type": "function", "function": function} | _texts("id", call)
                for call, function in zip(calls, functions, strict=True)
            ]
            said.append({"role": role, "content": content or "", "tool_calls": named})
        else:
            written = [f"{BEGIN}\n{_json(function)}\n</tool_call>" for function in functions]
            answered = _texts("tool_call_id", message) if apart else {}
            said.append({"role": role, "content": "\n".join([*([content] if content else []), *written])} | answered)
    return said


def _texts(key: str, given: dict[str, Any]) -> dict[str, str]:
    """The key with what is given for it, where that is a text."""
    return {key: given[key]} if isinstance(given.get(key), str) else {}


def _text_of_part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f'a part of a content must be {{"type": "text", "text": ..}}, not {part!r:.200}')
    return part["text"]


def _kinds_of(function: dict[str, Any]) -> Kinds:
    """By the JSON schema of a request's function, of which nothing but its name is sure to be there."""

    def kinds(schema: Any) -> list[str]:
        if not isinstance(schema, dict):
            return []
        own, others = schema.get("type"), schema.get("anyOf")
        own = [*(own if isinstance(own, list) else [own]), *(["null"] if schema.get("nullable") else [])]
        return own + [kind for other in (others if isinstance(others, list) else []) for kind in kinds(other)]

    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return {key: kinds(schema) for key, schema in properties.items()} if isinstance(properties, dict) else {}


def _function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # text that is no JSON is what was said
            arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def message_of(turn: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message of a turn, its calls apart where the request had tools."""
    text, calls = calls_in(turn, tools) if tools else (turn, [])
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def calls_in(text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str | None, list[dict[str, Any]]]:
    """What is said beside calls, None where nothing is, and the calls; where one of them is none, all of it is text.

    Args:
        tools: those of the request, as ``functions_of`` returns them.
    """
    beside, bodies = apart(text)
    try:
        kinds = {tool["function"]["name"]: _kinds_of(tool["function"]) for tool in tools}
        found = [call for body in bodies for call in read(body, kinds)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = []
    calls = []
    for name, arguments in found:
        arguments = arguments if isinstance(arguments, str) else _json(arguments)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    return (beside.strip() or None) if calls else text, calls


def apart(text: str) -> tuple[str, list[str]]:
    """What is said beside calls, and the bodies of these, which ``read`` reads, be they right or wrong.

    A call that stands in what the model thinks is none.
    """
    thought, answer = after_thinking(text)
    if bodies := TOOL_CALL.findall(answer):
        return thought + TOOL_CALL.sub("", answer), bodies
    beside, mark, body = answer.partition(MISTRAL)
    if mark:
        return thought + beside, [body]
    return (thought, [answer]) if _is_call(answer) else (text, [])


def after_thinking(text: str) -> tuple[str, str]:
    """What the model thinks, with its end, and what follows; together the text."""
    thought, end, answer = text.rpartition(THOUGHT)
    return thought + end, answer


def may_become_call(text: str) -> bool:
    """Whether the text may be the beginning of one that is a call as a whole."""
    return re.match(r"\s*(\[\s*)?(\{|\Z)", text) is not None


def _is_call(text: str) -> bool:
    """Whether a text without marks is one: JSON that has other keys is an answer."""
    if not text or not may_become_call(text):
        return False
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(text)
        calls = given if isinstance(given, list) else [given]
        has_all = lambda x: isinstance(x, dict) and "name" in x and ("arguments" in x or "parameters" in x)
        return bool(calls) and all(map(has_all, calls))
    return False


def read(body: str, kinds: Mapping[str, Kinds]) -> list[tuple[str, dict[str, Any] | str]]:
    """``(name, arguments)`` of each call in a body; arguments that are a text are JSON, or what was said.

    Args:
        kinds: by tool, of those of which something is known.

    Raises:
        ValueError, TypeError, KeyError: it holds none.
    """
    if found := FUNCTION.findall(body):
        calls = [(name, PARAMETER.findall(inside), kinds.get(name, {})) for name, inside in found]
        return [(name, {key: _value(text, of.get(key, ())) for key, text in given}) for name, given, of in calls]
    given, calls = json.loads(body), []
    for call in given if isinstance(given, list) else [given]:
        name, arguments = call["name"], call["arguments"] if "arguments" in call else call.get("parameters", {})
        if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
            raise TypeError(f"a call must have a name and arguments by name, and is {call!r:.100}")
        calls.append((name, arguments))
    return calls


def _value(text: str, kinds: Collection[str]) -> Any:
    """Of a parameter that stands in a text: the text where it takes one, else what JSON says, or the text."""
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return text
