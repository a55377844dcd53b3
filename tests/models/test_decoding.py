"""The text of growing rows equals the text of the whole row for any tokens, at a linear cost."""

import pathlib

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.actor import stop_strings
from jaxrl_llm.models.files import decoding
from jaxrl_llm.models.files.decoding import tokens_in
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.files.tokenizer import Tokenizer, fast_tokenizer_class

FILES = pathlib.Path(__file__).parents[1] / "fixtures" / "tokenizers"
KINDS = ("qwen2", "llama-bpe", "llama", "bytes")
EMOJI = "😀🙂é日本語"


def tokenizer_of(kind):
    if kind == "bytes":
        return make_byte_tokenizer()
    core = tokenizers.Tokenizer.from_file(str(FILES / f"{kind}.json"))
    return Tokenizer(fast_tokenizer_class()(tokenizer_object=core))


TOKENIZERS = {kind: tokenizer_of(kind) for kind in KINDS}


def rows(kind):
    """Return rows of tokens: of texts, of single bytes, arbitrary, and special ones."""
    tokenizer = TOKENIZERS[kind]
    texts = [EMOJI, " two  spaces ", "\n\n", "ab\u2028c.", "stop", "END", "\ufffd"]
    parts = [tokenizer.encode(text) for text in texts]
    byte_ids = sorted(tokenizer.byte_ids) or [tokenizer.encode(EMOJI)[0], *tokenizer.encode("é")]
    one = st.sampled_from(
        [[i] for i in byte_ids] + [[i] for i in tokenizer._special] + parts + [part[:1] for part in parts]
    )
    some = st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i])
    parts = st.one_of(one, one, some)
    rows = st.one_of(st.lists(parts, max_size=20), st.lists(parts, min_size=90, max_size=200))
    return rows.map(lambda parts: [i for part in parts for i in part])


def pieces(ids, sizes):
    begin = 0
    for size in sizes:
        yield ids[begin : begin + size]
        begin += size
    yield ids[begin:]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_text_of_tokens_in_pieces_is_the_text_of_the_row(kind, data):
    tokenizer, ids = TOKENIZERS[kind], data.draw(rows(kind))
    text = decoding.GrowingText(tokenizer.decode, tokenizer.byte_ids)
    whole, said = tokenizer.decode(ids), ""
    for piece in pieces(ids, data.draw(st.lists(st.integers(0, 9), max_size=60))):
        said += text.feed(piece)
        assert whole.startswith(said)
    assert said + text.finish() == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_lengths_of_prefixes_are_those_of_their_texts(kind, data):
    tokenizer, ids = TOKENIZERS[kind], data.draw(rows(kind))
    lengths = decoding.prefix_lengths(tokenizer.decode, ids, tokenizer.byte_ids)
    assert lengths == [len(tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_stop_string_ends_a_row_where_its_text_first_has_it(kind, data):
    tokenizer, ids = TOKENIZERS[kind], data.draw(rows(kind))
    stops = data.draw(st.lists(st.sampled_from(["op", " two", "😀", "D", "\n\n", "本語", " "]), max_size=3))
    first = next((n for n in range(1, len(ids) + 1) if any(x in tokenizer.decode(ids[:n]) for x in stops)), None)
    looked_at = found = 0
    for piece in pieces(ids, data.draw(st.lists(st.integers(1, 9), max_size=60))):
        size = looked_at + len(piece)
        found = stop_strings.completed_at(stops, tokenizer.decode, ids[:size], looked_at)
        if found:
            break
        looked_at = size
    assert found == first


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_is_linear_in_the_tokens(kind):
    """Once, the whole row was decoded for each chunk, and for each token of a row with a masked span."""
    tokenizer = TOKENIZERS[kind]
    line = tokenizer.encode("The 17th answer, x² = 4: naïve? 日本語\n")
    decoded = 0

    def decode(ids):
        nonlocal decoded
        decoded += len(ids)
        return tokenizer.decode(ids)

    def cost(size, work):
        nonlocal decoded
        decoded = 0
        work((line * (1 + size // len(line)))[:size])
        return decoded

    def stream(ids):
        text = decoding.GrowingText(decode, tokenizer.byte_ids)
        for begin in range(0, len(ids), 8):
            text.feed(ids[begin : begin + 8])
        text.finish()

    def stop(ids):
        for end in range(8, len(ids) + 1, 8):
            assert stop_strings.completed_at(["never"], decode, ids[:end], end - 8) is None

    spans = lambda ids: decoding.tokens_in(decode, ids, [[0, 50]], tokenizer.byte_ids)
    for work, most in ((stream, 20), (stop, 20), (spans, 100)):
        few, many = cost(1024, work), cost(4096, work)
        assert many < 4.5 * few and many < most * 4096, work.__name__


def test_spans_are_those_of_the_whole_rows_text():
    rng, tokenizer = np.random.default_rng(0), TOKENIZERS["llama"]
    ids = rng.integers(0, tokenizer.vocab_size, 300).tolist()
    text = tokenizer.decode(ids)
    ends = [len(tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
    ends = [min(ends[i:]) for i in range(len(ends))]
    spans = [[-5, 3], [40, 90], [80, 200], [150, 150], [len(text) - 2, len(text) + 9]]
    inside = {i for start, stop in spans for i in range(max(start, 0), min(stop, len(text)))}
    expected = [i for i in range(300) if ends[i] < ends[i + 1] and inside >= {*range(ends[i], ends[i + 1])}]
    assert decoding.tokens_in(tokenizer.decode, ids, spans, tokenizer.byte_ids) == expected and expected


PIECES = ["def", " f", "(x", "):\n", "    ", "return", " 1\n", "</s>", "\n", "é", ""]
TEXT = {i: piece for i, piece in enumerate(PIECES)} | {PIECES.index("</s>"): ""}


def decode_pieces(ids):
    return "".join(TEXT[i] for i in ids)


def test_tokens_whose_characters_all_lie_within_are_in():
    ids = [0, 1, 2, 3, 4, 5, 6, 7]  # "def f(x):\n    return 1\n", end
    text = decode_pieces(ids)
    line = text.index("    return")
    assert tokens_in(decode_pieces, ids, [[line, len(text)]]) == [4, 5, 6]
    assert tokens_in(decode_pieces, ids, [[line - 1, len(text)]]) == [4, 5, 6]  # "):\n" has characters beside it
    assert tokens_in(decode_pieces, ids, [[0, 3], [3, 5]]) == [0, 1]
    assert tokens_in(decode_pieces, ids, [[0, 2], [2, 4]]) == [0]  # together they hold "def"
    assert tokens_in(decode_pieces, ids, [[-5, 10**9]]) == [0, 1, 2, 3, 4, 5, 6]
    assert tokens_in(decode_pieces, ids, [[5, 5], [8, 2]]) == tokens_in(decode_pieces, [], [[0, 9]]) == []


def test_the_bytes_of_one_character_are_in_with_the_last_of_them():
    """Each byte shows a replacement character until the character is complete.

    So the last byte does not lengthen the text.
    """
    decode = lambda ids: bytes(ids).decode(errors="replace")
    ids = list("aé1".encode())
    assert tokens_in(decode, ids, [[0, 3]]) == [0, 1, 3]
    assert tokens_in(decode, ids, [[1, 2]]) == [1]


def test_bytes_that_a_decoder_shows_one_by_one_are_in_with_the_first_of_them():
    """SentencePiece's byte fallback shows four replacement characters, and then the complete character."""
    shown = {i: "a" + "�" * (i - 1) for i in range(1, 5)} | {0: "", 5: "a😀", 6: "a😀b", 7: "a😀bc"}
    decode = lambda ids: shown[len(ids)]
    ids = list(range(7))
    assert tokens_in(decode, ids, [[2, 4]]) == [5, 6]  # "bc"
    assert tokens_in(decode, ids, [[1, 2]]) == [1]
