"""Sources of external rollouts: files, other runs, and hindsight functions.

    a file            its groups in order, repeated without end; the whole file is checked before the run
    a run's workdir   the newest groups that the run has written since the previous iteration; the others are skipped
    a function        hindsight: new groups that the function makes of the groups of the previous iteration

Groups about a held-out question of this run are skipped and counted in all sources.

A hindsight function is given as "package.module:function" or "FILE.py:function". It has the parameters of a reward
function: prompts, completions and columns of one question. It returns a list of lines in the format of
``actor.external``. For example, it changes the question so that the run's wrong answer becomes right. The function runs
in its own process (``scoring.reward_worker``), with ``rewards.timeout_s`` for each question. If it fails, that question
has no lines. Failures are counted, and the first one is printed.

Owns: which line comes next, the reading position. Does not know: the content of a line, rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime import hosts
from jaxrl_llm.runtime.json_lines import BadRowError, lines
from jaxrl_llm.scoring.worker_processes import Printer, Worker, close_workers, failure_of, import_function
from jaxrl_llm.settings.schema import visible
from jaxrl_llm.types import SHARED_FILE

if TYPE_CHECKING:
    from jaxrl_llm.actor.external import Group
    from jaxrl_llm.actor.resampling import Sampled

HINDSIGHT_CALL = "jaxrl_llm.scoring.reward_worker:call_hindsight"


class HeldOutError(BadRowError):
    """A line whose question is held out in this run."""


def source_of(path: str, reader: Any) -> File | Feed | Hindsight:
    """Return the source that an entry of ``external.paths`` names.

    Args:
        reader: its method ``group(line, origin)`` parses a line as a group, or raises BadRowError.

    Raises:
        ConfigError: the path is not a file, folder or function, or a line of the file is not a group.
    """
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
    """The groups of a file in file order, repeated without end.

    Groups about held-out questions are left out. ``skipped`` is their number, and a warning reports it.
    """

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
        """Do nothing, because the file was read at the start."""

    def take(self) -> Group:
        group = self._groups[self._position % len(self._groups)]
        self._position += 1
        return dataclasses.replace(group)  # a copy, because the file's next pass needs a new ticket

    def state(self) -> dict[str, int]:
        return {"position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class Lines:
    """Source whose lines are taken once, the last line first.

    Attributes:
        skipped: number of lines so far that were not groups of this run.
        failed: number of questions so far on which a hindsight function failed.
    """

    def __init__(self, name: str, reader: Any):
        self._name, self._reader, self._lines = name, reader, []
        self.skipped = self.failed = 0

    def take(self) -> Group | None:
        """Return the next group, None if no line is left."""
        while self._lines:
            try:
                return self._reader.group(self._lines.pop(), self._name)
            except BadRowError:
                self.skipped += 1
        return None


class Feed(Lines):
    """Source of the groups that another run writes while this run reads.

    A file that has become shorter belongs to a resumed run, which writes groups that were already read. Nothing is read
    until the file is longer than before.
    """

    def __init__(self, folder: pathlib.Path, reader: Any):
        self._path, self._offset = folder / SHARED_FILE, 0
        super().__init__(str(self._path), reader)

    def look(self) -> None:
        """Read the new lines. Unused lines of the previous call are dropped."""
        self._lines = []
        new = b""
        if hosts.is_first() and self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        if new := hosts.exchange(new)[0]:  # the first host decides, because hosts may see different file lengths
            whole = new[: new.rfind(b"\n") + 1]  # the last line may not be fully written yet
            self._offset += len(whole)
            self._lines = whole.splitlines()

    def state(self) -> dict[str, int]:
        return {"offset": self._offset, "skipped": self.skipped}

    def restore(self, state: dict[str, int]) -> None:
        self._offset, self.skipped = state["offset"], state["skipped"]


class Hindsight(Lines):
    """Source of the lines that a hindsight function makes of the run's own groups.

    The next iteration takes the lines of the groups in turn: the first line of each group, then the second of each.
    """

    def __init__(self, name: str, reader: Any):
        super().__init__(name, reader)
        import_function(name, f"external.paths={visible(name)!r}")
        self._timeout_s = reader.config.rewards.timeout_s
        self._printer: Printer | None = None
        self._worker: Worker | None = None

    def hear(self, sampled: Sampled, decode: Callable[[list[int]], str]) -> None:
        """Call the function on the groups that were sampled. Unused lines of the previous call are dropped."""
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
        """Return the lines that the function makes of one group, and an error message or ""."""
        if self._worker is None:
            self._printer = Printer()
            self._worker = Worker([self._name], self._printer, HINDSIGHT_CALL)
        try:
            call = self._name, example.prompt, example.columns, texts, {}
            made, reason = self._worker.ask(call, self._timeout_s, _are_lines)
        except Exception as error:
            made, reason = [], failure_of(error)[1]
        return [line.encode() for line in made], reason and f"{example.origin}: {visible(reason)}"

    def close(self) -> None:
        """Kill the process, even if the function is running."""
        if self._worker and self._printer:
            close_workers([self._worker], self._printer)

    def look(self) -> None:
        """Do nothing, because ``hear`` has made the lines."""

    def state(self) -> dict[str, Any]:
        return {"lines": [x.decode() for x in self._lines], "skipped": self.skipped, "failed": self.failed}

    def restore(self, state: dict[str, Any]) -> None:
        self._lines = [line.encode() for line in state["lines"]]
        self.skipped, self.failed = state["skipped"], state["failed"]


def _are_lines(answer: Any) -> bool:
    """Return whether an answer has the form that ``reward_worker.call_hindsight`` returns."""
    match answer:
        case [list(lines), str()]:
            return all(isinstance(line, str) for line in lines)
    return False
