"""Redistribution of unfinished rollouts when a run resumes with a different number of data shards.

    prompts, rows    entry e of shard m has the global index m E + e, and keeps this index when M and E change
    slots            slots keep their global index in the same way. A row continues if the row and its slot are in the
                     same new shard. Otherwise the row restarts from its prompt.

No row restarts when shards are merged. A row that restarts is drawn with the same noise. With the same weights (a run
without ``rollout.lookahead_prompts``) a restarted row gets the same tokens again. The KV cache of a restarted row is
not sent to the new shard. This would need another program, which is only worthwhile if meshes change often.

Letters: as in ``sampler.py``.
Owns: the new places of unfinished rollouts. Does not know: how a checkpoint is read (``runtime.checkpoint_files``).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.actor.sampler import SamplerState
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.checkpoint_files import SAMPLER_ROWS
from jaxrl_llm.types import STOP_NONE


def deal(
    generator: Any, state: SamplerState | None, host: dict[str, Any], shapes: dict[str, list[int]]
) -> tuple[SamplerState | None, dict[str, Any], list[str]]:
    """Convert a saved sampler state to the number of data shards of the generator.

    Args:
        generator: a ``generator.Generator``.
        state: the saved state, already in the array shapes of the generator. None means no unfinished rollouts; the
            generator then keeps its own state.
        host: the actor's part of a checkpoint.
        shapes: shapes of the saved arrays by name.

    Returns:
        The state, ``host`` with the changed entries, and messages for the user.
    """
    sampler = generator.sampler
    M, E = sampler.shards, sampler.entries
    if state is None:
        return generator.state, host, []
    if (before := shapes[SAMPLER_ROWS][0]) == M:
        return state, host, []
    layout = sharding.of(state), sharding.replicated(sampler.mesh, 0)
    program = jax.jit(functools.partial(_deal, before=before), out_shardings=layout, donate_argnums=0)
    state, begins = program(state)  # donated, because the caches do not change
    begins = jax.device_get(begins)
    place = lambda m, e: divmod(m * (M * E // before) + e, E)
    turns = [[*place(m, e), *of_row] for m, e, *of_row in host["conversations"]]
    dealt = {
        "open_prompts": [[*place(m, e), *of_prompt] for m, e, *of_prompt in host["open_prompts"]],
        "conversations": [[*row, said] for *row, said in turns if not begins[tuple(row)]],
        "draws": [[[sum(of_shards), *[0.0] * (M - 1)] for of_shards in sums] for sums in host["draws"]],
    }
    words = f"rollouts in flight on {before} data-parallel devices go on on {M}"
    return state, host | dealt, [words + f"; {begins.sum()} of them begin again" * bool(begins.any())]


def _deal(state: SamplerState, *, before: int) -> tuple[SamplerState, jax.Array]:
    """Return the converted state, and a mask [M,E,G] bool of the rows that restart."""
    M, E, G, S = state.tokens.shape
    of_all, slots, Q = M * E * G, state.slot_row.size, E * G
    old, slot = state.slot_row.reshape(-1), jnp.arange(slots, dtype=jnp.int32)
    # Convert row indices from the slot's old shard to row indices in its new shard. Rows of other shards fall outside.
    row = old + slot // (slots // before) * (of_all // before) - slot // (slots // M) * Q
    slot_row = jnp.where((old >= 0) & (row >= 0) & (row < Q), row, -1).reshape(M, -1)
    has_slot = jnp.zeros((M, Q), bool)
    has_slot = jax.vmap(lambda has, r: has.at[r].set(True, mode="drop"))(has_slot, jnp.where(slot_row < 0, Q, slot_row))
    begins = state.started & (state.stop_reason == STOP_NONE) & ~has_slot.reshape(M, E, G)
    off = begins[..., None] & (jnp.arange(S).reshape(1, 1, 1, S) >= state.prompt_length[..., None])

    def clear(x: jax.Array, where: jax.Array = off) -> jax.Array:
        return jnp.where(where.reshape(*where.shape, *(1,) * (x.ndim - where.ndim)), jnp.zeros((), x.dtype), x)

    waiting = {name: clear(x, slot_row < 0 if name == "idle_steps" else begins) for name, x in state.waiting.items()}
    dealt = state.replace(
        slot_row=slot_row,
        tokens=clear(state.tokens),
        length=jnp.where(begins, state.prompt_length, state.length),
        behaviour_logp=clear(state.behaviour_logp),
        policy_version=jnp.where(off, -1, state.policy_version),
        started=state.started & ~begins,
        columns={name: clear(x) for name, x in state.columns.items()},
        waiting=waiting,
    )
    return dealt, begins
