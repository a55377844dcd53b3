"""Multi-turn completions on the device: rows wait for their environment, then read its answer.

    step       The policy ends a turn. Its row waits in its slot, and decode steps skip the slot.
    chunk      A row that has waited through a whole chunk appends its answer and reads the answer tokens. Each forward
               reads the next tokens of some rows. Forwards repeat until all answers are read.
    step       The policy draws again, after the last token of the answer.

To read tokens means to compute their keys and values for the KV cache. Only the state decides which chunk takes an
answer; the speed of the environment has no influence. Therefore a run that was stopped and resumed draws the same rows.
A row that reads attends to its prompt and its cache in token order, in the same way as the learner's rows attend to
their prompt.

While a row waits, its slot writes garbage into the cache after the row's tokens. When the row reads, its tokens are
moved behind the garbage, because the newest token of a cache must lie just before ``cache_end``.

Letters: as in ``sampler.py``, and A the width of an answer, R rows that read in one forward, T tokens read per row in
one forward, C positions of a layer's cache.
Owns: the state of rows that wait for their environment, how these rows continue. Does not know: environments, text, how
a token is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.actor import tables
from jaxrl_llm.models import mixers, moe
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.attention import Prompt
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_NONE

Waiting = Mapping[str, jax.Array]

# One forward reads at most READ_TOKENS tokens per row, for at most 1 / READ_PART of the slots. Small forwards waste
# little work on padding when few rows have few tokens to read. ``reread`` uses more tokens, because its rows are
# longer.
READ_TOKENS = 32
READ_PART = 4
REREAD_TOKENS = 128


def empty(shards: int, entries: int, group_size: int, slots: int) -> Waiting:
    """Return the waiting state of a sampler without rows.

    Returns:
        "is_waiting" [M,E,G] bool: the row waits for its environment.
        "is_due" [M,E,G] bool: the row has waited through a whole chunk and takes its answer at the start of the next
        one.
        "known" [M,E,G] i32: end of the row's newest answer; 0 before the first answer.
        "heard" [M,E,G] i32: number of answers that the row has received.
        "idle_steps" [M,Z/M] i32: decode steps that have skipped the slot while its row waits.
    """
    rows = (shards, entries, group_size)
    return {
        "is_waiting": jnp.zeros(rows, bool),
        "is_due": jnp.zeros(rows, bool),
        "known": jnp.zeros(rows, jnp.int32),
        "heard": jnp.zeros(rows, jnp.int32),
        "idle_steps": jnp.zeros((shards, slots // shards), jnp.int32),
    }


def idle_room(chunk_steps: int) -> int:
    """Return the spare cache positions per slot: the most decode steps that can pass while a row waits."""
    return 2 * chunk_steps


def by_slot(state: Any, of_rows: jax.Array) -> jax.Array:
    """Return the values [M,Z/M] of the slots' rows from a table [M,E,G]. An idle slot gets the value of row 0."""
    return jnp.take_along_axis(tables.by_row(of_rows), jnp.maximum(state.slot_row, 0), axis=1)


def decodes(state: Any) -> jax.Array:
    """Return a mask [M,Z/M] bool of the slots with a row that does not wait."""
    has_row = state.slot_row >= 0
    if not state.waiting:
        return has_row
    return has_row & ~by_slot(state, state.waiting["is_waiting"])


def length_of(state: Any) -> jax.Array:
    """Return the number of tokens drawn in the current turn of each slot's row, [M,Z/M] i32."""
    prompt_end = by_slot(state, state.prompt_length)
    answer_end = by_slot(state, state.waiting["known"])
    return by_slot(state, state.length) - jnp.maximum(prompt_end, answer_end)


def sample_of(state: Any, sample: jax.Array, group_id: jax.Array, branches: tuple[int, int]) -> jax.Array:
    """Return the sample index [M,Z/M] i32 that selects the noise of each slot's next token.

    Normally each row uses its own sample index. While rows share their first turns, they all use the sample index of
    the first of these rows. Rows with the same noise draw the same tokens. A deterministic environment gives these rows
    the same answers. After the shared turns, each row continues with its own noise.

    Args:
        sample: [M,Z/M] i32 index of each slot's row in its group.
        group_id: [M,Z/M] i32.
        branches: (rows, turns). Every ``rows`` adjacent rows of a group share 1 to ``turns`` turns. The number of
            shared turns is 1 + group_id % turns. (0, 0) means that no rows share turns.
    """
    rows, most = branches
    if not (rows and most and state.waiting):
        return sample
    num_shared_turns = 1 + group_id % most
    is_shared = by_slot(state, state.waiting["heard"]) < num_shared_turns
    first_sample = sample // rows * rows
    return jnp.where(is_shared, first_sample, sample)


def append_answers(
    model: Model,
    params: Any,
    state: Any,
    rope: Any,
    answers: jax.Array,
    verdict: jax.Array,
) -> Any:
    """Append the environment's answers to the due rows, and read the answers except for their last tokens.

    The next decode step reads the last token.

    Args:
        params, rope: as for a decode step.
        answers: [M,E,G,A] i32 tokens of each row's answer, padded with 0.
        verdict: [M,E,G] i32. A positive value is the number of answer tokens. A negative value is minus the ``STOP_*``
            with which the row ends. 0 means no answer. Values of rows that are not due are ignored.

    Returns:
        The new ``SamplerState``.
    """
    waiting = state.waiting
    columns = dict(state.columns)
    is_due = waiting["is_waiting"] & waiting["is_due"]
    verdict = jnp.where(is_due, verdict, 0)
    has_answer = verdict > 0
    ends = verdict < 0
    answer_width = answers.shape[3]
    position = jnp.arange(state.tokens.shape[3]).reshape(1, 1, 1, -1)
    place = position - state.length[..., None]  # index of a position of the row among the answer tokens
    new = jnp.take_along_axis(answers, jnp.clip(place, 0, answer_width - 1), axis=3)
    is_new = (place >= 0) & (place < verdict[..., None])
    if "support" in columns:  # an answer token was not drawn: its support contains only the token itself
        columns["support"] = jnp.where(is_new[..., None], new[..., None], columns["support"])
    slot_ends = by_slot(state, ends) & (state.slot_row >= 0)
    still_waits = waiting["is_waiting"] & (verdict == 0)
    state = state.replace(
        tokens=jnp.where(is_new, new, state.tokens),
        stop_reason=jnp.where(ends, -verdict, state.stop_reason).astype(jnp.int8),
        slot_row=jnp.where(slot_ends, -1, state.slot_row),
        columns=columns,
        waiting={
            "is_waiting": still_waits,
            "is_due": still_waits,  # due at the start of the next chunk
            "known": jnp.where(has_answer, state.length + verdict, waiting["known"]),
            "heard": waiting["heard"] + has_answer,
            "idle_steps": jnp.where(slot_ends, 0, waiting["idle_steps"]),
        },
    )
    return _read_all(model, params, rope, min(answer_width, READ_TOKENS), state)


def reread(model: Model, params: Any, state: Any, rope: Any, is_stale: jax.Array) -> Any:
    """Return a ``SamplerState`` in which ``params`` have recomputed the slot caches of the rows in stale entries.

    Each row is read from the last prompt token up to the position that its slot had read. The row then continues with
    the caches that these weights would have computed from the beginning. The caches of the prompts must already be
    computed with these weights.

    Args:
        params, rope: as for a decode step.
        is_stale: [M,E] bool, entries with caches of older weights.
    """
    waiting = state.waiting
    is_unfinished = state.started & (state.stop_reason == STOP_NONE)  # all these rows have slots
    begins = is_stale[:, :, None] & is_unfinished
    slot_begins = by_slot(state, begins) & (state.slot_row >= 0)
    group_size = state.tokens.shape[2]
    entry = jnp.maximum(state.slot_row, 0) // group_size
    begin = functools.partial(mixers.begin, model.arch, entry_MZ=entry, takes_MZ=slot_begins)
    idle_steps = waiting["idle_steps"] if waiting else jnp.zeros_like(state.slot_row)
    state = state.replace(
        cache_k=begin(state.cache_k, state.prompt_k),
        cache_v=begin(state.cache_v, state.prompt_v),
        length=jnp.where(begins, state.prompt_length, state.length),
        waiting={
            "known": jnp.where(begins, state.length, 0),
            "idle_steps": jnp.where(slot_begins, 0, idle_steps),
        },
    )
    state = _read_all(model, params, rope, min(state.tokens.shape[3], REREAD_TOKENS), state)
    if waiting:
        waiting = {**waiting, "idle_steps": state.waiting["idle_steps"]}
    return state.replace(waiting=waiting)


def _read_all(model: Model, params: Any, rope: Any, num_tokens: int, state: Any) -> Any:
    """Read all unread tokens, at most ``num_tokens`` of a row in one forward."""

    def has_unread(state: Any) -> jax.Array:
        return jnp.any(_unread(state) > 0)

    read = functools.partial(_read, model, params, rope, num_tokens)
    return jax.lax.while_loop(has_unread, read, state)


def _unread(state: Any) -> jax.Array:
    """Return the number of known tokens of each slot's row that are not yet read, [M,Z/M] i32."""
    num_unread = state.waiting["known"] - state.length
    return jnp.where(state.slot_row >= 0, by_slot(state, num_unread), 0)


def _read(model: Model, params: Any, rope: Any, T: int, state: Any) -> Any:
    """Read up to T tokens of each shard's first rows with unread tokens, in one forward."""
    S = state.tokens.shape[3]
    readers = _readers(state, T)
    # Position in the row of the token that follows each token to read.
    place_MRT = readers.length[..., None] + jnp.arange(T)[None, None]
    token_MRT = tables.take_at(tables.by_row(state.tokens), readers.row, jnp.minimum(place_MRT, S) - 1)
    places = readers.places(state)
    caches = (state.cache_k, state.cache_v)
    past = _by_layer(model, places, functools.partial(_past, S), (state.prompt_k, state.prompt_v), caches)
    hidden, made = model.forward(
        params,
        tables.flat(token_MRT),
        tables.flat(place_MRT) - 1,
        prompt=Prompt(*past, visible=jnp.arange(S)[None] < places["next"][:, None]),
        length=places["size"],
        rope=rope,
    )
    cache_k, cache_v = _by_layer(model, places, _kept, past, made[:2], caches)
    columns = dict(state.columns)
    if "experts" in columns:  # each position stores the experts of the previous token
        chosen = moe.by_token(hidden, made)[1].reshape(*place_MRT.shape, -1)
        columns["experts"] = _with_experts(columns["experts"], chosen, readers, place_MRT)
    return state.replace(
        cache_k=cache_k,
        cache_v=cache_v,
        length=_add_to_rows(state.length, readers),
        columns=columns,
        waiting={**state.waiting, "idle_steps": _without_idle_steps(state.waiting["idle_steps"], readers)},
    )


class _Readers(NamedTuple):
    """The rows that read in one forward, each [M,R] i32.

    Attributes:
        slot: slot of the row.
        row: index of the row in the shard's table.
        size: number of tokens that the row reads; 0 for a row without unread tokens.
        length: number of tokens of the row that are read, and the first token to read.
    """

    slot: jax.Array
    row: jax.Array
    size: jax.Array
    length: jax.Array

    def places(self, state: Any) -> dict[str, jax.Array]:
        """Return the slots, entries, sizes and cache positions of the rows, [R] i32 by name."""
        group_size = state.tokens.shape[2]
        prompt_length = _of_slots(by_slot(state, state.prompt_length), self.slot)
        places = {
            "slot": self.slot,
            "entry": self.row // group_size,
            "size": self.size,
            "idle": _of_slots(state.waiting["idle_steps"], self.slot),
            "oldest": prompt_length - 1,  # position of the first token in the slot's cache
            "next": self.length - 1,  # position of the first unread token
            "end": jnp.broadcast_to(state.cache_end, self.size.shape),
        }
        return {name: tables.flat(x) for name, x in places.items()}


def _readers(state: Any, T: int) -> _Readers:
    """Return the rows that read next: in each shard the first rows with unread tokens."""
    num_slots = state.slot_row.shape[1]
    num_readers = -(-num_slots // READ_PART)
    unread_MZ = _unread(state)
    slot_MR = jnp.argsort(unread_MZ <= 0, axis=1, stable=True)[:, :num_readers]
    return _Readers(
        slot=slot_MR,
        row=_of_slots(jnp.maximum(state.slot_row, 0), slot_MR),
        size=jnp.clip(_of_slots(unread_MZ, slot_MR), 0, T),
        length=_of_slots(by_slot(state, state.length), slot_MR),
    )


def _of_slots(values_MZ: jax.Array, slot_MR: jax.Array) -> jax.Array:
    """Return the values [M,R] of some slots from the values of all slots."""
    return jnp.take_along_axis(values_MZ, slot_MR, axis=1)


def _by_layer(model: Model, places: Mapping[str, jax.Array], function: Callable[..., Any], *arrays: Any) -> list[Any]:
    """Apply ``function`` to the keys and to the values of each layer. Each device works on its own rows and heads.

    Args:
        places: the result of ``_Readers.places``.
        function: receives the axis of a block's positions (None if the layer has states), the layer's part of each of
            ``arrays``, and ``places``.
        arrays: pairs of keys and values, each by layer.

    Returns:
        The results for the keys and for the values, each by layer.
    """
    axis_of_keys = 2 if model.attention == "splash" else 3
    axis_of_values = 2
    keys, values = zip(*arrays, strict=True)
    results = []
    for axis, by_layer in ((axis_of_keys, keys), (axis_of_values, values)):
        of_layers = []
        for layer, *of_layer in zip(model.arch.by_layer, *by_layer, strict=True):
            call = functools.partial(function, None if layer.is_recurrent else axis)
            of_layers.append(_on_devices(call, of_layer, places))
        results.append(tuple(of_layers))
    return results


def _on_devices(function: Callable[..., Any], of_layer: list[Any], places: Mapping[str, jax.Array]) -> Any:
    """Call ``function`` on each device with the device's rows and heads of one layer's arrays."""
    split = ("batch", "kv_heads")[: of_layer[0].ndim - 2]
    axes = (*[split] * len(of_layer), ("batch",))
    return sharding.by_device(function, *of_layer, places, axes=axes, shared=len(split))


def _with_experts(table: jax.Array, chosen: jax.Array, readers: _Readers, place_MRT: jax.Array) -> jax.Array:
    """Return the column "experts" [M,E,G,S,...] with the experts [M,R,T,...] of the tokens that the rows have read."""
    _, _, G, S, _ = table.shape
    T = place_MRT.shape[2]
    is_read = jnp.arange(T)[None, None] < readers.size[..., None]
    place_MRT = jnp.where(is_read, place_MRT, S)  # out of range for padding
    rows = tables.put_at(tables.by_row(table), readers.row, place_MRT, chosen.astype(table.dtype))
    return tables.by_group(rows, G)


def _add_to_rows(length: jax.Array, readers: _Readers) -> jax.Array:
    """Return the lengths [M,E,G] with the tokens that the rows have read."""

    def of_shard(length_Q: jax.Array, row_R: jax.Array, size_R: jax.Array) -> jax.Array:
        return length_Q.at[row_R].add(size_R)

    rows = jax.vmap(of_shard)(tables.by_row(length), readers.row, readers.size)
    return tables.by_group(rows, length.shape[2])


def _without_idle_steps(idle_steps: jax.Array, readers: _Readers) -> jax.Array:
    """Return the idle steps [M,Z/M], 0 for the slots whose rows have read."""

    def of_shard(idle_steps_Z: jax.Array, slot_R: jax.Array, size_R: jax.Array) -> jax.Array:
        return idle_steps_Z.at[slot_R].multiply(size_R == 0)

    return jax.vmap(of_shard)(idle_steps, readers.slot, readers.size)


def _past(
    width: int,
    axis: int | None,
    of_prompts: jax.Array,
    blocks: tuple[jax.Array, ...],
    places: Mapping[str, jax.Array],
) -> jax.Array:
    """Return one layer's keys or values [R,K,S,H] of the reading rows in token order, or their delta rule states.

    Args:
        width: S, the row width.
        axis: the axis of a block's positions; None if the layer has states.
        of_prompts: [E,K,L,H] keys or values of the prompts.
        blocks: the slots' cache blocks of the layer.
        places: slots, entries, sizes and cache positions of the reading rows, [R] i32 by name.
    """
    own = jnp.concatenate([block[places["slot"]] for block in blocks], axis=axis or 0)
    if axis is None:
        return own
    position = jnp.arange(width)[None]
    begin = places["end"] - places["idle"] - places["next"]  # the cache position of the row's first token
    place_RS = begin[:, None] + position
    own = _in_order(jnp.moveaxis(own, axis, 2), place_RS % own.shape[axis])
    prompts = of_prompts[places["entry"]]
    num_missing = width - prompts.shape[2]
    prompts = jnp.pad(prompts, ((0, 0), (0, 0), (0, num_missing), (0, 0)))
    is_before_RS = position < places["oldest"][:, None]
    return jnp.where(is_before_RS[:, None, :, None], prompts, own)


def _kept(
    axis: int | None,
    past_RKSH: jax.Array,
    new_RKTH: jax.Array,
    blocks: tuple[jax.Array, ...],
    places: Mapping[str, jax.Array],
) -> Any:
    """Return one layer's cache blocks of all slots, with the newly read tokens added. See ``_past``."""
    num_slots = len(blocks[0])
    slot = jnp.where(places["size"] > 0, places["slot"], num_slots)  # out of range: the slot stays unchanged
    if axis is None:
        parts = [new_RKTH]
    else:
        S = past_RKSH.shape[2]
        C = sum(block.shape[axis] for block in blocks)
        age_RC = (places["end"][:, None] - 1 - jnp.arange(C)[None]) % C
        nth_RC = places["size"][:, None] - 1 - age_RC  # index among the new tokens; negative for earlier tokens
        index_RC = jnp.where(nth_RC < 0, places["next"][:, None], S) + nth_RC
        past_and_new = jnp.concatenate([past_RKSH, new_RKTH], axis=2)
        in_order = _in_order(past_and_new, jnp.maximum(index_RC, 0))
        parts = jnp.split(jnp.moveaxis(in_order, 2, axis), len(blocks), axis=axis)
    kept = []
    for block, part in zip(blocks, parts, strict=True):
        # Remove nonfinite values, which would stay in the slot for later rows.
        finite = jnp.where(jnp.isfinite(part), part, 0)
        kept.append(block.at[slot].set(finite, mode="drop"))
    return tuple(kept)


def _in_order(x_RKXH: jax.Array, index_RY: jax.Array) -> jax.Array:
    """Return the positions ``index_RY`` of keys or values, [R,K,Y,H]."""
    return jnp.take_along_axis(x_RKXH, index_RY[:, None, :, None], axis=2)


def keep_states(state: Any, made: Any, is_active_MZ: jax.Array, arch: Architecture) -> Any:
    """Return the new caches ``made``, but keep the old delta rule states of the slots that a step skips."""

    def kept(old: jax.Array, new: jax.Array) -> jax.Array:
        is_active = is_active_MZ.reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(is_active, new, old)

    caches = []
    for old_by_layer, new_by_layer in zip((state.cache_k, state.cache_v), made[:2], strict=True):
        by_layer = []
        for layer, old, new in zip(arch.by_layer, old_by_layer, new_by_layer, strict=True):
            by_layer.append(tuple(map(kept, old, new)) if layer.is_recurrent else new)
        caches.append(tuple(by_layer))
    return tuple(caches)


def waiting_after_step(state: Any, is_waiting: jax.Array, is_active_MZ: jax.Array) -> Waiting:
    """Return ``state.waiting`` after a decode step. The idle steps of inactive slots with a row increase by one."""
    is_idle_MZ = (state.slot_row >= 0) & ~is_active_MZ
    idle_steps = state.waiting["idle_steps"] + is_idle_MZ
    return {**state.waiting, "is_waiting": is_waiting, "idle_steps": idle_steps}


def host_arrays(state: Any) -> tuple[jax.Array, ...]:
    """Return the arrays that the host reads after each chunk.

    Returns:
        Stop reasons, lengths and numbers of received answers, each [M,E,G]. The waiting rows of the slots [M,Z/M], -1
        for slots without a waiting row. The tokens and log-probs of the slots' rows [M,Z/M,S].
    """
    row = jnp.maximum(state.slot_row, 0)
    waits = by_slot(state, state.waiting["is_waiting"]) & (state.slot_row >= 0)
    return (
        state.stop_reason,
        state.length,
        state.waiting["heard"],
        jnp.where(waits, row, -1),
        _rows_of_slots(state.tokens, row),
        _rows_of_slots(state.behaviour_logp, row),
    )


def _rows_of_slots(table: jax.Array, row: jax.Array) -> jax.Array:
    """Return the rows [M,Z/M,S] of a table [M,E,G,S]. They stay on the devices of their shard."""
    return sharding.by_device(tables.take, tables.by_row(table), row, axes=(("batch",), ("batch",)))
