"""Columns that reward functions return in addition to a score, as arrays by completion.

A function returns ``{"reward": score, NAME: value, ...}`` for a completion. NAME is a column that
``algorithms.inputs.COLUMNS`` declares with ``from_rewards``, or "masked" for "reward_mask". The declaration decides the
form of the value:

    ROW    a number
    TURN   a list of numbers, the first for the policy's first turn
    TOKEN  a list of spans ``[start, stop]`` or ``[start, stop, number]``, in characters of the completion, without
           ``stop``. Tokens within the spans have the number, or 1.0.

Owns: the form of a value, the join over functions. Does not know: scores, which columns the method reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.algorithms.inputs import COLUMNS, ROW, TURN
from jaxrl_llm.scoring.worker_processes import is_number
from jaxrl_llm.scoring.worker_program import MAX_SCORE

ALIASES = {"masked": "reward_mask"}  # other names of columns in the values that reward functions return

Columns = dict[str, np.ndarray]  # name -> [completions, ...] f32, NaN = no value


class ColumnRequest(NamedTuple):
    """Columns that the method reads of the completions of one prompt.

    Attributes:
        shapes: shapes per completion by name (``Config.reward_columns``).
        positions: (index of a completion, spans of its text) -> positions of the tokens within the spans.
    """

    shapes: Mapping[str, tuple[int, ...]]
    positions: Callable[[int, list[list[int]]], list[int]]

    def empty(self, num: int) -> Columns:
        """Return the columns of ``num`` completions without values."""
        columns = {}
        for name, shape in self.shapes.items():
            columns[name] = np.full((num, *shape), np.nan, np.float32)
        return columns


def _no_positions(i: int, spans: list[list[int]]) -> list[int]:
    return []


NO_COLUMNS = ColumnRequest({}, _no_positions)


def write_values(columns: Columns, returned: Mapping[str, Any], i: int, request: ColumnRequest) -> list[str]:
    """Write the values that a function returned for completion ``i`` into ``columns``.

    Returns:
        Error messages, one for each invalid value.
    """
    reasons = []
    for key, value in returned.items():
        name = ALIASES.get(key, key)
        try:
            if name not in COLUMNS or not COLUMNS[name].from_rewards:
                raise ValueError("no column of rewards has this name")
            if name in columns:
                column = columns[name]
                column[i] = np.fmax(column[i], _value(name, value, i, request))
        except (TypeError, ValueError, IndexError) as error:
            reasons.append(f"returned a wrong {key!r:.100}: {error!s:.200}")
    return reasons


def _value(name: str, value: Any, i: int, request: ColumnRequest) -> np.ndarray:
    """Return the values of a column for completion ``i``, NaN = no value.

    Args:
        value: the value that the function returned, as plain JSON.

    Raises:
        TypeError, ValueError, IndexError: the value does not have the form that the column's declaration asks for.
    """
    kind = COLUMNS[name].from_rewards
    row = np.full(request.shapes[name], np.nan, np.float32)
    if kind == ROW:
        row[...] = _number(value)
    elif kind == TURN:
        numbers = [_number(number) for number in value]
        if len(numbers) > len(row):
            raise ValueError(f"the list has {len(numbers)} turns, but a completion has at most {len(row)}")
        row[: len(numbers)] = numbers
    else:
        for number, spans in _spans_by_number(value).items():
            positions = request.positions(i, spans)
            row[positions] = number
    return row


def _spans_by_number(value: Any) -> dict[float, list[list[int]]]:
    """Return the spans ``[start, stop]`` of a value, by the number that tokens within the spans have."""
    spans_by_number: dict[float, list[list[int]]] = {}
    for start, stop, *rest in value:
        number = _number(*rest) if rest else 1.0
        span = [operator.index(start), operator.index(stop)]
        spans_by_number.setdefault(number, []).append(span)
    return spans_by_number


def _number(value: Any) -> float:
    """Return a number within the limits of a score.

    Raises:
        ValueError: the value is not such a number.
    """
    if not is_number(value):
        raise ValueError(f"{value!r:.100} must be a number of magnitude at most {MAX_SCORE:g}")
    return float(value)


def joined_columns(prompts: Sequence[Sequence[Mapping[str, np.ndarray]]]) -> Columns:
    """Return the columns of all completions, [B, ...] f32 each: the largest value over the functions, 0.0 without any.

    Args:
        prompts: for each prompt, the columns of each function.
    """
    joined = {}
    for name in prompts[0][0]:
        largest = []
        for functions in prompts:
            values = [columns[name] for columns in functions]
            largest.append(np.fmax.reduce(values))
        joined[name] = np.nan_to_num(np.concatenate(largest), nan=0.0)
    return joined
