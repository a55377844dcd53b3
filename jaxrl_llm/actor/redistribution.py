"""Redistribution of unfinished rollouts when a run resumes with a different number of data shards.

    prompts, rows    entry e of shard m has the global index m E + e, and keeps this index when M and E change
    slots            slots keep their global index in the same way. A row continues if the row and its slot are in the
                     same new shard. Otherwise the row restarts from its prompt.

No row restarts when shards are merged. A row that restarts is drawn with the same noise. With the same weights (a run
without ``rollout.lookahead_prompts``) a restarted row gets the same tokens again. The KV cache of a restarted row is
not sent to the new shard. Sending the cache would need another program, which is only worthwhile if meshes change
often.

Letters: as in ``sampler.py``.
Owns: the new places of unfinished rollouts. Does not know: how a checkpoint is read (``runtime.checkpoint_files``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.actor import tables
from jaxrl_llm.actor.generator import Generator
from jaxrl_llm.actor.quotas import Place
from jaxrl_llm.actor.sampler import SamplerState
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.checkpoint_files import SAMPLER_ROWS
from jaxrl_llm.types import STOP_NONE


def redistribute(
    generator: Generator,
    state: SamplerState | None,
    host_state: dict[str, Any],
    shapes: dict[str, list[int]],
) -> tuple[SamplerState | None, dict[str, Any], list[str]]:
    """Convert a saved sampler state to the number of data shards of the generator.

    Args:
        state: the saved state, already in the array shapes of the generator. None means no unfinished rollouts; the
            generator then keeps its own state.
        host_state: the actor's part of a checkpoint.
        shapes: shapes of the saved arrays by name.

    Returns:
        The state, ``host_state`` with the changed entries, and messages for the user.
    """
    sampler = generator.sampler
    if state is None:
        return generator.state, host_state, []
    old_shards = shapes[SAMPLER_ROWS][0]
    if old_shards == sampler.shards:
        return state, host_state, []
    layout = sharding.of(state), sharding.replicated(sampler.mesh, 0)
    # Donate the state, so that the device does not hold a second copy of the unchanged caches.
    program = jax.jit(
        functools.partial(_move, old_shards=old_shards),
        out_shardings=layout,
        donate_argnums=0,
    )
    state, restarts = program(state)
    restarts = jax.device_get(restarts)
    moved = _move_host_state(host_state, old_shards, sampler.shards, sampler.entries, restarts)
    message = f"unfinished rollouts from {old_shards} data-parallel devices continue on {sampler.shards}"
    if restarts.any():
        message += f"; {restarts.sum()} of them restart"
    return state, host_state | moved, [message]


def _move_host_state(
    host_state: dict[str, Any],
    old_shards: int,
    shards: int,
    entries: int,
    restarts: np.ndarray,
) -> dict[str, Any]:
    """Return the entries of the actor's host state that depend on the number of shards."""
    old_entries = shards * entries // old_shards

    def new_place(shard: int, entry: int) -> Place:
        return divmod(shard * old_entries + entry, entries)

    open_prompts = []
    for shard, entry, *prompt in host_state["open_prompts"]:
        open_prompts.append([*new_place(shard, entry), *prompt])
    conversations = []
    for shard, entry, g, turns in host_state["conversations"]:
        row = (*new_place(shard, entry), g)
        if not restarts[row]:
            conversations.append([*row, turns])
    draws = []
    for sums in host_state["draws"]:
        draws.append([[sum(by_shard), *[0.0] * (shards - 1)] for by_shard in sums])
    return {
        "open_prompts": open_prompts,
        "conversations": conversations,
        "draws": draws,
    }


def _move(state: SamplerState, *, old_shards: int) -> tuple[SamplerState, jax.Array]:
    """Return the converted state, and a mask [M,E,G] bool of the rows that restart."""
    M, E, G, S = state.tokens.shape
    Q = E * G
    num_rows = M * Q
    num_slots = state.slot_row.size
    old_row = state.slot_row.reshape(-1)
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    # Convert row indices from the slot's old shard to row indices in its new shard. Rows of other shards fall outside.
    old_shard = slot // (num_slots // old_shards)
    new_shard = slot // (num_slots // M)
    row = old_row + old_shard * (num_rows // old_shards) - new_shard * Q
    keeps_row = (old_row >= 0) & (row >= 0) & (row < Q)
    slot_row = jnp.where(keeps_row, row, -1).reshape(M, -1)
    row_or_none = jnp.where(slot_row < 0, Q, slot_row)  # Q is out of range
    has_slot = tables.mark(jnp.zeros((M, Q), bool), row_or_none, True)
    restarts = state.started & (state.stop_reason == STOP_NONE) & ~tables.by_group(has_slot, G)
    is_completion = jnp.arange(S).reshape(1, 1, 1, S) >= state.prompt_length[..., None]
    is_cleared = restarts[..., None] & is_completion

    def clear(x: jax.Array, mask: jax.Array = is_cleared) -> jax.Array:
        return jnp.where(
            mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)),
            jnp.zeros((), x.dtype),
            x,
        )

    waiting = {}
    for name, table in state.waiting.items():
        waiting[name] = clear(table, slot_row < 0 if name == "idle_steps" else restarts)
    moved = dataclasses.replace(
        state,
        slot_row=slot_row,
        tokens=clear(state.tokens),
        length=jnp.where(restarts, state.prompt_length, state.length),
        behaviour_logp=clear(state.behaviour_logp),
        policy_version=jnp.where(is_cleared, -1, state.policy_version),
        started=state.started & ~restarts,
        columns={name: clear(x) for name, x in state.columns.items()},
        waiting=waiting,
    )
    return moved, restarts
