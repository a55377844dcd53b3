"""The engine of a server: requests that come at any time are prompts of one sampler, decoded side by side.

    threads of connections     submit --> waiting, so many and no more           Request.deltas --> tokens as they come
    the engine's own thread              --> free entries, prefill --> chunk of decode steps --> what is new of each row

A request's tokens are those that were drawn: nothing is decoded and encoded again. One that is cancelled, or has all
that it may have, gives its slot back after the chunk.

Owns: which request is where in the sampler's table, when one ends. Does not know: HTTP, text but for stop strings.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_llm.actor import stop_strings
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_NONE


class BusyError(Exception):
    """There are as many requests as may wait."""


@dataclasses.dataclass
class Request:
    """A prompt that is to be completed.

    Attributes:
        stop: the completion ends with the first token whose text completes one of these;
        stop_ids: with the first of these tokens, besides the model's own ends.
        temperature: its own; 0 = greedy, whose log-probs are 0. Heard where the sampler has temperatures by prompt.
        seed: of its noise; requests alike in all of this have the same answer. None = of its own.
        deltas: (token ids, log-probs, why it ended: "stop", "length", "error" or None), until it ends.
        is_cancelled: set by whoever no longer reads.
    """

    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    seed: int | None = None
    deltas: queue.SimpleQueue = dataclasses.field(default_factory=queue.SimpleQueue)
    is_cancelled: bool = False


@dataclasses.dataclass
class _Row:
    request: Request
    drawn: list[int] = dataclasses.field(default_factory=list)


class Engine:
    """Runs until it is closed.

    Args:
        sampler: of one completion a prompt; it cuts rows.
        compiled: its programs.
        params: sampler weights.
        decode_text: token ids to text.
        most_waiting: requests that may wait for an entry.
        first: number of the first request without a seed, which keys its noise.
    """

    def __init__(
        self,
        sampler: Sampler,
        compiled: dict[str, Any],
        params: Any,
        key: jax.Array,
        decode_text: Callable[[list[int]], str],
        most_waiting: int,
        first: int = 0,
    ):
        self.sampler, self._run, self._params, self._decode_text = sampler, compiled, params, decode_text
        self._version = sharding.put(np.int32(0), sharding.replicated(sampler.mesh, 0))
        self._key, self._most_waiting = key, most_waiting
        self._state = compiled["init_sampler"]()
        self._waiting: collections.deque[Request] = collections.deque()
        self._rows: dict[tuple[int, int], _Row] = {}
        self._wake, self._is_closed, self._count = threading.Condition(), False, first
        self.error: BaseException | None = None  # what has ended it
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; BusyError where too many wait."""
        with self._wake:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            if len(self._waiting) >= self._most_waiting:
                raise BusyError
            self._waiting.append(request)
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    # Below: in its thread.

    def _main(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._waiting or self._rows or self._is_closed):
                        self._wake.wait()
                    if self._is_closed:
                        break
                self._open()
                self._step()
        except BaseException as error:
            self.error = error
        with self._wake:
            self._is_closed = True
            left = [*self._waiting, *(row.request for row in self._rows.values())]
        for request in left:
            request.deltas.put(([], [], "error"))

    def _open(self) -> None:
        """Put requests that wait into free entries."""
        sampler = self.sampler
        M, E, each = sampler.shards, sampler.entries, sampler.num_prompts // sampler.shards
        while True:
            free = [[e for e in range(E) if (m, e) not in self._rows][:each] for m in range(M)]
            tokens = np.zeros((M, each, sampler.max_prompt_tokens), np.int32)
            length, name = np.ones((M, each), np.int32), np.zeros((M, each), np.int32)
            entry = np.full((M, each), E, np.int32)  # E: none
            with self._wake:
                self._waiting = collections.deque(x for x in self._waiting if not x.is_cancelled)
                for j, m in ((j, m) for j in range(each) for m in range(M)):
                    if j < len(free[m]) and self._waiting:
                        request = self._waiting.popleft()
                        self._rows[m, free[m][j]] = _Row(request)
                        tokens[m, j, : len(request.prompt)], length[m, j] = request.prompt, len(request.prompt)
                        seed, half = request.seed, 2**30  # no request without a seed shares the noise of one
                        name[m, j] = self._count % half if seed is None else half + seed % half
                        entry[m, j], self._count = free[m][j], self._count + 1
            if (entry == E).all():
                return
            arrays = tokens.reshape(M * each, -1), length.reshape(-1), name.reshape(-1), entry
            arrays = sharding.put(arrays, sharding.leading(sampler.mesh, arrays))
            self._state = self._run["prefill"](self._params, self._state, *arrays)
            if "temper" in self._run:
                temperature = np.ones((M, E), np.float32)
                for where, row in self._rows.items():
                    temperature[where] = row.request.temperature
                temperature = sharding.put(temperature, sharding.leading(sampler.mesh, temperature))
                self._state = self._run["temper"](self._state, temperature)

    def _step(self) -> None:
        """A chunk of decode steps, and to each request what is new."""
        wanted = np.zeros((self.sampler.shards, self.sampler.entries), bool)
        for where in self._rows:
            wanted[where] = True
        wanted = sharding.put(wanted, sharding.leading(self.sampler.mesh, wanted))
        self._state, told = self._run["decode"](self._params, self._state, self._version, self._key, wanted)
        tokens, logps = jax.device_get((self._state.tokens, self._state.behaviour_logp))
        reasons, lengths = jax.device_get(told)
        cut = np.zeros(reasons.shape, np.int32)
        for where, row in list(self._rows.items()):
            request, first = row.request, len(row.request.prompt)
            end = min(int(lengths[*where, 0]) - first, request.max_tokens)
            begin, is_over = len(row.drawn), bool(reasons[*where, 0] != STOP_NONE)
            row.drawn += tokens[*where, 0, first + begin : first + end].tolist()
            why = "stop" if is_over and row.drawn[-1] in self.sampler.eos_ids else None
            if (stopped := self._stopped(row, begin)) is not None:
                end, why = stopped, "stop"
            elif why is None and end >= request.max_tokens:
                why = "length"
            if why or request.is_cancelled:
                del self._rows[where]
                if not is_over:
                    cut[*where, 0] = first + max(end, 1)
            new = slice(first + begin, first + end)
            request.deltas.put((tokens[*where, 0, new].tolist(), logps[*where, 0, new].tolist(), why))
        if cut.any():
            cut = sharding.put(cut, sharding.leading(self.sampler.mesh, cut))
            self._state, _ = self._run["stop_rows"](self._state, cut)

    def _stopped(self, row: _Row, begin: int) -> int | None:
        """At how many tokens, more than ``begin``, the first is that ends the request besides the model's ends."""
        request, sizes = row.request, range(begin + 1, len(row.drawn) + 1)
        by_id = next((n for n in sizes if row.drawn[n - 1] in request.stop_ids), None)
        by_text = stop_strings.completed_at(request.stop, self._decode_text, row.drawn, begin)
        return min((n for n in (by_id, by_text) if n), default=None)
