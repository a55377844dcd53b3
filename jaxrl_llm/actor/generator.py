"""Rollout: the host's side of generation, which opens prompts, runs the sampler's chunks and hands out what is done.

    device   | chunk 1 | chunk 2                  | chunk 3                  | ...
    host       chunk 2   flags of 1, chunk 3,       flags of 2, chunk 4, ...
                         scoring of what ended in 1

The next chunk is dispatched before the host looks at the flags of the one before, so the device does not wait for it.
A chunk that comes after the last one needed finds nothing to do.

Owns: which prompt is open where, the order in which groups leave. Does not know: how a token is sampled
(``sampler.py``), where a stop string cuts (``stop_strings.py``), rewards, replay, where prompts come from.
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
from jaxrl_llm.actor.conversation import Conversations
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_NONE, Agreed, DrawSums, PerHost, PromptBatch, Rollout


class OpenPrompt(NamedTuple):
    """A prompt whose completions are being sampled; ``call`` of ``generate`` has opened it."""

    group_id: int
    example: Any
    tokens: list[int]
    call: int


@dataclasses.dataclass
class FinishedGroup:
    """A prompt whose G completions have stopped.

    Attributes:
        lengths: tokens of each completion.
        stop_reasons: why each ended (``types.STOP_*``).
        turns: of the policy in each; none are told without an environment.
        completions: their token ids, on the host whose rows they are; None elsewhere.
        played: what an environment made of them there.
        ticket: whatever ``on_finished`` returned there.
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
    """Host side of a sampler: opens prompts, runs chunks until P groups are done, hands them out.

    ``open_prompts`` mirrors which entry holds which prompt; with the device state it is what a
    checkpoint must carry for rollouts in flight.

    Args:
        max_lag: calls of ``generate`` that a prompt may stay open after the one that opened it (staleness); 0 = any.
        check: called before each chunk; what it raises leaves a state that a call of ``generate`` goes on from.
        talk: conversations with an environment; None = completions have one turn.
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
        # On the device; without lookahead prompts while they are sampled alone: no update has caches beside it.
        self.state: Any = compiled["init_sampler"]() if sampler.lookahead else None
        self.open_prompts: dict[tuple[int, int], OpenPrompt] = {}  # by shard and entry
        # Groups that finished and were not taken yet, tickets included.
        self.finished: dict[tuple[int, int], FinishedGroup] = {}
        self._chosen: list[list[tuple[int, int]]] = []  # places of the groups of the last call, by shard
        self.draws: list[DrawSums] = []  # of the calls since ``take_draws``

    def prompts_wanted(self) -> int:
        """Prompts the next ``generate`` call needs to fill its free entries."""
        return sum(map(len, self._free()))

    def _free(self) -> list[list[tuple[int, int]]]:
        """Entries of each shard that new prompts may take."""
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
        """Sample completions until P prompts have all of theirs; ``take`` then gives their rows.

        Args:
            params: sampler weights, as published.
            prompts: ``prompts_wanted()`` new prompts.
            version: [] i32 policy version of the weights, recorded per token.
            key: stream key of the noise.
            on_finished: called with each group of this host's when it has stopped, while others still decode.

        Returns:
            P groups. To every host come the stop reasons and lengths of each chunk, and to the host whose rows they
            are the token ids of each finished group.
        """
        sampler = self.sampler
        if self.state is None:
            self.state = self.run["init_sampler"]()
        if sampler.stale_cache:
            self.state = self.run["reread"](params, self.state, version)
        self._open(params, prompts, version)
        scanned = np.zeros((sampler.shards, sampler.entries, sampler.group_size), np.int64)
        # A stop string is found on the host alone: there the next chunk waits for what the host has to say.
        ahead = 0 if sampler.sampling.stop_strings else 1
        unread: collections.deque[Any] = collections.deque()  # stop reasons and lengths of the chunks dispatched
        leaving: list[Any] = []  # groups on their way to the host: their places by shard, what ``read_group`` gives
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
        """P*G rows of the groups that the last call of ``generate`` gave, in the same order; on the device."""
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
        """Sums over all tokens drawn since the last call of this, numbers; of the rows that are still open too."""
        draws, self.draws = jax.device_get(self.draws), []
        return jax.tree.map(lambda *sums: float(np.sum(sums)), *draws)

    def _read(self, reasons: np.ndarray, lengths: np.ndarray, heard: np.ndarray | None = None) -> list[Any]:
        """Note the groups that have stopped, and begin to read their tokens, one of each shard at a time."""
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
        """Take what has been read of the groups that leave, and hand out those of this host."""
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
        """What ``adopt`` takes of each open prompt but its text: shard, entry, calls since it was opened, group_id."""
        return [[*where, self.calls - prompt.call, prompt.group_id] for where, prompt in self.open_prompts.items()]

    def adopt(self, shard: int, entry: int, lag: int, group_id: int, example: Any, prompt: list[int]) -> None:
        """Note a prompt that a restored device state has open, since so many calls."""
        self.open_prompts[shard, entry] = OpenPrompt(group_id, example, prompt, self.calls - lag)

    def _open(self, params: Any, prompts: PromptBatch, version: jax.Array) -> None:
        """Prefill new prompts into free entries, P at a time, dealt contiguously over the shards."""
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
            entry = np.full((M, P // M), E, np.int32)  # E: dropped on the device
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
