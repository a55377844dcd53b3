"""Generation on the host: opening prompts, running the sampler's chunks and returning finished groups.

    device   | chunk 1 | chunk 2                  | chunk 3                  | ...
    host       chunk 2   flags of 1, chunk 3,       flags of 2, chunk 4, ...
                         scoring of 1's groups

The host dispatches the next chunk before it reads the flags of the previous chunk. Therefore the device does not wait
for the host. A chunk that is dispatched after the last necessary chunk does nothing.

Owns: the entry of each open prompt, the order in which groups leave. Does not know: how a token is sampled
(``sampler.py``), where a stop string cuts a row (``stop_strings.py``), rewards, replay, the source of prompts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.actor import quotas, staleness, stop_strings
from jaxrl_llm.actor.episodes import Conversations
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_NONE, Agreed, DrawSums, PerHost, PromptBatch, Rollout


class OpenPrompt(NamedTuple):
    """A prompt whose completions are being sampled. ``call`` is the number of the ``generate`` call that opened it."""

    group_id: int
    example: Any
    tokens: list[int]
    call: int


@dataclasses.dataclass
class FinishedGroup:
    """A prompt whose G completions have stopped.

    Attributes:
        group_id: position in the prompt stream.
        example: the question.
        lengths: number of tokens of each completion.
        stop_reasons: stop reason of each completion (``types.STOP_*``).
        turns: number of policy turns of each completion; empty without an environment.
        completions: token ids of each completion, on the host that owns the rows; None on other hosts.
        played: the group's conversations with the environment (``conversation.Played``), on the host that owns the
            rows.
        ticket: the value that ``on_finished`` returned, on the host that owns the rows.
    """

    group_id: Agreed[int]
    example: Agreed[Any]
    lengths: Agreed[list[int]]
    stop_reasons: Agreed[list[int]]
    turns: Agreed[list[int]] = dataclasses.field(default_factory=list)
    completions: PerHost[list[list[int]] | None] = None
    played: PerHost[Any] = None
    ticket: PerHost[Any] = None


class Generator:
    """Host side of a sampler: opens prompts, runs chunks until P groups have finished, and returns the groups.

    ``open_prompts`` records which entry holds which prompt. A checkpoint needs ``open_prompts`` and the device state to
    restore unfinished rollouts.

    Args:
        sampler: description of the sampler.
        compiled: the compiled programs of the sampler by name.
        decode_text: converts token ids to text.
        max_lag: number of ``generate`` calls that a prompt may stay open after the call that opened the prompt
            (``staleness``); 0 means no limit.
        check: called before each chunk. If ``check`` raises, a later ``generate`` call continues from the current
            state.
        talk: conversations with an environment; None means that completions have one turn.
    """

    def __init__(
        self,
        sampler: Sampler,
        compiled: dict[str, Any],
        decode_text: Callable[[list[int]], str],
        max_lag: int = 0,
        check: Callable[[], None] = lambda: None,
        talk: Conversations | None = None,
    ):
        self.sampler = sampler
        self.run = compiled
        self.decode_text = decode_text
        self.max_lag = max_lag
        self.check = check
        self.talk = talk
        self.calls = 0
        # On the device. Without lookahead prompts the state exists only while sampling, to free its memory for the
        # update.
        self.state: Any = compiled["init_sampler"]() if sampler.lookahead else None
        self.open_prompts: dict[tuple[int, int], OpenPrompt] = {}  # by shard and entry
        # Finished groups that ``take`` has not collected yet, with their tickets.
        self.finished: dict[tuple[int, int], FinishedGroup] = {}
        self._chosen: list[list[tuple[int, int]]] = []  # places of the last call's groups, by shard
        self.draws: list[DrawSums] = []  # sums of the calls since ``take_draws``

    def prompts_wanted(self) -> int:
        """Return the number of prompts that the next ``generate`` call needs to fill the free entries."""
        return sum(map(len, self._free()))

    def _free(self) -> list[list[tuple[int, int]]]:
        """Return, for each shard, the entries that new prompts may take."""
        M, E = self.sampler.shards, self.sampler.entries
        free = [[(m, e) for e in range(E) if (m, e) not in self.open_prompts] for m in range(M)]
        return staleness.within_capacity(self, free) if self.max_lag else free

    def generate(
        self,
        params: Any,
        prompts: PromptBatch,
        *,
        version: jax.Array,
        key: jax.Array,
        on_finished: Callable[[FinishedGroup], Any] = lambda group: None,
    ) -> list[FinishedGroup]:
        """Sample completions until P prompts have all their completions. ``take`` then returns the rows.

        Args:
            params: published sampler weights.
            prompts: ``prompts_wanted()`` new prompts.
            version: [] i32 policy version of the weights, recorded per token.
            key: stream key of the noise.
            on_finished: called with each finished group of this host while other groups still decode.

        Returns:
            P groups. Every host receives the stop reasons and lengths after each chunk. Only the host that owns the
            rows of a finished group receives its token ids.
        """
        sampler = self.sampler
        if self.state is None:
            self.state = self.run["init_sampler"]()
        if sampler.stale_cache:
            self.state = self.run["reread"](params, self.state, version)
        self._open(params, prompts, version)
        scanned = np.zeros((sampler.shards, sampler.entries, sampler.group_size), np.int64)
        # Only the host can find stop strings. With stop strings, the next chunk waits for the search of the host.
        ahead = 0 if sampler.sampling.stop_strings else 1
        unread: collections.deque[Any] = collections.deque()  # stop reasons and lengths of the dispatched chunks
        leaving: list[Any] = []  # groups on their way to the host: places by shard, output of ``read_group``
        due = staleness.due(self)
        is_due = np.array([[(m, e) in due for e in range(sampler.entries)] for m in range(sampler.shards)])
        is_due = sharding.put(is_due, sharding.leading(sampler.mesh, is_due))
        if self.talk:
            self.talk.note(self.run["read_waiting"](self.state), self.open_prompts)
        while True:
            self.check()
            while len(unread) <= ahead:
                answers = self.talk.answers(sampler, self.check) if self.talk else ()
                self.state, told = self.run["decode"](params, self.state, version, key, is_due, *answers)
                unread.append(told)
            self._receive(leaving, on_finished)
            told = unread.popleft()
            told = self.talk.note(told, self.open_prompts) if self.talk else jax.device_get(told)
            reasons, lengths, *heard = told
            if sampler.sampling.stop_strings:
                reasons, lengths = stop_strings.stop(self, reasons, lengths, scanned)
            leaving = self._read(reasons, lengths, *heard)
            done = [[where for where in self.finished if where[0] == shard] for shard in range(sampler.shards)]
            is_enough = quotas.is_enough(np.array([len(places) for places in done]), sampler.num_prompts, sampler.slack)
            if is_enough and due <= self.finished.keys():
                break
        self._receive(leaving, on_finished)
        age = lambda where: self.open_prompts[where].group_id
        self._chosen = quotas.chosen(done, age, due, sampler.num_prompts, sampler.slack)
        return [self.finished[where] for where in quotas.in_rows(self._chosen, sampler.num_prompts)]

    def take(self) -> Rollout:
        """Remove the groups of the last ``generate`` call. Return their P*G rows in the same order, on the device."""
        sampler = self.sampler
        leaving = quotas.arrays(self._chosen, sampler.num_prompts, sampler.slack, sampler.entries)
        leaving = sharding.put(leaving, sharding.leading(sampler.mesh, leaving))
        rollout, draws, self.state = self.run["collect"](self.state, *leaving)
        self.draws.append(draws)
        for where in (where for places in self._chosen for where in places):
            del self.open_prompts[where], self.finished[where]
            if self.talk:
                self.talk.forget(where)
        self.calls += 1
        if not self.sampler.lookahead:
            self.state = None
        return rollout

    def take_draws(self) -> DrawSums:
        """Return sums over all tokens drawn since the last ``take_draws`` call, including tokens of open rows."""
        draws, self.draws = jax.device_get(self.draws), []
        return jax.tree.map(lambda *sums: float(np.sum(sums)), *draws)

    def _read(self, reasons: np.ndarray, lengths: np.ndarray, heard: np.ndarray | None = None) -> list[Any]:
        """Record the newly finished groups and start reading their tokens, one group per shard at a time."""
        new: list[list[tuple[int, int]]] = [[] for _ in range(self.sampler.shards)]
        for where, prompt in self.open_prompts.items():
            if where not in self.finished and (reasons[where] != STOP_NONE).all():
                sizes, why = (lengths[where] - len(prompt.tokens)).tolist(), reasons[where].tolist()
                turns = [] if heard is None else (heard[where] + 1).tolist()
                self.finished[where] = FinishedGroup(prompt.group_id, prompt.example, sizes, why, turns)
                new[where[0]].append(where)
        reading = []
        for places in itertools.zip_longest(*new):
            entries = np.array([where[1] if where else 0 for where in places], np.int32)
            entries = sharding.put(entries, sharding.leading(self.sampler.mesh, entries))
            reading.append((places, self.run["read_group"](self.state.tokens, entries)))
        return reading

    def _receive(self, leaving: list[Any], on_finished: Callable[[FinishedGroup], Any]) -> None:
        """Store the token ids of finished groups of this host and pass the groups to ``on_finished``."""
        for places, tokens in leaving:
            for shard, rows in sharding.own_rows(tokens).items():
                if where := places[shard]:
                    group, first = self.finished[where], len(self.open_prompts[where].tokens)
                    sizes = zip(rows, group.lengths, strict=True)
                    group.completions = [row[first : first + size].tolist() for row, size in sizes]
                    if self.talk:
                        group.played = self.talk.played(where, group.example, group.completions)
                    group.ticket = on_finished(group)

    def opened(self) -> list[list[int]]:
        """Return shard, entry, calls since the opening and group_id of each open prompt, for ``adopt``."""
        return [[*where, self.calls - prompt.call, prompt.group_id] for where, prompt in self.open_prompts.items()]

    def adopt(self, shard: int, entry: int, lag: int, group_id: int, example: Any, prompt: list[int]) -> None:
        """Record an open prompt of a restored device state. The prompt was opened ``lag`` calls ago."""
        self.open_prompts[shard, entry] = OpenPrompt(group_id, example, prompt, self.calls - lag)

    def _open(self, params: Any, prompts: PromptBatch, version: jax.Array) -> None:
        """Prefill new prompts into free entries, P at a time. Each shard takes a contiguous part of the prompts."""
        sampler = self.sampler
        P, M, E = sampler.num_prompts, sampler.shards, sampler.entries
        free = self._free()
        total = len(prompts.examples)
        assert total == sum(map(len, free)), "one prompt for every free entry"
        starts = np.cumsum([0, *map(len, free)])
        waves = -(-max(map(len, free)) // (P // M))
        of_version = (version,) if sampler.stale_cache else ()
        for wave in range(waves):
            index = np.zeros((M, P // M), np.int64)
            entry = np.full((M, P // M), E, np.int32)  # the device drops entry E
            for m in range(M):
                for j, where in enumerate(free[m][wave * (P // M) : (wave + 1) * (P // M)]):
                    i = starts[m] + wave * (P // M) + j
                    index[m, j], entry[m, j] = i, where[1]
                    name, tokens = int(prompts.group_id[i]), prompts.tokens[i, : prompts.length[i]].tolist()
                    self.open_prompts[where] = OpenPrompt(name, prompts.examples[i], tokens, self.calls)
            flat = index.reshape(-1)
            arrays = (prompts.tokens[flat], prompts.length[flat], prompts.group_id[flat], entry)
            arrays = sharding.put(arrays, sharding.leading(sampler.mesh, arrays))
            self.state = self.run["prefill"](params, self.state, *arrays, *of_version)
