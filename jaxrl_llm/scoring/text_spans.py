"""Spans of a completion's text that a reward function masks.

Owns: the format in which a reward function returns spans, and the tokens that lie in the spans. Does not know: the
effect of a mask (algorithms.shaping), jax.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxrl_llm.models.files import decoding


def unpacked(value: Any) -> tuple[Any, list[list[int]]]:
    """Return the score and the spans of one value that a reward function returned.

    A value with spans is ``{"reward": score, "masked": [[start, stop], ...]}``, in characters, without ``stop``. Any
    other value is returned as the score, without spans. The caller must check whether the score is a number.
    """
    with contextlib.suppress(BaseException):  # a user's function can return any object
        if isinstance(value, Mapping) and set(value) == {"reward", "masked"}:
            return value["reward"], [[int(start), int(stop)] for start, stop in value["masked"]]
    return value, []


def tokens_in(
    decode: decoding.Decode, ids: list[int], spans: Sequence[Sequence[int]], byte_ids: Collection[int] = ()
) -> list[int]:
    """Return the positions, from 0, of the tokens whose characters all lie within spans of the decoded text.

    A token is left out if one of its characters lies outside the spans. A token without a character of its own is also
    left out. Examples are the end token and the first bytes of a character.

    Args:
        decode, byte_ids: see ``decoding``.
    """
    ends = decoding.prefix_lengths(decode, ids, byte_ids)
    # Some decoders show each byte of an incomplete character as one character. The text shrinks when the last byte
    # comes.
    ends = [*itertools.accumulate(reversed(ends), min)][::-1]
    covered = _covered(spans, ends[-1])
    return [
        i
        for i in range(len(ids))
        if ends[i] < ends[i + 1] and covered[ends[i + 1]] - covered[ends[i]] == ends[i + 1] - ends[i]
    ]


def _covered(spans: Sequence[Sequence[int]], length: int) -> list[int]:
    """Return, for each n from 0 to ``length``, how many of the first n characters lie within spans."""
    changes = [0] * (length + 1)
    for start, stop in spans:
        start, stop = max(start, 0), min(stop, length)
        if start < stop:
            changes[start] += 1
            changes[stop] -= 1
    depths = itertools.accumulate(changes[:-1])
    return [0, *itertools.accumulate(int(depth > 0) for depth in depths)]
