"""Clocks for the compiled programs of a run. Each clock wraps the programs (``iteration.Wrap``).

    Stopwatch    waits for each program and measures its seconds alone
    DeviceClock  does not wait, and records when the device is busy while the host continues

Owns: the clocks. Does not know: the programs.
"""

from __future__ import annotations

import collections
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


class Stopwatch:
    """Seconds of every call by program name. Each call waits until its results exist."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)

    def wrap(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments):
            jax.block_until_ready(arguments)
            start = time.perf_counter()
            result = jax.block_until_ready(program(*arguments))
            self.seconds[name].append(time.perf_counter() - start)
            return result

        return call

    def total(self, prefix: str) -> float:
        """Return the seconds of all calls so far of the programs whose names begin with ``prefix``."""
        return sum(sum(seconds) for name, seconds in self.seconds.items() if name.startswith(prefix))


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median of ``repeats`` calls after two warm-up calls. The second warm-up call may compile again."""
    for _ in range(2):
        jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class DeviceClock:
    """Clock that records when the device works on each program, while the host continues.

    The clock requests a slice of each program's smallest result at once, and a thread waits for the slice. The result
    itself may be donated to the next program before it exists. Programs of one device run in order. Therefore a program
    is busy from its dispatch, or from the end of the program before it, to its own end. The dispatch counts as busy.
    """

    def __init__(self):
        self.intervals: list[tuple[str, float, float]] = []  # name, dispatched, done
        self._probe = jax.jit(lambda x: x.reshape(-1)[:1])
        self._waiting: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def wrap(self, name: str, program: Any) -> Any:
        return _Watched(name, program, self)

    def note(self, name: str, dispatched: float, result: Any) -> None:
        smallest = min(jax.tree.leaves(result), key=lambda x: x.size)
        self._waiting.put((name, dispatched, self._probe(smallest)))

    def close(self) -> None:
        """Wait until the device has finished the last program."""
        self._waiting.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while True:
            item = self._waiting.get()
            if item is None:
                return
            name, dispatched, probe = item
            probe.block_until_ready()
            self.intervals.append((name, dispatched, time.perf_counter()))


class _Watched:
    """A compiled program that a ``DeviceClock`` watches. All other attributes come from the program."""

    def __init__(self, name: str, program: Any, clock: DeviceClock):
        self._name, self._program, self._clock = name, program, clock

    def __call__(self, *arguments: Any) -> Any:
        dispatched = time.perf_counter()
        result = self._program(*arguments)
        self._clock.note(self._name, dispatched, result)
        return result

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._program, attribute)


def idle_shares(intervals: Sequence[tuple[str, float, float]], last: str) -> list[float]:
    """Return the share of each iteration in which the device was idle.

    Args:
        intervals: (name, dispatch time, end time) of each program, in the order of execution.
        last: the program that ends an iteration. The time before its first end is not counted.

    Returns:
        For each iteration, 1 - busy time / elapsed time.
    """
    shares: list[float] = []
    begin = end = None
    busy = 0.0
    for name, dispatched, done in intervals:
        if end is not None:
            busy += done - max(dispatched, end)
        end = done
        if name == last:
            if begin is not None:
                shares.append(1 - busy / (done - begin))
            begin = done
            busy = 0.0
    return shares
