"""Incremental decoding: the text of a growing row of tokens, at a cost that is linear in the number of tokens.

The text of a row is not the concatenation of its tokens' texts. A token may be a part of a character, and a tokenizer
may drop the space at the beginning of a text. The text is the concatenation only if the row is split at a *cut*: a
position between two tokens that is not inside a character. The functions decode from a cut a few tokens back, and not
the whole row.

    decode      token ids -> text, ``Tokenizer.decode``
    byte_ids    tokens of one byte, <0x00> to <0xFF>, of SentencePiece's byte fallback. A run of byte tokens is decoded
                as a whole. If one byte makes the run invalid, each byte becomes a replacement character.

Owns: the positions of cuts, which part of a row's text is final, which tokens lie in a span of the text. Does not know:
tokenizers, stop strings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"  # replaces bytes that are not a character, or not yet a complete character
CHARACTER_TOKENS = 4  # a UTF-8 character has at most 4 bytes, and so at most 4 tokens
WINDOW = 32  # earlier tokens that are decoded again together with new tokens

Decode = Callable[[list[int]], str]


class GrowingText:
    """Decoder of tokens that come in pieces. The returned pieces of text concatenate to the text of all tokens."""

    def __init__(self, decode: Decode, byte_ids: Collection[int] = ()):
        self._decode = decode
        self._byte_ids = byte_ids
        self._ids: list[int] = []  # tokens since a cut
        self._returned = 0  # characters of the text of `_ids` that were returned
        self._open_run = 0  # tokens at the end that may belong to an unfinished run of byte tokens

    def feed(self, ids: Sequence[int]) -> str:
        """Append tokens, and return the new text that later tokens cannot change."""
        self._ids += ids
        self._open_run = self._run_at_end(ids)
        if self._open_run > len(ids):
            return ""
        text = self._decode(self._ids[: len(self._ids) - self._open_run])
        certain = len(text) - text.endswith(REPLACEMENT)
        new = text[self._returned : certain]
        self._returned = max(self._returned, certain)
        if len(self._ids) - self._open_run > 2 * WINDOW:
            self._move()
        return new

    def _run_at_end(self, ids: Sequence[int]) -> int:
        """Return how many tokens at the end may belong to an unfinished run of byte tokens, once ``ids`` are added."""
        if not self._byte_ids:
            return 0
        for size, i in enumerate(reversed(ids)):
            if i not in self._byte_ids and self._decode([i]):
                return size
        return self._open_run + len(ids)

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._decode(self._ids)[self._returned :]

    def _move(self) -> None:
        """Drop the tokens that are not needed to decode later tokens."""
        closed = len(self._ids) - self._open_run
        cut = last_cut(self._decode, self._ids, closed - WINDOW, self._byte_ids)
        waiting = len(self._decode(self._ids[:closed])) - self._returned
        kept = len(self._decode(self._ids[cut:closed])) - waiting
        if kept > 0:
            self._ids = self._ids[cut:]
            self._returned = kept


def prefix_lengths(decode: Decode, ids: list[int], byte_ids: Collection[int] = ()) -> list[int]:
    """Return ``len(decode(ids[:i]))`` for each i from 0 to ``len(ids)``."""
    lengths = [0]
    begin = 0  # first token of the window
    before = 0  # characters before the window
    for i in range(1, len(ids) + 1):
        lengths.append(before + len(decode(ids[begin:i])))
        if i - begin >= 2 * WINDOW and (i - begin) % WINDOW == 0:
            cut = last_cut(decode, ids[begin:i], i - begin - WINDOW, byte_ids)
            kept = len(decode(ids[begin + cut : i]))
            if cut and kept:
                begin += cut
                before = lengths[i] - kept
    return lengths


def tokens_in(
    decode: Decode,
    ids: list[int],
    spans: Sequence[Sequence[int]],
    byte_ids: Collection[int] = (),
) -> list[int]:
    """Return the positions, from 0, of the tokens whose characters all lie within spans of the decoded text.

    A token is left out if one of its characters lies outside the spans. A token without a character of its own is also
    left out. Examples are the end token and the first bytes of a character.

    Args:
        decode, byte_ids: see the module.
    """
    ends = prefix_lengths(decode, ids, byte_ids)
    # Some decoders show each byte of an incomplete character as one character. The text shrinks when the last byte
    # comes.
    reversed_ends = itertools.accumulate(reversed(ends), min)
    ends = list(reversed_ends)[::-1]
    covered = _covered(spans, ends[-1])
    tokens = []
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        num_chars = stop - start
        num_covered = covered[stop] - covered[start]
        if num_chars > 0 and num_covered == num_chars:
            tokens.append(i)
    return tokens


def _covered(spans: Sequence[Sequence[int]], length: int) -> list[int]:
    """Return, for each n from 0 to ``length``, how many of the first n characters lie within spans."""
    changes = [0] * (length + 1)
    for start, stop in spans:
        first = max(start, 0)
        end = min(stop, length)
        if first < end:
            changes[first] += 1
            changes[end] -= 1
    depths = itertools.accumulate(changes[:-1])
    return [0, *itertools.accumulate(int(depth > 0) for depth in depths)]


def window_before(decode: Decode, ids: list[int], place: int, chars: int) -> int:
    """Return a cut at least ``chars`` characters before ``place``, or 0. The first token's characters do not count."""
    size = max(chars, CHARACTER_TOKENS)
    while True:
        begin = last_cut(decode, ids, max(0, place - size))
        if begin == 0:
            return 0
        text = decode(ids[begin:place])
        # Four replacement characters may stand for the four bytes of one character.
        unclear = text.count(REPLACEMENT)
        at_least = len(text) - unclear + unclear // 4
        first_token = decode(ids[begin : begin + 1])
        if at_least - len(first_token) >= chars:
            return begin
        size *= 2


def last_cut(decode: Decode, ids: list[int], place: int, byte_ids: Collection[int] = ()) -> int:
    """Return the last cut at or before ``place``."""
    while place > 0 and not _is_cut(decode, ids, place, byte_ids):
        place -= 1
    return max(place, 0)


def _is_cut(decode: Decode, ids: list[int], place: int, byte_ids: Collection[int]) -> bool:
    """Return whether the text before ``place`` and the text after it concatenate to the whole text."""
    if byte_ids:
        may_continue_run = ids[place] in byte_ids or not decode(ids[place : place + 1])
        if may_continue_run:
            return False
    right = decode(ids[place : place + CHARACTER_TOKENS])
    if not right:
        return False
    if right[0] != REPLACEMENT:
        return True
    size = CHARACTER_TOKENS
    while True:
        begin = max(0, place - size)
        left = decode(ids[begin:place])
        if begin == 0 or len(left) >= CHARACTER_TOKENS:
            return decode(ids[begin : place + CHARACTER_TOKENS]) == left + right
        size *= 2
