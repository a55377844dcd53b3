"""The content of an answer's tokens: the same text and calls for any split into pieces."""

import pytest
from conversations.test_tool_calls import TOOLS, coder, hermes, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from models.test_decoding import KINDS, TOKENIZERS

from jaxrl_llm.conversations import tools
from jaxrl_llm.serving.content import Content, TextBefore

TEXTS = [
    hermes("a </tool_call> 😀"),
    coder("x </parameter> y"),
    llama("</think>"),
    "</think>\n\n",
    " a ",
    "\n",
    "é日本😀",
]
TEXTS += ["STO", "STOP", "<tool_call>", "{", "🙂" * 3]


def content_of(kind, pieces, stops):
    content = Content(TOKENIZERS[kind], stops, TOOLS)
    text = "".join([content.feed(piece) for piece in pieces])
    text += content.finish()
    return text, [call["function"] for call in content.tool_calls]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.sampled_from(TEXTS), max_size=6),
    stops=st.sampled_from([(), ("STOP",), ("\n\n", "P")]),
    data=st.data(),
)
def test_content_and_calls_do_not_depend_on_pieces(kind, texts, stops, data):
    ids = [i for text in texts for i in TOKENIZERS[kind].encode(text)]
    whole = content_of(kind, [ids], stops)
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=8))
    pieces, place = [], 0
    while place < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(ids[place : place + size])
        place += size
    assert content_of(kind, pieces, stops) == whole
    before = TextBefore(stops)
    text = before.feed(TOKENIZERS[kind].decode(ids)) + before.finish()
    message = tools.message_of(text, TOOLS)
    assert whole[0] == (message["content"] or "")
    assert whole[1] == [call["function"] for call in message.get("tool_calls", [])]


def test_text_before_stop_strings_ends_before_the_first_to_be_complete():
    for stops, text, expected in (
        (("abcd", "bc"), "xabcd", "xa"),
        (("b", "ab"), "xab", "x"),
        (("END",), "the EN", "the EN"),
        (("\n\n",), "a\n\nb", "a"),
        ((), "a", "a"),
    ):
        for size in range(1, len(text) + 1):
            before = TextBefore(stops)
            pieces = [before.feed(text[i : i + size]) for i in range(0, len(text), size)]
            assert "".join(pieces) + before.finish() == expected
