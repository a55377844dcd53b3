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
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

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
READ_TOKENS, READ_PART = 32, 4
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
    rows = shards, entries, group_size
    flags = {name: jnp.zeros(rows, bool) for name in ("is_waiting", "is_due")}
    counts = {name: jnp.zeros(rows, jnp.int32) for name in ("known", "heard")}
    return flags | counts | {"idle_steps": jnp.zeros((shards, slots // shards), jnp.int32)}


def idle_room(chunk_steps: int) -> int:
    """Return the spare cache positions per slot: the most decode steps that can pass while a row waits."""
    return 2 * chunk_steps


def by_slot(state: Any, of_rows: jax.Array) -> jax.Array:
    """Return the values [M,Z/M] of the slots' rows from a table [M,E,G]. An idle slot gets the value of row 0."""
    return jnp.take_along_axis(
        of_rows.reshape(state.slot_row.shape[0], -1),
        jnp.maximum(state.slot_row, 0),
        axis=1,
    )


def decodes(state: Any) -> jax.Array:
    """Return a mask [M,Z/M] bool of the slots with a row that does not wait."""
    has_row = state.slot_row >= 0
    return has_row & ~by_slot(state, state.waiting["is_waiting"]) if state.waiting else has_row


def length_of(state: Any) -> jax.Array:
    """Return the number of tokens drawn in the current turn of each slot's row, [M,Z/M] i32."""
    before = jnp.maximum(by_slot(state, state.prompt_length), by_slot(state, state.waiting["known"]))
    return by_slot(state, state.length) - before


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
    is_shared = by_slot(state, state.waiting["heard"]) < 1 + group_id % most
    return jnp.where(is_shared, sample // rows * rows, sample)


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
    w, columns = state.waiting, dict(state.columns)
    said = jnp.where(w["is_waiting"] & w["is_due"], verdict, 0)
    goes_on, ends = said > 0, said < 0
    place = jnp.arange(state.tokens.shape[3]).reshape(1, 1, 1, -1) - state.length[..., None]
    new = jnp.take_along_axis(answers, jnp.clip(place, 0, answers.shape[3] - 1), axis=3)
    is_new = (place >= 0) & (place < said[..., None])
    if "support" in columns:  # an answer token was not drawn: its support contains only the token itself
        columns["support"] = jnp.where(is_new[..., None], new[..., None], columns["support"])
    slot_ends = by_slot(state, ends) & (state.slot_row >= 0)
    waits = w["is_waiting"] & (said == 0)
    state = state.replace(
        tokens=jnp.where(is_new, new, state.tokens),
        stop_reason=jnp.where(ends, -said, state.stop_reason).astype(jnp.int8),
        slot_row=jnp.where(slot_ends, -1, state.slot_row),
        columns=columns,
        waiting={
            "is_waiting": waits,
            "is_due": waits,  # due at the start of the next chunk
            "known": jnp.where(goes_on, state.length + said, w["known"]),
            "heard": w["heard"] + goes_on,
            "idle_steps": jnp.where(slot_ends, 0, w["idle_steps"]),
        },
    )
    read = functools.partial(_read, model, params, rope, min(answers.shape[3], READ_TOKENS))
    return jax.lax.while_loop(lambda state: jnp.any(_unread(state) > 0), read, state)


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
    # All these rows have slots, because they have started and have not stopped.
    begins = is_stale[:, :, None] & state.started & (state.stop_reason == STOP_NONE)
    slot_begins = by_slot(state, begins) & (state.slot_row >= 0)
    entry = jnp.maximum(state.slot_row, 0) // state.tokens.shape[2]
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
    tokens = min(state.tokens.shape[3], REREAD_TOKENS)
    read = functools.partial(_read, model, params, rope, tokens)
    state = jax.lax.while_loop(lambda state: jnp.any(_unread(state) > 0), read, state)
    return state.replace(waiting={**waiting, "idle_steps": state.waiting["idle_steps"]} if waiting else waiting)


def _unread(state: Any) -> jax.Array:
    """Return the number of known tokens of each slot's row that are not yet read, [M,Z/M] i32."""
    return jnp.where(state.slot_row >= 0, by_slot(state, state.waiting["known"] - state.length), 0)


def _read(model: Model, params: Any, rope: Any, T: int, state: Any) -> Any:
    """Read up to T tokens of each shard's first rows with unread tokens, in one forward."""
    (M, slots), (_, _, G, S), unread_MZ = (
        state.slot_row.shape,
        state.tokens.shape,
        _unread(state),
    )
    slot_MR = jnp.argsort(unread_MZ <= 0, axis=1, stable=True)[:, : -(-slots // READ_PART)]
    take = lambda of_slots: jnp.take_along_axis(of_slots, slot_MR, axis=1)
    row_MR, size_MR = (
        take(jnp.maximum(state.slot_row, 0)),
        jnp.clip(take(unread_MZ), 0, T),
    )
    length_MR, prompt_MR = (take(by_slot(state, x)) for x in (state.length, state.prompt_length))
    rows = lambda x: x.reshape(M, -1, *x.shape[3:])
    place_MRT = length_MR[..., None] + jnp.arange(T)[None, None]  # row position of the token after each read token
    token_MRT = jax.vmap(lambda t, r, p: t[r[:, None], p])(rows(state.tokens), row_MR, jnp.minimum(place_MRT, S) - 1)

    flat = lambda x: sharding.constrain(x.reshape(-1, *x.shape[2:]), "batch", *(None,) * (x.ndim - 2))
    at = {
        "slot": slot_MR,
        "entry": row_MR // G,
        "size": size_MR,
        "idle": take(state.waiting["idle_steps"]),
    }
    # Cache positions of the slot's first token and of its first unread token.
    at |= {"oldest": prompt_MR - 1, "next": length_MR - 1}
    at |= {"end": jnp.broadcast_to(state.cache_end, size_MR.shape)}
    at = {name: flat(x) for name, x in at.items()}

    def each(function, *arrays):  # for the keys and values of a layer; each device works on its own rows and heads
        def one(axis, layer, first, *others):
            split = ("batch", "kv_heads")[: first.ndim - 2]
            axes = (*(split for _ in (first, *others)), ("batch",))
            call = functools.partial(function, None if layer.is_recurrent else axis)
            return sharding.by_device(call, first, *others, at, axes=axes, shared=len(split))

        both = zip((2 if model.attention == "splash" else 3, 2), *arrays, strict=True)
        return [tuple(map(functools.partial(one, axis), model.arch.by_layer, *x)) for axis, *x in both]

    past = each(
        functools.partial(_past, S),
        (state.prompt_k, state.prompt_v),
        (state.cache_k, state.cache_v),
    )
    seen = Prompt(*past, visible=jnp.arange(S)[None] < at["next"][:, None])
    how = {"prompt": seen, "length": at["size"], "rope": rope}
    hidden, made = model.forward(params, flat(token_MRT), flat(place_MRT) - 1, **how)
    cache_k, cache_v = each(_kept, past, made[:2], (state.cache_k, state.cache_v))

    columns, unrows = (
        dict(state.columns),
        lambda x: x.reshape(state.length.shape + x.shape[2:]),
    )
    if "experts" in columns:  # each position stores the experts of the previous token
        chosen = moe.by_token(hidden, made)[1].reshape(*place_MRT.shape, -1).astype(columns["experts"].dtype)
        place_MRT = jnp.where(jnp.arange(T)[None, None] < size_MR[..., None], place_MRT, S)  # out of range for padding
        put = jax.vmap(lambda t, r, p, x: t.at[r[:, None], p].set(x, mode="drop"))
        columns["experts"] = unrows(put(rows(columns["experts"]), row_MR, place_MRT, chosen))
    length = jax.vmap(lambda t, r, x: t.at[r].add(x))(rows(state.length), row_MR, size_MR)
    idle = jax.vmap(lambda t, slot, x: t.at[slot].multiply(x == 0))(state.waiting["idle_steps"], slot_MR, size_MR)
    return state.replace(
        cache_k=cache_k,
        cache_v=cache_v,
        length=unrows(length),
        columns=columns,
        waiting={**state.waiting, "idle_steps": idle},
    )


def _past(
    width: int,
    axis: int | None,
    of_prompts: jax.Array,
    blocks: tuple[jax.Array, ...],
    at: Any,
) -> jax.Array:
    """Return one layer's keys or values [R,K,S,H] of the reading rows in token order, or their delta rule states.

    Args:
        width: S, the row width.
        axis: the axis of a block's positions; None if the layer has states.
        of_prompts: [E,K,L,H] keys or values of the prompts.
        blocks: the slots' cache blocks of the layer.
        at: slots, entries, sizes and positions of the reading rows, [R] i32 by name.
    """
    own = jnp.concatenate([x[at["slot"]] for x in blocks], axis=axis or 0)
    if axis is None:
        return own
    place_RS = (at["end"] - at["idle"] - at["next"])[:, None] + jnp.arange(width)[None]
    own = _in_order(jnp.moveaxis(own, axis, 2), place_RS % own.shape[axis])
    prompts = jnp.pad(
        of_prompts[at["entry"]],
        ((0, 0), (0, 0), (0, width - of_prompts.shape[2]), (0, 0)),
    )
    is_before_RS = jnp.arange(width)[None] < at["oldest"][:, None]
    return jnp.where(is_before_RS[:, None, :, None], prompts, own)


def _kept(
    axis: int | None,
    past_RKSH: jax.Array,
    new_RKTH: jax.Array,
    blocks: tuple[jax.Array, ...],
    at: Any,
) -> Any:
    """Return one layer's cache blocks of all slots, with the newly read tokens added. See ``_past``."""
    parts, slot = [new_RKTH], jnp.where(at["size"] > 0, at["slot"], len(blocks[0]))  # out of range: slot unchanged
    if axis is not None:
        S, C = past_RKSH.shape[2], sum(x.shape[axis] for x in blocks)
        age_RC = (at["end"][:, None] - 1 - jnp.arange(C)[None]) % C
        nth_RC = at["size"][:, None] - 1 - age_RC  # index among the new tokens; negative for earlier tokens
        index_RC = jnp.where(nth_RC < 0, at["next"][:, None], S) + nth_RC
        both = jnp.concatenate([past_RKSH, new_RKTH], axis=2)
        parts = jnp.split(
            jnp.moveaxis(_in_order(both, jnp.maximum(index_RC, 0)), 2, axis),
            len(blocks),
            axis=axis,
        )
    whole = lambda x: jnp.where(
        jnp.isfinite(x), x, 0
    )  # remove nonfinite values, which would stay in the slot for later rows
    return tuple(x.at[slot].set(whole(part), mode="drop") for x, part in zip(blocks, parts, strict=True))


def _in_order(x_RKXH: jax.Array, index_RY: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_RKXH, index_RY[:, None, :, None], axis=2)


def keep_states(state: Any, made: Any, is_active_MZ: jax.Array, arch: Architecture) -> Any:
    """Return the new caches ``made``, but keep the old delta rule states of the slots that a step skips."""

    def kept(layer, old, new):
        if not layer.is_recurrent:
            return new
        mask = lambda x: is_active_MZ.reshape(-1, *(1,) * (x.ndim - 1))
        return tuple(jnp.where(mask(x), y, x) for x, y in zip(old, new, strict=True))

    of = zip((state.cache_k, state.cache_v), made[:2], strict=True)
    return tuple(tuple(map(kept, arch.by_layer, old, new)) for old, new in of)


def waiting_after_step(state: Any, is_waiting: jax.Array, is_active_MZ: jax.Array) -> Waiting:
    """Return ``state.waiting`` after a decode step. The idle steps of inactive slots with a row increase by one."""
    idle_steps = state.waiting["idle_steps"] + ((state.slot_row >= 0) & ~is_active_MZ)
    return {**state.waiting, "is_waiting": is_waiting, "idle_steps": idle_steps}


def host_arrays(state: Any) -> tuple[jax.Array, ...]:
    """Return the arrays that the host reads after each chunk.

    Returns:
        Stop reasons, lengths and numbers of received answers, each [M,E,G]. The waiting rows of the slots [M,Z/M], -1
        for slots without a waiting row. The tokens and log-probs of the slots' rows [M,Z/M,S].
    """
    M, _, _, S = state.tokens.shape
    row = jnp.maximum(state.slot_row, 0)
    waits = by_slot(state, state.waiting["is_waiting"]) & (state.slot_row >= 0)
    read = jax.vmap(lambda of_rows, row: of_rows[row])
    by_row = (x.reshape(M, -1, S) for x in (state.tokens, state.behaviour_logp))
    of_slots = [sharding.by_device(read, x, row, axes=(("batch",),) * 2) for x in by_row]
    return (
        state.stop_reason,
        state.length,
        state.waiting["heard"],
        jnp.where(waits, row, -1),
        *of_slots,
    )
