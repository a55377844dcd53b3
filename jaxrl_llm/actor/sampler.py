"""The sampler: jitted prefill, and jitted chunks of decode steps with continuous batching over decode slots.

    table of open rollouts [M, E, G]        slots [M, Z/M]: the row of the table that each slot decodes
      tokens, lengths, logp, version          + the KV cache of the slot
              |  prefill: one forward per prompt fills the prompt cache [E], which its group shares
              |  refill:  an idle slot takes the next pending row
              |  step:    every busy slot decodes one token and appends it to its row
              v
            collect: groups whose G rows have all stopped leave as a Rollout

A slot starts at the last prompt token. The slot's own cache stores the key of this token, and the prompt cache masks
this position. Therefore the same decode step draws every completion token, including the first one. All bookkeeping is
local to a data shard m: no collective moves a rollout until it leaves. With ``lookahead_prompts`` the table also holds
prompts of later iterations. These prompts keep the slots busy while stragglers finish. Their state stays in the sampler
between iterations.

With lookahead prompts the weights change while rollouts are open, and cached values from older weights become stale.
``_reread`` recomputes stale values before the next chunk. It always recomputes the prompts, and also the tokens drawn
so far if ``stale_cache`` is "recompute".

Letters: M data shards, E open prompts and Q = E*G rows per shard, G samples per prompt, Z slots of all shards, L prompt
width, C completion width, S row width, K key heads, H head size, N ids of a support.
Owns: sampler state and its programs. Does not know: the host loop that runs the programs, text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.actor import quotas, stop_strings, turns
from jaxrl_llm.config import SamplingConfig
from jaxrl_llm.models import mixers, moe
from jaxrl_llm.models import rope as ropes
from jaxrl_llm.models.attention import Cache, Prompt
from jaxrl_llm.models.blocks import CacheSizes
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.filters import Filter, filter_logits, keep_support, support_of
from jaxrl_llm.ops.logp import project
from jaxrl_llm.ops.sampling import sample_inverse_cdf, surprise_moments, token_logp
from jaxrl_llm.runtime import rng, sharding
from jaxrl_llm.runtime.programs import Program, run_if
from jaxrl_llm.types import STOP_EOS, STOP_LENGTH, STOP_NONE, DrawSums, Rollout, WithColumns

NO_PROMPT = -1
# Number of ids kept with each token if no setting gives a number.
SUPPORT_TOKENS = 64


@flax.struct.dataclass
class SamplerState(WithColumns):
    """State of the sampler that persists between chunks and between iterations."""

    # Each layer has its own arrays, because some compilers copy a layer's slice of a shared array before reading it.
    # A gated delta rule layer has its two states (delta_rule.empty_states) in place of keys and values. The state of a
    # prompt is the state before the last prompt token.
    # KV cache blocks (``attention.Cache``) of each slot, from the last prompt token on.
    cache_k: tuple[tuple[jax.Array, ...], ...]
    cache_v: tuple[tuple[jax.Array, ...], ...]
    prompt_k: tuple[jax.Array, ...]  # [M*E, K, L, H], one per prompt
    prompt_v: tuple[jax.Array, ...]
    cache_end: jax.Array  # [] i32 cache position of all slots' next tokens; shorter caches use it modulo their length
    slot_row: jax.Array  # [M, Z/M] i32 row in the shard's table, -1 = idle slot
    tokens: jax.Array  # [M, E, G, S] i32
    prompt_length: jax.Array  # [M, E, G] i32
    length: jax.Array  # [M, E, G] i32
    behaviour_logp: jax.Array  # [M, E, G, S] f32
    policy_version: jax.Array  # [M, E, G, S] i32
    stop_reason: jax.Array  # [M, E, G] i8
    started: jax.Array  # [M, E, G] bool, whether the row has had a slot
    group_id: jax.Array  # [M, E] i32, NO_PROMPT = the entry is free
    # [M, E] i32 version of the weights that computed prompt_k and prompt_v; None if weights never change.
    prompt_version: jax.Array | None
    drawn: DrawSums  # sums since the last call of collect
    columns: Mapping[str, jax.Array]  # [M, E, G, S, ...], same names as Rollout.columns
    waiting: Mapping[str, jax.Array]  # state of rows that wait for an environment (turns.empty); {} without one


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Static description of a sampler, from which its programs are compiled.

    Attributes:
        num_prompts: P, prompts collected per call of ``generate``.
        lookahead: number of further prompts that may be open.
        slack: number of groups beyond its quota that a shard may give to a call (``quotas``).
        stale_cache: treatment of the cached completion tokens of open rows when the weights change, "keep" or
            "recompute". "" means that weights never change while a rollout is open.
        keeps_support: keep the ids that the filters left for each token, because the learner computes log-probs over
            these ids.
        keeps_entropy: keep the entropy of each token's distribution, because credit assignment uses it.
        learner_mesh: mesh of the collected rollouts, with the same devices; None means ``mesh``.
        keeps_old_logp: keep the learner's log-probs under older weights, because rows can span policy versions.
        keeps_experts: keep the experts of each token, because the learner uses the same experts.
        eos_ids: tokens that end a completion, or a turn with an environment; () never stops early.
        cuts_rows: compile the program ``stop_rows`` so that the host can end rows also without stop strings.
        answer_tokens: A, the largest number of tokens in an environment's answer to a turn; 0 means no environment.
        turn_tokens: a completion is truncated when one turn has this many tokens; 0 means no limit per turn.
        branches: number of rows of a group that share their first turns, and the largest number of shared turns
            (``turns.sample_of``).
    """

    model: Model
    mesh: Mesh
    sampling: SamplingConfig
    eos_ids: tuple[int, ...]
    num_prompts: int
    group_size: int
    max_prompt_tokens: int
    num_slots: int
    chunk_steps: int
    lookahead: int = 0
    slack: int = 0
    stale_cache: str = ""
    keeps_support: bool = True
    keeps_entropy: bool = False
    keeps_old_logp: bool = False
    keeps_experts: bool = False
    cuts_rows: bool = False
    answer_tokens: int = 0
    turn_tokens: int = 0
    branches: tuple[int, int] = (0, 0)
    learner_mesh: Mesh | None = None

    @property
    def shards(self) -> int:
        return sharding.num_data_shards(self.mesh)

    @property
    def entries(self) -> int:
        """Return E, the number of open prompts per shard."""
        return (self.num_prompts + self.lookahead) // self.shards

    @property
    def row_tokens(self) -> int:
        return self.max_prompt_tokens + self.sampling.max_completion_tokens

    @property
    def support_tokens(self) -> int:
        """Return N, the number of ids kept with each token so that the learner normalises over the same ids, or 0."""
        sampling = self.sampling
        vocab_size = self.model.arch.vocab_size
        if sampling.temperature == 0 or not self.keeps_support or not Filter.of(sampling).leaves_out(vocab_size):
            return 0
        limit = sampling.support_tokens or sampling.top_k or SUPPORT_TOKENS
        return min(limit, sampling.top_k or vocab_size, vocab_size)

    # ---- state -------------------------------------------------------------------------------------

    @property
    def columns(self) -> dict[str, tuple[Any, ...]]:
        """Return the dtype and sizes of each further value per token, by name (algorithms.inputs.COLUMNS)."""
        arch = self.model.arch
        columns: dict[str, tuple[Any, ...]] = {}
        if self.support_tokens:
            columns["support"] = (jnp.int32, self.support_tokens)
        if self.keeps_entropy:
            columns["entropy"] = (jnp.float32,)
        if self.keeps_old_logp:
            columns["earlier_logp"] = (jnp.float32,)
        if self.keeps_experts:
            columns["experts"] = (
                moe.id_dtype(arch),
                arch.num_layers * arch.experts_per_token,
            )
        return columns

    def _empty(self) -> SamplerState:
        arch = self.model.arch
        M = self.shards
        E = self.entries
        G = self.group_size
        S = self.row_tokens
        talks = self.answer_tokens > 0
        sizes = CacheSizes(
            slots=self.num_slots,
            prompts=M * E,
            prompt_width=self.max_prompt_tokens,
            completion=self.sampling.max_completion_tokens,
            implementation=self.model.attention,
            dtype=self.model.compute_dtype,
            spare=turns.idle_room(self.chunk_steps) if talks else 0,
        )
        return SamplerState(
            **mixers.empty_caches(arch, sizes),
            cache_end=jnp.int32(0),
            slot_row=jnp.full((M, self.num_slots // M), -1, jnp.int32),
            tokens=jnp.zeros((M, E, G, S), jnp.int32),
            prompt_length=jnp.ones((M, E, G), jnp.int32),
            length=jnp.ones((M, E, G), jnp.int32),
            behaviour_logp=jnp.zeros((M, E, G, S), jnp.float32),
            policy_version=jnp.full((M, E, G, S), -1, jnp.int32),
            stop_reason=jnp.zeros((M, E, G), jnp.int8),
            started=jnp.zeros((M, E, G), bool),
            group_id=jnp.full((M, E), NO_PROMPT, jnp.int32),
            prompt_version=jnp.full((M, E), -1, jnp.int32) if self.stale_cache else None,
            drawn=self._no_draws(),
            columns={name: jnp.zeros((M, E, G, S, *rest), dtype) for name, (dtype, *rest) in self.columns.items()},
            waiting=turns.empty(M, E, G, self.num_slots) if talks else {},
        )

    def _no_draws(self) -> DrawSums:
        return DrawSums(*(jnp.zeros(self.shards, jnp.float32) for _ in dataclasses.fields(DrawSums)))

    def abstract_state(self) -> SamplerState:
        """Return the shapes of the state with their shardings."""
        shape = jax.eval_shape(self._empty)

        def place(path, x):
            if path[0].name in ("cache_k", "cache_v", "prompt_k", "prompt_v"):
                axes = ("batch", "kv_heads", None, None) if x.ndim == 4 else ("batch", None, None)
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.named(self.mesh, x.shape, axes))
            return sharding.rows(self.mesh, x.shape, x.dtype)

        return jax.tree_util.tree_map_with_path(place, shape)

    def abstract_rollout(self) -> Rollout:
        """Return the shapes of an iteration's rollout, without shardings."""
        leaving = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in self._leaving_shapes]
        return jax.eval_shape(self._collect, jax.eval_shape(self._empty), *leaving)[0]

    @property
    def _leaving_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of the index arrays (``quotas.arrays``) that select the groups to collect."""
        M, quota = self.shards, self.num_prompts // self.shards
        shapes = [(M, quota + self.slack)]
        if self.slack:
            shapes.append((M, quota))
        return shapes

    # ---- programs ----------------------------------------------------------------------------------

    def programs(self, abstract_params: Any) -> dict[str, Program]:
        """Return the sampler's programs by name, described by shapes only."""
        P = self.num_prompts
        L = self.max_prompt_tokens
        M = self.shards
        A = self.answer_tokens
        state = self.abstract_state()
        state_layout = sharding.of(state)
        rows = functools.partial(sharding.rows, self.mesh)
        whole = sharding.replicated(self.mesh, 0)
        scalar = sharding.undivided(self.mesh, jnp.int32)
        key = sharding.undivided(self.mesh, jax.eval_shape(lambda: rng.stream(0, "sample")).dtype)
        entry = rows((M, P // M), jnp.int32)
        leaving = [rows(shape, jnp.int32) for shape in self._leaving_shapes]
        rollout = jax.eval_shape(self._collect, state, *leaving)[0]
        new_prompts = (
            rows((P, L), jnp.int32),
            rows((P,), jnp.int32),
            rows((P,), jnp.int32),
            entry,
        )
        version = (scalar,) if self.stale_cache else ()
        table = (M, self.entries, self.group_size)
        answers = ()
        host_layout: Any = whole
        if A:
            answers = (rows((*table, A), jnp.int32), rows(table, jnp.int32))
            by_shard = rows((M,), jnp.int32).sharding
            host_layout = (whole, whole, whole, whole, by_shard, by_shard)
        programs = {
            "init_sampler": Program(self._empty, (), out_shardings=state_layout),
            "prefill": Program(
                self._prefill,
                (abstract_params, state, *new_prompts, *version),
                out_shardings=state_layout,
                donate=(1,),
            ),
            "decode": Program(
                self._decode,
                (
                    abstract_params,
                    state,
                    scalar,
                    key,
                    rows((M, self.entries), jnp.bool),
                    *answers,
                ),
                (state_layout, host_layout),
                donate=(1,),
            ),
            "read_group": Program(
                self._read_group,
                (state.tokens, rows((M,), jnp.int32)),
                out_shardings=rows((M,), jnp.int32).sharding,
            ),
            "collect": Program(
                self._collect,
                (state, *leaving),
                (
                    sharding.leading(self.learner_mesh or self.mesh, rollout),
                    whole,
                    state_layout,
                ),
                donate=(0,),
            ),
        }
        if self.cuts_rows or self.sampling.stop_strings:
            programs["stop_rows"] = Program(
                stop_strings.cut,
                (state, rows(table, jnp.int32)),
                (state_layout, whole),
                donate=(0,),
            )
        if self.stale_cache:
            programs["reread"] = Program(
                self._reread,
                (abstract_params, state, scalar),
                out_shardings=state_layout,
                donate=(1,),
            )
        if A:
            programs["read_waiting"] = Program(turns.host_arrays, (state,), host_layout)
        return programs

    def _prefill(
        self,
        params,
        state: SamplerState,
        tokens_PL,
        length_P,
        group_id_P,
        entry_MP,
        version=None,
    ) -> SamplerState:
        """Open P prompts in the given entries of their shards. A padding prompt has entry E and is dropped.

        Args:
            version: [] i32 policy version of the weights, required if the state has a ``prompt_version``.
        """
        M, _, G, S = state.tokens.shape
        P, L = tokens_PL.shape
        set_entries = lambda t, n: jax.vmap(lambda t, n, e: t.at[e].set(n, mode="drop"))(t, n, entry_MP)
        caches, noted = self._read_prompts(params, state, tokens_PL, length_P, entry_MP)

        def put(table, value_P):  # [M, E, G, ...] <- [P, ...], the same for every sample of the group
            value = value_P.reshape(M, P // M, 1, *value_P.shape[1:])
            value = jnp.broadcast_to(value, (M, P // M, G, *value_P.shape[1:])).astype(table.dtype)
            return set_entries(table, value)

        zeros = jnp.zeros((P,), jnp.int32)
        if version is not None:
            caches["prompt_version"] = set_entries(state.prompt_version, jnp.broadcast_to(version, (M, P // M)))
        return dataclasses.replace(
            state,
            **caches,
            tokens=put(state.tokens, jnp.pad(tokens_PL, ((0, 0), (0, S - L)))),
            prompt_length=put(state.prompt_length, length_P),
            length=put(state.length, length_P),
            behaviour_logp=put(state.behaviour_logp, jnp.zeros((P, S))),
            policy_version=put(state.policy_version, jnp.full((P, S), -1)),
            stop_reason=put(state.stop_reason, zeros),
            started=put(state.started, zeros),
            group_id=set_entries(state.group_id, group_id_P.reshape(M, P // M)),
            columns={name: put(x, noted.get(name, jnp.zeros((P, *x.shape[3:])))) for name, x in state.columns.items()},
            waiting={name: x if name == "idle_steps" else put(x, zeros) for name, x in state.waiting.items()},
        )

    def _read_prompts(
        self, params, state: SamplerState, tokens_PL, length_P, entry_MP
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Return ``prompt_k`` and ``prompt_v`` with P prompts in the given entries, and their columns [P,S,...]."""
        M, _, _, S = state.tokens.shape
        P, L = tokens_PL.shape
        positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (P, L))
        _, made = self.model.forward(params, tokens_PL, positions, length=length_P - 1)
        noted = {"experts": moe.prompt_experts(made, length_P, S)} if self.keeps_experts else {}

        def put(cache, new):  # [M*E, ...] <- [P, ...]
            by_shard = lambda x: x.reshape(M, -1, *x.shape[1:])
            into = jax.vmap(lambda t, n, e: t.at[e].set(n, mode="drop"))
            return into(by_shard(cache), by_shard(new), entry_MP).reshape(cache.shape)

        caches = {
            "prompt_k": tuple(map(put, state.prompt_k, made[0])),
            "prompt_v": tuple(map(put, state.prompt_v, made[1])),
        }
        return caches, noted

    def _reread(self, params, state: SamplerState, version) -> SamplerState:
        """Recompute the stale caches of open rollouts with the given weights.

        The caches of the prompts are always recomputed. With ``stale_cache`` "recompute", the caches of the tokens
        drawn so far are recomputed too. Tokens, log-probs and versions stay the same. A state without stale rollouts
        stays the same, bit for bit. Therefore a resumed run can call this program again without effect.

        Args:
            version: [] i32 policy version of the weights.
        """
        M, E, _, S = state.tokens.shape
        P, L = self.num_prompts, self.max_prompt_tokens
        is_open = (state.group_id >= 0) & jnp.any(state.stop_reason == STOP_NONE, axis=2)
        is_stale_ME = is_open & (state.prompt_version != version)
        of_entries = jax.vmap(lambda table, entry: table[entry])

        def read(carry):
            state, left_ME = carry
            entry_MP = jnp.argsort(~left_ME, axis=1, stable=True)[:, : P // M].astype(jnp.int32)
            is_left_MP = jnp.take_along_axis(left_ME, entry_MP, axis=1)
            length_P = of_entries(state.prompt_length[:, :, 0], entry_MP).reshape(P)
            tokens_PL = of_entries(state.tokens[:, :, 0, :L], entry_MP).reshape(P, L)
            tokens_PL = jnp.where(jnp.arange(L)[None] < length_P[:, None], tokens_PL, 0)
            tokens_PL = sharding.constrain(tokens_PL, "batch", None)
            entry_MP = jnp.where(is_left_MP, entry_MP, E)
            caches, noted = self._read_prompts(params, state, tokens_PL, length_P, entry_MP)
            columns = dict(state.columns)
            # All rows of a group get the same values, because the learner computes a prompt once per group.
            if "experts" in noted:
                chosen = noted["experts"].reshape(M, P // M, S, -1).astype(columns["experts"].dtype)
                of_prompts = jnp.zeros((M, E, S, chosen.shape[-1]), chosen.dtype)
                of_prompts = jax.vmap(lambda t, n, e: t.at[e].set(n, mode="drop"))(of_prompts, chosen, entry_MP)
                is_read = jnp.zeros((M, E), bool)
                is_read = jax.vmap(lambda t, e: t.at[e].set(True, mode="drop"))(is_read, entry_MP)
                is_prompt = jnp.arange(S).reshape(1, 1, 1, S) < state.prompt_length[..., None]
                is_new = is_read[:, :, None, None] & is_prompt
                columns["experts"] = jnp.where(is_new[..., None], of_prompts[:, :, None], columns["experts"])
            left_ME = jax.vmap(lambda left, entry: left.at[entry].set(False, mode="drop"))(left_ME, entry_MP)
            return dataclasses.replace(state, **caches, columns=columns), left_ME

        state, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), read, (state, is_stale_ME))
        if self.stale_cache == "recompute":
            rope = ropes.tables(self.model.arch, jnp.arange(self.row_tokens))
            state = turns.reread(self.model, params, state, rope, is_stale_ME)
        return dataclasses.replace(state, prompt_version=jnp.where(is_stale_ME, version, state.prompt_version))

    def _refill(self, state: SamplerState) -> SamplerState:
        """Assign the next pending rows to idle slots, oldest prompt first."""
        M, E, G, _ = state.tokens.shape
        Q = E * G
        pending = ((state.group_id >= 0)[:, :, None] & ~state.started & (state.stop_reason == STOP_NONE)).reshape(M, Q)
        # Position of each prompt in the prompt stream; an older prompt has a smaller position.
        age = jnp.repeat(state.group_id, G, axis=1)

        def one_shard(slot_row, pending, age):
            # Sort pending rows before all other rows. The sort is stable, so the samples of a prompt stay in order.
            queue = jnp.lexsort((age, ~pending))
            idle = slot_row < 0
            turn = jnp.cumsum(idle) - 1
            takes = idle & (turn < jnp.sum(pending))
            return jnp.where(takes, queue[jnp.clip(turn, 0, Q - 1)], slot_row), takes

        slot_row, takes = jax.vmap(one_shard)(state.slot_row, pending, age)
        started = jax.vmap(lambda s, r, t: s.at[jnp.where(t, r, Q)].set(True, mode="drop"))(
            state.started.reshape(M, Q), slot_row, takes
        ).reshape(M, E, G)
        begin = functools.partial(mixers.begin, self.model.arch, entry_MZ=jnp.maximum(slot_row, 0) // G)
        return dataclasses.replace(
            state,
            slot_row=slot_row,
            started=started,
            cache_k=begin(state.cache_k, state.prompt_k, takes_MZ=takes),
            cache_v=begin(state.cache_v, state.prompt_v, takes_MZ=takes),
        )

    def _decode(self, params, state: SamplerState, version, key, due, *answers):
        """Refill idle slots, then run up to ``chunk_steps`` decode steps. End early when no slot can decode.

        The chunk does nothing if enough groups have finished (``quotas.is_enough``) and all due groups have finished.
        This happens because the host dispatches a chunk before it reads the result of the previous chunk.

        Args:
            due: [M, E] bool, entries whose groups must finish in this call of ``generate``.
            answers: the environment's answers to the waiting rows, as arguments of ``turns.append_answers``.

        Returns:
            The state, and the arrays that every host reads. Without an environment, these arrays are the stop reasons
            and lengths [M, E, G] of all open rows. With an environment, they are the output of ``turns.host_arrays``.
        """
        finished = (state.group_id >= 0) & jnp.all(state.stop_reason != STOP_NONE, axis=2)
        is_enough = quotas.is_enough(jnp.sum(finished, axis=1), self.num_prompts, self.slack)
        is_wanted = ~is_enough | jnp.any(due & ~finished)
        # Skip the whole chunk, not only the loop, because the work before the loop costs time too.
        state = run_if(
            is_wanted,
            lambda state: self._decode_chunk(params, state, version, key, answers),
            state,
        )
        return state, turns.host_arrays(state) if answers else (state.stop_reason, state.length)

    def _decode_chunk(self, params, state: SamplerState, version, key, answers) -> SamplerState:
        # Compute the rope angles outside the loop. Inside the loop, every layer would compute them again.
        rope = ropes.tables(self.model.arch, jnp.arange(self.row_tokens))
        if answers:
            state = turns.append_answers(self.model, params, state, rope, *answers)
        # If all slots are idle, restart at the beginning of the caches, so that attention reads the smallest possible
        # part.
        state = dataclasses.replace(state, cache_end=jnp.where(jnp.any(state.slot_row >= 0), state.cache_end, 0))
        state = self._refill(state)
        prompt = self._prompts(state)

        def busy(carry):
            step, state = carry
            return (step < self.chunk_steps) & jnp.any(turns.decodes(state))

        def body(carry):
            step, state = carry
            return step + 1, self._decode_step(params, prompt, rope, state, version, key)

        _, state = jax.lax.while_loop(busy, body, (jnp.int32(0), state))
        return state

    def _prompts(self, state: SamplerState) -> Prompt:
        """Return the open prompts for attention in a whole chunk, because slots take no new rows within a chunk."""
        M, E, G, _ = state.tokens.shape
        row_MZ = jnp.where(state.slot_row >= 0, state.slot_row, E * G)
        slots = jnp.broadcast_to(jnp.arange(row_MZ.shape[1]), row_MZ.shape)
        member = jnp.zeros((M, E * G), jnp.int32)
        member = jax.vmap(lambda m, row, slot: m.at[row].set(slot, mode="drop"))(member, row_MZ, slots)
        before_last = state.prompt_length[:, :, 0].reshape(M * E, 1) - 1
        return Prompt(
            keys=state.prompt_k,
            values=state.prompt_v,
            visible=jnp.arange(self.max_prompt_tokens)[None, :] < before_last,
            member=member,
            place=jnp.maximum(state.slot_row, 0),
        )

    def _decode_step(self, params, prompt: Prompt, rope, state: SamplerState, version, key) -> SamplerState:
        """Draw one token in each slot whose row does not wait, and append the token to the slot's row."""
        M, E, G, _ = state.tokens.shape
        Q = E * G
        rows = lambda x: x.reshape(M, Q, *x.shape[3:])
        active_MZ = turns.decodes(state)
        row_MZ = jnp.maximum(state.slot_row, 0)
        read = jax.vmap(lambda table, row: table[row])
        length_MZ = read(rows(state.length), row_MZ)
        position_MZ = length_MZ - 1
        token_MZ = jax.vmap(lambda t, r, p: t[r, p])(rows(state.tokens), row_MZ, position_MZ)

        index_MZ = length_MZ - read(rows(state.prompt_length), row_MZ)  # position of the next token in the completion
        cache = Cache(
            state.cache_k,
            state.cache_v,
            _by_row(jnp.where(active_MZ, index_MZ, 0)),
            state.cache_end,
        )
        hidden, caches = self.model.forward(
            params,
            _by_row(token_MZ)[:, None],
            _by_row(position_MZ)[:, None],
            prompt=prompt,
            cache=cache,
            rope=rope,
        )

        new_columns = {"experts": moe.by_token(hidden, caches)[1]} if self.keeps_experts else {}
        waiting = state.waiting
        if waiting:
            caches = turns.keep_states(state, caches, active_MZ, self.model.arch)
        logits_ZV = sharding.constrain(project(hidden[:, 0], self.model.head(params)), "batch", "vocab")
        drawn_Z, logp_Z, draw_columns, draw_sums = self._draw(logits_ZV, state, active_MZ, row_MZ, index_MZ, key)
        new_columns |= draw_columns
        drawn_MZ = drawn_Z.reshape(row_MZ.shape)
        logp_MZ = logp_Z.reshape(row_MZ.shape)
        version_MZ = jnp.broadcast_to(version, row_MZ.shape)
        is_eos, reason_MZ = self._stop_reasons(state, drawn_MZ, index_MZ)

        target_MZ = jnp.where(active_MZ, row_MZ, Q)  # out of range for idle slots, so their writes are dropped
        at_token = jax.vmap(lambda t, r, p, x: t.at[r, p].set(x, mode="drop"))
        at_row = jax.vmap(lambda t, r, x: t.at[r].set(x, mode="drop"))
        unrows = lambda x: x.reshape(M, E, G, *x.shape[2:])
        write_token = lambda t, x: unrows(at_token(rows(t), target_MZ, length_MZ, x))
        write_row = lambda t, x: unrows(at_row(rows(t), target_MZ, x))
        if waiting:
            waiting = turns.waiting_after_step(state, write_row(waiting["is_waiting"], is_eos), active_MZ)
        # Only layers with keys and values have positions. Recurrent states are left out.
        num_positions = [sum(x.shape[2] for x in blocks) for blocks in caches[1] if blocks[0].ndim == 4]
        columns = dict(state.columns)
        for name, column in state.columns.items():
            if name in new_columns:
                value = new_columns[name].reshape(*row_MZ.shape, *column.shape[4:])
                columns[name] = write_token(column, value)
        return dataclasses.replace(
            state,
            cache_k=caches[0],
            cache_v=caches[1],
            cache_end=(state.cache_end + 1) % math.lcm(*num_positions),
            tokens=write_token(state.tokens, drawn_MZ),
            behaviour_logp=write_token(state.behaviour_logp, logp_MZ),
            policy_version=write_token(state.policy_version, version_MZ),
            length=write_row(state.length, length_MZ + 1),
            stop_reason=write_row(state.stop_reason, reason_MZ),
            slot_row=jnp.where(active_MZ & (reason_MZ != STOP_NONE), -1, state.slot_row),
            waiting=waiting,
            drawn=draw_sums,
            columns=columns,
        )

    def _draw(
        self,
        logits_ZV: jax.Array,
        state: SamplerState,
        active_MZ,
        row_MZ,
        index_MZ,
        key,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], DrawSums]:
        """Draw a token in each slot.

        Args:
            active_MZ: slots that really draw a token; the tokens of the other slots are ignored.
            row_MZ: the slots' rows in the shard's table.
            index_MZ: position of the token in the completion.

        Returns:
            The tokens [Z] i32, their log-probs [Z] f32, their columns [Z,...] and the new ``state.drawn``.
        """
        sampling = self.sampling
        if sampling.temperature == 0.0:
            # Greedy decoding has no sampling distribution, so the log-probs are the model's at temperature 1.
            drawn_Z = jnp.argmax(logits_ZV, axis=-1).astype(jnp.int32)
            logp_Z, _ = token_logp(logits_ZV, drawn_Z)
            return drawn_Z, logp_Z, {}, state.drawn
        G = state.tokens.shape[2]
        group_MZ = jax.vmap(lambda table, row: table[row])(state.group_id, row_MZ // G)
        sample_MZ = turns.sample_of(state, row_MZ % G, group_MZ, self.branches)
        uniform_Z = rng.token_uniform(key, _by_row(group_MZ), _by_row(sample_MZ), _by_row(index_MZ))
        size = self.support_tokens

        def draw(logits, uniform, axis):
            support = None
            if size:
                support = support_of(logits, size, axis)
                logits = keep_support(logits, support, axis)
            return (
                support,
                sample_inverse_cdf(logits, uniform, axis),
                surprise_moments(logits, axis),
            )

        logits_ZV = filter_logits(self.tempered(logits_ZV, state), Filter.of(sampling))
        is_cut_Z = jnp.sum(logits_ZV > -jnp.inf, axis=-1) > size if size else False
        # Each device searches its own part of the vocabulary. Otherwise XLA would gather the logits of all devices.
        support, (drawn_Z, logp_Z), (entropy_Z, variance_Z) = sharding.by_vocabulary(draw, logits_ZV, uniform_Z)
        error_square_Z = jnp.square(logp_Z + entropy_Z)
        draws: list[Any] = [1.0, -logp_Z, entropy_Z, error_square_Z, variance_Z, is_cut_Z]
        draw_sums = jax.tree.map(functools.partial(_add, active_MZ), state.drawn, DrawSums(*draws))
        columns = {"entropy": entropy_Z}
        if support is not None:
            columns["support"] = support
        return drawn_Z, logp_Z, columns, draw_sums

    def _stop_reasons(self, state: SamplerState, drawn_MZ, index_MZ) -> tuple[jax.Array, jax.Array]:
        """Return whether each slot's token is an end token, and the stop reason [M,Z/M] i8 of the slot's row."""
        is_eos = jnp.zeros(drawn_MZ.shape, bool)
        for eos in self.eos_ids:
            is_eos |= drawn_MZ == eos
        is_full = index_MZ + 1 >= self.sampling.max_completion_tokens
        if state.waiting and self.turn_tokens:
            is_full |= turns.length_of(state) + 1 >= self.turn_tokens
        at_eos = STOP_NONE if state.waiting else STOP_EOS  # with an environment, an end token ends a turn
        reason_MZ = jnp.where(is_eos, at_eos, jnp.where(is_full, STOP_LENGTH, STOP_NONE)).astype(jnp.int8)
        return is_eos, reason_MZ

    def tempered(self, logits_ZV: jax.Array, state: SamplerState) -> jax.Array:
        """Return the logits that ``sampling`` filters. Serving overrides this method to apply temperatures per row."""
        return logits_ZV

    def _read_group(self, tokens, entry_M):
        """Return the tokens [M,G,S] of one entry per shard. The tokens stay on the devices of their shard."""
        return sharding.by_device(jax.vmap(lambda t, e: t[e]), tokens, entry_M, axes=(("batch",),) * 2)

    def _collect(self, state: SamplerState, entry_MX, *source_MP) -> tuple[Rollout, DrawSums, SamplerState]:
        """Remove P finished groups, given by ``quotas.arrays``, from the table and free their entries."""
        G = self.group_size
        take = lambda x: quotas.take(x, entry_MX, *source_MP)  # [M, P/M, G, ...]
        flat = lambda x: take(x).reshape(-1, *x.shape[3:])
        group_id = jnp.repeat(take(state.group_id).reshape(-1), G)
        rollout = Rollout(
            tokens=flat(state.tokens),
            prompt_length=flat(state.prompt_length),
            length=flat(state.length),
            behaviour_logp=flat(state.behaviour_logp),
            group_id=group_id,
            policy_version=flat(state.policy_version),
            stop_reason=flat(state.stop_reason),
            columns={name: flat(x) for name, x in state.columns.items()},
        )
        free = jax.vmap(lambda ids, e: ids.at[e].set(NO_PROMPT, mode="drop"))(state.group_id, entry_MX)
        return (
            rollout,
            state.drawn,
            dataclasses.replace(state, group_id=free, drawn=self._no_draws()),
        )


def _by_row(x: jax.Array) -> jax.Array:
    """Return values [Z,...] of slots [M,Z/M,...], split over the data shards."""
    return sharding.constrain(x.reshape(-1, *x.shape[2:]), "batch", *(None,) * (x.ndim - 2))


def _add(is_drawn_MZ: jax.Array, total_M: jax.Array, value: Any) -> jax.Array:
    """Add the values of the slots that drew a token to ``total_M``. ``value`` is one number or one per slot [Z]."""
    value_MZ = jnp.broadcast_to(value, is_drawn_MZ.size).reshape(is_drawn_MZ.shape)
    return total_M + jnp.sum(jnp.where(is_drawn_MZ, value_MZ, 0), axis=1, dtype=jnp.float32)
