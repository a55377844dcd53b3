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
    is_list = isinstance(tools, list)
    items = tools if is_list else [tools]
    for tool in items:
        if not is_list or not _is_tool(tool):
            raise ValueError(
                f'tools={tool!r:.200} must be a list of {{"type": "function", "function": {{"name": ..}}}}'
            )
    return items


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _json(value: Any) -> str:
    """Return JSON in the form that models write: of the characters outside ASCII, only lone surrogates are escaped."""
    return json_lines.written(value, ensure_ascii=False)


def with_tool_list(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the messages with the tools in the system message, for a chat template that does not support tools.

    If the first message is not a system message, a system message is inserted before it.
    """
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    text = (
        f"You may call these functions, which are given as JSON:\n<tools>\n{lines}\n</tools>\nTo call one write "
        '<tool_call>{"name": NAME, "arguments": {..}}</tool_call> and nothing after it.'
    )
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    content = f"{first['content']}\n\n{text}"
    return [{"role": "system", "content": content}, *messages[1:]]


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
    items = messages if isinstance(messages, list) and messages else [messages]
    return [_text_message(message, messages, apart) for message in items]


def _text_message(message: Any, messages: Any, apart: bool) -> dict[str, Any]:
    """Return one message of ``texts_of``; ``messages`` is the whole list, for the error message."""
    fields = message if isinstance(message, dict) else {}
    role = fields.get("role")
    content = fields.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of_part(part) for part in content)
    calls = fields.get("tool_calls") or []
    try:
        functions = [_function(call["function"]) for call in calls]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tool_calls={calls!r:.200} must have functions with a name and arguments") from None
    has_content = isinstance(content, str) or (bool(functions) and content is None)
    if not isinstance(role, str) or not has_content:
        raise ValueError(f"messages={messages!r:.200} must be a list of objects with a role and a content, texts")
    have_objects = all(isinstance(function["arguments"], dict) for function in functions)
    if apart and functions and have_objects:
        named_calls = []
        for call, function in zip(calls, functions, strict=True):
            named_call = {"type": "function", "function": function}
            named_calls.append(named_call | _text_field("id", call))
        return {"role": role, "content": content or "", "tool_calls": named_calls}
    lines = [content] if content else []
    for function in functions:
        lines.append(f"{BEGIN}\n{_json(function)}\n{END}")
    text_message = {"role": role, "content": "\n".join(lines)}
    if apart:
        text_message |= _text_field("tool_call_id", fields)
    return text_message


def _text_field(key: str, fields: dict[str, Any]) -> dict[str, str]:
    """Return ``{key: value}`` if the key's value is a string, else {}."""
    value = fields.get(key)
    return {key: value} if isinstance(value, str) else {}


def _text_of_part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValueError(f'content={part!r:.200} must be a text, or a list of {{"type": "text", "text": ..}}')


def _kinds_of(function: dict[str, Any]) -> Kinds:
    """Return the JSON types of each parameter of a request's function.

    Only the function's name has been checked, so that every part of its schema may be missing or malformed.
    """
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {key: _kinds_of_schema(schema) for key, schema in properties.items()}


def _kinds_of_schema(schema: Any) -> list[Any]:
    """Return the JSON types that a schema accepts."""
    if not isinstance(schema, dict):
        return []
    types = schema.get("type")
    kinds = list(types) if isinstance(types, list) else [types]
    if schema.get("nullable"):
        kinds.append("null")
    alternatives = schema.get("anyOf")
    if isinstance(alternatives, list):
        for alternative in alternatives:
            kinds += _kinds_of_schema(alternative)
    return kinds


def _function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # arguments that are not JSON stay a string
            arguments = json_lines.strict(arguments)
    return {"name": function["name"], "arguments": arguments}


class Message:
    """Assistant message of a turn whose text comes in pieces. The split does not change the result.

    Args:
        tools: tools of the request, as ``functions_of`` returns them. Without tools, calls are text.

    Attributes:
        tool_calls: calls in the form of the API, after ``finish``. If any call cannot be parsed, all calls are text.
    """

    def __init__(self, tools: Sequence[dict[str, Any]]):
        self.tool_calls: list[dict[str, Any]] = []
        functions = [tool["function"] for tool in tools]
        self._kinds = {function["name"]: _kinds_of(function) for function in functions}
        self._reader = tool_calls.Reader() if tools else None

    def feed(self, piece: str) -> str:
        """Append a piece of text, and return the new content that later text cannot change."""
        return piece if self._reader is None else self._reader.feed(piece)

    def finish(self) -> str:
        """Return the rest of the content."""
        if self._reader is None:
            return ""
        self._reader.finish()
        functions = self._functions(self._reader.calls)
        for name, arguments in functions:
            text = arguments if isinstance(arguments, str) else _json(arguments)
            call = {
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": name, "arguments": text},
            }
            self.tool_calls.append(call)
        return self._reader.rest(is_called=bool(functions))

    def _functions(self, calls: Sequence[tool_calls.Call]) -> list[tool_calls.Function]:
        """Return the (name, arguments) of all calls; [] if any call cannot be parsed."""
        functions = []
        try:
            for call in calls:
                functions += tool_calls.read(call, self._kinds)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        return functions


def message_of(turn: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant message of a whole turn. If the request had tools, calls are in ``tool_calls``."""
    content, calls = calls_in(turn, tools)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    return message


def calls_in(turn: str, tools: Sequence[dict[str, Any]]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text outside the tool calls of a turn, and the calls. The text is None if it is only whitespace.

    If any call cannot be parsed, or ``tools`` is empty, the whole turn is text.
    """
    message = Message(tools)
    content = message.feed(turn)
    content += message.finish()
    is_empty = bool(message.tool_calls) and not content.strip()
    return None if is_empty else content, message.tool_calls
