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
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.actor import quotas, stop_strings, tables, turns
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
        if sampling.temperature == 0 or not self.keeps_support:
            return 0
        if not Filter.of(sampling).leaves_out(vocab_size):
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
        columns = {}
        for name, (dtype, *sizes) in self.columns.items():
            columns[name] = jnp.zeros((M, E, G, S, *sizes), dtype)
        has_answers = self.answer_tokens > 0
        cache_sizes = CacheSizes(
            slots=self.num_slots,
            prompts=M * E,
            prompt_width=self.max_prompt_tokens,
            completion=self.sampling.max_completion_tokens,
            implementation=self.model.attention,
            dtype=self.model.compute_dtype,
            spare=turns.idle_room(self.chunk_steps) if has_answers else 0,
        )
        return SamplerState(
            **mixers.empty_caches(arch, cache_sizes),
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
            columns=columns,
            waiting=turns.empty(M, E, G, self.num_slots) if has_answers else {},
        )

    def _no_draws(self) -> DrawSums:
        names = [field.name for field in dataclasses.fields(DrawSums)]
        return DrawSums(**{name: jnp.zeros(self.shards, jnp.float32) for name in names})

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
        quota = self.num_prompts // self.shards
        shapes = [(self.shards, quota + self.slack)]
        if self.slack:
            shapes.append((self.shards, quota))
        return shapes

    # ---- programs ----------------------------------------------------------------------------------

    def programs(self, abstract_params: Any) -> dict[str, Program]:
        """Return the sampler's programs by name, described by shapes only."""
        state = self.abstract_state()
        programs = {
            "init_sampler": Program(self._empty, (), out_shardings=sharding.of(state)),
            "prefill": self._prefill_program(abstract_params, state),
            "decode": self._decode_program(abstract_params, state),
            "read_group": self._read_group_program(state),
            "collect": self._collect_program(state),
        }
        if self.cuts_rows or self.sampling.stop_strings:
            programs["stop_rows"] = self._stop_rows_program(state)
        if self.stale_cache:
            programs["reread"] = self._reread_program(abstract_params, state)
        if self.answer_tokens:
            programs["read_waiting"] = Program(turns.host_arrays, (state,), self._flags_layout)
        return programs

    def _prefill_program(self, abstract_params: Any, state: SamplerState) -> Program:
        P = self.num_prompts
        tokens = self._rows(P, self.max_prompt_tokens)
        length = self._rows(P)
        group_id = self._rows(P)
        entry = self._rows(self.shards, P // self.shards)
        version = (self._scalar,) if self.stale_cache else ()
        return Program(
            self._prefill,
            (abstract_params, state, tokens, length, group_id, entry, *version),
            out_shardings=sharding.of(state),
            donate=(1,),
        )

    def _decode_program(self, abstract_params: Any, state: SamplerState) -> Program:
        key = sharding.undivided(self.mesh, jax.eval_shape(lambda: rng.stream(0, "sample")).dtype)
        due = sharding.rows(self.mesh, (self.shards, self.entries), jnp.bool)
        answers = ()
        if self.answer_tokens:
            answers = (self._rows(*self._table, self.answer_tokens), self._rows(*self._table))
        return Program(
            self._decode,
            (abstract_params, state, self._scalar, key, due, *answers),
            (sharding.of(state), self._flags_layout),
            donate=(1,),
        )

    def _read_group_program(self, state: SamplerState) -> Program:
        entry = self._rows(self.shards)
        return Program(self._read_group, (state.tokens, entry), out_shardings=entry.sharding)

    def _collect_program(self, state: SamplerState) -> Program:
        leaving = [self._rows(*shape) for shape in self._leaving_shapes]
        rollout = jax.eval_shape(self._collect, state, *leaving)[0]
        rollout_layout = sharding.leading(self.learner_mesh or self.mesh, rollout)
        return Program(
            self._collect,
            (state, *leaving),
            (rollout_layout, self._whole, sharding.of(state)),
            donate=(0,),
        )

    def _stop_rows_program(self, state: SamplerState) -> Program:
        new_length = self._rows(*self._table)
        return Program(stop_strings.cut, (state, new_length), (sharding.of(state), self._whole), donate=(0,))

    def _reread_program(self, abstract_params: Any, state: SamplerState) -> Program:
        return Program(
            self._reread,
            (abstract_params, state, self._scalar),
            out_shardings=sharding.of(state),
            donate=(1,),
        )

    @property
    def _table(self) -> tuple[int, int, int]:
        """Return the shape of the table of open rollouts."""
        return self.shards, self.entries, self.group_size

    @property
    def _scalar(self) -> jax.ShapeDtypeStruct:
        """Return an abstract i32 number."""
        return sharding.undivided(self.mesh, jnp.int32)

    def _rows(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Return an abstract i32 array of rows."""
        return sharding.rows(self.mesh, shape, jnp.int32)

    @property
    def _whole(self) -> Any:
        """Return the sharding of arrays that every device holds."""
        return sharding.replicated(self.mesh, 0)

    @property
    def _flags_layout(self) -> Any:
        """Return the sharding of the arrays that the host reads after each chunk."""
        whole = self._whole
        if not self.answer_tokens:
            return whole
        by_shard = self._rows(self.shards).sharding
        return (whole, whole, whole, whole, by_shard, by_shard)  # as turns.host_arrays returns them

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
        caches, prompt_columns = self._read_prompts(params, state, tokens_PL, length_P, entry_MP)

        def put(table, value_P):  # [M, E, G, ...] <- [P, ...], the same for every sample of the group
            sizes = value_P.shape[1:]
            value = value_P.reshape(M, P // M, 1, *sizes)
            value = jnp.broadcast_to(value, (M, P // M, G, *sizes))
            return tables.put(table, entry_MP, value.astype(table.dtype))

        columns = {}
        for name, column in state.columns.items():
            value_P = prompt_columns.get(name)
            if value_P is None:
                value_P = jnp.zeros((P, *column.shape[3:]))
            columns[name] = put(column, value_P)
        zeros = jnp.zeros((P,), jnp.int32)
        waiting = {}
        for name, table in state.waiting.items():
            waiting[name] = table if name == "idle_steps" else put(table, zeros)
        if version is not None:
            assert state.prompt_version is not None, "weights never change"
            version_MP = jnp.broadcast_to(version, (M, P // M))
            caches["prompt_version"] = tables.put(state.prompt_version, entry_MP, version_MP)
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
            group_id=tables.put(state.group_id, entry_MP, group_id_P.reshape(M, P // M)),
            columns=columns,
            waiting=waiting,
        )

    def _read_prompts(
        self, params, state: SamplerState, tokens_PL, length_P, entry_MP
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Return ``prompt_k`` and ``prompt_v`` with P prompts in the given entries, and their columns [P,S,...]."""
        M, _, _, S = state.tokens.shape
        P, L = tokens_PL.shape
        positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (P, L))
        _, made = self.model.forward(params, tokens_PL, positions, length=length_P - 1)
        columns = {}
        if self.keeps_experts:
            columns["experts"] = moe.prompt_experts(made, length_P, S)

        def by_shard(x):
            return x.reshape(M, -1, *x.shape[1:])

        def put(cache, new):  # [M*E, ...] <- [P, ...]
            return tables.put(by_shard(cache), entry_MP, by_shard(new)).reshape(cache.shape)

        caches = {
            "prompt_k": tuple(map(put, state.prompt_k, made[0])),
            "prompt_v": tuple(map(put, state.prompt_v, made[1])),
        }
        return caches, columns

    def _reread(self, params, state: SamplerState, version) -> SamplerState:
        """Recompute the stale caches of open rollouts with the given weights.

        The caches of the prompts are always recomputed. With ``stale_cache`` "recompute", the caches of the tokens
        drawn so far are recomputed too. Tokens, log-probs and versions stay the same. A state without stale rollouts
        stays the same, bit for bit. Therefore a resumed run can call this program again without effect.

        Args:
            version: [] i32 policy version of the weights.
        """
        version_ME = state.prompt_version
        assert version_ME is not None, "weights never change"
        is_open = (state.group_id >= 0) & jnp.any(state.stop_reason == STOP_NONE, axis=2)
        is_stale_ME = is_open & (version_ME != version)

        def has_stale_prompts(carry):
            _, left_ME = carry
            return jnp.any(left_ME)

        def reread(carry):
            state, left_ME = carry
            return self._reread_prompts(params, state, left_ME)

        state, _ = jax.lax.while_loop(has_stale_prompts, reread, (state, is_stale_ME))
        if self.stale_cache == "recompute":
            rope = ropes.tables(self.model.arch, jnp.arange(self.row_tokens))
            state = turns.reread(self.model, params, state, rope, is_stale_ME)
        return dataclasses.replace(state, prompt_version=jnp.where(is_stale_ME, version, version_ME))

    def _reread_prompts(self, params, state: SamplerState, left_ME) -> tuple[SamplerState, jax.Array]:
        """Recompute the caches of P stale prompts. Return the state, and the mask of the prompts that are left.

        Args:
            left_ME: [M, E] bool, the entries with stale prompts.
        """
        M, E, _, _ = state.tokens.shape
        P = self.num_prompts
        L = self.max_prompt_tokens
        left_first_ME = jnp.argsort(~left_ME, axis=1, stable=True)
        entry_MP = left_first_ME[:, : P // M].astype(jnp.int32)
        is_left_MP = jnp.take_along_axis(left_ME, entry_MP, axis=1)
        # The first sample of a group has the prompt of all samples.
        length_P = tables.take(state.prompt_length[:, :, 0], entry_MP).reshape(P)
        tokens_PL = tables.take(state.tokens[:, :, 0, :L], entry_MP).reshape(P, L)
        is_prompt_PL = jnp.arange(L)[None] < length_P[:, None]
        tokens_PL = sharding.constrain(jnp.where(is_prompt_PL, tokens_PL, 0), "batch", None)
        entry_MP = jnp.where(is_left_MP, entry_MP, E)
        caches, prompt_columns = self._read_prompts(params, state, tokens_PL, length_P, entry_MP)
        columns = dict(state.columns)
        if "experts" in prompt_columns:
            columns["experts"] = _with_prompt_experts(state, prompt_columns["experts"], entry_MP)
        left_ME = tables.mark(left_ME, entry_MP, False)
        return dataclasses.replace(state, **caches, columns=columns), left_ME

    def _refill(self, state: SamplerState) -> SamplerState:
        """Assign the next pending rows to idle slots, oldest prompt first."""
        _, E, G, _ = state.tokens.shape
        Q = E * G
        is_open = (state.group_id >= 0)[:, :, None]
        pending = tables.by_row(is_open & ~state.started & (state.stop_reason == STOP_NONE))
        # Position of each prompt in the prompt stream; an older prompt has a smaller position.
        age = jnp.repeat(state.group_id, G, axis=1)

        def one_shard(slot_row, pending, age):
            # Sort pending rows before all other rows. The sort is stable, so the samples of a prompt stay in order.
            queue = jnp.lexsort((age, ~pending))
            idle = slot_row < 0
            place = jnp.cumsum(idle) - 1  # place of an idle slot in the queue
            takes = idle & (place < jnp.sum(pending))
            next_row = queue[jnp.clip(place, 0, Q - 1)]
            return jnp.where(takes, next_row, slot_row), takes

        slot_row, takes = jax.vmap(one_shard)(state.slot_row, pending, age)
        started = tables.mark(tables.by_row(state.started), jnp.where(takes, slot_row, Q), True)
        begin = functools.partial(mixers.begin, self.model.arch, entry_MZ=jnp.maximum(slot_row, 0) // G)
        return dataclasses.replace(
            state,
            slot_row=slot_row,
            started=tables.by_group(started, G),
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
            and lengths [M, E, G] of all open rows. With an environment, the arrays are the output of
            ``turns.host_arrays``.
        """
        finished = (state.group_id >= 0) & jnp.all(state.stop_reason != STOP_NONE, axis=2)
        is_enough = quotas.is_enough(jnp.sum(finished, axis=1), self.num_prompts, self.slack)
        is_wanted = ~is_enough | jnp.any(due & ~finished)

        def decode_chunk(state):
            return self._decode_chunk(params, state, version, key, answers)

        # Skip the whole chunk, not only the loop, because the work before the loop costs time too.
        state = run_if(is_wanted, decode_chunk, state)
        if answers:
            return state, turns.host_arrays(state)
        return state, (state.stop_reason, state.length)

    def _decode_chunk(self, params, state: SamplerState, version, key, answers) -> SamplerState:
        """Append the answers, refill idle slots and run the decode steps of a chunk."""
        # Compute the rope angles outside the loop. Inside the loop, every layer would compute them again.
        rope = ropes.tables(self.model.arch, jnp.arange(self.row_tokens))
        if answers:
            state = turns.append_answers(self.model, params, state, rope, *answers)
        # If all slots are idle, restart at the beginning of the caches, so that attention reads the smallest possible
        # part.
        has_rows = jnp.any(state.slot_row >= 0)
        state = dataclasses.replace(state, cache_end=jnp.where(has_rows, state.cache_end, 0))
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
        member = tables.put(member, row_MZ, slots)
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
        slots = _slots(state)
        hidden, caches = self._forward_newest(params, prompt, rope, state, slots)
        columns = {}
        if self.keeps_experts:
            columns["experts"] = moe.by_token(hidden, caches)[1]
        if state.waiting:
            caches = turns.keep_states(state, caches, slots.active, self.model.arch)
        logits_ZV = sharding.constrain(project(hidden[:, 0], self.model.head(params)), "batch", "vocab")
        drawn = self._draw(logits_ZV, state, slots, key)
        new = _NewTokens(
            token=drawn.token.reshape(slots.row.shape),
            logp=drawn.logp.reshape(slots.row.shape),
            version=jnp.broadcast_to(version, slots.row.shape),
            columns=columns | drawn.columns,
        )
        state = dataclasses.replace(
            state,
            cache_k=caches[0],
            cache_v=caches[1],
            cache_end=(state.cache_end + 1) % _steps_of_cycle(caches[1]),
            drawn=drawn.sums,
        )
        return self._append(state, slots, new)

    def _forward_newest(
        self, params, prompt: Prompt, rope, state: SamplerState, slots: _Slots
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Return the result of ``Model.forward`` for the newest token of each slot's row."""
        position_MZ = slots.length - 1
        token_MZ = tables.take_at(tables.by_row(state.tokens), slots.row, position_MZ)
        num_earlier = jnp.where(slots.active, slots.index, 0)
        return self.model.forward(
            params,
            tables.flat(token_MZ)[:, None],
            tables.flat(position_MZ)[:, None],
            prompt=prompt,
            cache=Cache(state.cache_k, state.cache_v, tables.flat(num_earlier), state.cache_end),
            rope=rope,
        )

    def _append(self, state: SamplerState, slots: _Slots, new: _NewTokens) -> SamplerState:
        """Append the new tokens of active slots to their rows, and free the slots whose rows stop."""
        _, E, G, _ = state.tokens.shape
        # The row of an inactive slot is out of range, so that its writes are dropped.
        target_MZ = jnp.where(slots.active, slots.row, E * G)

        def put_token(table, value):
            return tables.by_group(tables.put_at(tables.by_row(table), target_MZ, slots.length, value), G)

        def put_row(table, value):
            return tables.by_group(tables.put(tables.by_row(table), target_MZ, value), G)

        is_eos, reason_MZ = self._stop_reasons(state, new.token, slots.index)
        waiting = state.waiting
        if waiting:
            is_waiting = put_row(waiting["is_waiting"], is_eos)
            waiting = turns.waiting_after_step(state, is_waiting, slots.active)
        columns = dict(state.columns)
        for name, column in state.columns.items():
            if name in new.columns:
                value = new.columns[name].reshape(*slots.row.shape, *column.shape[4:])
                columns[name] = put_token(column, value)
        has_stopped = slots.active & (reason_MZ != STOP_NONE)
        return dataclasses.replace(
            state,
            tokens=put_token(state.tokens, new.token),
            behaviour_logp=put_token(state.behaviour_logp, new.logp),
            policy_version=put_token(state.policy_version, new.version),
            length=put_row(state.length, slots.length + 1),
            stop_reason=put_row(state.stop_reason, reason_MZ),
            slot_row=jnp.where(has_stopped, -1, state.slot_row),
            waiting=waiting,
            columns=columns,
        )

    def _draw(self, logits_ZV: jax.Array, state: SamplerState, slots: _Slots, key) -> _Drawn:
        """Draw a token in each slot."""
        sampling = self.sampling
        if sampling.temperature == 0.0:
            # Greedy decoding has no sampling distribution, so the log-probs are the model's at temperature 1.
            token_Z = jnp.argmax(logits_ZV, axis=-1).astype(jnp.int32)
            logp_Z, _ = token_logp(logits_ZV, token_Z)
            return _Drawn(token_Z, logp_Z, {}, state.drawn)
        G = state.tokens.shape[2]
        group_MZ = tables.take(state.group_id, slots.row // G)
        sample_MZ = turns.sample_of(state, slots.row % G, group_MZ, self.branches)
        uniform_Z = rng.token_uniform(
            key,
            tables.flat(group_MZ),
            tables.flat(sample_MZ),
            tables.flat(slots.index),
        )
        size = self.support_tokens

        def draw(logits, uniform, axis):
            support = None
            if size:
                support = support_of(logits, size, axis)
                logits = keep_support(logits, support, axis)
            drawn = sample_inverse_cdf(logits, uniform, axis)
            return support, drawn, surprise_moments(logits, axis)

        logits_ZV = filter_logits(self.tempered(logits_ZV, state), Filter.of(sampling))
        is_cut_Z: Any = False
        if size:
            is_cut_Z = jnp.sum(logits_ZV > -jnp.inf, axis=-1) > size
        # Each device searches its own part of the vocabulary. Otherwise XLA would gather the logits of all devices.
        support, (token_Z, logp_Z), (entropy_Z, variance_Z) = sharding.by_vocabulary(draw, logits_ZV, uniform_Z)
        error_square_Z = jnp.square(logp_Z + entropy_Z)
        draws: list[Any] = [1.0, -logp_Z, entropy_Z, error_square_Z, variance_Z, is_cut_Z]
        sums = jax.tree.map(functools.partial(_add, slots.active), state.drawn, DrawSums(*draws))
        columns = {"entropy": entropy_Z}
        if support is not None:
            columns["support"] = support
        return _Drawn(token_Z, logp_Z, columns, sums)

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

        def of_shard(tokens, entry):
            return tokens[entry]

        return sharding.by_device(jax.vmap(of_shard), tokens, entry_M, axes=(("batch",), ("batch",)))

    def _collect(self, state: SamplerState, entry_MX, *source_MP) -> tuple[Rollout, DrawSums, SamplerState]:
        """Remove P finished groups, given by ``quotas.arrays``, from the table and free their entries."""
        G = self.group_size

        def take(table):  # [M, P/M, G, ...]
            return quotas.take(table, entry_MX, *source_MP)

        def flat(table):
            return take(table).reshape(-1, *table.shape[3:])

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
        group_id_ME = tables.mark(state.group_id, entry_MX, NO_PROMPT)
        remaining = dataclasses.replace(state, group_id=group_id_ME, drawn=self._no_draws())
        return rollout, state.drawn, remaining


class _Slots(NamedTuple):
    """The decode slots in one step, each [M, Z/M].

    Attributes:
        active: whether the slot has a row that does not wait.
        row: index of the slot's row in the shard's table; 0 for an idle slot.
        length: number of tokens of the row, which is the position of its next token.
        index: position of the next token in the completion.
    """

    active: jax.Array
    row: jax.Array
    length: jax.Array
    index: jax.Array


class _Drawn(NamedTuple):
    """The tokens [Z] i32 drawn in a step, their log-probs [Z] f32, their columns [Z,...] and the new sums."""

    token: jax.Array
    logp: jax.Array
    columns: dict[str, jax.Array]
    sums: DrawSums


class _NewTokens(NamedTuple):
    """The next token of each slot's row: token, log-prob and policy version [M, Z/M], and columns [Z,...]."""

    token: jax.Array
    logp: jax.Array
    version: jax.Array
    columns: dict[str, jax.Array]


def _slots(state: SamplerState) -> _Slots:
    """Return the slots of the next decode step."""
    row_MZ = jnp.maximum(state.slot_row, 0)
    length_MZ = tables.take(tables.by_row(state.length), row_MZ)
    prompt_length_MZ = tables.take(tables.by_row(state.prompt_length), row_MZ)
    return _Slots(turns.decodes(state), row_MZ, length_MZ, length_MZ - prompt_length_MZ)


def _steps_of_cycle(values: Any) -> int:
    """Return the number of steps after which the cache of every layer is at its beginning again.

    Args:
        values: cache blocks by layer. A delta rule layer has states, which have no positions.
    """
    sizes = []
    for blocks in values:
        if blocks[0].ndim == 4:
            sizes.append(sum(block.shape[2] for block in blocks))
    return math.lcm(*sizes)


def _with_prompt_experts(state: SamplerState, experts_PS: jax.Array, entry_MP: jax.Array) -> jax.Array:
    """Return the column "experts" of the state with new experts of the prompts in the given entries.

    All rows of a group get the same experts, because the learner computes a prompt once per group.
    """
    column = state.columns["experts"]
    M, E, _, S, width = column.shape
    experts_MPS = experts_PS.reshape(M, -1, S, width).astype(column.dtype)
    of_prompts = tables.put(jnp.zeros((M, E, S, width), column.dtype), entry_MP, experts_MPS)
    is_read_ME = tables.mark(jnp.zeros((M, E), bool), entry_MP, True)
    position = jnp.arange(S).reshape(1, 1, 1, S)
    is_prompt = position < state.prompt_length[..., None]
    is_new = is_read_ME[:, :, None, None] & is_prompt
    return jnp.where(is_new[..., None], of_prompts[:, :, None], column)


def _add(is_drawn_MZ: jax.Array, total_M: jax.Array, value: Any) -> jax.Array:
    """Add the values of the slots that drew a token to ``total_M``. ``value`` is one number or one per slot [Z]."""
    value_MZ = jnp.broadcast_to(value, is_drawn_MZ.size).reshape(is_drawn_MZ.shape)
    return total_M + jnp.sum(jnp.where(is_drawn_MZ, value_MZ, 0), axis=1, dtype=jnp.float32)
