"""Annotation: log-probs, values and hidden states that the learner computes for fresh rollouts before training.

The forward passes run in pieces of at most ``update.micro_batch_size`` rows.

Owns: the functions that annotate an iteration's rollouts. Does not know: which method needs which column, the ring,
credit. Letters: B rows, S row width, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.critic import expected_value
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.masks import completion_mask, sampled_mask
from jaxrl_llm.types import OpenRollouts, Rollout, TrainState

Open = TypeVar("Open", bound=OpenRollouts)
Values = TypeVar("Values")  # one or more arrays with a row axis


@dataclasses.dataclass(frozen=True)
class Annotation:
    """Annotation functions of a run.

    Attributes:
        reference_model: model that computes the reference's log-probs.
        columns: names of the columns that ``annotate`` computes (inputs.COLUMNS).
        group_size: number of neighbouring fresh rollouts that share a prompt.
        num_parts: ``join`` cuts own and external rows into this many parts each and interleaves the parts.
    """

    update: Update
    reference_model: Model
    group_size: int
    num_parts: int
    columns: frozenset[str] = frozenset()

    def annotate(
        self,
        state: TrainState,
        reference: Any,
        rollout: Rollout,
        base: Any = None,
    ) -> dict[str, jax.Array]:
        """Compute ``columns`` for fresh rollouts, [B,...] each.

        Args:
            reference: weights of the reference; None = the reference in ``state.others``.
            base: frozen weights under the adapters; None = the policy has no adapters. A frozen reference can be the
                same arrays.
        """
        policy = lora.join(state.params["policy"], base)
        columns = {}
        if "generation_logp" in self.columns:
            columns["generation_logp"] = self.old_logp(policy, state.step, rollout)
        if "hidden" in self.columns:
            columns["hidden"] = self.hidden(policy, rollout)
        if "ref_logp" in self.columns:
            model = self.reference_model
            if reference is None:
                model = self.update.model
                reference = lora.join(state.others["reference"], base)
            columns["ref_logp"] = self.reference(reference, rollout, model)
        if "value" in self.columns:
            learned = {**state.params, "policy": policy}
            columns["value"] = self.values(learned, rollout)
        return columns

    def logp(self, params: Any, rollout: Rollout) -> jax.Array:
        """Return the log-probs of fresh rollouts, [B,S]."""

        def logp_of(rows: Rollout, unit: int) -> jax.Array:
            return self.update.logp(params, rows, group_size=unit).logp

        return self._by_micro_batch(logp_of, rollout)

    def logp_and_entropy(
        self,
        params: Any,
        rollout: Rollout,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the log-probs of fresh rollouts and the entropies of their distributions, [B,S] each."""

        def values_of(rows: Rollout, unit: int) -> tuple[jax.Array, jax.Array]:
            values = self.update.logp(params, rows, group_size=unit)
            return values.logp, values.entropy

        return self._by_micro_batch(values_of, rollout)

    def old_logp(self, params: Any, version: jax.Array, rollout: Rollout) -> jax.Array:
        """Return the learner's log-prob [B,S] of each token under the weights that drew the token.

        Tokens of the current weights are computed here. Tokens of older weights come from the column "earlier_logp".
        """
        logp = self.logp(params, rollout)
        earlier_logp = rollout.columns.get("earlier_logp")
        if earlier_logp is None:
            return logp
        return jnp.where(rollout.policy_version == version, logp, earlier_logp)

    def score_open(
        self,
        params: Any,
        version: jax.Array,
        state: Open,
        base: Any = None,
    ) -> Open:
        """Store the learner's log-probs of the tokens that the current weights drew in open (unfinished) rollouts.

        The log-probs go into the column "earlier_logp". ``old_logp`` reads the column when the rollouts are finished.
        """
        shards, groups, group_size = state.tokens.shape[:3]
        num_rows = shards * groups * group_size

        def flat(x: jax.Array) -> jax.Array:  # [M, E, G, ...] -> [B, ...]
            return x.reshape(-1, *x.shape[3:])

        rows = Rollout(
            tokens=flat(state.tokens),
            prompt_length=flat(state.prompt_length),
            length=flat(state.length),
            behaviour_logp=flat(state.behaviour_logp),
            group_id=jnp.arange(num_rows, dtype=jnp.int32) // group_size,
            policy_version=flat(state.policy_version),
            stop_reason=flat(state.stop_reason),
            columns=jax.tree.map(flat, state.columns),
        )
        policy = lora.join(params, base)
        logp = self.logp(policy, rows).reshape(state.tokens.shape)
        is_new = state.policy_version == version
        earlier_logp = jnp.where(is_new, logp, state.columns["earlier_logp"])
        return state.with_columns(earlier_logp=earlier_logp)

    def reference(self, params: Any, rollout: Rollout, model: Model) -> jax.Array:
        """Return the log-probs of fresh rollouts under the reference, [B,S]. The ring stores them with the rollouts."""
        teacher = dataclasses.replace(self.update, model=model)
        # The reference chooses experts by its own router, not by the sampler's choice of experts.
        columns = dict(rollout.columns)
        columns.pop("experts", None)
        rows = dataclasses.replace(rollout, columns=columns)
        annotation = dataclasses.replace(self, update=teacher)
        return annotation.logp(params, rows)

    def join(
        self,
        params: Any,
        version: jax.Array,
        rollout: Rollout,
        external: Rollout,
        base: Any = None,
    ) -> Rollout:
        """Join own and external rows. External rows are treated as if the current weights had just drawn them.

        The current weights give the external rows their behaviour log-probs and entropies.
        """
        row_width = external.tokens.shape[1]
        mask = completion_mask(external.prompt_length, external.length, row_width)
        policy = lora.join(params, base)
        behaviour_logp, entropy = self.logp_and_entropy(policy, external)
        columns = {"entropy": entropy, "earlier_logp": jnp.zeros_like(behaviour_logp)}
        external = dataclasses.replace(
            external,
            behaviour_logp=behaviour_logp,
            policy_version=jnp.where(mask, version, -1),
            columns={name: columns[name] for name in rollout.columns},
        )

        def parts(x: jax.Array) -> jax.Array:
            return x.reshape(self.num_parts, -1, *x.shape[1:])

        def interleave(own: jax.Array, external: jax.Array) -> jax.Array:
            joined_parts = jnp.concatenate([parts(own), parts(external)], axis=1)
            return joined_parts.reshape(-1, *own.shape[1:])

        return jax.tree.map(interleave, rollout, external)

    def values(self, params: Any, rollout: Rollout) -> jax.Array:
        """Return the critic's value at each sampled token of fresh rollouts, [B,S] f32 in units of reward, else 0.0."""

        def values_of(rows: Rollout, unit: int) -> jax.Array:
            # Only the value head's outputs are used. The compiler removes the unused log-probs.
            outputs = self.update.logp(params["policy"], rows, group_size=unit, head=params["critic"]).readout
            assert outputs is not None
            value = expected_value(outputs, self.update.objective.bins)
            mask = sampled_mask(rows.prompt_length, rows.length, rows.policy_version)
            return jnp.where(mask, value, 0.0)

        return self._by_micro_batch(values_of, rollout)

    def hidden(self, params: Any, rollout: Rollout) -> jax.Array:
        """Return the mean of the hidden states that predict the completion tokens of fresh rollouts, [B,D] f32."""

        def states(hidden: jax.Array) -> jax.Array:
            return hidden.astype(jnp.float32)

        def mean_state(rows: Rollout, unit: int) -> jax.Array:
            readout = self.update.logp(params, rows, group_size=unit, readout=states).readout
            assert readout is not None
            completion_length = rows.length - rows.prompt_length
            num_states = jnp.maximum(completion_length, 1)
            return jnp.sum(readout, axis=1) / num_states[:, None]

        return self._by_micro_batch(mean_state, rollout)

    def _by_micro_batch(
        self,
        values_of: Callable[[Rollout, int], Values],
        rollout: Rollout,
    ) -> Values:
        """Apply ``values_of(rows, group_size)``, [b,...], to all fresh rollouts, [B,...], one micro-batch at a time."""
        B = rollout.tokens.shape[0]
        shards = self.update.num_devices
        max_rows = self.update.config.micro_batch_size
        # If a micro-batch can hold whole groups, the prompt of a group is computed once.
        unit = self.group_size if self.group_size * shards <= max_rows else 1
        num_micro = _num_micro_batches(B, max_rows, num_units=B // shards // unit)

        # Every micro-batch takes rows of every shard.
        def split(x: jax.Array) -> jax.Array:  # [B, ...] -> [n, shards * rows, ...]
            by_shard = x.reshape(shards, num_micro, -1, *x.shape[1:])
            by_micro_batch = by_shard.swapaxes(0, 1)
            return by_micro_batch.reshape(num_micro, B // num_micro, *x.shape[1:])

        def join(x: jax.Array) -> jax.Array:  # [n, shards * rows, ...] -> [B, ...]
            by_micro_batch = x.reshape(num_micro, shards, -1, *x.shape[2:])
            by_shard = by_micro_batch.swapaxes(0, 1)
            return by_shard.reshape(B, *x.shape[2:])

        def values_of_unit(rows: Rollout) -> Values:
            return values_of(rows, unit)

        values = jax.lax.map(values_of_unit, jax.tree.map(split, rollout))
        return jax.tree.map(join, values)


def _num_micro_batches(num_rows: int, max_rows: int, *, num_units: int) -> int:
    """Return the smallest number of equal micro-batches of whole units with at most ``max_rows`` rows."""
    divisors = [n for n in range(1, num_units + 1) if num_units % n == 0]
    return min(n for n in divisors if num_rows // n <= max_rows)
