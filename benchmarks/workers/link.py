"""A worker's end of the line to ``benchmarks.run``: JSON lines over stdin and stdout.

    run                         worker
    the job          ---->
                     <----      {"ready": {package: version}}      weights are loaded
    "step"           ---->
                     <----      {"generate_s": .., "update_s": .., "step_s": .., "tokens": .., "samples": ..,
                                 "peak_bytes": ..}
    ...
    end of input     ---->      ends

What libraries print goes to stderr. This file runs in environments without the project's dependencies: it imports the
standard library and ``jaxrl_llm.scoring``, which does the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.scoring.answers import integer_of


class Link:
    """Reads the job when made; ``job`` is its dictionary."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.job: dict[str, Any] = json.loads(sys.stdin.readline())

    def ready(self, *packages: str) -> None:
        """Say that steps can come, with the versions of the packages that will run them."""
        self._send({"ready": {name: importlib.metadata.version(name) for name in packages}})

    def steps(self) -> Iterator[None]:
        """One turn for each step asked for."""
        while self.next_step():
            yield

    def next_step(self) -> bool:
        """Wait for the next request; False when there is none any more."""
        return sys.stdin.readline() != ""

    def report(
        self, *, generate_s: float, update_s: float, step_s: float, tokens: int, samples: int, **others: float
    ) -> None:
        """The figures of one step; tokens are those generated."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        figures = {"generate_s": generate_s, "update_s": update_s, "step_s": step_s}
        self._send({**figures, "tokens": tokens, "samples": samples, "peak_bytes": peak, **others})

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def reward(completion: str) -> float:
    """Share of digits and spaces: cheap, the same for every system, and hardly ever tied within a group."""
    return sum(letter.isdigit() or letter == " " for letter in completion) / max(1, len(completion))


def is_right(completion: str, answer: str) -> bool:
    """Return whether the integer that a completion answers is the answer: what the main job rewards."""
    integer = integer_of(completion)
    return integer is not None and int(integer) == int(answer)
