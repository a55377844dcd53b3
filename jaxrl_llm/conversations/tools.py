"""Conversion of tool calls between messages of the OpenAI API and the text of models.

Owns: messages with tool calls to texts, and texts to messages. Does not know: where a call begins and ends
(``tool_calls``), routes, chat templates.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.conversations import tool_calls
from jaxrl_llm.conversations.tool_calls import BEGIN, END, Kinds
from jaxrl_llm.runtime import json_lines


def functions_of(tools: Any) -> list[dict[str, Any]]:
    """Return the ``tools`` of a request unchanged. Raise ValueError if they are not a list of functions."""
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        is_one = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not is_one or not isinstance(tools, list):
            raise ValueError(
                f'tools={tool!r:.200} must be a list of {{"type": "function", "function": {{"name": ..}}}}'
            )
    return tools


def _json(value: Any) -> str:
    """Return JSON as models write it. Characters outside ASCII are not escaped, except lone surrogates."""
    return json_lines.written(value, ensure_ascii=False)


def told(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the messages with the tools in the system message, for a chat template that does not support tools.

    If the first message is not a system message, a system message is inserted before it.
    """
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    text = f"You may call these functions, which are given as JSON:\n<tools>\n{lines}\n</tools>\nTo call one write "
    text += '<tool_call>{"name": NAME, "arguments": {..}}</tool_call> and nothing after it.'
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
    return [{"role": "system", "content": f"{first['content']}\n\n{text}" if first else text}, *rest]


def texts_of(messages: Any, *, apart: bool = False) -> list[dict[str, Any]]:
    """Return a request's messages as roles and texts. The assistant's tool calls become part of its text.

    A content that is a list of parts becomes the texts of the parts, joined by line breaks.

    Args:
        apart: keep the calls in ``tool_calls``, in the form that chat templates take, if all arguments of the message
            are objects. Ids of calls and of tool results are kept if they are strings. Calls with other arguments
            become text.

    Raises:
        ValueError: there is no message, an item is not a message, or a part is not text.
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
    """Return ``{key: value}`` if the key's value is a string, else {}."""
    return {key: given[key]} if isinstance(given.get(key), str) else {}


def _text_of_part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f'a part of a content must be {{"type": "text", "text": ..}}, not {part!r:.200}')
    return part["text"]


def _kinds_of(function: dict[str, Any]) -> Kinds:
    """Return the JSON types of each parameter of a request's function.

    Only the function's name has been checked, so that every part of its schema may be missing or malformed.
    """

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
        with contextlib.suppress(ValueError, RecursionError):  # arguments that are not JSON stay a string
            arguments = json_lines.strict(arguments)
    return {"name": function["name"], "arguments": arguments}


class Message:
    """Assistant message of a turn whose text comes in pieces. Any split gives the same content and calls.

    Args:
        tools: tools of the request, as ``functions_of`` returns them. Without tools, calls are text.

    Attributes:
        tool_calls: calls in the form of the API, after ``finish``. If any call cannot be parsed, all calls are text.
    """

    def __init__(self, tools: Sequence[dict[str, Any]]):
        self.tool_calls: list[dict[str, Any]] = []
        self._kinds = {tool["function"]["name"]: _kinds_of(tool["function"]) for tool in tools}
        self._reader = tool_calls.Reader() if tools else None

    def feed(self, piece: str) -> str:
        """Append a piece of text, and return the new content that later text cannot change."""
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
    """Return the assistant message of a whole turn. If the request had tools, calls are in ``tool_calls``."""
    content, calls = calls_in(turn, tools)
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def calls_in(turn: str, tools: Sequence[dict[str, Any]]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text outside the tool calls of a turn, and the calls. The text is None if it is only whitespace.

    If any call cannot be parsed, or ``tools`` is empty, the whole turn is text.
    """
    message = Message(tools)
    content = message.feed(turn)
    content += message.finish()
    is_empty = bool(message.tool_calls) and not content.strip()
    return None if is_empty else content, message.tool_calls
