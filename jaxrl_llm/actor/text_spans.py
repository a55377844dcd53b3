"""Spans of a completion's text that reward functions mask: how one says so, and which tokens they have.

Owns: these two. Does not know: what masking does (algorithms.shaping), jax.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def unpacked(value: Any) -> tuple[Any, list[list[int]]]:
    """A score, and the spans [start, stop) that come with it, in characters: ``{"reward": score, "masked": spans}``.

    What has another form is taken for a score, and is none.
    """
    with contextlib.suppress(BaseException):  # it may be anything
        if isinstance(value, Mapping) and set(value) == {"reward", "masked"}:
            return value["reward"], [[int(start), int(stop)] for start, stop in value["masked"]]
    return value, []


def tokens_in(decode: Callable[[list[int]], str], ids: list[int], spans: Sequence[Sequence[int]]) -> list[int]:
    """Places, from 0, of the tokens whose characters all lie within spans of the decoded text.

    A token that has a character beside them is not in, nor one without a character of its own, such as that of the end,
    or the first bytes of a character.
    """
    ends = [len(decode(ids[:i])) for i in range(len(ids) + 1)]
    # Bytes apart are one character each to some decoders, until the last of them makes one character of all.
    ends = [*itertools.accumulate(reversed(ends), min)][::-1]
    inside = {i for start, stop in spans for i in range(max(start, 0), min(stop, ends[-1]))}
    return [i for i in range(len(ids)) if ends[i] < ends[i + 1] and inside.issuperset(range(ends[i], ends[i + 1]))]
