"""Tool calls in the text of a model: text that quotes a mark, independence of how the text is split, linear cost."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.conversations import environment_worker, tool_calls, tools

TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}}}}
]
MARKS = [*tool_calls.MARKS, tool_calls.THINK, "<function=write>", "</function>", "<parameter=text>", "</parameter>"]


def hermes(text):
    return f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': {'text': text}})}\n</tool_call>"


def coder(text):
    return f"<tool_call>\n<function=write>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"


def llama(text):
    return json.dumps({"name": "write", "parameters": {"text": text}})


def mistral(text):
    return f"[TOOL_CALLS][{json.dumps({'name': 'write', 'arguments': {'text': text}})}]"


FORMS = (hermes, coder, llama, mistral)


def arguments(turn):
    _, calls = tools.calls_in(turn, TOOLS)
    return [json.loads(call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_inside_an_argument_is_the_argument_s(form, mark):
    """Once, the call was lost, or its argument was cut at the mark."""
    for text in (f"a {mark} b", mark, f"{mark} {mark}", f'"{mark}"', f"a\n{mark} b"):
        assert arguments(form(text)) == [{"text": text}], text
        assert arguments(f"I write.\n{form(text)}") == ([] if form is llama else [{"text": text}]), text
        assert arguments(f"I think {form('no')}</think>\n{form(text)}") == [{"text": text}], text


@pytest.mark.parametrize(
    "text",
    [
        coder("inner"),
        hermes("inner"),
        "x </parameter></function> y",
        "x </parameter> <parameter=b> y",
        "<think>I call</think>\n" + hermes("inner"),
        "</think>\n\n",
        '\\"</tool_call>\\',
        "\u2028\x85</tool_call>",
    ],
)
def test_a_whole_call_inside_an_argument_is_the_argument_s(text):
    for form in (hermes, llama, mistral):
        assert arguments(form(text)) == [{"text": text}]
    if text != coder("inner"):  # in this form nothing tells the inner end from the outer one
        assert arguments(coder(text)) == [{"text": text}]


def test_each_call_ends_where_its_own_grammar_ends():
    turn = f"{hermes('a </tool_call> b')}\nand {coder('c </function> d')} then {hermes('e')}"
    content, calls = tools.calls_in(turn, TOOLS)
    assert content == "and  then"
    assert arguments(turn) == [{"text": "a </tool_call> b"}, {"text": "c </function> d"}, {"text": "e"}]
    assert len(calls) == 3


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_a_thought_are_not_carried_out(form):
    for thought in (
        f"Perhaps {form('no')}?",
        "Perhaps <tool_call>",
        '<tool_call>{"name": "write", "arguments": {"text": "',
        "<tool_call>\n<function=write>\n<parameter=text>\n",
        "[TOOL_CALLS]",
        '{"name": "write", "parameters": {"text": "',
    ):
        content, calls = tools.calls_in(f"{thought}</think>\n{form('yes')}", TOOLS)
        assert (content, len(calls)) == (f"{thought}</think>", 1), thought
        assert arguments(f"{thought}</think>\n{form('yes')}") == [{"text": "yes"}]
        assert tools.calls_in(f"{thought}</think>\nDone.", TOOLS) == (f"{thought}</think>\nDone.", [])


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "01",
        "+1",
        ".5",
        "1.",
        "0x1",
        "'a'",
        "True",
        '"\\x"',
        '"a\tb"',
        "9" * 5000,
    ],
)
def test_arguments_that_are_not_json_are_no_call(value):
    """Once, `NaN` was accepted in a call whose arguments must be JSON."""
    for turn in (
        f'<tool_call>{{"name": "write", "arguments": {{"n": {value}}}}}</tool_call>',
        f'{{"name": "write", "parameters": {{"n": {value}}}}}',
        f'[TOOL_CALLS][{{"name": "write", "arguments": {{"n": {value}}}}}]',
    ):
        assert tools.calls_in(turn, TOOLS) == (turn, [])
    written = f"<tool_call><function=write><parameter=n>{value}</parameter></function></tool_call>"
    assert arguments(written) == [{"n": value}]  # in this form it is text


def test_a_key_that_stands_twice_is_no_call():
    """JSON readers differ: some take the first of two values, others the last."""
    turn = '<tool_call>{"name": "write", "arguments": {"text": "a", "text": "b"}}</tool_call>'
    assert tools.calls_in(turn, TOOLS) == (turn, [])


def test_a_call_that_cannot_be_parsed_is_told_to_the_policy_and_the_others_are_carried_out():
    class Writes:
        def reset(self):
            pass

        def write(self, text: str):
            """Returns the text."""
            return text

    broken = [
        '<tool_call>{"name": "write", "arguments": {"n": NaN}}</tool_call>',
        "<tool_call><function=a></tool_call>",
    ]
    turn = f"{hermes('a </tool_call>')}{broken[0]}{coder('b </think> c')}{broken[1]}"
    said = [message["content"] for message in environment_worker.Episode(Writes, {}).answer(turn)]
    assert said[0] == "a </tool_call>" and said[2] == "b </think> c"
    assert said[1].startswith("error: ") and said[3].startswith("error: ")


# ---- pieces ----------------------------------------------------------------------------------------------------------

PARTS = [*MARKS, "\n", " ", "a", '"', "{", "}", "[", "]", ",", ":", "\\", "1", "true", "NaN", "</", "<tool"]
PARTS += [form(text) for form in FORMS for text in ("x", "a </tool_call> b", "\n</think>\n")]


def read_in_pieces(turn, places):
    message = tools.Message(TOOLS)
    content = ""
    for begin, end in zip([0, *places], [*places, len(turn)], strict=True):
        content += message.feed(turn[begin:end])
        assert message.tool_calls == []
    content += message.finish()
    return content, [call["function"] for call in message.tool_calls]


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), data=st.data())
def test_any_split_into_pieces_gives_the_same_content_and_calls(parts, data):
    turn = "".join(parts)
    places = sorted(data.draw(st.lists(st.integers(0, len(turn)), max_size=8)))
    content, calls = read_in_pieces(turn, [])
    assert read_in_pieces(turn, places) == (content, calls)
    assert read_in_pieces(turn, [*range(len(turn))]) == (content, calls)
    if not calls:
        assert content == turn
    whole = tools.message_of(turn, TOOLS)
    assert (whole["content"] or "") == content
    assert [call["function"] for call in whole.get("tool_calls", [])] == calls
    for call in calls:
        json.loads(call["arguments"], parse_constant=pytest.fail)


def test_text_comes_as_soon_as_it_is_known_to_be_text():
    message = tools.Message(TOOLS)
    assert [message.feed(x) for x in ("I ", "look <", "b> <tool_c", "all> in vain", " {")] == [
        "I",
        " look",
        " <b>",
        " <tool_call> in vain",
        " {",
    ]
    assert message.finish() == "" and message.tool_calls == []


# ---- cost ------------------------------------------------------------------------------------------------------------

OPENED = "<tool_call><function=write><parameter=text>"
REPEATED = ["<tool_call>", "<tool_call>{", '<tool_call>["', '<tool_call>{"a":"', '<tool_call>{"a": 1}', "[TOOL_CALLS]["]
REPEATED += [
    OPENED,
    f"{OPENED}</parameter>",
    '</think>{"',
    "<tool_call>x</tool_call>",
    "</parameter>",
    "<",
    hermes("a"),
]


def seconds(turn):
    """Return the least processor time of three tries."""
    taken = []
    for _ in range(3):
        begun = time.process_time()
        tool_calls.calls_of(turn)
        taken.append(time.process_time() - begun)
    return min(taken)


@pytest.mark.parametrize("part", REPEATED)
def test_the_cost_is_linear_in_the_text(part):
    """Once, 4,096 marks without a call took 1.6 seconds."""
    assert seconds(part * 8192) < 3.5 * seconds(part * 4096) + 0.01
    assert part != "<tool_call>" or seconds(part * 4096) < 0.02


def test_the_cost_is_linear_where_calls_are_never_closed():
    for few in (500, 1000):
        opened, closed = OPENED, "<parameter=text></parameter>"
        assert seconds(opened * 2 * few + closed * 2 * few) < 3.5 * seconds(opened * few + closed * few) + 0.01


def test_the_cost_of_pieces_is_linear_in_the_text():
    def stream(size):
        turn = hermes("x" * size)
        reader, begun = tool_calls.Reader(), time.process_time()
        for begin in range(0, len(turn), 4):
            reader.feed(turn[begin : begin + 4])
        reader.finish()
        assert len(reader.calls) == 1
        return time.process_time() - begun

    assert min(stream(40_000) for _ in range(3)) < 6 * min(stream(10_000) for _ in range(3)) + 0.01
