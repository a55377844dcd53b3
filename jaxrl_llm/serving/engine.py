"""Serving engine with continuous batching: requests that arrive at any time are decoded together by one sampler.

    connection threads     submit --> bounded queue                         Request.deltas --> streamed tokens
    engine thread                     --> free entries, prefill --> chunk of decode steps --> new tokens of each row

The answer has exactly the sampled tokens; no text is encoded again. A request that is finished or cancelled frees its
decode slot after the current chunk.

Owns: the place of each request in the sampler's table, when a request ends. Does not know: HTTP, text except stop
strings.
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
    """The queue of waiting requests is full."""


@dataclasses.dataclass
class Request:
    """A prompt to complete, with its sampling settings and the queue of its tokens.

    Attributes:
        prompt: token ids.
        max_tokens: maximum number of completion tokens.
        stop: stop strings. The completion ends with the first token whose text completes a stop string.
        stop_ids: token ids that end the completion, in addition to the model's end tokens.
        temperature: sampling temperature, used if the sampler is a ``TemperingSampler``. 0 = greedy, with log-probs 0.
        seed: seed of the sampling noise. Requests with equal prompt, settings and seed get the same answer. If None,
            the engine chooses a seed.
        deltas: new (token ids, log-probs, finish reason), one item per chunk. The reason is None until the last item,
            which has "stop", "length" or "error".
        is_cancelled: set by the reader when it no longer wants tokens.
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
    """Thread that decodes requests from its construction until ``close``.

    Args:
        sampler: sampler with one completion per prompt, and with the program "stop_rows".
        compiled: the sampler's compiled programs by name.
        params: sampler weights.
        key: key of the sampling noise.
        decode_text: token ids to text.
        most_waiting: maximum number of requests that wait for an entry.
        first: number of the first request. The number selects the noise of a request without a seed.
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
        self.error: BaseException | None = None  # the exception that ended the engine
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BusyError: the queue is full.
            RuntimeError: the engine is closed.
        """
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
        """Wait until the engine's thread ends."""
        self._thread.join()

    # The methods below run in the engine's thread.

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
        """Move waiting requests into free entries, and prefill their prompts."""
        sampler = self.sampler
        M, E, each = sampler.shards, sampler.entries, sampler.num_prompts // sampler.shards
        while True:
            free = [[e for e in range(E) if (m, e) not in self._rows][:each] for m in range(M)]
            tokens = np.zeros((M, each, sampler.max_prompt_tokens), np.int32)
            length, name = np.ones((M, each), np.int32), np.zeros((M, each), np.int32)
            entry = np.full((M, each), E, np.int32)  # E = no request
            with self._wake:
                self._waiting = collections.deque(x for x in self._waiting if not x.is_cancelled)
                for j, m in ((j, m) for j in range(each) for m in range(M)):
                    if j < len(free[m]) and self._waiting:
                        request = self._waiting.popleft()
                        self._rows[m, free[m][j]] = _Row(request)
                        tokens[m, j, : len(request.prompt)], length[m, j] = request.prompt, len(request.prompt)
                        seed, half = request.seed, 2**30  # two ranges: requests with and without a seed share no noise
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
        """Run a chunk of decode steps, and put the new tokens of each request into its ``deltas``."""
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
        """Return the length above ``begin`` at which a stop string or stop id ends the request, None if none does."""
        request, sizes = row.request, range(begin + 1, len(row.drawn) + 1)
        by_id = next((n for n in sizes if row.drawn[n - 1] in request.stop_ids), None)
        by_text = stop_strings.completed_at(request.stop, self._decode_text, row.drawn, begin)
        return min((n for n in (by_id, by_text) if n), default=None)
