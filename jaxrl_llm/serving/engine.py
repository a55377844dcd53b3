"""Serving engine with continuous batching: requests that arrive at any time are decoded together by one sampler.

    connection threads     submit --> bounded queue                         Request.deltas --> streamed tokens
    engine thread                     --> free entries, prefill --> chunk of decode steps --> new tokens of each row

The answer has exactly the sampled tokens; no text is encoded again. A request that is finished or cancelled frees its
decode slot after the current chunk.

Owns: the place of each request in the sampler's table, when a request ends. Does not know: HTTP, texts other than stop
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

NUM_NOISE_IDS = 2**30  # number of noise ids for requests without a seed; requests with a seed have as many others


class BusyError(Exception):
    """Error for a request that comes while the queue of waiting requests is full."""


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
        is_cancelled: the reader sets it when it needs no more tokens.
    """

    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    seed: int | None = None
    deltas: queue.SimpleQueue[tuple[list[int], list[float], str | None]] = dataclasses.field(
        default_factory=queue.SimpleQueue
    )
    is_cancelled: bool = False


@dataclasses.dataclass
class _Row:
    """A request in an entry of the sampler, with the tokens drawn so far."""

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
        self.sampler = sampler
        self._programs = compiled
        self._params = params
        self._key = key
        self._decode_text = decode_text
        self._most_waiting = most_waiting
        self._version = sharding.put(np.int32(0), sharding.replicated(sampler.mesh, 0))
        self._state = compiled["init_sampler"]()
        self._waiting: collections.deque[Request] = collections.deque()
        self._rows: dict[tuple[int, int], _Row] = {}
        self._wake = threading.Condition()
        self._is_closed = False
        self._count = first
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
        """End the engine's thread. Requests that are not finished get the finish reason "error"."""
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
            unfinished = [*self._waiting, *(row.request for row in self._rows.values())]
        for request in unfinished:
            request.deltas.put(([], [], "error"))

    def _open(self) -> None:
        """Move waiting requests into free entries, and prefill their prompts."""
        while True:
            wave = self._next_wave()
            if wave is None:
                return
            arrays = sharding.put(wave, sharding.leading(self.sampler.mesh, wave))
            self._state = self._programs["prefill"](self._params, self._state, *arrays)
            if "temper" in self._programs:
                self._set_temperatures()

    def _next_wave(self) -> tuple[np.ndarray, ...] | None:
        """Move waiting requests into at most ``num_prompts`` free entries.

        Returns:
            Tokens, lengths, noise ids and entries of the prompts, as arguments of "prefill". None if no request waits
            or no entry is free.
        """
        sampler = self.sampler
        M = sampler.shards
        E = sampler.entries
        quota = sampler.num_prompts // M
        free = []
        for m in range(M):
            free_entries = [e for e in range(E) if (m, e) not in self._rows]
            free.append(free_entries[:quota])
        tokens = np.zeros((M, quota, sampler.max_prompt_tokens), np.int32)
        length = np.ones((M, quota), np.int32)
        noise_id = np.zeros((M, quota), np.int32)
        entry = np.full((M, quota), E, np.int32)  # entry E means that no request was opened
        with self._wake:
            self._waiting = collections.deque(request for request in self._waiting if not request.is_cancelled)
            for j in range(quota):
                for m in range(M):
                    if j >= len(free[m]) or not self._waiting:
                        continue
                    request = self._waiting.popleft()
                    self._rows[m, free[m][j]] = _Row(request)
                    tokens[m, j, : len(request.prompt)] = request.prompt
                    length[m, j] = len(request.prompt)
                    noise_id[m, j] = self._noise_id(request)
                    entry[m, j] = free[m][j]
                    self._count += 1
        if (entry == E).all():
            return None
        return (
            tokens.reshape(M * quota, -1),
            length.reshape(-1),
            noise_id.reshape(-1),
            entry,
        )

    def _noise_id(self, request: Request) -> int:
        """Return the number that selects the noise of a request. Requests with and without a seed share no number."""
        if request.seed is None:
            return self._count % NUM_NOISE_IDS
        return NUM_NOISE_IDS + request.seed % NUM_NOISE_IDS

    def _set_temperatures(self) -> None:
        """Give the sampler the temperatures of all rows."""
        sampler = self.sampler
        temperatures = np.ones((sampler.shards, sampler.entries), np.float32)
        for place, row in self._rows.items():
            temperatures[place] = row.request.temperature
        temperatures = sharding.put(temperatures, sharding.leading(sampler.mesh, temperatures))
        self._state = self._programs["temper"](self._state, temperatures)

    def _step(self) -> None:
        """Run a chunk of decode steps, and put the new tokens of each request into its ``deltas``."""
        sampler = self.sampler
        wanted = np.zeros((sampler.shards, sampler.entries), bool)
        for place in self._rows:
            wanted[place] = True
        wanted = sharding.put(wanted, sharding.leading(sampler.mesh, wanted))
        decode = self._programs["decode"]
        self._state, flags = decode(self._params, self._state, self._version, self._key, wanted)
        tokens, logps = jax.device_get((self._state.tokens, self._state.behaviour_logp))
        reasons, lengths = jax.device_get(flags)
        new_lengths = np.zeros(reasons.shape, np.int32)
        for place, row in list(self._rows.items()):
            request = row.request
            start = len(request.prompt)
            begin = len(row.drawn)
            end = min(int(lengths[*place, 0]) - start, request.max_tokens)
            has_stopped = bool(reasons[*place, 0] != STOP_NONE)
            row.drawn += tokens[*place, 0, start + begin : start + end].tolist()
            end, finish_reason = self._finish(row, begin, end, has_stopped)
            if finish_reason or request.is_cancelled:
                del self._rows[place]
                if not has_stopped:
                    new_lengths[*place, 0] = start + max(end, 1)
            new = slice(start + begin, start + end)
            request.deltas.put(
                (
                    tokens[*place, 0, new].tolist(),
                    logps[*place, 0, new].tolist(),
                    finish_reason,
                )
            )
        if new_lengths.any():
            placed = sharding.put(new_lengths, sharding.leading(sampler.mesh, new_lengths))
            self._state, _ = self._programs["stop_rows"](self._state, placed)

    def _finish(self, row: _Row, begin: int, end: int, has_stopped: bool) -> tuple[int, str | None]:
        """Return the number of tokens of a request, and its finish reason or None.

        Args:
            begin, end: numbers of tokens before and after the last chunk.
            has_stopped: whether the sampler has ended the row.
        """
        stopped_at = self._stopped(row, begin)
        if stopped_at is not None:
            return stopped_at, "stop"
        if has_stopped and row.drawn[-1] in self.sampler.eos_ids:
            return end, "stop"
        if end >= row.request.max_tokens:
            return end, "length"
        return end, None

    def _stopped(self, row: _Row, begin: int) -> int | None:
        """Return the length above ``begin`` at which a stop string or stop id ends the request, or None."""
        request = row.request
        lengths = []
        for length in range(begin + 1, len(row.drawn) + 1):
            if row.drawn[length - 1] in request.stop_ids:
                lengths.append(length)
                break
        text_length = stop_strings.completed_at(request.stop, self._decode_text, row.drawn, begin)
        if text_length is not None:
            lengths.append(text_length)
        return min(lengths, default=None)
