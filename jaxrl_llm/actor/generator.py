"""Generation on the host: opening prompts, running the sampler's chunks and returning finished groups.

    device   | chunk 1 | chunk 2                  | chunk 3                  | ...
    host       chunk 2   flags of 1, chunk 3,       flags of 2, chunk 4, ...
                         scoring of 1's groups

The host dispatches the next chunk before it reads the flags of the previous chunk. Therefore the device does not wait
for the host. A chunk that is dispatched after the last necessary chunk does nothing.

The staleness gate ``rollout.max_lag_iterations`` limits the number of calls of ``generate`` during which a prompt stays
open. Prompts are opened up to

    capacity = min(free entries, (max_lag + calls so far + 1) * P - opened so far)

P is the number of prompts per call. A call waits for the prompts that reach their limit with this call.

Source: the capacity formula is from AReaL, Fu et al. 2025, arXiv:2505.24298. The version of AReaL counts batches.
Differs: a call also waits for stragglers. Therefore the limit bounds the staleness of the rollouts that are trained on,
not only the number of submitted prompts.

Owns: the entry of each open prompt, the order in which groups leave, the staleness gate. Does not know: how a token is
sampled (``sampler.py``), where a stop string cuts a row (``stop_strings.py``), rewards, replay, the source of prompts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.actor import quotas, stop_strings
from jaxrl_llm.actor.episodes import Conversations, Played
from jaxrl_llm.actor.quotas import Place
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_NONE, Agreed, DrawSums, Example, PerHost, PromptBatch, Rollout


class OpenPrompt(NamedTuple):
    """A prompt whose completions are being sampled. ``call`` is the number of the ``generate`` call that opened it."""

    group_id: int
    example: Example
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
        played: the group's conversations with the environment, on the host that owns the rows.
        ticket: the value that ``on_finished`` returned, on the host that owns the rows.
    """

    group_id: Agreed[int]
    example: Agreed[Example]
    lengths: Agreed[list[int]]
    stop_reasons: Agreed[list[int]]
    turns: Agreed[list[int]] = dataclasses.field(default_factory=list)
    completions: PerHost[list[list[int]] | None] = None
    played: PerHost[Played | None] = None
    ticket: PerHost[Any] = None


# Groups that are being copied to the host: one place (shard, entry) per shard, or None without a group, and the tokens
# [M,G,S].
Reading = list[tuple[tuple[Place | None, ...], jax.Array]]


class Generator:
    """Host side of a sampler: opens prompts, runs chunks until P groups have finished, and returns the groups.

    ``open_prompts`` records which entry holds which prompt. A checkpoint needs ``open_prompts`` and the device state to
    restore unfinished rollouts.

    Args:
        sampler: description of the sampler.
        compiled: the compiled programs of the sampler by name.
        decode_text: converts token ids to text.
        max_lag: number of ``generate`` calls that a prompt may stay open after the call that opened the prompt; 0 means
            no limit.
        check: called before each chunk. If ``check`` raises, a later ``generate`` call continues from the current
            state.
        conversations: conversations with an environment; None means that completions have one turn.
    """

    def __init__(
        self,
        sampler: Sampler,
        compiled: Mapping[str, Callable[..., Any]],
        decode_text: Callable[[list[int]], str],
        max_lag: int = 0,
        check: Callable[[], None] = lambda: None,
        conversations: Conversations | None = None,
    ):
        self.sampler = sampler
        self.programs = compiled
        self.decode_text = decode_text
        self.max_lag = max_lag
        self.check = check
        self.conversations = conversations
        self.calls = 0
        # On the device. Without lookahead prompts the state exists only while sampling, to free its memory for the
        # update.
        self.state: Any = compiled["init_sampler"]() if sampler.lookahead else None
        self.open_prompts: dict[Place, OpenPrompt] = {}
        # Finished groups that ``take`` has not collected yet, with their tickets.
        self.finished: dict[Place, FinishedGroup] = {}
        self._chosen: list[list[Place]] = []  # places (shard, entry) of the last call's groups, by shard
        self.draws: list[DrawSums] = []  # sums of the calls since ``take_draws``

    # ---- one call ----------------------------------------------------------------------------------------------------

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
            self.state = self.programs["init_sampler"]()
        if sampler.stale_cache:
            self.state = self.programs["reread"](params, self.state, version)
        self._open(params, prompts, version)
        due = self._due()
        self._run_chunks(params, version, key, due, on_finished)
        self._chosen = quotas.chosen(
            self._finished_places(),
            self._group_id,
            due,
            sampler.num_prompts,
            sampler.slack,
        )
        return [self.finished[place] for place in quotas.in_rows(self._chosen, sampler.num_prompts)]

    def _run_chunks(
        self,
        params: Any,
        version: jax.Array,
        key: jax.Array,
        due: set[Place],
        on_finished: Callable[[FinishedGroup], Any],
    ) -> None:
        """Run chunks of decode steps until the finished groups fill a call and include the due groups."""
        sampler = self.sampler
        scanned = np.zeros((sampler.shards, sampler.entries, sampler.group_size), np.int64)
        # Only the host can find stop strings. With stop strings, the next chunk waits for the search of the host.
        chunks_ahead = 0 if sampler.sampling.stop_strings else 1
        unread: collections.deque[Any] = collections.deque()  # stop reasons and lengths of the dispatched chunks
        reading: Reading = []
        is_due = self._due_mask(due)
        if self.conversations:
            self.conversations.ask(self.programs["read_waiting"](self.state), self.open_prompts)
        while True:
            self.check()
            while len(unread) <= chunks_ahead:
                answers = self.conversations.answers(sampler, self.check) if self.conversations else ()
                self.state, flags = self.programs["decode"](params, self.state, version, key, is_due, *answers)
                unread.append(flags)
            self._receive(reading, on_finished)
            reasons, lengths, *answer_counts = self._read_flags(unread.popleft())
            if sampler.sampling.stop_strings:
                reasons, lengths = stop_strings.stop(self, reasons, lengths, scanned)
            reading = self._start_reading(reasons, lengths, *answer_counts)
            if self._has_enough(due):
                break
        self._receive(reading, on_finished)

    def _group_id(self, place: Place) -> int:
        """Return the position in the prompt stream of an open prompt. Older prompts have smaller positions."""
        return self.open_prompts[place].group_id

    def _finished_places(self) -> list[list[Place]]:
        """Return the places of the finished groups by shard."""
        by_shard: list[list[Place]] = [[] for _ in range(self.sampler.shards)]
        for place in self.finished:
            shard, _ = place
            by_shard[shard].append(place)
        return by_shard

    def _has_enough(self, due: set[Place]) -> bool:
        """Return whether the finished groups are enough for a call and include all due groups."""
        sampler = self.sampler
        num_finished = np.array([len(places) for places in self._finished_places()])
        return quotas.is_enough(num_finished, sampler.num_prompts, sampler.slack) and due <= self.finished.keys()

    def _due_mask(self, due: set[Place]) -> jax.Array:
        """Return a mask [M,E] bool of the due entries, on the devices."""
        sampler = self.sampler
        mask = np.zeros((sampler.shards, sampler.entries), bool)
        for place in due:
            mask[place] = True
        return sharding.put(mask, sharding.leading(sampler.mesh, mask))

    def _read_flags(self, flags: tuple[jax.Array, ...]) -> Any:
        """Return stop reasons and lengths [M,E,G] after a chunk, and the numbers of received answers if there are any.

        If there is an environment, the new turns of waiting rows are sent to it.
        """
        if self.conversations:
            return self.conversations.ask(flags, self.open_prompts)
        return jax.device_get(flags)

    def _start_reading(
        self,
        reasons: np.ndarray,
        lengths: np.ndarray,
        answer_counts: np.ndarray | None = None,
    ) -> Reading:
        """Record the newly finished groups and start reading their tokens, one group per shard at a time."""
        new_places: list[list[Place]] = [[] for _ in range(self.sampler.shards)]
        for place, prompt in self.open_prompts.items():
            if place in self.finished or not (reasons[place] != STOP_NONE).all():
                continue
            self.finished[place] = FinishedGroup(
                group_id=prompt.group_id,
                example=prompt.example,
                lengths=(lengths[place] - len(prompt.tokens)).tolist(),
                stop_reasons=reasons[place].tolist(),
                turns=[] if answer_counts is None else (answer_counts[place] + 1).tolist(),
            )
            new_places[place[0]].append(place)
        reading: Reading = []
        for places in itertools.zip_longest(*new_places):
            entries = np.array([place[1] if place else 0 for place in places], np.int32)
            entries = sharding.put(entries, sharding.leading(self.sampler.mesh, entries))
            reading.append((places, self.programs["read_group"](self.state.tokens, entries)))
        return reading

    def _receive(self, reading: Reading, on_finished: Callable[[FinishedGroup], Any]) -> None:
        """Store the token ids of finished groups of this host and pass the groups to ``on_finished``."""
        for places, tokens in reading:
            for shard, rows in sharding.own_rows(tokens).items():
                place = places[shard]
                if place is None:
                    continue
                group = self.finished[place]
                start = len(self.open_prompts[place].tokens)
                completions = []
                for row, length in zip(rows, group.lengths, strict=True):
                    completions.append(row[start : start + length].tolist())
                group.completions = completions
                if self.conversations:
                    group.played = self.conversations.played(place, group.example, completions)
                group.ticket = on_finished(group)

    def take(self) -> Rollout:
        """Remove the groups of the last ``generate`` call. Return their P*G rows in the same order, on the device."""
        sampler = self.sampler
        indices = quotas.arrays(self._chosen, sampler.num_prompts, sampler.slack, sampler.entries)
        indices = sharding.put(indices, sharding.leading(sampler.mesh, indices))
        rollout, draws, self.state = self.programs["collect"](self.state, *indices)
        self.draws.append(draws)
        for places in self._chosen:
            for place in places:
                del self.open_prompts[place]
                del self.finished[place]
                if self.conversations:
                    self.conversations.forget(place)
        self.calls += 1
        if not sampler.lookahead:
            self.state = None
        return rollout

    def take_draws(self) -> DrawSums:
        """Return sums over all tokens drawn since the last ``take_draws`` call, including tokens of open rows."""
        draws = jax.device_get(self.draws)
        self.draws = []
        return jax.tree.map(lambda *sums: float(np.sum(sums)), *draws)

    # ---- opening prompts ---------------------------------------------------------------------------------------------

    def prompts_wanted(self) -> int:
        """Return the number of prompts that the next ``generate`` call needs to fill the free entries."""
        return sum(map(len, self._free()))

    def _free(self) -> list[list[Place]]:
        """Return, for each shard, the entries that new prompts may take."""
        M = self.sampler.shards
        E = self.sampler.entries
        free = []
        for m in range(M):
            places = [(m, e) for e in range(E)]
            free.append([place for place in places if place not in self.open_prompts])
        if not self.max_lag:
            return free
        # Capacity of a shard. Past calls do not appear in the formula, because each call adds P prompts to the capacity
        # and collects P groups.
        capacity = (self.max_lag + 1) * (self.sampler.num_prompts // M)
        allowed = []
        for places in free:
            num_open = E - len(places)
            allowed.append(places[: max(0, capacity - num_open)])
        return allowed

    def _due(self) -> set[Place]:
        """Return the open prompts that the next call must wait for. The result is empty if ``max_lag`` is 0.

        The result contains two kinds of prompts:

        - Prompts that reach the limit with the next call.
        - The oldest prompts that reach the limit with a later call, if the later calls cannot collect all of them.

        A later call is assumed to collect its quota of P / M groups from the shard. A call can collect fewer groups
        only if the shard has at most ``max_lag`` quotas of entries (``quotas.slack_of``). In this case the later calls
        have enough room.
        """
        due: set[Place] = set()
        if not self.max_lag:
            return due
        quota = self.sampler.num_prompts // self.sampler.shards
        for shard in range(self.sampler.shards):
            places = [place for place in self.open_prompts if place[0] == shard]
            places.sort(key=self._group_id)
            for later_calls in range(self.max_lag):
                last_call = self.calls + later_calls - self.max_lag
                late = [place for place in places if self.open_prompts[place].call <= last_call]
                num_due = max(0, len(late) - later_calls * quota)
                due |= set(late[:num_due])
        return due

    def _open(self, params: Any, prompts: PromptBatch, version: jax.Array) -> None:
        """Prefill new prompts into free entries, P at a time. Each shard takes a contiguous part of the prompts."""
        sampler = self.sampler
        M = sampler.shards
        quota = sampler.num_prompts // M
        free = self._free()
        assert len(prompts.examples) == sum(map(len, free)), "one prompt for every free entry"
        starts = np.cumsum([0, *map(len, free)])
        num_waves = -(-max(map(len, free)) // quota)
        version_argument = (version,) if sampler.stale_cache else ()
        for wave in range(num_waves):
            index = np.zeros((M, quota), np.int64)
            entry = np.full((M, quota), sampler.entries, np.int32)  # unused places hold entry E, which the device drops
            begin = wave * quota
            for m in range(M):
                for j, place in enumerate(free[m][begin : begin + quota]):
                    i = starts[m] + begin + j
                    index[m, j] = i
                    entry[m, j] = place[1]
                    self.open_prompts[place] = self._open_prompt(prompts, i)
            flat = index.reshape(-1)
            arrays = (
                prompts.tokens[flat],
                prompts.length[flat],
                prompts.group_id[flat],
                entry,
            )
            arrays = sharding.put(arrays, sharding.leading(sampler.mesh, arrays))
            self.state = self.programs["prefill"](params, self.state, *arrays, *version_argument)

    def _open_prompt(self, prompts: PromptBatch, i: int) -> OpenPrompt:
        """Return the record of prompt ``i`` of a batch, opened by this call."""
        return OpenPrompt(
            group_id=int(prompts.group_id[i]),
            example=prompts.examples[i],
            tokens=prompts.tokens[i, : prompts.length[i]].tolist(),
            call=self.calls,
        )

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def opened(self) -> list[list[int]]:
        """Return shard, entry, calls since the opening and group_id of each open prompt, for ``adopt``."""
        opened = []
        for place, prompt in self.open_prompts.items():
            lag = self.calls - prompt.call
            opened.append([*place, lag, prompt.group_id])
        return opened

    def adopt(
        self,
        shard: int,
        entry: int,
        lag: int,
        group_id: int,
        example: Example,
        prompt: list[int],
    ) -> None:
        """Record an open prompt of a restored device state. The prompt was opened ``lag`` calls ago."""
        self.open_prompts[shard, entry] = OpenPrompt(group_id, example, prompt, self.calls - lag)
