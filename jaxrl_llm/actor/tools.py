"""Calls of tools between the OpenAI API's messages and the text of models.

Owns: how messages with calls become texts, and texts messages. Does not know: where a call begins and ends
(``tool_calls``), routes, chat templates.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.actor import tool_calls
from jaxrl_llm.actor.tool_calls import BEGIN, END, Kinds
from jaxrl_llm.runtime import json_lines


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
    """Return JSON as models write it: characters as they are, halves of surrogate pairs as escapes."""
    return json_lines.written(value, ensure_ascii=False)


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
            written = [f"{BEGIN}\n{_json(function)}\n{END}" for function in functions]
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
        with contextlib.suppress(ValueError, RecursionError):  # text that is no JSON stays text
            arguments = json_lines.strict(arguments)
    return {"name": function["name"], "arguments": arguments}


class Message:
    """The assistant's message of a turn whose text comes in pieces. Any split gives the same content and calls.

    Args:
        tools: those of the request, as ``functions_of`` returns them. Without any, a call is text.

    Attributes:
        tool_calls: after ``finish``, in the API's form. If one of the calls cannot be parsed, all of them are text.
    """

    def __init__(self, tools: Sequence[dict[str, Any]]):
        self.tool_calls: list[dict[str, Any]] = []
        self._kinds = {tool["function"]["name"]: _kinds_of(tool["function"]) for tool in tools}
        self._reader = tool_calls.Reader() if tools else None

    def feed(self, piece: str) -> str:
        """Return the content that can be shown after one more piece of text."""
        return piece if self._reader is None else self._reader.feed(piece)

    def finish(self) -> str:
        """Return the rest of the content."""
        if self._reader is None:
            return ""
        self._reader.finish()
        found = self._read()
        for name, arguments in found:
            arguments = arguments if isinstance(arguments, str) else _json(arguments)
            function = {"name": name, "arguments": arguments}
            self.tool_calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
        return self._reader.rest(is_called=bool(found))

    def _read(self) -> list[tuple[str, dict[str, Any] | str]]:
        try:
            return [one for call in self._reader.calls for one in tool_calls.read(call, self._kinds)]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []


def message_of(turn: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message of a whole turn, with its calls apart if the request had tools."""
    content, calls = calls_in(turn, tools)
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def calls_in(turn: str, tools: Sequence[dict[str, Any]]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text beside the calls of a turn, None if there is only space, and the calls.

    If a call cannot be parsed, or without ``tools``, the whole turn is text.
    """
    message = Message(tools)
    content = message.feed(turn)
    content += message.finish()
    is_empty = bool(message.tool_calls) and not content.strip()
    return None if is_empty else content, message.tool_calls
