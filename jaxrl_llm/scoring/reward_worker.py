"""The call of a reward function or a hindsight function in a worker process (worker_program.py).

Owns: the arguments of a function, which values are scores, the columns in addition to a score. Does not know:
deadlines, weights, jax. (A worker must start fast and stay small, so this module imports only the standard library.)
"""

from __future__ import annotations

import builtins
import contextlib
import json
from collections.abc import Callable, Mapping, Set
from copy import deepcopy
from itertools import islice
from math import nan
from numbers import Complex, Integral, Real
from operator import length_hint
from types import SimpleNamespace
from typing import Any, TypeVar

from jaxrl_llm.scoring.worker_program import MAX_SCORE, message, one_line
from jaxrl_llm.settings.functions import awaited

# Keep a copy, because a user function that replaces `builtins.float` must not change scores.
__builtins__ = dict(vars(builtins))

RewardFunction = TypeVar("RewardFunction", bound=Callable)
TEXTS = (str, bytes, bytearray, memoryview)


def one_by_one(function: RewardFunction) -> RewardFunction:
    """Declare that a reward function scores each completion independently. (Decorator.)

    The pool then calls the function once per completion, so that a failure affects one completion only.
    """
    vars(function)["one_by_one"] = True
    return function


def call(
    function: Callable,
    prompt: Any,
    columns: dict[str, Any],
    completions: list[str],
    **by_completion: list[Any],
) -> tuple[list[float | list[float] | None], list[str], list[dict[str, Any]]]:
    """Call a reward function on the completions of one prompt, with the arguments that TRL and Tunix use.

    Args:
        by_completion: further arguments with one value per completion: ``messages`` and ``environments``.

    Returns:
        (scores, error messages, columns). A score is a number, or None if the function returned no valid score. With
        ``messages``, a score may be a list with a number for each turn of the policy. The columns of each completion
        are the further values that the function returned for this completion, by name.
    """
    num = len(completions)
    if "environments" in by_completion:
        by_completion["environments"] = [x and SimpleNamespace(**x) for x in by_completion["environments"]]
    try:
        values = _values(function, prompt, columns, completions, by_completion)
    except BaseException as error:  # also catch SystemExit, because a function must not end this process
        return [None] * num, [message(error)], [{}] * num
    scores = []
    reasons: list[str] = []
    columns_by_completion = []
    for value, messages in zip(values, by_completion.get("messages", [None] * num), strict=True):
        score, returned_columns = unpacked(value)
        scores.append(_score(score, messages, reasons))
        columns_by_completion.append(returned_columns)
    return scores, reasons, columns_by_completion


def call_hindsight(
    function: Callable, prompt: Any, columns: dict[str, Any], completions: list[str]
) -> tuple[list[str], str]:
    """Call a hindsight function on the completions of one prompt.

    Returns:
        The lines of external groups that the function returned, as JSON, and an error message or "".
    """
    try:
        repeated = {name: [deepcopy(value) for _ in completions] for name, value in columns.items()}
        lines = function([deepcopy(prompt) for _ in completions], completions, **repeated)
        return [json.dumps(line) for line in awaited(lines)], ""
    except BaseException as error:  # also catch SystemExit, because a user's function must not end this process
        return [], message(error)


def _values(
    function: Callable,
    prompt: Any,
    columns: dict[str, Any],
    completions: list[str],
    by_completion: dict[str, list[Any]],
) -> list[Any]:
    """Call the function and return its values, one per completion."""
    num = len(completions)
    prompts = [deepcopy(prompt) for _ in completions]  # copy the arguments, because a function may modify them
    repeated = {key: [deepcopy(value) for _ in completions] for key, value in columns.items()}
    returned = awaited(function(prompts=prompts, completions=completions, **repeated | by_completion))
    if isinstance(returned, (*TEXTS, Mapping, Set)):
        raise TypeError(f"returned {type(returned).__name__}, not a list of scores")
    values = list(islice(returned, num + 1))  # a generator may never end
    if len(values) != num:
        raise ValueError(f"returned {length_hint(returned, len(values))} scores for {num} completions")
    return values


def unpacked(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the score and the columns of one value that a reward function returned.

    A value with columns is ``{"reward": score, NAME: value, ...}``. Any other value is returned as the score, without
    columns. The caller must check whether the score is a number.
    """
    with contextlib.suppress(BaseException):  # a user's function can return any object
        if isinstance(value, Mapping) and "reward" in value and len(value) > 1:
            columns = {name: column for name, column in value.items() if name != "reward"}
            if all(isinstance(name, str) for name in columns):
                return value["reward"], {name: _plain(column) for name, column in columns.items()}
    return value, {}


def _plain(value: Any) -> Any:
    """Return a number, or a sequence of numbers or sequences, as plain JSON."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (*TEXTS, Mapping, Set)):
        raise TypeError("not a number")
    return [_plain(x) for x in value]


def _score(value: Any, messages: list[dict[str, str]] | None, reasons: list[str]) -> float | list[float] | None:
    """Return the score of one completion. If it is invalid, append a reason and return None.

    Args:
        messages: the messages of the completion if the function received them. The score may then be a list with a
            number for each turn of the policy.
    """
    if messages is None or not isinstance(value, (list, tuple)):
        return number(value, reasons)
    num_turns = sum(message["role"] == "assistant" for message in messages)
    if len(value) != num_turns:
        reasons.append(f"returned {len(value)} scores for {num_turns} turns")
        return None
    scores = []
    is_valid = True
    for turn_value in value:
        score = number(turn_value, reasons)
        if score is None:
            is_valid = False
        else:
            scores.append(score)
    if not scores or not is_valid:
        return None
    return scores if len(scores) > 1 else scores[0]


def number(value: Any, reasons: list[str]) -> float | None:
    """Convert a value that a user's function returned to a score. If it is invalid, append a reason and return None."""
    score = nan
    returned: Any = type(value).__name__
    with contextlib.suppress(BaseException):
        # float() also accepts values that are not numbers: "1", an array of one element, numpy's complex.
        if isinstance(value, Real) or not (isinstance(value, (*TEXTS, Complex)) or getattr(value, "ndim", 0)):
            score = float(value)
            returned = score
    if abs(score) <= MAX_SCORE:  # this comparison is false for NaN
        return score
    reasons.append(one_line(f"returned {returned} for a score"))
    return None
