"""Figures of a benchmark: a JSON file with the machine and the commit, and command-line errors.

    {"benchmark": "run", "date": .., "commit": .., "hardware": {..}, "versions": {..}, "settings": {..},
     "figures": [{"name": "ours/step_s", "value": 41.2, "unit": "s", "better": "less"}, ..]}

Owns: the form of the file. Does not know: the meaning of a figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import machine


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        better: "less" or "more"; "" for a figure without a direction, such as a ceiling of the machine or a count.
    """

    name: str
    value: float
    unit: str
    better: str = ""


class Arguments(argparse.ArgumentParser):
    """argparse whose errors are one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        print("error: " + " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


def at_least(lowest: int) -> Any:
    """Return an argument type that accepts whole numbers of at least ``lowest``."""

    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {lowest}")
        return int(text)

    return parse


def share(text: str) -> float:
    """Parse a number of at least 0 (an argument type)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0, such as 0.1")
    return value


def write(
    path: Path,
    benchmark: str,
    figures: Iterable[Figure],
    *,
    versions: dict[str, str],
    settings: dict[str, Any],
) -> None:
    """Write the figures with machine, commit and versions to ``path``, and make its folders."""
    record = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "hardware": machine.hardware(),
        "versions": versions,
        "settings": settings,
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Figure]]:
    """Return the record of a file that ``write`` made, and its figures by name.

    Raises:
        ValueError: the file does not exist or has another form.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record, {figure["name"]: Figure(**figure) for figure in record["figures"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a benchmark's JSON file ({type(error).__name__}: {error})") from error
