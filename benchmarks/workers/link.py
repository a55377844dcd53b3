"""A worker's connection to ``benchmarks.run``: JSON lines over stdin and stdout.

    run                         worker
    the job          ---->
                     <----      {"ready": {package: version}}      weights are loaded
    "step"           ---->
                     <----      {"generate_s": .., "update_s": .., "step_s": .., "tokens": .., "samples": ..,
                                 "peak_bytes": ..}
    ...
    end of input     ---->      ends

Output of libraries goes to stderr. This file runs in environments without the project's dependencies. It imports only
the standard library and ``jaxrl_llm.scoring.answers``, which needs nothing else.
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
    """The connection. The constructor reads the job into the dictionary ``job``."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.job: dict[str, Any] = json.loads(sys.stdin.readline())

    def ready(self, *packages: str) -> None:
        """Report that steps can begin, with the versions of the packages that run them."""
        self._send({"ready": {name: importlib.metadata.version(name) for name in packages}})

    def steps(self) -> Iterator[None]:
        """Yield once for each requested step."""
        while self.next_step():
            yield

    def next_step(self) -> bool:
        """Wait for the next request. Return False after the last request."""
        return sys.stdin.readline() != ""

    def report(
        self, *, generate_s: float, update_s: float, step_s: float, tokens: int, samples: int, **others: float
    ) -> None:
        """Send the figures of one step. ``tokens`` counts generated tokens."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        figures = {"generate_s": generate_s, "update_s": update_s, "step_s": step_s}
        self._send({**figures, "tokens": tokens, "samples": samples, "peak_bytes": peak, **others})

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def reward(completion: str) -> float:
    """Return the share of digits and spaces: cheap, equal for every system, and rarely tied within a group."""
    return sum(letter.isdigit() or letter == " " for letter in completion) / max(1, len(completion))


def is_right(completion: str, answer: str) -> bool:
    """Return whether the integer in a completion is the right answer, as the reward of the main job does."""
    integer = integer_of(completion)
    return integer is not None and int(integer) == int(answer)
