"""Where the answers of others come from: files, other runs, and what the run's own answers would have been right for.

    a file            its groups in order, again and again; it is checked as a whole before the run
    a run's workdir   of what it has written since the iteration before, the newest groups; others are passed over
    a function        hindsight: a line for each group that it makes of those which the last iteration has sampled

What is about a held-out question of this run is left out of all of them, and counted.

Such a function, "package.module:function" or "FILE.py:function", has the arguments of a reward function (prompts,
completions and columns, of one question) and returns a list of lines as files have them (``actor.guests``). It runs in
a process of its own (``hindsight_worker``) and has ``rewards.timeout_s`` for each question. Where it fails, of that
question there are none: counted, and said the first time.

Owns: which lines come next, where reading stands. Does not know: what is in a line, rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxrl_llm.actor.printing import Printer
from jaxrl_llm.actor.rewards import Worker, failed, imported, put_away
from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime import hosts
from jaxrl_llm.runtime.json_lines import BadRowError, lines
from jaxrl_llm.runtime.nested import visible
from jaxrl_llm.types import SHARED_FILE

if TYPE_CHECKING:
    from jaxrl_llm.actor.guests import Group
    from jaxrl_llm.actor.resampling import Sampled


class HeldOutError(BadRowError):
    """The line is about a question that the run holds out."""


def source_of(path: str, reader: Any) -> File | Feed | Hindsight:
    """Of a path; ``reader.group(line, origin)`` makes a group of a line, or raises BadRowError."""
    where = pathlib.Path(path).expanduser()
    if os.path.exists(where):
        return (Feed if where.is_dir() else File)(where, reader)
    if ":" in path:
        return Hindsight(path, reader)
    raise ConfigError(
        f"external.paths: {path} is neither a file nor the workdir of a run (make the folder if that run is still "
        "to be started)"
    )


class File:
    """The groups of a file in its order, again and again; a warning counts those that are left out (``skipped``)."""

    failed = 0

    def __init__(self, path: pathlib.Path, reader: Any):
        self._groups, self._position, self.skipped = [], 0, 0
        try:
            for number, line in lines(path):
                try:
                    self._groups.append(reader.group(line, f"{path}:{number}"))
                except HeldOutError:
                    self.skipped += 1
                except BadRowError as error:
                    raise ConfigError(f"{path}:{number}: {error}") from error
        except OSError as error:
            raise ConfigError(f"external.paths: {path} cannot be read: {error.strerror or error}") from error
        left_out = f"{self.skipped} groups of external.paths {path} are left out: their questions are held out"
        if not self._groups:
            raise ConfigError(f"external.paths: {path} is empty" if not self.skipped else f"all {left_out}")
        if self.skipped and hosts.is_first():
            print(f"warning: {left_out}", file=sys.stderr)

    def look(self) -> None:
        """Nothing is new."""

    def take(self) -> Group:
        group = self._groups[self._position % len(self._groups)]
        self._position += 1
        return dataclasses.replace(group)  # its ticket is of one visit

    def state(self) -> dict[str, int]:
        return {"position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class Lines:
    """Lines that are taken once, the last first.

    Attributes:
        skipped: lines that were no group, so far.
        failed: questions on which a function has failed, so far.
    """

    def __init__(self, name: str, reader: Any):
        self._name, self._reader, self._lines = name, reader, []
        self.skipped = self.failed = 0

    def take(self) -> Group | None:
        """The next; None where there is none."""
        while self._lines:
            try:
                return self._reader.group(self._lines.pop(), self._name)
            except BadRowError:
                self.skipped += 1
        return None


class Feed(Lines):
    """What a run writes while this one reads. A file that is shorter than it was is one that a resumed run repeats."""

    def __init__(self, folder: pathlib.Path, reader: Any):
        self._path, self._offset = folder / SHARED_FILE, 0
        super().__init__(str(self._path), reader)

    def look(self) -> None:
        """Read what is new; what was left of the last time is passed over."""
        self._lines = []
        new = b""
        if hosts.is_first() and self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        if new := hosts.exchange(new)[0]:  # hosts may see the file grow at other times
            whole = new[: new.rfind(b"\n") + 1]  # the rest of a line may still be on its way
            self._offset += len(whole)
            self._lines = whole.splitlines()

    def state(self) -> dict[str, int]:
        return {"offset": self._offset, "skipped": self.skipped}

    def restore(self, state: dict[str, int]) -> None:
        self._offset, self.skipped = state["offset"], state["skipped"]


class Hindsight(Lines):
    """What a function makes of the run's own groups, one of each by turns, in the next iteration; the rest is left."""

    def __init__(self, name: str, reader: Any):
        super().__init__(name, reader)
        imported(name, f"external.paths: {visible(name)!r}")
        self._timeout_s, self._printer, self._worker = reader.config.rewards.timeout_s, None, None

    def hear(self, sampled: Sampled, decode: Callable[[list[int]], str]) -> None:
        """Make lines of what has been sampled; what was left of the last time is passed over."""
        own, made = sampled.completions(), []
        size = len(sampled.rewards.outcome) // len(sampled.groups)
        for first, group in zip(range(0, len(sampled.groups) * size, size), sampled.groups, strict=True):
            texts = [decode(own[i]) for i in range(first, first + size)] if first in own else None
            made.append(None if texts is None else self._made_of(group.example, texts))
        lines, reasons = zip(*hosts.complete(made), strict=True)
        by_turns = [line for turn in itertools.zip_longest(*lines) for line in turn if line is not None]
        self._lines = by_turns[::-1]
        if not self.failed and any(reasons) and hosts.is_first():
            said = f"warning: external.paths: {visible(self._name)} has failed on {next(filter(None, reasons))}"
            print(f"{said}; more of it is counted, in external/failed_calls", file=sys.stderr)
        self.failed += sum(map(bool, reasons))

    def _made_of(self, example: Any, texts: list[str]) -> tuple[list[bytes], str]:
        """Lines, and what went wrong, "" where nothing did."""
        if self._worker is None:
            self._printer = Printer()
            self._worker = Worker([self._name], self._printer, "hindsight_worker")
        try:
            call = self._name, example.prompt, example.columns, texts, {}
            made, reason = self._worker.ask(call, self._timeout_s, _are_lines)
        except Exception as error:
            made, reason = [], failed(error)[1]
        return [line.encode() for line in made], reason and f"{example.origin}: {visible(reason)}"

    def close(self) -> None:
        """End the process, whatever the function is doing."""
        if self._worker:
            put_away([self._worker], self._printer)

    def look(self) -> None:
        """What is there was heard."""

    def state(self) -> dict[str, Any]:
        return {"lines": [x.decode() for x in self._lines], "skipped": self.skipped, "failed": self.failed}

    def restore(self, state: dict[str, Any]) -> None:
        self._lines = [line.encode() for line in state["lines"]]
        self.skipped, self.failed = state["skipped"], state["failed"]


def _are_lines(answer: Any) -> bool:
    """Whether an answer has the form of ``hindsight_worker.call``."""
    match answer:
        case [list(lines), str()]:
            return all(isinstance(line, str) for line in lines)
    return False
