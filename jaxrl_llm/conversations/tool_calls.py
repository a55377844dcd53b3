"""Parser of tool calls in the text of a model, for streamed and for whole texts.

    <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>   Hermes, Qwen, SmolLM2: one or a list
    <tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>   Qwen3-Coder, Qwen3.5
    {"name": "weather", "parameters": {"city": "Paris"}}   Llama 3: the whole text, one or a list
    [TOOL_CALLS][{"name": "weather", "arguments": {..}}]   Mistral, with or without its mark

A mark inside an argument is part of the argument. JSON is parsed to its end. ``</parameter>`` closes a value only if
the next element of the grammar follows. Calls before the last ``</think>`` outside a call belong to the model's
reasoning, and are not executed.

Owns: the grammar of calls, and where a call begins and ends. Does not know: the OpenAI API, tools, routes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Generator, Mapping
from typing import Any

from jaxrl_llm.runtime import json_lines

BEGIN = "<tool_call>"
END = "</tool_call>"
MISTRAL = "[TOOL_CALLS]"
THINK = "<think>"  # the chat template may put this mark in the prompt
THOUGHT = "</think>"
MARKS = (BEGIN, END, MISTRAL, THOUGHT)
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
MAX_NAME_CHARS = 256

_MARK = re.compile("|".join(map(re.escape, MARKS)))
_NAME = re.compile(rf"([^>\n]{{1,{MAX_NAME_CHARS}}})>")
_SPACE = re.compile(r"\s*")
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_NO_CALL = re.compile(r"\s*(?:[^\s<{\[]|<[^f])")  # if this pattern matches after a mark, the mark does not begin a call
_LATER_CALL = re.compile(rf"{BEGIN}\s*(?:{FUNCTION}|[\[{{])")

Kinds = Mapping[str, Collection[str]]  # JSON schema types that each parameter of a tool accepts
Function = tuple[str, dict[str, Any] | str]  # name and arguments of a call; a text if they are not JSON
Step = Generator[None, None, Any]  # a parser step, which yields when it needs more text


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call in a text, well-formed or broken.

    Attributes:
        body: the text between the marks.
        start, end: positions in the text where the call begins and ends, marks included.
        functions: name and parameters' texts of each function in Qwen3-Coder's form. None if the body is JSON.
        is_broken: the body does not match the grammar, so that ``read`` raises.
    """

    body: str
    start: int
    end: int
    functions: list[tuple[str, list[tuple[str, str]]]] | None = None
    is_broken: bool = False


class Reader:
    """Parser of one turn's text, which comes in pieces. Any split into pieces gives the same text and calls.

    Attributes:
        calls: the calls after the last thought, in order, after ``finish``.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._is_broken = False  # whether any of `calls` is broken
        self._text = ""
        self._is_whole = False
        self._settled = 0  # text before this position stays plain text, whatever follows
        self._solid = 0  # end of the last word before `_settled`
        self._shown = 0
        self._closes: dict[bool, tuple[int, float]] = {}  # cache of `_close`, by form of the value: (start, close)
        self._unclosed: set[int] = set()  # starts of values in calls that do not match the grammar
        self._thought_in_value: int | None = None
        self._parser = self._turn()

    def feed(self, piece: str) -> str:
        """Append a piece of text, and return the new text that can be shown, without whitespace at its end."""
        self._text += piece
        settled = self._settled
        next(self._parser, None)
        new = self._text[settled : self._settled].rstrip()
        if new:
            self._solid = settled + len(new)
        shown = self._shown
        self._shown = max(shown, self._solid)
        return self._text[shown : self._shown]

    def finish(self) -> None:
        """Parse the rest of the text, because the text has ended."""
        self._is_whole = True
        next(self._parser, None)

    def rest(self, *, is_called: bool) -> str:
        """Return the text that ``feed`` has not returned.

        Args:
            is_called: the calls are executed. The calls and the whitespace around the text are then removed.
        """
        if not is_called:
            return self._text[self._shown :]
        parts = []
        place = self._shown
        for call in self.calls:
            parts.append(self._text[place : call.start])
            place = call.end
        text = "".join([*parts, self._text[place:]]).rstrip()
        return text if self._shown else text.lstrip()

    # ---- the grammar ----

    def _turn(self) -> Step:
        place = 0
        while place is not None:
            place = yield from self._answer(place)

    def _answer(self, place: int) -> Step:
        """Parse the text after a thought. Return the position where the next thought ends, None at the end of the text.

        A thought is the model's reasoning before ``</think>``.
        """
        self.calls = []
        self._is_broken = False
        place = yield from self._call_without_mark(place)
        opened = mistral = None  # the last mark of each kind without a call after it
        while True:
            mark = yield from self._next_mark(place)
            if mark is None:
                break
            place = mark.end()
            if mark[0] == THOUGHT:
                return self._end_thought(place)
            if mark[0] == BEGIN:
                call = None if _NO_CALL.match(self._text, place) else (yield from self._marked_call(mark))
                if self._thought_in_value is not None:
                    return self._end_thought(self._thought_in_value)
                opened = mark if call is None else None
                if call is not None:
                    place = self._add(call)
            elif mark[0] == END and opened is not None:
                body = self._text[opened.end() : mark.start()]
                self._add(Call(body, opened.start(), place, is_broken=True))
                opened = None
            elif mark[0] == MISTRAL:
                mistral = mark
                end = yield from self._json_after(place)
                after = None if end is None else (yield from self._after_space(end))
                place = place if end is None else end
                if after is not None and after == len(self._text):
                    self._add(Call(self._text[mark.end() : end], mark.start(), after))
                    place = after
                    mistral = None
        if mistral is not None and not self.calls:
            self._add(
                Call(
                    self._text[mistral.end() :],
                    mistral.start(),
                    len(self._text),
                    is_broken=True,
                )
            )
        return None

    def _end_thought(self, place: int) -> int:
        self.calls = []
        self._is_broken = False
        self._thought_in_value = None
        self._settled = place
        return place

    def _add(self, call: Call) -> int:
        self._is_broken = self._is_broken or call.is_broken
        self.calls.append(call)
        return call.end

    def _settle(self, place: int) -> None:
        """Record that the text before ``place`` is plain text, unless it has calls that may be executed."""
        if not self.calls or self._is_broken:
            self._settled = max(self._settled, place)

    def _next_mark(self, place: int) -> Step:
        """Return the match of the next mark, None at the end of the text."""
        while True:
            mark = _MARK.search(self._text, place)
            if mark is not None:
                self._settle(mark.start())
                return mark
            place = max(place, len(self._text) - len(_begun_mark(self._text)))
            self._settle(place)
            if self._is_whole:
                return None
            yield

    def _call_without_mark(self, begin: int) -> Step:
        """Parse Llama's form of a call: JSON that is the whole answer. Return where the search for marks begins."""
        end = yield from self._json_after(begin)
        if end is None:
            return begin
        if not _is_call(self._text[begin:end]):
            return end
        after = yield from self._after_space(end)
        if after < len(self._text):
            return end
        return self._add(Call(self._text[begin:end], begin, after))

    def _marked_call(self, mark: re.Match) -> Step:
        """Return the call after a mark, None if no call follows."""
        place = yield from self._after_space(mark.end())
        if (yield from self._starts(place, FUNCTION)):
            return (yield from self._written_call(mark.start(), mark.end(), place))
        end = yield from self._json_after(place)
        if end is None:
            return None
        after = yield from self._after_space(end)
        if not (yield from self._starts(after, END)):
            return None
        return Call(self._text[mark.end() : after], mark.start(), after + len(END))

    # ---- Qwen3-Coder's form ----

    def _written_call(self, start: int, begin: int, place: int) -> Step:
        """Return the call whose first function stands at ``place``, None if the text does not match the grammar."""
        functions: list[tuple[str, list[tuple[str, str]]]] = []
        values: list[int] = []
        while not (yield from self._starts(place, END)):
            name, place = yield from self._named(place, FUNCTION)
            if name is None:
                break
            functions.append((name, []))
            place = yield from self._parameters(place, functions[-1][1], values)
            if place is None:
                break
        else:
            return Call(self._text[begin:place], start, place + len(END), functions)
        self._unclosed.update(values)
        return None

    def _parameters(self, place: int, found: list[tuple[str, str]], values: list[int]) -> Step:
        """Append a function's parameters to ``found``, and the positions where their values begin to ``values``.

        Return the position after the function, None if the text does not match the grammar.
        """
        while True:
            place = yield from self._after_space(place)
            if (yield from self._starts(place, FUNCTION_END)):
                return (yield from self._after_space(place + len(FUNCTION_END)))
            name, begin = yield from self._named(place, PARAMETER)
            if name is None or begin in self._unclosed:
                return None
            values.append(begin)
            close = yield from self._close(begin)
            if close is None or self._ends_thought(begin, close):
                return None
            value = self._text[begin:close].removeprefix("\n").removesuffix("\n")
            found.append((name, value))
            place = close + len(PARAMETER_END)

    def _close(self, begin: int) -> Step:
        """Return the position of the ``</parameter>`` that closes the value at ``begin``, None if no tag closes it."""
        on_lines = yield from self._starts(begin, "\n")
        start, close = self._closes.get(on_lines, (0, -1))
        if not start <= begin <= close:
            close = -1
            place = begin
            while close < 0:
                place = yield from self._find(PARAMETER_END, place)
                if place is None:
                    close = float("inf")
                elif (yield from self._is_closed(place + len(PARAMETER_END), on_lines)):
                    close = place
                else:
                    place += 1
            self._closes[on_lines] = begin, close
        return None if close == float("inf") else close

    def _is_closed(self, begin: int, on_lines: bool) -> Step:
        """Return whether the ``</parameter>`` that ends at ``begin`` closes its value.

        It closes the value if another parameter follows, or if the end of the function follows and then another
        function or the call's end.
        """
        place = yield from self._after_space(begin)
        if (yield from self._starts(place, FUNCTION_END)):
            place = yield from self._after_space(place + len(FUNCTION_END))
            if (yield from self._starts(place, END)):
                return True
            name, _ = yield from self._named(place, FUNCTION)
            return name is not None
        if on_lines and place > begin and "\n" not in self._text[begin:place]:
            return False  # chat templates write each parameter on separate lines
        name, _ = yield from self._named(place, PARAMETER)
        return name is not None

    def _ends_thought(self, begin: int, close: int) -> bool:
        """Return whether the value contains the end of a thought and then another call.

        The call of this value is then unfinished and only mentioned in the thought. The method then sets
        ``_thought_in_value`` to the end of the thought.
        """
        end = self._text.find(THOUGHT, begin, close)
        if end < 0 or self._text.find(THINK, begin, end) >= 0:
            return False
        if _LATER_CALL.search(self._text, end, close) is None:
            return False
        self._thought_in_value = end + len(THOUGHT)
        return True

    def _named(self, place: int, mark: str) -> Step:
        """Return (name, end of the tag) of ``<function=NAME>`` or ``<parameter=NAME>``. Without a tag, name is None."""
        if (yield from self._starts(place, mark)):
            place += len(mark)
            while True:
                name = _NAME.match(self._text, place)
                if name is not None:
                    return name[1], name.end()
                begun = self._text[place : place + MAX_NAME_CHARS + 1]
                if self._is_whole or len(begun) > MAX_NAME_CHARS or "\n" in begun or ">" in begun:
                    break
                yield
        return None, place

    # ---- JSON ----

    def _json_after(self, place: int) -> Step:
        """Return the end of the JSON object or list after ``place``, None if no JSON follows."""
        place = yield from self._after_space(place)
        if self._text[place : place + 1] not in ("{", "["):
            return None
        closers: list[str] = []
        expected = "value"
        while True:
            place = yield from self._after_space(place, _JSON_SPACE)
            sign = self._text[place : place + 1]
            if sign == "":
                return None
            if sign in "]}" and closers and sign == closers[-1] and expected in ("first value", "first key", "next"):
                closers.pop()
                place += 1
                expected = "next"
                if not closers:
                    return place
            elif expected == "next" and sign == ",":
                expected = "key" if closers[-1] == "}" else "value"
                place += 1
            elif expected == "colon" and sign == ":":
                expected = "value"
                place += 1
            elif expected.endswith("key") and sign == '"':
                expected = "colon"
                place = yield from self._string(place + 1)
            elif expected.endswith("value") and sign in "{[":
                closers.append("}" if sign == "{" else "]")
                expected = "first key" if sign == "{" else "first value"
                place += 1
            elif expected.endswith("value"):
                expected = "next"
                place = yield from (self._string(place + 1) if sign == '"' else self._scalar(place))
            else:
                return None
            if place is None:
                return None

    def _string(self, place: int) -> Step:
        """Return the end of the string whose characters begin at ``place``, None if it is not JSON."""
        while True:
            place = _end_of(_PLAIN, self._text, place)
            sign = self._text[place : place + 1]
            if sign == '"':
                return place + 1
            escape = _ESCAPE.match(self._text, place)
            if escape is not None:
                place = escape.end()
            elif self._is_whole or (sign and (sign != "\\" or len(self._text) - place >= len(r"\u0000"))):
                return None
            else:
                yield

    def _scalar(self, begin: int) -> Step:
        """Return the end of the number, true, false or null at ``begin``, None for other text."""
        place = begin
        while True:
            place = _end_of(_WORD, self._text, place)
            if place < len(self._text) or self._is_whole:
                return place if _SCALAR.fullmatch(self._text, begin, place) else None
            yield

    # ---- text that may go on ----

    def _after_space(self, place: int, space: re.Pattern = _SPACE) -> Step:
        """Return the position after the whitespace that begins at ``place``."""
        while True:
            place = _end_of(space, self._text, place)
            if place < len(self._text) or self._is_whole:
                return place
            yield

    def _starts(self, place: int, wanted: str) -> Step:
        """Return whether ``wanted`` stands at ``place``."""
        while True:
            there = self._text[place : place + len(wanted)]
            if there == wanted or self._is_whole or not wanted.startswith(there):
                return there == wanted
            yield

    def _find(self, wanted: str, place: int) -> Step:
        """Return the position of the next ``wanted`` from ``place`` on, None if the text has no more."""
        while True:
            found = self._text.find(wanted, place)
            if found >= 0:
                return found
            if self._is_whole:
                return None
            place = max(place, len(self._text) - len(wanted) + 1)
            yield


def _end_of(pattern: re.Pattern, text: str, place: int) -> int:
    """Return the end of the pattern's match at ``place``; ``place`` itself without a match."""
    match = pattern.match(text, place)
    return place if match is None else match.end()


def _begun_mark(text: str) -> str:
    """Return the part at the end of the text that may be the beginning of a mark, or ""."""
    tail = text[1 - max(map(len, MARKS)) :]
    begun = tail[max(tail.rfind("<"), tail.rfind("[")) :]
    return begun if begun and any(mark.startswith(begun) for mark in MARKS) else ""


def _is_call(text: str) -> bool:
    """Return whether JSON without marks is a tool call. JSON without a name and arguments is an ordinary answer."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json_lines.strict(text)
        calls = value if isinstance(value, list) else [value]
        return bool(calls) and all(map(_has_name_and_arguments, calls))
    return False


def _has_name_and_arguments(call: Any) -> bool:
    return isinstance(call, dict) and "name" in call and ("arguments" in call or "parameters" in call)


def calls_of(text: str) -> list[Call]:
    """Return the tool calls of a turn, including broken calls."""
    reader = Reader()
    reader.feed(text)
    reader.finish()
    return reader.calls


def read(call: Call, kinds: Mapping[str, Kinds]) -> list[Function]:
    """Return ``(name, arguments)`` of each function in a call. Arguments may be a string, which need not be JSON.

    Args:
        kinds: known types of the parameters of each tool.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: the call cannot be parsed.
    """
    functions: list[tuple[str, dict[str, Any] | str]] = []
    if call.functions is not None:
        for name, parameters in call.functions:
            kinds_of_tool = kinds.get(name, {})
            functions.append(
                (
                    name,
                    {key: _value(text, kinds_of_tool.get(key, ())) for key, text in parameters},
                )
            )
        return functions
    if call.body.lstrip().startswith(FUNCTION):
        form = f"{FUNCTION}NAME>{PARAMETER}KEY>VALUE{PARAMETER_END}{FUNCTION_END}"
        raise ValueError(f"the call {call.body!r:.100} must have the form {form}")
    value = json_lines.strict(call.body)
    if call.is_broken:
        raise ValueError(f"the call {call.body!r:.100} must be an object or a list of objects")
    for function in value if isinstance(value, list) else [value]:
        name = function["name"]
        arguments = function["arguments"] if "arguments" in function else function.get("parameters", {})
        if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
            raise TypeError(f"a call must have a name and arguments by name, and is {function!r:.100}")
        functions.append((name, arguments))
    return functions


def _value(text: str, kinds: Collection[str]) -> Any:
    """Return a parameter's value: the text if the parameter accepts strings, else the parsed JSON.

    Text that is not JSON stays text. For a parameter that accepts strings and null, "null" is None.
    """
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    with contextlib.suppress(ValueError, RecursionError):
        return json_lines.strict(text)
    return text
