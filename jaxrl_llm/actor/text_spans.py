"""Spans of a completion's text that a reward function masks.

Owns: the form in which a reward function returns spans, and which tokens lie in them. Does not know: what masking does
(algorithms.shaping), jax.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxrl_llm.actor import decoding


def unpacked(value: Any) -> tuple[Any, list[list[int]]]:
    """A score, and the spans [start, stop) that come with it, in characters: ``{"reward": score, "masked": spans}``.

    What has another form is taken for a score, and is none.
    """
    with contextlib.suppress(BaseException):  # it may be anything
        if isinstance(value, Mapping) and set(value) == {"reward", "masked"}:
            return value["reward"], [[int(start), int(stop)] for start, stop in value["masked"]]
    return value, []


def tokens_in(
    decode: decoding.Decode, ids: list[int], spans: Sequence[Sequence[int]], byte_ids: Collection[int] = ()
) -> list[int]:
    """Return places, from 0, of the tokens whose characters all lie within spans of the decoded text.

    A token with a character outside the spans is left out. So is a token without a character of its own: the end token,
    or the first bytes of a character.

    Args:
        decode, byte_ids: as in ``decoding``.
    """
    ends = decoding.prefix_lengths(decode, ids, byte_ids)
    # Bytes apart are one character each to some decoders, until the last of them makes one character of all.
    ends = [*itertools.accumulate(reversed(ends), min)][::-1]
    covered = _covered(spans, ends[-1])
    return [
        i
        for i in range(len(ids))
        if ends[i] < ends[i + 1] and covered[ends[i + 1]] - covered[ends[i]] == ends[i + 1] - ends[i]
    ]


def _covered(spans: Sequence[Sequence[int]], length: int) -> list[int]:
    """Return how many of the first n characters lie within spans, of each n from 0 to ``length``."""
    changes = [0] * (length + 1)
    for start, stop in spans:
        start, stop = max(start, 0), min(stop, length)
        if start < stop:
            changes[start] += 1
            changes[stop] -= 1
    depths = itertools.accumulate(changes[:-1])
    return [0, *itertools.accumulate(int(depth > 0) for depth in depths)]
