"""Completions of several turns, on the device: rows wait for their environment, then read what it answers.

    step       the policy ends a turn: its row waits in its slot, which others' steps go past
    chunk      a row that has waited through a whole chunk takes the answer that the host has by then
    step       the answer's tokens are read one by one, as the policy's own would be; then the policy draws again

Which chunk takes an answer follows from the state alone, not from when the environment was done: the same rows come of
a run that was stopped and resumed. What a slot that waits writes into its cache is garbage, after its row's tokens;
these are moved behind it when the row goes on, for a cache's newest token lies before its end.

Letters: as in ``sampler.py``, and A the width of an answer.
Owns: what a row that waits is, how it goes on. Does not know: environments, text, how a token is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import run_if

Waiting = Mapping[str, jax.Array]


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
    if not rows or not state.waiting:
        return sample
    is_shared = by_slot(state, state.waiting["heard"]) < 1 + group_id % most
    return jnp.where(is_shared, sample // rows * rows, sample)


def hear(state: Any, answers: jax.Array, verdict: jax.Array, arch: Architecture, implementation: str) -> Any:
    """A ``SamplerState`` whose due rows have what the environment said.

    Args:
        answers: [M,E,G,A] i32 tokens of each row's answer, 0 after them.
        verdict: [M,E,G] i32, above 0 how many tokens it has; below 0 minus the ``STOP_*`` that the row ends with; 0
            where there is nothing to hear. Of a row that is not due it is not looked at.
    """
    w = state.waiting
    said = jnp.where(w["is_waiting"] & w["is_due"], verdict, 0)
    goes_on, ends = said > 0, said < 0
    known = jnp.where(goes_on, state.length + said, w["known"])
    place = jnp.arange(state.tokens.shape[3]).reshape(1, 1, 1, -1) - state.length[..., None]
    new = jnp.take_along_axis(answers, jnp.clip(place, 0, answers.shape[3] - 1), axis=3)
    slot_goes_on, slot_ends = (by_slot(state, x) & (state.slot_row >= 0) for x in (goes_on, ends))
    shift = jnp.where(slot_goes_on, w["idle_steps"], 0)
    move = functools.partial(_move_caches, shift_Z=shift.reshape(-1), arch=arch, implementation=implementation)
    cache_k, cache_v = run_if(jnp.any(shift > 0), move, (state.cache_k, state.cache_v))
    waits = w["is_waiting"] & (said == 0)
    return state.replace(
        cache_k=cache_k,
        cache_v=cache_v,
        tokens=jnp.where((place >= 0) & (place < said[..., None]), new, state.tokens),
        stop_reason=jnp.where(ends, -said, state.stop_reason).astype(jnp.int8),
        slot_row=jnp.where(slot_ends, -1, state.slot_row),
        waiting={
            "is_waiting": waits,
            "is_due": waits,  # when the chunk that now begins has ended
            "known": known,
            "heard": w["heard"] + goes_on,
            "idle_steps": jnp.where(slot_goes_on | slot_ends, 0, w["idle_steps"]),
        },
    )


def _move_caches(caches: Any, *, shift_Z: jax.Array, arch: Architecture, implementation: str) -> Any:
    """Keys and values of each slot so many places on, round from the end to the beginning."""

    def moved(blocks, axis):
        turn = jax.vmap(lambda x, by: jnp.roll(x, by, axis - 1))
        whole = jnp.concatenate(blocks, axis=axis)
        whole = sharding.by_device(turn, whole, shift_Z, axes=(("batch", "kv_heads"), ("batch",)), shared=2)
        width = blocks[0].shape[axis]
        return tuple(jax.lax.slice_in_dim(whole, i * width, (i + 1) * width, axis=axis) for i in range(len(blocks)))

    key_axis = 2 if implementation == "splash" else 3
    of = lambda axis: lambda layer, blocks: blocks if layer.is_delta else moved(blocks, axis)
    return tuple(tuple(map(of(axis), arch.by_layer, x)) for x, axis in zip(caches, (key_axis, 2), strict=True))


def keep_states(state: Any, made: Any, is_active_MZ: jax.Array, arch: Architecture) -> Any:
    """New caches ``made`` in which the states of slots that a step goes past are as they were (the delta rule's)."""

    def kept(layer, old, new):
        if not layer.is_delta:
            return new
        mask = lambda x: is_active_MZ.reshape(-1, *(1,) * (x.ndim - 1))
        return tuple(jnp.where(mask(x), y, x) for x, y in zip(old, new, strict=True))

    of = zip((state.cache_k, state.cache_v), made, strict=True)
    return tuple(tuple(map(kept, arch.by_layer, old, new)) for old, new in of)


def gone_on(state: Any, is_waiting: jax.Array, is_active_MZ: jax.Array) -> Waiting:
    """``state.waiting`` after a step that went past other slots with a row than the active ones."""
    idle_steps = state.waiting["idle_steps"] + ((state.slot_row >= 0) & ~is_active_MZ)
    return {**state.waiting, "is_waiting": is_waiting, "idle_steps": idle_steps}


def read_answer(state: Any, is_drawn_MZ: jax.Array, drawn: Any, noted: Any) -> tuple[Any, ...]:
    """Tokens, log-probs, policy versions [M,Z/M] and what is noted of tokens where answers are read instead of drawn.

    No policy drew these: log-prob 0, version -1, entropy 0; all that the token could have been is itself.
    """
    M, _, _, S = state.tokens.shape
    row, length = jnp.maximum(state.slot_row, 0), by_slot(state, state.length)
    answer_MZ = jax.vmap(lambda tokens, row, place: tokens[row, place])(state.tokens.reshape(M, -1, S), row, length)
    tokens, logp, version = (jnp.where(is_drawn_MZ, x, y) for x, y in zip(drawn, (answer_MZ, 0.0, -1), strict=True))
    is_drawn_Z, answer_Z = is_drawn_MZ.reshape(-1), answer_MZ.reshape(-1)
    noted = dict(noted)
    if noted.get("support") is not None:
        noted["support"] = jnp.where(is_drawn_Z[:, None], noted["support"], answer_Z[:, None])
    if "entropy" in noted:
        noted["entropy"] = jnp.where(is_drawn_Z, noted["entropy"], 0.0)
    return tokens, logp, version, noted


def told(state: Any) -> tuple[jax.Array, ...]:
    """What the host looks at: stop reasons, lengths and answers heard [M,E,G], the rows [M,Z/M] that wait in slots, -1
    where none does, and these slots' tokens and log-probs [M,Z/M,S].
    """
    M, _, _, S = state.tokens.shape
    row = jnp.maximum(state.slot_row, 0)
    waits = by_slot(state, state.waiting["is_waiting"]) & (state.slot_row >= 0)
    read = jax.vmap(lambda of_rows, row: of_rows[row])
    by_row = (x.reshape(M, -1, S) for x in (state.tokens, state.behaviour_logp))
    of_slots = [sharding.by_device(read, x, row, axes=(("shards",),) * 2) for x in by_row]
    return state.stop_reason, state.length, state.waiting["heard"], jnp.where(waits, row, -1), *of_slots
