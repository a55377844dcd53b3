"""Readers that check the rows of a run's files: metrics.jsonl, samples.jsonl and eval_*.json.

A disk can damage a file, and a person can edit it. This module checks the rows once, when a file is read. Later code
can rely on the types of the fields.

Owns: the fields of a row and their types. Does not know: who reads the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.runtime.json_lines import read_json, read_log
from jaxrl_llm.settings.schema import ConfigError

LARGEST_NUMBER = 1e300  # a chart computes with sums and differences of its values
LARGEST_COUNT = 10**12


class Kind(NamedTuple):
    """Type of a field: a test of its value, and its description in an error message."""

    accepts: Callable[[Any], bool]
    words: str


def _is_number(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and abs(value) <= LARGEST_NUMBER and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def _is_size(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("role")) and "content" in value


def _is_prompt(value: Any) -> bool:
    if _is_list(value):
        return len(value) > 0 and all(_is_message(message) for message in value)
    return _is_text(value)


def _is_parts(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(number) for number in value.values())


NUMBER = Kind(_is_number, f"a number of at most {LARGEST_NUMBER:g}, or null")
COUNT = Kind(_is_count, f"a whole number from 0 to {LARGEST_COUNT:,}")
SIZE = Kind(_is_size, f"a whole number from 1 to {LARGEST_COUNT:,}")
TEXT = Kind(_is_text, "text")
PROMPT = Kind(_is_prompt, "text, or a list of messages with role and content")
PARTS = Kind(_is_parts, "an object of numbers")
LIST = Kind(_is_list, "a list")

SAMPLE_FIELDS = {
    "iteration": COUNT,
    "prompt": PROMPT,
    "completion": TEXT,
    "reward": NUMBER,
    "parts": PARTS,
    "stop_reason": TEXT,
    "policy_version": NUMBER,
    "age": NUMBER,
}
ANSWER_FIELDS = {"prompt": PROMPT, "completion": TEXT, "reward": NUMBER}
EVALUATION_FIELDS = {"pass_rate": NUMBER, "num_samples": SIZE, "samples": LIST}


def read_metric_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, one per iteration: ``iteration`` and a number or None for each metric.

    Raises:
        ConfigError: a line is not a JSON object, or a value has another type. The error names file, line, field and
            value.
    """
    rows = read_log(path)
    for number, row in enumerate(rows, start=1):
        fields = dict.fromkeys(row, NUMBER)
        fields["iteration"] = COUNT
        _check_row(row, fields, f"{path}:{number}")
    return rows


def read_samples(path: Path, fields: Mapping[str, Kind] = SAMPLE_FIELDS) -> list[dict[str, Any]]:
    """Return the rows of a samples.jsonl, or an empty list if the file does not exist.

    Args:
        fields: the fields that the caller reads. Only these fields are checked.

    Raises:
        ConfigError: a line is not a JSON object, or one of the fields is missing or has another type.
    """
    if not path.is_file():
        return []
    rows = read_log(path)
    for number, row in enumerate(rows, start=1):
        _check_row(row, fields, f"{path}:{number}")
    return rows


def read_evaluation(path: Path) -> dict[str, Any] | None:
    """Return the content of an eval_*.json, or None if the file does not exist.

    The keys are ``pass_rate``, ``num_samples`` (per question) and ``samples``.

    Raises:
        ConfigError: the file is not a JSON object, or a value has another type.
    """
    if not path.is_file():
        return None
    evaluation = read_json(path)
    _check_row(evaluation, EVALUATION_FIELDS, str(path))
    for number, sample in enumerate(evaluation["samples"], start=1):
        where = f"{path}: samples[{number - 1}]"
        if not isinstance(sample, dict):
            raise ConfigError(f"{where}={sample!r:.60} must be an object")
        _check_row(sample, ANSWER_FIELDS, where)
    return evaluation


def _check_row(row: Mapping[str, Any], fields: Mapping[str, Kind], where: str) -> None:
    for name, kind in fields.items():
        if name not in row:
            raise ConfigError(f"{where}: `{name}` is missing, which must be {kind.words}; the file is damaged")
        if not kind.accepts(row[name]):
            value = _shortened(row[name])
            raise ConfigError(f"{where}: {name}={value} must be {kind.words}; the file is damaged")


def _shortened(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python refuses to print a whole number of this many digits
        return f"a {type(value).__name__} that is too large to print"
