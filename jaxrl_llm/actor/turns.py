"""Completions of several turns, on the device: rows wait for their environment, then read what it answers.

    step       the policy ends a turn: its row waits in its slot, which others' steps go past
    chunk      a row that has waited through a whole chunk takes the answer that the host has by then, and reads it: the
               next tokens of some rows are one forward, after another, until none is left to read
    step       the policy draws again, after the answer's last token

Which chunk takes an answer follows from the state alone, not from when the environment was done: the same rows come of
a run that was stopped and resumed. A row that reads sees its prompt and its cache as rows of the learner see their
prompt, in the order of their tokens. What a slot that waits writes into its cache is garbage, after its row's tokens:
these are moved behind it when the row reads, for a cache's newest token lies before its end.

Letters: as in ``sampler.py``, and A the width of an answer, R rows that read at once, T tokens of each, C places of a
layer's cache.
Owns: what a row that waits is, how it goes on. Does not know: environments, text, how a token is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import delta_rule, moe
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.attention import Prompt
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_NONE

Waiting = Mapping[str, jax.Array]

# A forward of answers is of so many tokens of each row at most, and of so large a part of the slots: where few rows
# have little to read, little is computed that nobody wants. Rows that are read again have more tokens to read.
READ_TOKENS, READ_PART = 32, 4
REREAD_TOKENS = 128


def empty(shards: int, entries: int, group_size: int, slots: int) -> Waiting:
    """Of no row: "is_waiting" and "is_due" [M,E,G] bool, the latter of those that have waited through a whole chunk,
    "known" [M,E,G] i32, where a row's tokens end that are drawn or answered, "heard" [M,E,G] i32 answers, and
    "idle_steps" [M,Z/M] i32, steps that have gone past a slot whose row waits.
    """
    rows = shards, entries, group_size
    flags = {name: jnp.zeros(rows, bool) for name in ("is_waiting", "is_due")}
    counts = {name: jnp.zeros(rows, jnp.int32) for name in ("known", "heard")}
    return flags | counts | {"idle_steps": jnp.zeros((shards, slots // shards), jnp.int32)}


def idle_room(chunk_steps: int) -> int:
    """Places that a slot's cache wants besides its row's tokens: steps that may go past while the row waits."""
    return 2 * chunk_steps


def by_slot(state: Any, of_rows: jax.Array) -> jax.Array:
    """Of the rows that slots have, [M,Z/M] from [M,E,G]; some row's where a slot has none."""
    return jnp.take_along_axis(of_rows.reshape(state.slot_row.shape[0], -1), jnp.maximum(state.slot_row, 0), axis=1)


def decodes(state: Any) -> jax.Array:
    """[M,Z/M] bool: slots with a row that does not wait."""
    has_row = state.slot_row >= 0
    return has_row & ~by_slot(state, state.waiting["is_waiting"]) if state.waiting else has_row


def length_of(state: Any) -> jax.Array:
    """[M,Z/M] i32: tokens that the policy has drawn of the turn that each slot's row is in."""
    before = jnp.maximum(by_slot(state, state.prompt_length), by_slot(state, state.waiting["known"]))
    return by_slot(state, state.length) - before


def sample_of(state: Any, sample: jax.Array, group_id: jax.Array, branches: tuple[int, int]) -> jax.Array:
    """Index that names the noise of each slot's next token, [M,Z/M] i32: its row's in the group, ``sample``, or where
    rows of a group share their first turns that of the first of them.

    By the same noise rows draw the same tokens, and an environment that does as it did before says the same to them:
    they come to one state, and go on from there each by itself.

    Args:
        group_id: [M,Z/M] i32.
        branches: so many rows share their turns, 1 to so many of these, by turns of the groups; (0, 0) = none do.
    """
    rows, most = branches
    if not (rows and most and state.waiting):
        return sample
    is_shared = by_slot(state, state.waiting["heard"]) < 1 + group_id % most
    return jnp.where(is_shared, sample // rows * rows, sample)


def hear(model: Model, params: Any, state: Any, rope: Any, answers: jax.Array, verdict: jax.Array) -> Any:
    """A ``SamplerState`` whose due rows have what the environment said, and have read it but for its last token.

    Args:
        params, rope: as a decode step has them; the next one takes the last token.
        answers: [M,E,G,A] i32 tokens of each row's answer, 0 after them.
        verdict: [M,E,G] i32, above 0 how many tokens it has; below 0 minus the ``STOP_*`` that the row ends with; 0
            where there is nothing to hear. Of a row that is not due it is not looked at.
    """
    w, columns = state.waiting, dict(state.columns)
    said = jnp.where(w["is_waiting"] & w["is_due"], verdict, 0)
    goes_on, ends = said > 0, said < 0
    place = jnp.arange(state.tokens.shape[3]).reshape(1, 1, 1, -1) - state.length[..., None]
    new = jnp.take_along_axis(answers, jnp.clip(place, 0, answers.shape[3] - 1), axis=3)
    is_new = (place >= 0) & (place < said[..., None])
    if "support" in columns:  # all that such a token could have been is itself
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
            "is_due": waits,  # when the chunk that now begins has ended
            "known": jnp.where(goes_on, state.length + said, w["known"]),
            "heard": w["heard"] + goes_on,
            "idle_steps": jnp.where(slot_ends, 0, w["idle_steps"]),
        },
    )
    read = functools.partial(_read, model, params, rope, min(answers.shape[3], READ_TOKENS))
    return jax.lax.while_loop(lambda state: jnp.any(_unread(state) > 0), read, state)


def reread(model: Model, params: Any, state: Any, rope: Any, is_stale: jax.Array) -> Any:
    """Return a ``SamplerState`` whose slots' caches, of rows in stale entries, are computed anew with ``params``.

    Each row is read from its first token after the prompt up to what its slot had read: it then goes on as if these
    weights had drawn it from the beginning. The prompts' own caches must be of these weights already.

    Args:
        params, rope: as a decode step has them.
        is_stale: [M,E] bool.
    """
    waiting = state.waiting
    begins = is_stale[:, :, None] & state.started & (state.stop_reason == STOP_NONE)  # these rows have slots
    slot_begins = by_slot(state, begins) & (state.slot_row >= 0)
    entry = jnp.maximum(state.slot_row, 0) // state.tokens.shape[2]
    begin = functools.partial(delta_rule.begin, model.arch, entry_MZ=entry, takes_MZ=slot_begins)
    idle_steps = waiting["idle_steps"] if waiting else jnp.zeros_like(state.slot_row)
    state = state.replace(
        cache_k=begin(state.cache_k, state.prompt_k),
        cache_v=begin(state.cache_v, state.prompt_v),
        length=jnp.where(begins, state.prompt_length, state.length),
        waiting={"known": jnp.where(begins, state.length, 0), "idle_steps": jnp.where(slot_begins, 0, idle_steps)},
    )
    tokens = min(state.tokens.shape[3], REREAD_TOKENS)
    read = functools.partial(_read, model, params, rope, tokens)
    state = jax.lax.while_loop(lambda state: jnp.any(_unread(state) > 0), read, state)
    return state.replace(waiting={**waiting, "idle_steps": state.waiting["idle_steps"]} if waiting else waiting)


def _unread(state: Any) -> jax.Array:
    """[M,Z/M] i32, how many tokens of each slot's row are known and not read."""
    return jnp.where(state.slot_row >= 0, by_slot(state, state.waiting["known"] - state.length), 0)


def _read(model: Model, params: Any, rope: Any, T: int, state: Any) -> Any:
    """Up to T tokens of the first of each shard's rows that have some to read."""
    (M, slots), (_, _, G, S), unread_MZ = state.slot_row.shape, state.tokens.shape, _unread(state)
    slot_MR = jnp.argsort(unread_MZ <= 0, axis=1, stable=True)[:, : -(-slots // READ_PART)]
    take = lambda of_slots: jnp.take_along_axis(of_slots, slot_MR, axis=1)
    row_MR, size_MR = take(jnp.maximum(state.slot_row, 0)), jnp.clip(take(unread_MZ), 0, T)
    length_MR, prompt_MR = (take(by_slot(state, x)) for x in (state.length, state.prompt_length))
    rows = lambda x: x.reshape(M, -1, *x.shape[3:])
    place_MRT = length_MR[..., None] + jnp.arange(T)[None, None]  # of the tokens after each, in their rows
    token_MRT = jax.vmap(lambda t, r, p: t[r[:, None], p])(rows(state.tokens), row_MR, jnp.minimum(place_MRT, S) - 1)

    flat = lambda x: sharding.constrain(x.reshape(-1, *x.shape[2:]), "batch", *(None,) * (x.ndim - 2))
    at = {"slot": slot_MR, "entry": row_MR // G, "size": size_MR, "idle": take(state.waiting["idle_steps"])}
    at |= {"oldest": prompt_MR - 1, "next": length_MR - 1}  # positions: of a cache's first token, of the first to read
    at |= {"end": jnp.broadcast_to(state.cache_end, size_MR.shape)}
    at = {name: flat(x) for name, x in at.items()}

    def each(function, *arrays):  # of keys and of values, by layer; by each device on its own rows and heads
        def one(axis, layer, first, *others):
            split = ("batch", "kv_heads")[: first.ndim - 2]
            axes = (*(split for _ in (first, *others)), ("batch",))
            call = functools.partial(function, None if layer.is_delta else axis)
            return sharding.by_device(call, first, *others, at, axes=axes, shared=len(split))

        both = zip((2 if model.attention == "splash" else 3, 2), *arrays, strict=True)
        return [tuple(map(functools.partial(one, axis), model.arch.by_layer, *x)) for axis, *x in both]

    past = each(functools.partial(_past, S), (state.prompt_k, state.prompt_v), (state.cache_k, state.cache_v))
    seen = Prompt(*past, visible=jnp.arange(S)[None] < at["next"][:, None])
    how = {"prompt": seen, "length": at["size"], "rope": rope}
    hidden, made = model.forward(params, flat(token_MRT), flat(place_MRT) - 1, **how)
    cache_k, cache_v = each(_kept, past, made[:2], (state.cache_k, state.cache_v))

    columns, unrows = dict(state.columns), lambda x: x.reshape(state.length.shape + x.shape[2:])
    if "experts" in columns:  # each token has the choice of the one before it
        chosen = moe.by_token(hidden, made)[1].reshape(*place_MRT.shape, -1).astype(columns["experts"].dtype)
        place_MRT = jnp.where(jnp.arange(T)[None, None] < size_MR[..., None], place_MRT, S)  # out of range: padding's
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


def _past(width: int, axis: int | None, of_prompts: jax.Array, blocks: tuple[jax.Array, ...], at: Any) -> jax.Array:
    """A layer's keys, or values, of the rows that read, in the order of their tokens: [R,K,S,H]; or their states.

    Args:
        axis: of a block's places; None where it has states.
        of_prompts: [E,K,L,H].
        at: numbers of these rows, [R] i32 by name.
    """
    own = jnp.concatenate([x[at["slot"]] for x in blocks], axis=axis or 0)
    if axis is None:
        return own
    place_RS = (at["end"] - at["idle"] - at["next"])[:, None] + jnp.arange(width)[None]
    own = _in_order(jnp.moveaxis(own, axis, 2), place_RS % own.shape[axis])
    prompts = jnp.pad(of_prompts[at["entry"]], ((0, 0), (0, 0), (0, width - of_prompts.shape[2]), (0, 0)))
    is_before_RS = jnp.arange(width)[None] < at["oldest"][:, None]
    return jnp.where(is_before_RS[:, None, :, None], prompts, own)


def _kept(axis: int | None, past_RKSH: jax.Array, new_RKTH: jax.Array, blocks: tuple[jax.Array, ...], at: Any) -> Any:
    """The layer's blocks, of all slots, with what the rows have read; arguments as of ``_past``."""
    parts, slot = [new_RKTH], jnp.where(at["size"] > 0, at["slot"], len(blocks[0]))  # out of range: as it was
    if axis is not None:
        S, C = past_RKSH.shape[2], sum(x.shape[axis] for x in blocks)
        age_RC = (at["end"][:, None] - 1 - jnp.arange(C)[None]) % C
        nth_RC = at["size"][:, None] - 1 - age_RC  # of the new tokens; below 0: before them
        index_RC = jnp.where(nth_RC < 0, at["next"][:, None], S) + nth_RC
        both = jnp.concatenate([past_RKSH, new_RKTH], axis=2)
        parts = jnp.split(jnp.moveaxis(_in_order(both, jnp.maximum(index_RC, 0)), 2, axis), len(blocks), axis=axis)
    whole = lambda x: jnp.where(jnp.isfinite(x), x, 0)  # a row gone wrong leaves nothing in its slot
    return tuple(x.at[slot].set(whole(part), mode="drop") for x, part in zip(blocks, parts, strict=True))


def _in_order(x_RKXH: jax.Array, index_RY: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_RKXH, index_RY[:, None, :, None], axis=2)


def keep_states(state: Any, made: Any, is_active_MZ: jax.Array, arch: Architecture) -> Any:
    """New caches ``made`` in which the states of slots that a step goes past are as they were (the delta rule's)."""

    def kept(layer, old, new):
        if not layer.is_delta:
            return new
        mask = lambda x: is_active_MZ.reshape(-1, *(1,) * (x.ndim - 1))
        return tuple(jnp.where(mask(x), y, x) for x, y in zip(old, new, strict=True))

    of = zip((state.cache_k, state.cache_v), made[:2], strict=True)
    return tuple(tuple(map(kept, arch.by_layer, old, new)) for old, new in of)


def gone_on(state: Any, is_waiting: jax.Array, is_active_MZ: jax.Array) -> Waiting:
    """``state.waiting`` after a step that went past other slots with a row than the active ones."""
    idle_steps = state.waiting["idle_steps"] + ((state.slot_row >= 0) & ~is_active_MZ)
    return {**state.waiting, "is_waiting": is_waiting, "idle_steps": idle_steps}


def told(state: Any) -> tuple[jax.Array, ...]:
    """What the host looks at: stop reasons, lengths and answers heard [M,E,G], the rows [M,Z/M] that wait in slots, -1
    where none does, and these slots' tokens and log-probs [M,Z/M,S].
    """
    M, _, _, S = state.tokens.shape
    row = jnp.maximum(state.slot_row, 0)
    waits = by_slot(state, state.waiting["is_waiting"]) & (state.slot_row >= 0)
    read = jax.vmap(lambda of_rows, row: of_rows[row])
    by_row = (x.reshape(M, -1, S) for x in (state.tokens, state.behaviour_logp))
    of_slots = [sharding.by_device(read, x, row, axes=(("batch",),) * 2) for x in by_row]
    return state.stop_reason, state.length, state.waiting["heard"], jnp.where(waits, row, -1), *of_slots
