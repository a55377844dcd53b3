"""Sources of external groups: files, other runs, and hindsight functions.

    a file            its groups in order, repeated without end; the whole file is checked before the run
    a run's workdir   the newest groups that the run has written since the previous iteration; older groups are skipped
    a function        hindsight: new groups that the function makes of the groups of the previous iteration

All sources skip and count the groups about a held-out question of this run.

A hindsight function is given as "package.module:function" or "FILE.py:function". It has the parameters of a reward
function: prompts, completions and columns of one question. It returns a list of lines in the format of
``actor.external_groups``. For example, it changes the question so that the run's wrong answer becomes right. The
function runs in its own process (``scoring.reward_worker``), with ``rewards.timeout_s`` for each question. If the
function fails, that question has no lines. Failures are counted, and the first one is printed.

Owns: the order of the lines, the reading position. Does not know: the content of a line, rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import sys
from typing import Any

from jaxrl_llm.actor.external_groups import ExternalGroup, GroupParser, HeldOutError
from jaxrl_llm.actor.resampling import Sampled
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files.decoding import Decode
from jaxrl_llm.runtime import hosts
from jaxrl_llm.runtime.json_lines import BadRowError, lines
from jaxrl_llm.scoring.worker_processes import Printer, Worker, close_workers, failure_of, import_function
from jaxrl_llm.settings.schema import visible
from jaxrl_llm.types import SHARED_FILE, Example

HINDSIGHT_CALL = "jaxrl_llm.scoring.reward_worker:call_hindsight"


def source_of(path: str, parser: GroupParser) -> FileSource | RunSource | HindsightSource:
    """Return the source that an entry of ``external.paths`` names.

    Raises:
        ConfigError: the path is not a file, folder or function, or a line of the file is not a group.
    """
    place = pathlib.Path(path).expanduser()
    if os.path.exists(place):
        return RunSource(place, parser) if place.is_dir() else FileSource(place, parser)
    if ":" in path:
        return HindsightSource(path, parser)
    raise ConfigError(
        f"external.paths={path!r} must be a file, the workdir of a run, or a function. No such file or folder exists. "
        "If the run has not started yet, create its workdir."
    )


class FileSource:
    """The groups of a file in file order, repeated without end.

    Groups about held-out questions are left out. ``skipped`` is their number, and a warning reports it.
    """

    failed = 0

    def __init__(self, path: pathlib.Path, parser: GroupParser):
        self._groups, self.skipped = _read_groups(path, parser)
        self._position = 0
        message = f"{self.skipped} groups of external.paths={str(path)!r} are left out: their questions are held out"
        if not self._groups:
            reason = f"all {message}" if self.skipped else f"external.paths={str(path)!r} is empty"
            raise ConfigError(reason)
        if self.skipped and hosts.is_first():
            print(f"warning: {message}", file=sys.stderr)

    def refresh(self) -> None:
        """Do nothing, because the file was read at the start."""

    def next_group(self) -> ExternalGroup:
        """Return the next group of the file."""
        group = self._groups[self._position % len(self._groups)]
        self._position += 1
        return dataclasses.replace(group)  # copy the group, because the file's next pass needs a new ticket

    def state(self) -> dict[str, int]:
        """Return the reading position as plain JSON, for ``restore``."""
        return {"position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Restore the reading position."""
        self._position = state["position"]


def _read_groups(path: pathlib.Path, parser: GroupParser) -> tuple[list[ExternalGroup], int]:
    """Return the groups of a file, and the number of groups about held-out questions, which are left out."""
    groups = []
    num_held_out = 0
    try:
        for number, line in lines(path):
            try:
                groups.append(parser.group(line, f"{path}:{number}"))
            except HeldOutError:
                num_held_out += 1
            except BadRowError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"external.paths={str(path)!r} cannot be read: {reason}") from error
    return groups, num_held_out


class LineSource:
    """Source that takes each of its lines once. The last line is taken first.

    Attributes:
        skipped: number of lines so far that were not groups of this run.
        failed: number of questions so far on which a hindsight function failed.
    """

    def __init__(self, name: str, parser: GroupParser):
        self.skipped = 0
        self.failed = 0
        self._name = name
        self._parser = parser
        self._lines: list[bytes] = []

    def next_group(self) -> ExternalGroup | None:
        """Return the next group, or None if no line is left."""
        while self._lines:
            line = self._lines.pop()
            try:
                return self._parser.group(line, self._name)
            except BadRowError:
                self.skipped += 1
        return None


class RunSource(LineSource):
    """Source of the groups that another run writes while this run reads.

    A file that has become shorter belongs to a resumed run, which writes groups that were already read. Nothing is read
    until the file is longer than before.
    """

    def __init__(self, folder: pathlib.Path, parser: GroupParser):
        self._path = folder / SHARED_FILE
        self._offset = 0
        super().__init__(str(self._path), parser)

    def refresh(self) -> None:
        """Read the new lines. Unused lines of the previous call are dropped."""
        self._lines = []
        content = b""
        if hosts.is_first() and self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        # The first host decides, because hosts may see different lengths of the file.
        content = hosts.exchange(content)[0]
        end = content.rfind(b"\n") + 1  # the last line may be incomplete
        self._offset += end
        self._lines = content[:end].splitlines()

    def state(self) -> dict[str, int]:
        """Return the reading position as plain JSON, for ``restore``."""
        return {"offset": self._offset, "skipped": self.skipped}

    def restore(self, state: dict[str, int]) -> None:
        """Restore the reading position."""
        self._offset = state["offset"]
        self.skipped = state["skipped"]


class HindsightSource(LineSource):
    """Source of the lines that a hindsight function makes of the run's own groups.

    The next iteration takes the lines of the groups in turn: the first line of every group, then the second line of
    every group.
    """

    def __init__(self, name: str, parser: GroupParser):
        super().__init__(name, parser)
        import_function(name, f"external.paths={visible(name)!r}")
        self._timeout_s = parser.config.rewards.timeout_s
        self._process: tuple[Worker, Printer] | None = None

    def observe(self, sampled: Sampled, decode: Decode) -> None:
        """Call the function on the groups that were sampled. Unused lines of the previous call are dropped."""
        completions = sampled.completions()
        group_size = len(sampled.rewards.outcome) // len(sampled.groups)
        results: list[tuple[list[bytes], str] | None] = []
        for j, group in enumerate(sampled.groups):
            first = j * group_size
            if first in completions:
                texts = [decode(completions[i]) for i in range(first, first + group_size)]
                results.append(self._call(group.example, texts))
            else:  # the rows of the group are on another host
                results.append(None)
        all_results = [result for result in hosts.complete(results) if result is not None]
        reasons = [reason for _, reason in all_results if reason]
        if reasons and not self.failed and hosts.is_first():
            print(
                f"warning: external.paths: {visible(self._name)} has failed on {reasons[0]}; "
                "the metric external/failed_calls counts further failures",
                file=sys.stderr,
            )
        self.failed += len(reasons)
        rounds = itertools.zip_longest(*(group_lines for group_lines, _ in all_results))
        in_turn = [line for line in itertools.chain(*rounds) if line is not None]
        self._lines = in_turn[::-1]  # reversed, because the last line is taken first

    def _call(self, example: Example, texts: list[str]) -> tuple[list[bytes], str]:
        """Return the lines that the function makes of one group, and an error message or ""."""
        arguments = self._name, example.prompt, example.columns, texts, {}
        try:
            new_lines, reason = self._worker().ask(arguments, self._timeout_s, _are_lines)
        except Exception as error:
            new_lines = []
            _, reason = failure_of(error)
        if reason:
            reason = f"{example.origin}: {visible(reason)}"
        return [line.encode() for line in new_lines], reason

    def _worker(self) -> Worker:
        """Return the function's process. Start the process if it does not exist."""
        if self._process is None:
            printer = Printer()
            worker = Worker([self._name], printer, HINDSIGHT_CALL)
            self._process = worker, printer
        return self._process[0]

    def close(self) -> None:
        """Kill the process, even if the function is running."""
        if self._process is not None:
            worker, printer = self._process
            close_workers([worker], printer)

    def refresh(self) -> None:
        """Do nothing, because ``observe`` has made the lines."""

    def state(self) -> dict[str, Any]:
        """Return the lines and counts as plain JSON, for ``restore``."""
        texts = [line.decode() for line in self._lines]
        return {"lines": texts, "skipped": self.skipped, "failed": self.failed}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the lines and counts."""
        self._lines = [line.encode() for line in state["lines"]]
        self.skipped = state["skipped"]
        self.failed = state["failed"]


def _are_lines(answer: Any) -> bool:
    """Return whether an answer has the form that ``reward_worker.call_hindsight`` returns."""
    match answer:
        case [list(texts), str()]:
            return all(isinstance(text, str) for text in texts)
    return False
